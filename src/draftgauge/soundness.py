"""Controls on the drafter's weights and arithmetic: every tensor is used and trained, and the dtype can hold it.

Perturbs one tensor at a time and looks whether the drafted states move; looks for weights that still have the value
that they began with; compares what two dtypes draft. Knows nothing of acceptance.

Letters: A anchors, D depth, H hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from draftgauge.drafters import DFlash
from draftgauge.features import Recorded, read_item
from draftgauge.recording import Item, Recording
from draftgauge.trust import Control, Verdict

#: A short stretch of text is enough to see whether anything moves, and cheap for a large drafter.
_POSITIONS, _ANCHORS = 64, 2
_DTYPE_ANCHORS = 32
#: From this share on, first choices that another dtype changes are more than near-ties.
_MANY_FLIPS = 0.05
_FLOAT16_MAX = 65504.0
#: Matrices are compared on so many of their values.
_COMPARED = 4096


def soundness_controls(
    drafter: DFlash,
    recording: Recording,
    *,
    items: Sequence[Item],
    reopen: Callable[[str], DFlash],
) -> list[Control]:
    """Whether every tensor is used and trained, and what another dtype would change.

    Args:
        drafter: The drafter, in the dtype that the run computes in.
        recording: What it is measured on.
        items: The prompts that are measured, the first of which is drafted on.
        reopen: Gives the same drafter in the dtype of that name.
    """
    dtype = drafter.ends.embedding.dtype
    seen = read_item(recording, items[0], wiring=drafter.wiring, dtype=dtype)
    return [_tensors_used(drafter, seen), _trained(drafter), _dtypes(drafter, seen, reopen=reopen)]


@torch.inference_mode()
def _tensors_used(drafter: DFlash, seen: Recorded) -> Control:
    """Every tensor that the wiring reads moves the output when it is perturbed."""
    last = min(len(seen.tokens) - 1, seen.prompt_len + _POSITIONS)
    anchors = torch.arange(max(1, last - _ANCHORS), last)
    before = _states(drafter, seen, anchors)
    idle, count = [], 0
    for name, _ in drafter.named_parameters():
        count += 1
        with _perturbed(drafter, name):
            if torch.equal(_states(drafter, seen, anchors), before):
                idle.append(name)
    named = ", ".join(idle[:8]) + (f" and {len(idle) - 8} more" if len(idle) > 8 else "")
    return Control(
        "tensors-used",
        "every tensor that the wiring reads moves the drafted states when it is perturbed",
        f"{count - len(idle)} of {count} tensors do" + (f"; not {named}" if idle else ""),
        "failed" if idle else "passed",
        {"tensors": count, "idle": idle},
        "a layer that adds nothing hides its own weights: compare them with the trainer's; they may never have been "
        "loaded or trained"
        if idle
        else None,
    )


def _states(drafter: DFlash, seen: Recorded, anchors: Int[Tensor, " A"]) -> Float[Tensor, "A D H"]:
    context = drafter.context(seen.features[: int(anchors[-1])])
    return drafter.draft(context, anchors=anchors, anchor_tokens=seen.tokens[anchors])


@contextlib.contextmanager
def _perturbed(drafter: DFlash, name: str) -> Iterator[None]:
    """The drafter with one of its tensors changed a little, for as long as the context is open.

    The stored bytes are mapped and never written to: another tensor stands in their place meanwhile.
    """
    path, _, leaf = name.rpartition(".")
    module = dict(drafter.named_modules())[path]
    kept: nn.Parameter = getattr(module, leaf)
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(kept.shape, generator=generator).to(kept.dtype)
    other = kept.detach() * (1 + noise) + noise * kept.detach().float().abs().mean().to(kept.dtype)
    setattr(module, leaf, nn.Parameter(other, requires_grad=False))
    try:
        yield
    finally:
        setattr(module, leaf, kept)


def _trained(drafter: DFlash) -> Control:
    """No tensor still has the value that networks begin with, and no two layers are the same."""
    constant: list[str] = []
    twins: list[str] = []
    seen: dict[object, str] = {}
    for name, tensor in drafter.named_parameters():
        flat = tensor.detach().flatten()
        if bool((flat == flat[0]).all()):
            constant.append(f"{name} is {float(flat[0]):g} throughout")
        elif tensor.dim() > 1:
            mark = (tuple(tensor.shape), tuple(flat[:: max(1, len(flat) // _COMPARED)][:_COMPARED].tolist()))
            if mark in seen:
                twins.append(f"{name} equals {seen[mark]}")
            seen.setdefault(mark, name)
    found = [*twins, *constant]
    verdict: Verdict = "failed" if twins else "caution" if constant else "passed"
    return Control(
        "tensors-trained",
        "no tensor has the value that networks begin with, and no two are the same",
        "none has"
        if not found
        else "; ".join(found[:6]) + (f"; and {len(found) - 6} more" if len(found) > 6 else ""),
        verdict,
        {"constant": constant, "twins": twins},
        "such tensors were never trained, or are a copy: compare them with the trainer's" if found else None,
    )


@torch.inference_mode()
def _dtypes(drafter: DFlash, seen: Recorded, *, reopen: Callable[[str], DFlash]) -> Control:
    """What another dtype would draft, and whether float16 could hold what is computed."""
    mine = str(drafter.ends.embedding.dtype).removeprefix("torch.")
    other = "bfloat16" if mine == "float32" else "float32"
    anchors = seen.anchors[:: max(1, len(seen.anchors) // _DTYPE_ANCHORS)][:_DTYPE_ANCHORS]
    with _largest(drafter) as largest:
        ours = _first_choices(drafter, seen, anchors)
    second = reopen(other)
    cast = Recorded(seen.tokens, seen.prompt_len, seen.features.to(second.ends.embedding.dtype))
    flipped = float((ours != _first_choices(second, cast, anchors)).float().mean())
    place, peak = max(largest.items(), key=lambda entry: entry[1])
    finite = all(value < float("inf") for value in largest.values())
    overflows = peak > _FLOAT16_MAX
    verdict: Verdict = (
        "failed" if not finite else "caution" if flipped > _MANY_FLIPS or overflows else "passed"
    )
    advice = None
    if not finite:
        advice = f"values overflow in {mine}: measure with --dtype float32"
    elif overflows:
        advice = f"float16 ends at {_FLOAT16_MAX:.0f}: serve this drafter in bfloat16 or float32"
    elif flipped > _MANY_FLIPS:
        advice = f"more than near-ties change: measure in the dtype that serves, and expect other numbers in {other}"
    return Control(
        "dtype",
        f"{mine} and {other} draft the same tokens, and nothing overflows",
        f"{flipped:.1%} of {ours.numel()} first choices differ; the largest value is {peak:.3g}, in {place}",
        verdict,
        {"flipped": flipped, "choices": ours.numel(), "largest": peak, "largest_in": place},
        advice,
    )


def _first_choices(drafter: DFlash, seen: Recorded, anchors: Int[Tensor, " A"]) -> Int[Tensor, "A D"]:
    return torch.stack([drafter.logits(some).argmax(-1) for some in _states(drafter, seen, anchors)])


@contextlib.contextmanager
def _largest(drafter: DFlash) -> Iterator[dict[str, float]]:
    """The largest magnitude that each part of the network gives out while the context is open."""
    largest: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        for name, module in drafter.named_modules():
            if isinstance(module, nn.Linear):
                handle = module.register_forward_hook(_note(largest, name))
                stack.callback(handle.remove)
        yield largest


def _note(largest: dict[str, float], name: str) -> Callable[[nn.Module, object, Tensor], None]:
    def after(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        largest[name] = max(
            largest.get(name, 0.0), float(output.float().abs().nan_to_num(nan=torch.inf).max())
        )

    return after
