"""A training place and a laboratory on this machine, each a container entered with `env`, and a plan for them.

The checkpoints are a trainer's files of the tiny golden drafter; the recording is the tiny target's.
"""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch

from draftgauge.fleet.pipeline import Log
from draftgauge.fleet.plans import FleetPlan, read_plan
from draftgauge.progress import byte_bar
from tests import tiny


@dataclass(frozen=True)
class Yard:
    """The folder of everything: `train/` at training, `lab/` at the laboratory, `plan.toml` here."""

    folder: Path
    said: list[str]

    def checkpoint(self, step: int, **beside: Any) -> Path:
        """A trainer's checkpoint of a step; the weights differ a little from step to step."""
        generator = torch.Generator().manual_seed(step)
        state = {
            name: tensor + 0.001 * torch.randn(tensor.shape, generator=generator)
            if tensor.is_floating_point()
            else tensor
            for name, tensor in tiny.weights().items()
        }
        path = self.folder / "train" / "out" / f"step_{step}" / "checkpoint.pt"
        return tiny.trainer_pt(path, state, step=step, config=tiny.drafter_config(), **beside)

    def plan(self, **changes: Any) -> FleetPlan:
        """The plan, with tables of it replaced."""
        value: dict[str, Any] = {
            "fleet": "fleet.toml",
            "checkpoint": "train:out/step_10/checkpoint.pt",
            "recording": f"lab:recordings/{tiny.recording().path.name}",
            "check": False,
            "eval": {"budgets": [4], "max_blocks": 6},
            "trainer": {
                "log": "train:train.log",
                "pattern": r"step (?P<step>\d+) .* (?P<ktok_per_s>[\d.]+) Ktok/s",
            },
        }
        value = {name: item for name, item in (value | changes).items() if item is not None}
        file = self.folder / "plan.toml"
        file.write_text(tomli_w.dumps(value))
        return read_plan(file)

    def log(self) -> Log:
        """A log whose lines are kept."""
        return Log(self.said.append, byte_bar)


def yard(folder: Path) -> Yard:
    """A new one."""
    for name in ("train/out", "lab/recordings"):
        (folder / name).mkdir(parents=True)
    shutil.copytree(tiny.recording().path, folder / "lab" / "recordings" / tiny.recording().path.name)
    (folder / "train" / "train.log").write_text(
        "step 12 loss 2.0 | 19.4 Ktok/s\nstep 13 loss 2.0 | 19.5 Ktok/s\n"
    )
    (folder / "fleet.toml").write_text(f"""
[hosts.workstation]
keep_free = "1 MB"

[containers.train]
host = "workstation"
enter = ["env"]
work = {json.dumps(str(folder / "train"))}

[containers.lab]
host = "workstation"
enter = ["env", "OMP_NUM_THREADS=1"]
work = {json.dumps(str(folder / "lab"))}
python = {json.dumps(sys.executable)}
keep_free = "1 MB"
""")
    return Yard(folder, [])
