"""Speed as ratios, each against a stated rival or limit in the same run.

    python bench/run.py                 all four
    python bench/run.py tree help       some of them

(replay) evaluating a checkpoint, all anchors, chain and DDTree 4 to 64, against decoding the same prompts online
under the same six policies, and under the chain alone; (tree) expanding to 1024 nodes at every anchor against a
plain Python heap; (open) opening and loading a synthetic 3 GB training checkpoint against the bytes of its
model tensors; (help) `draftgauge --help` against `python -c pass`.
"""

from __future__ import annotations

import argparse
import heapq
import json
import multiprocessing
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "demo"))

SECONDS_PER_TREE_SIDE = 3.0


def bench_replay(prompts: int) -> None:
    """Evaluating against decoding online: wall time of both, on the demo's target, prompts and drafter."""
    import run as demo
    import torch

    import draftgauge as dg
    from draftgauge.decode import decode
    from draftgauge.evaluate import Options
    from draftgauge.measure import DEFAULT_POLICIES
    from draftgauge.pairing import open_drafter
    from draftgauge.stated import wiring_of
    from draftgauge.target import load_target

    checkpoint = dg.open_checkpoint(ROOT / demo.LATE)
    wiring = wiring_of(checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        prompt_set = dg.read_prompts("builtin:coding10").first(prompts)
        request = dg.Request(taps=wiring.taps, max_new_tokens=int(demo.NEW_TOKENS))
        recording = dg.record_target(ROOT / demo.TARGET, prompt_set, request=request, root=Path(folder))
        started = time.perf_counter()
        run = dg.evaluate_checkpoint(ROOT / demo.LATE, recording.path, Options(), root=Path(folder, "runs"))
        replay_s = time.perf_counter() - started
        target = load_target(ROOT / demo.TARGET, dtype="float32")
        drafter = open_drafter(checkpoint, wiring, recording=recording, dtype="float32")
        online_s = {}
        for policy in DEFAULT_POLICIES:
            started = time.perf_counter()
            for item in recording.items:
                tokens = torch.from_numpy(np.array(recording.tensors(item).tokens.mapped()).view(np.int32))
                decode(
                    target,
                    drafter,
                    prompt_ids=tokens[: item.prompt_len].tolist(),
                    policy=policy,
                    max_new_tokens=item.completion_len,
                )
            online_s[policy.label] = time.perf_counter() - started
    total = sum(online_s.values())
    each = ", ".join(f"{label} {seconds:.1f} s" for label, seconds in online_s.items())
    print(f"replay: {len(run.summary['prompts'])} prompts, all anchors, six policies: {replay_s:.1f} s")
    print(
        f"  against online decoding under the six policies ({each}): {total / replay_s:.1f} x faster (aim 20)"
    )
    print(f"  against one online chain decode: {online_s['chain'] / replay_s:.1f} x faster")


def plain_heap(log_probs: np.ndarray, budget: int) -> list[tuple[int, ...]]:
    """The rival of (tree): best-first expansion with heapq and tuples of ranks."""
    depth, width = log_probs.shape
    rows = log_probs.tolist()
    heap: list[tuple[float, tuple[int, ...], float]] = [(-rows[0][0], (0,), 0.0)]
    nodes: list[tuple[int, ...]] = []
    while heap and len(nodes) < budget:
        score, path, above = heapq.heappop(heap)
        nodes.append(path)
        level = len(path) - 1
        if path[-1] + 1 < min(width, budget):
            rank = path[-1] + 1
            heapq.heappush(heap, (-(above + rows[level][rank]), (*path[:-1], rank), above))
        if level + 1 < depth:
            heapq.heappush(heap, (score - rows[level + 1][0], (*path, 0), -score))
    return nodes


def bench_tree() -> None:
    """Expanding to 1024 nodes at every anchor, against the plain heap on the same anchors."""
    from draftgauge.acceptance import NO_REFERENCE
    from draftgauge.tree import expand, reference_order

    generator = np.random.default_rng(0)
    logits = generator.standard_normal((512, 15, 4096)).astype(np.float32) * 3
    ordered = -np.sort(-logits, axis=2)[:, :, :1024]
    lists = np.ascontiguousarray(ordered - np.log(np.exp(logits).sum(axis=2, keepdims=True)))
    # References that are never inside make every expansion run to its full budget.
    ranks = np.full((512, 15), 1023, dtype=np.int32)
    ranks[:, 0] = 0
    reference_order(lists[:2], ranks=ranks[:2], budget=1024)
    assert expand(lists[0], budget=1024).ranks[-1] == plain_heap(lists[0], 1024)[-1][-1]
    assert ranks.max() < NO_REFERENCE
    ours = _seconds_per_item(lambda i: expand(lists[i], budget=1024), len(lists))
    replayed = _seconds_per_item(
        lambda i: reference_order(lists[i : i + 1], ranks=ranks[i : i + 1], budget=1024), len(lists)
    )
    theirs = _seconds_per_item(lambda i: plain_heap(lists[i], 1024), len(lists))
    print(f"tree: 1024 nodes, depth 15: {ours * 1e6:.0f} us an anchor; plain heapq {theirs * 1e6:.0f} us")
    print(
        f"  whole tree {theirs / ours:.0f} x faster, position of the reference {theirs / replayed:.0f} x (aim 50)"
    )


def _seconds_per_item(work: Callable[[int], object], count: int) -> float:
    times = []
    deadline = time.perf_counter() + SECONDS_PER_TREE_SIDE
    for i in range(count):
        started = time.perf_counter()
        work(i)
        times.append(time.perf_counter() - started)
        if time.perf_counter() > deadline:
            break
    return statistics.median(times)


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


def bench_open() -> None:
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
    print(f"open: {size / 1e9:.2f} GB file, {value['model'] / 1e9:.2f} GB of it the model, listed in")
    print(f"  {value['opened_s']:.3f} s; verified and every weight read in {value['loaded_s']:.1f} s")
    print(
        f"  peak memory {value['peak'] / 1e9:.2f} GB, of it {value['before'] / 1e9:.2f} GB before opening (torch)"
    )
    above = (value["peak"] - value["before"]) / value["model"]
    ratio = value["peak"] / value["model"]
    print(f"  {ratio:.2f} x the model's bytes (aim 1.2), {above:.2f} x above torch")


def bench_help() -> None:
    """Starting the command line against starting Python."""

    def seconds(*command: str) -> float:
        times = []
        for _ in range(9):
            started = time.perf_counter()
            subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, check=True)
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    ours, python = seconds("-m", "draftgauge", "--help"), seconds("-c", "pass")
    print(
        f"help: draftgauge --help {ours * 1e3:.0f} ms, python -c pass {python * 1e3:.0f} ms: {ours / python:.1f} x"
    )


def main() -> None:
    """Runs the benches that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", nargs="*", default=["open", "help", "tree", "replay"])
    parser.add_argument("--prompts", type=int, default=10, help="of the replay bench")
    options = parser.parse_args()
    benches = {
        "help": bench_help,
        "tree": bench_tree,
        "open": bench_open,
        "replay": lambda: bench_replay(options.prompts),
    }
    unknown = sorted(set(options.which) - set(benches))
    if unknown:
        parser.error(f"unknown bench {', '.join(unknown)}; expected {', '.join(benches)}")
    for name in options.which:
        benches[name]()
    print(f"peak memory of this process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")


if __name__ == "__main__":
    main()
