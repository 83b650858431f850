"""The original use at its true size: a drafter of 1.7 billion parameters, three cached prompts, on this machine.

`python bench/true_scale.py FOLDER` makes, once, in FOLDER: a `checkpoint.pt` of exactly those shapes (5 layers,
hidden 5120, intermediate 17408, 32 query and 8 key heads of 128, five taps) with optimizer state, all in bfloat16;
the ends of a target with 248,320 tokens; loose features of 3 prompts of 536 tokens whose last state gives the
references. Weights are random with a seed, so acceptance is what chance gives; time and memory are the real thing's.

Then `inspect`, `recordings import` and `eval` run as anybody would run them. Printed are peak memory against the
bytes that must be held, and the time of a block against the machine's own rate at these shapes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 5, 5120, 17408, 32, 8, 128
VOCABULARY, TAPS, LAST = 248320, (1, 16, 31, 46), 63
PROMPTS, PROMPT, LENGTH = ("fizzbuzz", "binary_search", "linked_list_reverse"), 120, 536
BLOCK, ROUNDS = 16, 30
WIRING = f"""\
taps = {[*TAPS, LAST]}
tap_after_final_norm = true
block_size = 32
mask_token_id = {VOCABULARY - 1}
predicts_from_anchor = false
rope_theta = 10000000.0
rms_norm_eps = 1e-6
rope_dims = 64
head_dim = {HEAD_DIM}
layer_types = {json.dumps(["full_attention"] * LAYERS)}
num_target_layers = 64
"""


def drafter_shapes() -> dict[str, tuple[int, ...]]:
    """The 58 tensors of the drafter, and the three others that its trainer saved beside them."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, 5 * HIDDEN)}
    shapes |= dict.fromkeys(("hidden_norm.weight", "norm.weight"), (HIDDEN,))
    for layer in range(LAYERS):
        inner = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "self_attn.q_norm": (HEAD_DIM,),
            "self_attn.k_norm": (HEAD_DIM,),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in inner.items()}
    return shapes | {"verifier_norm.weight": (HIDDEN,), "num_updates": (), "num_tokens": ()}


def make(folder: Path) -> None:
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
    state = {name: weight(*shape) for name, shape in drafter_shapes().items()}
    moments = {
        i: {"step": torch.tensor(4000.0), "exp_avg": torch.zeros_like(t), "exp_avg_sq": torch.zeros_like(t)}
        for i, t in enumerate(state.values())
    }
    optimizer = {"state": moments, "param_groups": [{"lr": 1e-4, "params": list(moments)}]}
    saved = {"model_state_dict": state, "optimizer_state_dict": optimizer, "global_step": 4000}
    torch.save(saved, folder / "step_4000" / "checkpoint.pt")
    del state, moments, optimizer, saved

    head = weight(VOCABULARY, HIDDEN)
    norm = (torch.rand(HIDDEN, generator=generator) + 0.5).bfloat16()
    (folder / "target").mkdir()
    tensors = {"model.embed_tokens.weight": as_stored(head), "model.norm.weight": as_stored(norm)}
    write_safetensors(folder / "target" / "model.safetensors", tensors)
    config: dict[str, Any] = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "dtype": "bfloat16",
    }
    config |= {"hidden_size": HIDDEN, "num_hidden_layers": 64, "vocab_size": VOCABULARY, "head_dim": HEAD_DIM}
    config |= {"intermediate_size": INNER, "num_attention_heads": 40, "num_key_value_heads": 8}
    config |= {"rms_norm_eps": 1e-6, "rope_theta": 1e7, "tie_word_embeddings": True}
    (folder / "target" / "config.json").write_text(json.dumps(config))

    (folder / "cached").mkdir()
    rows = []
    for name in PROMPTS:
        state_ = torch.randn(LENGTH, HIDDEN, generator=generator)
        last = (state_ * torch.rsqrt(state_.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16() * norm
        said = (last[PROMPT - 1 : -1] @ head.T).argmax(-1)
        prompt = torch.randint(0, VOCABULARY - 1, (PROMPT,), generator=generator)
        tokens = torch.cat((prompt, said))
        aux = (torch.randn(LENGTH, 4 * HIDDEN, generator=generator)).bfloat16()
        value = {"aux_hidden": aux[None], "last_hidden": last[None], "input_ids": tokens[None]}
        torch.save(value, folder / "cached" / f"{name}.pt")
        rows.append({"id": name, "prompt_ids": prompt.tolist()})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "wiring.toml").write_text(WIRING)
    (folder / "complete").touch()


def rates() -> dict[str, float]:
    """GFLOP/s of this machine's own products with a 5120 x 17408 matrix, by dtype and rows."""
    import torch

    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        matrix = torch.randn(HIDDEN, INNER).to(dtype)
        for rows in (BLOCK, 3 * BLOCK, 30 * BLOCK):
            some = torch.randn(rows, HIDDEN).to(dtype)
            some @ matrix
            times = []
            for _ in range(5):
                began = time.perf_counter()
                some @ matrix
                times.append(time.perf_counter() - began)
            found[f"{str(dtype).removeprefix('torch.')} {rows} rows"] = (
                2e-9 * rows * HIDDEN * INNER / min(times)
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


def main() -> int:
    """Make what is missing, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="outside the repository; about 16 GB")
    parser.add_argument("--all-anchors", action="store_true", help="also every anchor; minutes")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if not (folder / "complete").is_file():
        alone("true_scale.make(pathlib.Path(sys.argv[1]))", folder)
    rate = json.loads(alone("print(json.dumps(true_scale.rates()))"))
    for name, value in rate.items():
        print(f"{value:7.0f} GFLOP/s  {name} with the 5120 x 17408 matrix")

    sizes = drafter_shapes()
    drafter = 2 * sum(1 if not s else s[0] * (s[1] if len(s) > 1 else 1) for s in sizes.values())
    head = 2 * VOCABULARY * HIDDEN
    found, took, peak = timed("inspect", "step_4000", "--wiring", "wiring.toml", cwd=folder)
    print(
        f"inspect   {took:6.1f} s  peak {peak / 1e9:5.2f} GB  {found['file']['bytes_file'] / 1e9:.1f} GB on disk"
    )
    words = ("recordings", "import", "cached", "--target", "target", "--checkpoint", "step_4000", "--wiring")
    layers = ("--layers", f"aux_hidden={','.join(map(str, TAPS))}", "--layers", f"last_hidden={LAST}")
    made, took, peak = timed(*words, "wiring.toml", "--prompts", "prompts.jsonl", *layers, cwd=folder)
    print(f"import    {took:6.1f} s  peak {peak / 1e9:5.2f} GB  {len(made['items'])} prompts")
    operations = 2e-9 * BLOCK * (drafter / 2 - HIDDEN * 5 * HIDDEN + VOCABULARY * HIDDEN)
    for dtype, width in (("bfloat16", 1), ("float32", 2)):
        fastest = max(speed for name, speed in rate.items() if name.startswith(dtype))
        for anchors in ("walk", "all") if arguments.all_anchors else ("walk",):
            words = ("eval", "step_4000", "--recording", made["path"], "--wiring", "wiring.toml")
            asked = ("--block-size", BLOCK, "--budgets", "16,64", "--dtype", dtype, "--anchors", anchors)
            limit = ("--max-blocks", ROUNDS) if anchors == "walk" else ()
            name = f"{dtype}-{anchors}-{time.time_ns()}"
            _, took, peak = timed(*words, *asked, *limit, "--name", name, cwd=folder)
            blocks = pq.read_metadata(folder / "runs" / name / "blocks.parquet").num_rows
            held = width * (drafter + head)
            print(
                f"eval {dtype:8} {anchors:4} {took:7.1f} s  {blocks} blocks, {took / blocks:5.2f} s each, floor "
                f"{operations / fastest:.2f} s ({operations:.0f} GFLOP)  peak {peak / 1e9:5.2f} GB, "
                f"{peak / held:.2f} x the {held / 1e9:.2f} GB that must be held"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
