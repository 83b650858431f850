"""The original use's case, made small: what measuring it holds in memory, against the bytes that must be held."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.true_scale import PROMPTS, Sizes, make
from draftgauge.importing import ImportRequest, import_features
from draftgauge.prompts import read_prompts
from tests import tiny

SMALL = Sizes(
    layers=2,
    hidden=768,
    inner=2048,
    heads=8,
    kv_heads=2,
    head_dim=64,
    vocabulary=100_000,
    taps=(1, 3),
    prompt=20,
    length=90,
)
#: What is held besides, whatever the sizes: a part of the logits three times over, buffers of the libraries.
ROOM = 5 * (1 << 26)
#: Evaluates, and says how much anonymous memory that took at its highest, in bytes: mapped files can be dropped.
MEASURING = """
import json, re, sys, threading, time
from pathlib import Path
from draftgauge.evaluate import Options, evaluate_checkpoint
from draftgauge.acceptance import Policy
from draftgauge.cli.options import read_toml
from draftgauge.stated import Stated

def anonymous():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def watch():
    while True:
        seen.append(anonymous())
        time.sleep(0.002)

def evaluate(checkpoint, recording, wiring, dtype, prompts):
    stated = Stated(wiring=read_toml(Path(wiring)), source="the case", block_size=16)
    policies = (Policy("chain"), Policy("ddtree", 16), Policy("ddtree", 64))
    options = Options(stated, policies=policies, dtype=dtype, num_prompts=prompts)
    return evaluate_checkpoint(checkpoint, recording, options, root=Path(checkpoint) / "runs")

small, case, dtype = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
evaluate(*small, dtype, 1)  # whatever libraries keep for themselves is there after this
before, seen = anonymous(), []
threading.Thread(target=watch, daemon=True).start()
evaluate(*case, dtype, None)
print(max(seen) - before)
"""


def case(folder: Path, sizes: Sizes) -> list[str]:
    """A checkpoint, a recording of its loose features, and its wiring."""
    make(folder, sizes)
    *aux, last = sizes.taps
    layers = {"aux_hidden": tuple(aux), "last_hidden": (last,)}
    recording = import_features(
        folder / "cached",
        folder / "target",
        prompts=read_prompts(str(folder / "prompts.jsonl")),
        request=ImportRequest(sizes.taps, layers=layers),
        root=folder / "recordings",
    )
    assert {item.id for item in recording.items} == set(PROMPTS)
    return [str(folder / "step_4000"), str(recording.path), str(folder / "wiring.toml")]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """A case that is next to nothing, and the one to measure."""
    folder = tmp_path_factory.mktemp("cases")
    least = Sizes(2, 64, 128, 4, 2, 16, 500, (1, 3), 20, 90)
    return [case(folder / "least", least), case(folder / "small", SMALL)]


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 0)])
def test_memory_is_what_must_be_held(cases: list[list[str]], dtype: str, width: int) -> None:
    """Drafter and head once in the dtype to compute in; nothing of them in the one they are stored in, which stay
    mapped; and of logits and scores a part at a time, whatever the optimizer and the second block size bring.
    """
    done = subprocess.run(
        [sys.executable, "-c", MEASURING, *map(json.dumps, cases), dtype],
        env=tiny.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    peak, held = int(done.stdout), width * SMALL.held(1)
    assert peak < 1.15 * held + ROOM, f"{peak / 1e6:.0f} MB, {held / 1e6:.0f} MB must be held"
    assert peak > 0.8 * held
