"""Write docs/walks.md: three walks through a measurement, with what the commands really print.

`make walks` runs every command on the demo pair (minutes) and writes the page; nothing on it is typed by hand but
the sentences between the commands.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "walks.md"
OUT = Path("demo-output/walks")
TARGET = Path(".cache/SmolLM2-135M-Instruct")
DRAFTER = Path("demo/drafter/step_4000")
PROMPTS = ("--prompts", "builtin:coding10", "--max-new-tokens", "192", "--recordings", OUT / "recordings")

HEAD = """# Three walks

<!-- Written by docs/walks.py from what the commands print: edit that, then run `make walks`. -->

The demo's drafter and target (`make demo` sets both up), three times: a healthy checkpoint, one whose taps are off
by one, and one whose recording is stale. Every block is what the command printed, in full.
"""


def shown(*arguments: object) -> str:
    """A command as the reader would type it, and what it prints; its exit code where that is not 0."""
    words = [str(argument) for argument in arguments]
    done = subprocess.run(  # noqa: S603 - our own command line
        [sys.executable, "-m", "draftgauge", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TQDM_DISABLE": "1"},
    )
    if done.returncode not in (0, 4):
        raise SystemExit(f"{words} failed:\n{done.stderr}")
    print(f"{' '.join(words)}: exit code {done.returncode}", file=sys.stderr)
    text = done.stdout.rstrip().replace(f"{ROOT}/", "")
    if done.returncode:
        text += f"\n{done.stderr.strip().splitlines()[-1]}\n(exit code {done.returncode})"
    return f"```text\n$ draftgauge {' '.join(words)}\n{text}\n```\n"


def recorded(*arguments: object) -> tuple[str, Path]:
    """What `record` prints, and the folder that it made."""
    before = set((ROOT / OUT / "recordings").glob("*"))
    text = shown("record", *arguments, *PROMPTS)
    (made,) = set((ROOT / OUT / "recordings").glob("*")) - before
    return text, made.relative_to(ROOT)


def tuned_target(folder: Path) -> Path:
    """The target as somebody may have tuned it since: one middle layer's weights are a tenth larger."""
    shutil.copytree(ROOT / TARGET, ROOT / folder)
    file = ROOT / folder / "model.safetensors"
    with safe_open(file, "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    name = "model.layers.8.mlp.down_proj.weight"
    tensors[name] = tensors[name] * 1.1
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def healthy() -> list[str]:
    """Everything is as it should be."""
    record, recording = recorded("--target", TARGET, "--checkpoint", DRAFTER, "--taps-around")
    return [
        "## A healthy checkpoint\n",
        "Record the target once. `--taps-around` also keeps the layers beside each tap on the first prompts, which\n"
        "a diagnosis needs to try taps that are off by one.\n",
        record,
        "Is a measurement of this pair to be trusted? `check` runs every control and says what each expected:\n",
        shown("check", DRAFTER, "--recording", recording),
        "Is there a better wiring nearby? A drafter that is wired as it was trained has none:\n",
        shown("diagnose", DRAFTER, "--recording", recording),
        "So the number is right, and what it says is about the drafter:\n",
        shown("eval", DRAFTER, "--recording", recording, "--runs", OUT / "runs", "--name", "healthy"),
    ]


def off_by_one() -> list[str]:
    """The config counts layers from 1."""
    taps = ("--taps", "2,11,20,28")
    record, recording = recorded("--target", TARGET, *taps, "--taps-around")
    fixed = OUT / "fixed.toml"
    return [
        "## Taps off by one\n",
        "The drafter reads the outputs of layers 1, 10, 19 and 27, counted from 0. Suppose that its config counts\n"
        "from 1: everything loads, nothing crashes, and the target is recorded at the layers that it names.\n",
        record,
        shown(
            "eval", DRAFTER, *taps, "--recording", recording, "--runs", OUT / "runs", "--name", "off-by-one"
        ),
        "Nothing but a lower number shows it. `diagnose` tries the wirings nearby on the same anchors:\n",
        shown("diagnose", DRAFTER, *taps, "--recording", recording, "--write", fixed),
        f"`{fixed}` is what `--wiring` takes:\n",
        f"```toml\n{(ROOT / fixed).read_text(encoding='utf-8').strip()}\n```\n",
    ]


def stale() -> list[str]:
    """The target changed after it was recorded."""
    tuned = tuned_target(OUT / "target")
    record, recording = recorded("--target", tuned, "--checkpoint", DRAFTER)
    shutil.rmtree(ROOT / tuned)
    shutil.copytree(ROOT / TARGET, ROOT / tuned)
    return [
        "## A stale recording\n",
        "A target was recorded, then its weights changed: one middle layer was tuned, its ends are the same. The\n"
        "recording is consistent in itself, so only the target can tell; `check` asks it where it is at hand.\n",
        record,
        shown("check", DRAFTER, "--recording", recording),
    ]


def main() -> None:
    """Runs the walks in a fresh folder and writes the page."""
    shutil.rmtree(ROOT / OUT, ignore_errors=True)
    (ROOT / OUT).mkdir(parents=True)
    PAGE.write_text("\n".join([HEAD, *healthy(), *off_by_one(), *stale()]), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
