"""The original use at its true size: a drafter of 1.7 billion parameters, three cached prompts, on this machine.

`python bench/true_scale.py FOLDER` makes, once, in FOLDER: a `checkpoint.pt` of exactly those shapes (5 layers,
hidden 5120, intermediate 17408, 32 query and 8 key heads of 128, five taps) with optimizer state, all in bfloat16;
the ends of a target with 248,320 tokens; loose features of 3 prompts of 536 tokens whose last state gives the
references. Weights are random with a seed, so acceptance is what chance gives; time and memory are the real thing's.

Then `inspect`, `recordings import` and `eval` run as anybody would run them. Peak memory against the bytes that must
be held, and the time of a block against the machine's own rate at these shapes, are kept in `bench/history.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

PROMPTS = ("fizzbuzz", "binary_search", "linked_list_reverse")
BLOCK, ROUNDS = 16, 30


@dataclass(frozen=True)
class Sizes:
    """The sizes of a drafter and of what it was made for; the defaults are the original use's."""

    layers: int = 5
    hidden: int = 5120
    inner: int = 17408
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 248320
    taps: tuple[int, ...] = (1, 16, 31, 46, 63)
    prompt: int = 120
    length: int = 536

    @property
    def target_layers(self) -> int:
        """Layers of the target: the last tap is its last."""
        return self.taps[-1] + 1

    @property
    def drafter(self) -> dict[str, tuple[int, ...]]:
        """The drafter's tensors, and the three others that its trainer saved beside them."""
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (self.hidden, len(self.taps) * self.hidden)}
        shapes |= dict.fromkeys(("hidden_norm.weight", "norm.weight"), (self.hidden,))
        for layer in range(self.layers):
            inner = {
                "self_attn.q_proj": (self.heads * self.head_dim, self.hidden),
                "self_attn.k_proj": (self.kv_heads * self.head_dim, self.hidden),
                "self_attn.v_proj": (self.kv_heads * self.head_dim, self.hidden),
                "self_attn.o_proj": (self.hidden, self.heads * self.head_dim),
                "self_attn.q_norm": (self.head_dim,),
                "self_attn.k_norm": (self.head_dim,),
                "mlp.gate_proj": (self.inner, self.hidden),
                "mlp.up_proj": (self.inner, self.hidden),
                "mlp.down_proj": (self.hidden, self.inner),
                "input_layernorm": (self.hidden,),
                "post_attention_layernorm": (self.hidden,),
            }
            shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in inner.items()}
        return shapes | {"verifier_norm.weight": (self.hidden,), "num_updates": (), "num_tokens": ()}

    def held(self, width: int) -> int:
        """Bytes of the drafter and the head, at so many bytes a number."""
        return width * (sum(map(math.prod, self.drafter.values())) + self.vocabulary * self.hidden)

    @property
    def block_gflop(self) -> float:
        """Operations of a drafted block: every matrix but the fusion of the taps, and the head."""
        rows = self.held(1) - self.hidden * len(self.taps) * self.hidden
        return 2e-9 * BLOCK * rows

    @property
    def wiring(self) -> str:
        """A file for `--wiring`: what the checkpoint does not say."""
        return f"""\
taps = {list(self.taps)}
tap_after_final_norm = true
block_size = 32
mask_token_id = {self.vocabulary - 1}
predicts_from_anchor = false
rope_theta = 10000000.0
rms_norm_eps = 1e-6
rope_dims = {self.head_dim // 2}
head_dim = {self.head_dim}
layer_types = {json.dumps(["full_attention"] * self.layers)}
num_target_layers = {self.target_layers}
"""


def make(folder: Path, sizes: Sizes = Sizes()) -> None:
    """Writes everything; in a process of its own, whose peak memory is nobody's."""
    import torch

    from draftgauge.features import as_stored
    from draftgauge.tensorfile import write_safetensors

    generator = torch.Generator().manual_seed(20)

    def weight(*shape: int, scale: float = 0.02) -> torch.Tensor:
        if len(shape) < 2:
            return torch.ones(shape, dtype=torch.bfloat16)
        made = torch.empty(shape, dtype=torch.bfloat16)
        for part in made.split(1 << 10):
            part.copy_(torch.randn(part.shape, generator=generator) * scale)
        return made

    (folder / "step_4000").mkdir(parents=True)
    state = {name: weight(*shape) for name, shape in sizes.drafter.items()}
    moments = {
        i: {"step": torch.tensor(4000.0), "exp_avg": torch.zeros_like(t), "exp_avg_sq": torch.zeros_like(t)}
        for i, t in enumerate(state.values())
    }
    optimizer = {"state": moments, "param_groups": [{"lr": 1e-4, "params": list(moments)}]}
    saved = {"model_state_dict": state, "optimizer_state_dict": optimizer, "global_step": 4000}
    torch.save(saved, folder / "step_4000" / "checkpoint.pt")
    del state, moments, optimizer, saved

    head = weight(sizes.vocabulary, sizes.hidden)
    norm = (torch.rand(sizes.hidden, generator=generator) + 0.5).bfloat16()
    (folder / "target").mkdir()
    tensors = {"model.embed_tokens.weight": as_stored(head), "model.norm.weight": as_stored(norm)}
    write_safetensors(folder / "target" / "model.safetensors", tensors)
    config: dict[str, Any] = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "dtype": "bfloat16",
    }
    config |= {"hidden_size": sizes.hidden, "vocab_size": sizes.vocabulary, "head_dim": sizes.head_dim}
    config |= {"intermediate_size": sizes.inner, "num_hidden_layers": sizes.target_layers}
    config |= {"num_attention_heads": sizes.hidden // sizes.head_dim, "num_key_value_heads": sizes.kv_heads}
    config |= {"rms_norm_eps": 1e-6, "rope_theta": 1e7, "tie_word_embeddings": True}
    (folder / "target" / "config.json").write_text(json.dumps(config))

    (folder / "cached").mkdir()
    rows = []
    for name in PROMPTS:
        state_ = torch.randn(sizes.length, sizes.hidden, generator=generator)
        last = (state_ * torch.rsqrt(state_.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16() * norm
        said = (last[sizes.prompt - 1 : -1] @ head.T).argmax(-1)
        prompt = torch.randint(0, sizes.vocabulary - 1, (sizes.prompt,), generator=generator)
        tokens = torch.cat((prompt, said))
        aux = (
            torch.randn(sizes.length, (len(sizes.taps) - 1) * sizes.hidden, generator=generator)
        ).bfloat16()
        value = {"aux_hidden": aux[None], "last_hidden": last[None], "input_ids": tokens[None]}
        torch.save(value, folder / "cached" / f"{name}.pt")
        rows.append({"id": name, "prompt_ids": prompt.tolist()})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "wiring.toml").write_text(sizes.wiring)
    (folder / "complete").touch()


def rates() -> dict[str, float]:
    """GFLOP/s of this machine's own products with a 5120 x 17408 matrix, by dtype and rows."""
    import torch

    sizes, found = Sizes(), {}
    for dtype in (torch.bfloat16, torch.float32):
        matrix = torch.randn(sizes.hidden, sizes.inner).to(dtype)
        for rows in (BLOCK, 3 * BLOCK, 30 * BLOCK):
            some = torch.randn(rows, sizes.hidden).to(dtype)
            some @ matrix
            times = []
            for _ in range(5):
                began = time.perf_counter()
                some @ matrix
                times.append(time.perf_counter() - began)
            found[f"{str(dtype).removeprefix('torch.')} {rows} rows"] = (
                2e-9 * rows * sizes.hidden * sizes.inner / min(times)
            )
    return found


def timed(*words: object, cwd: Path) -> tuple[Any, float, float]:
    """What a draftgauge command prints as JSON, its seconds and its peak memory in bytes.

    Memory is the proportional set size, sampled: a file that is mapped twice is held once.
    """
    command = [sys.executable, "-m", "draftgauge", *map(str, words), "--json"]
    began, peak = time.perf_counter(), 0
    with (cwd / "out.json").open("w") as out:
        child = subprocess.Popen(command, cwd=cwd, stdout=out)
        while child.poll() is None:
            peak = max(peak, held_by(child.pid))
            time.sleep(0.2)
    took = time.perf_counter() - began
    if child.returncode not in (0, 4):
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
    return json.loads((cwd / "out.json").read_text()), took, peak


def held_by(pid: int) -> int:
    """Bytes that a process holds now; 0 once it is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def alone(code: str, *words: object) -> str:
    """What a function of this file prints in a process of its own."""
    here = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import true_scale, json, pathlib; {code}"
    done = subprocess.run(
        [sys.executable, "-c", here, *map(str, words)], check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def measured(
    folder: Path, rate: Mapping[str, float], *, kinds: Sequence[str], sizes: Sizes = Sizes()
) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """The ratios' names and values, and what they are made of, for walks and perhaps for all anchors."""
    _, inspect_s, inspect_bytes = timed("inspect", "step_4000", "--wiring", "wiring.toml", cwd=folder)
    words = ("recordings", "import", "cached", "--target", "target", "--checkpoint", "step_4000", "--wiring")
    layers = (
        "--layers",
        f"aux_hidden={','.join(map(str, sizes.taps[:-1]))}",
        "--layers",
        f"last_hidden={sizes.taps[-1]}",
    )
    made, import_s, import_bytes = timed(
        *words, "wiring.toml", "--prompts", "prompts.jsonl", *layers, cwd=folder
    )
    before = {
        "inspect_s": inspect_s,
        "inspect_peak_bytes": inspect_bytes,
        "import_s": import_s,
        "import_peak_bytes": import_bytes,
        "gflop_per_s": dict(rate),
    }
    for dtype, width in (("bfloat16", 2), ("float32", 4)):
        fastest = max(speed for name, speed in rate.items() if name.startswith(dtype))
        floor_s, held = sizes.block_gflop / fastest, sizes.held(width)
        for anchors in kinds:
            words = ("eval", "step_4000", "--recording", made["path"], "--wiring", "wiring.toml")
            asked = ("--block-size", BLOCK, "--budgets", "16,64", "--dtype", dtype, "--anchors", anchors)
            limit = ("--max-blocks", ROUNDS) if anchors == "walk" else ()
            name = f"{dtype}-{anchors}-{time.time_ns()}"
            _, took, peak = timed(*words, *asked, *limit, "--name", name, cwd=folder)
            blocks = pq.read_metadata(folder / "runs" / name / "blocks.parquet").num_rows
            raw = {
                "eval_s": took,
                "blocks": blocks,
                "floor_s": floor_s,
                "peak_bytes": peak,
                "held_bytes": held,
            }
            yield f"true-scale-memory-{dtype}-{anchors}", peak / held, before | raw
            yield f"true-scale-time-{dtype}-{anchors}", took / blocks / floor_s, before | raw


def main() -> int:
    """Make what is missing, measure, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="outside the repository; about 16 GB")
    parser.add_argument("--all-anchors", action="store_true", help="also every anchor; minutes")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if not (folder / "complete").is_file():
        alone("true_scale.make(pathlib.Path(sys.argv[1]))", folder)
    rate = json.loads(alone("print(json.dumps(true_scale.rates()))"))
    records = measured(folder, rate, kinds=("walk", "all") if arguments.all_anchors else ("walk",))
    sys.path[0] = str(
        Path(__file__).resolve().parent.parent
    )  # as a script it stands in the wrong folder first
    from bench.history import keep
    from bench.records import found

    keep([found(name, value, **raw) for name, value, raw in records], left_out={})
    return 0


if __name__ == "__main__":
    sys.exit(main())
