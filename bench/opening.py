"""Opening and reading a synthetic training checkpoint of about 3 GB, against the bytes of its model."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.records import Record, found

_OPEN = """
import json, resource, sys, time
from draftgauge.checkpoint import open_checkpoint, require_finite, verify
import torch
from draftgauge.features import as_torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
started = time.perf_counter()
checkpoint = open_checkpoint(sys.argv[1])
opened = time.perf_counter() - started
verify(checkpoint)
require_finite(checkpoint)
held = [as_torch(t) for t in checkpoint.tensors.values()]
total = sum(float(t.sum()) for t in held)  # all of them stay mapped, as in a drafter
print(json.dumps({"opened_s": opened, "loaded_s": time.perf_counter() - started, "before": before,
    "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "model": checkpoint.bytes_model}))
"""


def write_training_checkpoint(path: Path) -> None:
    """A synthetic file of about 3 GB, of which a third is the model and the rest AdamW's moments."""
    import torch

    hidden, layers = 2048, 4
    shapes = {"fc.weight": (hidden, 5 * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(layers):
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"layers.{i}.self_attn.{part}.weight"] = (hidden, hidden)
        for part in ("q_norm", "k_norm"):
            shapes[f"layers.{i}.self_attn.{part}.weight"] = (128,)
        shapes[f"layers.{i}.mlp.gate_proj.weight"] = (3 * hidden, hidden)
        shapes[f"layers.{i}.mlp.up_proj.weight"] = (3 * hidden, hidden)
        shapes[f"layers.{i}.mlp.down_proj.weight"] = (hidden, 3 * hidden)
        for part in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers.{i}.{part}.weight"] = (hidden,)
    model = {name: torch.randn(shape) for name, shape in shapes.items()}
    moments = {
        i: {"step": torch.tensor(1.0), "exp_avg": t.clone(), "exp_avg_sq": t.clone()}
        for i, t in enumerate(model.values())
    }
    torch.save({"model_state_dict": model, "optimizer_state_dict": {"state": moments}, "step": 1}, path)


def bench_open() -> Iterator[Record]:
    """Opening and reading such a file: peak memory against the model's bytes, and the time to list it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        # In a process of its own: a child inherits the peak memory of the process that starts it.
        writer = multiprocessing.get_context("spawn").Process(target=write_training_checkpoint, args=(path,))
        writer.start()
        writer.join()
        size = path.stat().st_size
        out = subprocess.run(
            [sys.executable, "-c", _OPEN, str(path)], capture_output=True, text=True, check=True
        ).stdout
    value = json.loads(out)
    yield found(
        "open",
        value["peak"] / value["model"],
        file_bytes=size,
        model_bytes=value["model"],
        above_torch=(value["peak"] - value["before"]) / value["model"],
        listed_s=value["opened_s"],
        read_s=value["loaded_s"],
    )
