"""The tiny golden models as users have them: directories, trainer files, a recording, and the command line."""

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from draftgauge.drafters import as_torch
from draftgauge.prompts import Prompt, PromptSet
from draftgauge.record import Request, record_target
from draftgauge.recording import Recording, open_recording
from tests.golden import MODELS, config_of, tensors_of

#: A token at which the recorded target stops: some completions reach it within their 40 tokens.
STOP = 23
NEW_TOKENS = 40
PROMPTS: Mapping[str, tuple[int, ...]] = {
    "one": (26,),
    "five": (25, 159, 99, 118, 120),
    "long": (
        142,
        5,
        97,
        29,
        80,
        185,
        109,
        14,
        108,
        25,
        150,
        189,
        195,
        124,
        173,
        73,
        29,
        102,
        88,
        132,
        198,
        55,
    ),
    "pair": (7, 7),
    "three": (81, 86, 58),
    "four": (200, 3, 60, 11),
}


def target_dir(folder: Path, name: str = "targetA", *, stops: Sequence[int] = (), **config: Any) -> Path:
    """A Hugging Face directory of a golden target."""
    folder.mkdir(parents=True)
    golden = config_of(name)
    kind = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[golden["kind"]]
    said = {"model_type": golden["kind"], "architectures": [kind], "dtype": "float32", "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(said | golden["config"] | config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(stops) or None}))
    shutil.copy(MODELS / f"{name}.safetensors", folder / "model.safetensors")
    return folder


def drafter_config(name: str = "draftA8") -> dict[str, Any]:
    return {"rope_theta": 10000.0, **config_of(name)["config"]}


def drafter_dir(folder: Path, name: str = "draftA8", **config: Any) -> Path:
    """A z-lab style directory of a golden drafter."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(drafter_config(name) | config))
    shutil.copy(MODELS / f"{name}.safetensors", folder / "model.safetensors")
    return folder


def weights(name: str = "draftA8") -> dict[str, torch.Tensor]:
    return {key: as_torch(stored).clone() for key, stored in tensors_of(name).items()}


def trainer_pt(path: Path, state: Mapping[str, torch.Tensor] | None = None, **beside: Any) -> Path:
    """A trainer's own file: the weights of a golden drafter (or `state`), an optimizer, and what is `beside`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    moments = {0: {"step": torch.tensor(7.0), "exp_avg": torch.ones(4)}}
    value = {
        "model_state_dict": weights() if state is None else dict(state),
        "optimizer_state_dict": {"state": moments, "param_groups": [{"lr": 0.1, "params": [0]}]},
        **beside,
    }
    torch.save(value, path)
    return path


def prompt_set(names: Sequence[str] = tuple(PROMPTS)) -> PromptSet:
    prompts = (Prompt(n, category=f"length {len(PROMPTS[n])}", prompt_ids=PROMPTS[n]) for n in names)
    return PromptSet("tiny.jsonl", tuple(prompts))


def prompts_file(path: Path, names: Sequence[str] = tuple(PROMPTS)) -> Path:
    path.write_text("".join(json.dumps({"id": n, "prompt_ids": list(PROMPTS[n])}) + "\n" for n in names))
    return path


@cache
def workshop() -> Path:
    """A folder that every test reads and none writes: `target`, `drafter`, and a recording of all prompts."""
    folder = Path(tempfile.mkdtemp(prefix="draftgauge-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target_dir(folder / "target", stops=[STOP])
    drafter_dir(folder / "drafter")
    return folder


@cache
def recording() -> Recording:
    """What the tiny target did on all prompts: taps 1 and 3, which draftA8 reads, and the last layer."""
    return record_target(
        workshop() / "target",
        prompt_set(),
        request=Request(taps=(1, 3, 5), max_new_tokens=NEW_TOKENS),
        root=workshop() / "recordings",
    )


@cache
def wide_recording() -> Recording:
    """What the tiny target did on 48 short prompts: enough for several shards."""
    prompts = tuple(Prompt(f"p{i:02d}", prompt_ids=(10 + 3 * i, 1 + i)) for i in range(48))
    return record_target(
        workshop() / "target",
        PromptSet("wide.jsonl", prompts),
        request=Request(taps=(1, 3), max_new_tokens=NEW_TOKENS),
        root=workshop() / "recordings",
    )


def copied_recording(folder: Path) -> Recording:
    """The recording again, to be changed."""
    return open_recording(shutil.copytree(recording().path, folder))


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "draftgauge", *map(str, arguments)]


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **variables}


def draftgauge(*arguments: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
    )


def own_target(folder: Path) -> tuple[Recording, Path]:
    """A recording of a target that a test may change, and that target."""
    target = target_dir(folder / "target")
    request = Request(taps=(1, 3), max_new_tokens=4)
    return record_target(target, prompt_set(["one"]), request=request, root=folder / "recordings"), target
