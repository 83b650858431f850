"""A headless Chromium that tells what went wrong in it: its log, its requests, what overflows, what axe finds."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
WIDTHS, SCHEMES = (1280, 390), ("light", "dark")


def missing() -> str:
    """Why no browser can be driven here; empty where one can."""
    lacking = [name for name, path in (("chromium", CHROMIUM), ("chromedriver", DRIVER)) if path is None]
    return f"no {' and no '.join(lacking)} here (`make hosts` installs them)" if lacking else ""


@contextmanager
def browser(profile: Path) -> Iterator[webdriver.Chrome]:
    """A fresh browser that cannot reach anything but this machine."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in (
        "--headless=new",
        "--no-sandbox",  # tests may run as root
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--hide-scrollbars",
        "--force-device-scale-factor=1",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        "--no-proxy-server",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        shape(driver, width=1280, scheme="light")
        yield driver
    finally:
        driver.quit()


def shape(driver: webdriver.Chrome, *, width: int, scheme: str, height: int = 900) -> None:
    """Another width in CSS pixels, and light or dark."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


def complaints(driver: webdriver.Chrome) -> list[str]:
    """What the console said since the last time."""
    return [entry["message"] for entry in driver.get_log("browser")]


def requests(driver: webdriver.Chrome) -> list[str]:
    """What pages asked for since the last time; `data:` and the browser's own pages are no requests."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    urls = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    return [url for url in urls if urlsplit(url).scheme not in ("data", "chrome", "about", "blob")]


def overflowing(driver: webdriver.Chrome) -> list[str]:
    """The elements that make the page wider than the window; none where it is not."""
    return list(
        driver.execute_script(
            """
            const page = document.documentElement;
            if (page.scrollWidth <= page.clientWidth) return [];
            return [...document.querySelectorAll("body *")]
              .filter((e) => e.getBoundingClientRect().right > page.clientWidth + 1)
              .slice(0, 5).map((e) => e.outerHTML.slice(0, 200)).concat(`${page.scrollWidth} px`);
            """
        )
    )


def inaccessible(driver: webdriver.Chrome) -> list[str]:
    """The rules of axe that the page breaks, with the first elements that do."""
    if not driver.execute_script("return typeof window.axe === 'object'"):
        driver.execute_script(_axe())
    found = driver.execute_async_script(
        "const done = arguments[arguments.length - 1];"
        "axe.run(document, {resultTypes: ['violations']}).then((r) => done(r.violations), (e) => done(String(e)));"
    )
    assert isinstance(found, list), found
    return [f"{rule['id']} ({rule['impact']}): {_nodes(rule)}" for rule in found]


def _nodes(rule: dict[str, Any]) -> str:
    return " | ".join(f"{node['html'][:160]} {node['failureSummary']}" for node in rule["nodes"][:3])


def _axe() -> str:
    """The source of axe, out of the package that carries it."""
    for file in metadata.files("axe-playwright-python") or ():
        if file.name == "axe.min.js":
            return Path(str(file.locate())).read_text(encoding="utf-8")
    raise FileNotFoundError("axe-playwright-python carries no axe.min.js; run `make setup`")
