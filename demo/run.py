"""The demo: record a real target on ten coding prompts, measure two checkpoints of one drafter, compare them.

Everything goes through the command line that users have; each command is shown before it runs. Needs the
target that `make target` unpacks; writes into demo-output/ only.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = Path(".cache/SmolLM2-135M-Instruct")
EARLY = Path("demo/drafter/step_250/checkpoint.pt")
LATE = Path("demo/drafter/step_4000/checkpoint.pt")
OUT = Path("demo-output")
NEW_TOKENS = "192"


def draftgauge(*arguments: str | Path, as_json: bool = False) -> str:
    """Shows and runs one command; returns what it printed. Progress goes to the terminal as usual."""
    words = ["draftgauge", *map(str, arguments)]
    print(f"\n$ {shlex.join(words)}", flush=True)
    command = [sys.executable, "-m", "draftgauge", *words[1:], *(["--json"] if as_json else [])]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def measure(checkpoint: Path, recording: Path) -> Path:
    """Evaluates a checkpoint; returns the run's folder."""
    output = draftgauge("eval", checkpoint, "--recording", recording, "--runs", OUT / "runs", as_json=True)
    value = json.loads(output)
    tau = value["summary"]["policies"]["chain"]["tau_response"]["value"]
    print(f"tau {tau:.3f}, kept in {value['path']}")
    return Path(value["path"])


def main() -> None:
    """Runs the main job from end to end."""
    started = time.perf_counter()
    output = draftgauge(
        *("record", "--target", TARGET, "--prompts", "builtin:coding10", "--checkpoint", LATE),
        *("--max-new-tokens", NEW_TOKENS, "--recordings", OUT / "recordings"),
        as_json=True,
    )
    recorded = json.loads(output)
    tokens = sum(item["length"] - item["prompt_len"] for item in recorded["items"])
    recording = OUT / "recordings" / recorded["path"].rsplit("/", 1)[-1]
    print(f"{len(recorded['items'])} prompts, {tokens} reference tokens, kept in {recording}")
    early, late = measure(EARLY, recording), measure(LATE, recording)
    print(draftgauge("compare", late, early))
    print(draftgauge("show", late))
    print(f"done in {time.perf_counter() - started:.0f} s. Four commands to try next:\n")
    for line in (
        f"draftgauge check {LATE} --recording {recording}",
        f"draftgauge diagnose {LATE} --recording {recording}",
        f"draftgauge eval {LATE} --recording {recording} --runs {OUT}/runs --block-size 4",
        f"draftgauge eval {LATE} --recording {recording} --runs {OUT}/runs --budgets 16,256,1024",
    ):
        print(f"  .venv/bin/{line}")


if __name__ == "__main__":
    main()
