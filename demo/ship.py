"""Makes a checkpoint small enough to ship: bfloat16 weights, no optimizer, the rest as it was.

Usage: `python demo/ship.py TRAINING/step_N demo/drafter`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from draftgauge.store import publish_directory


def main() -> None:
    """Rewrites one checkpoint."""
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    value = torch.load(source / "checkpoint.pt", weights_only=True)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in value["model_state_dict"].items()}
    shipped = {"model_state_dict": weights, "step": value["step"], "config": value["config"]}
    with publish_directory(out / source.name) as folder:
        torch.save(shipped, folder / "checkpoint.pt")
    print(f"{out / source.name}: {(out / source.name / 'checkpoint.pt').stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
