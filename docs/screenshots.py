"""Make the pictures of docs/images/ from demo-output/: the demo's report and viewer, light, dark and narrow.

`make screenshots` runs it after `make demo`; it needs chromium and its driver (`make hosts`).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from selenium import webdriver

from draftgauge.report.page import page
from tests.browser import browser, missing, shape
from tests.shelf import served

ROOT = Path(__file__).resolve().parent.parent
DEMO, IMAGES = ROOT / "demo-output", ROOT / "docs" / "images"
#: A repository keeps every version of a picture.
MOST_BYTES = 300_000
#: Whose machine a picture was made on is nobody's concern.
HOME = "/home/ada/draftgauge"
MOVE = """
for (const parent of new Set([...document.querySelectorAll("wbr")].map((place) => place.parentElement))) {
  const parts = parent.textContent.replaceAll(arguments[0], arguments[1]).split("/");
  parent.replaceChildren(...parts.flatMap((part, i) => i ? ["/", document.createElement("wbr"), part] : [part]));
}
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) walker.currentNode.data = walker.currentNode.data.replaceAll(arguments[0], arguments[1]);
"""
SHAPES: Mapping[str, tuple[int, int, str]] = {
    "light": (1280, 860, "light"),
    "dark": (1280, 860, "dark"),
    "narrow": (390, 844, "light"),
}


#: Which of them are worth their bytes, where not all are.
FORMS: Mapping[str, Sequence[str]] = {
    "tokens": ("light", "dark"),
    "comparison": ("light", "dark"),
    "recording": ("light",),
}


def main() -> int:
    """Writes every picture; 1 where one cannot be made or is too large."""
    if lacking := missing() or (not (DEMO / "runs").is_dir() and "no demo-output/runs here (`make demo`)"):
        print(lacking, file=sys.stderr)
        return 1
    IMAGES.mkdir(exist_ok=True)
    large = []
    with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as driver:
        for path in pictures(driver):
            size = path.stat().st_size
            large += [path.name] * (size > MOST_BYTES)
            print(f"{path.relative_to(ROOT)}  {size / 1000:.0f} kB")
    if large:
        print(f"larger than {MOST_BYTES / 1000:.0f} kB: {', '.join(large)}", file=sys.stderr)
    return bool(large)


def pictures(driver: webdriver.Chrome) -> Iterator[Path]:
    """Takes one picture after the other, of the top of each page."""
    with served(DEMO, report=page) as client:
        for name, path in addresses().items():
            for form in FORMS.get(name, SHAPES):
                width, height, scheme = SHAPES[form]
                shape(driver, width=width, scheme=scheme, height=height)
                driver.get(str(client.base_url).rstrip("/") + path)
                driver.execute_script(MOVE, str(ROOT), HOME)
                picture = IMAGES / f"{name}-{form}.png"
                driver.save_screenshot(str(picture))
                yield picture


def addresses() -> Mapping[str, str]:
    """The pages of the viewer that are shown, the report's among them."""
    early, late = (run_of(step) for step in (250, 4000))
    recording = next(DEMO.glob("recordings/*/recording.json")).parent.name
    return {
        "viewer": "/",
        "report": f"/run/runs/{late}",
        "tokens": f"/run/runs/{late}?prompt=binary_search#h-texts",
        "comparison": f"/compare?run=runs/{early}&run=runs/{late}",
        "recording": f"/recording/recordings/{recording}",
    }


def run_of(step: int) -> str:
    """The name of the demo's run of a step."""
    return next(DEMO.glob(f"runs/step_{step}-*/run.json")).parent.name


if __name__ == "__main__":
    sys.exit(main())
