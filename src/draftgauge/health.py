"""Controls on the recording: that its features are features, of these tokens, of this target, and its text is sound.

Needs no drafter and no target: a recording can be asked whether it is consistent in itself. Knows nothing of wirings.

Letters: T positions, H hidden size, R rows, K of them that are kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftgauge.errors import RecordingError, TargetError
from draftgauge.features import as_torch, normed
from draftgauge.recording import BEFORE_NORM, MANIFEST, Item, Recording
from draftgauge.repetition import DEGENERATE_SHARE, repetition_share
from draftgauge.store import sha256_file
from draftgauge.targetfiles import config_files, tokenizer_files, weight_files
from draftgauge.trust import Control, Verdict

#: What rounding may do to a recorded state, relative to its size, when other prompts are computed beside it.
_TOLERANCE: Mapping[str, float] = {"float32": 1e-2, "bfloat16": 0.15, "float16": 0.05}
#: Rows of the head's product that tell whether the final state gives the text, per recording.
_HEAD_ROWS = 1024
#: A recording reproduces its references when so many do; of those that do not, near-ties are counted apart.
_REPRODUCED = 0.98
_FAR_CAUTION, _FAR_FAILED = 0.01, 0.05
#: Rows that equal the row before them: more than this share is no coincidence.
_REPEATED_ROWS = 0.1
_NAMED = 4


def recording_controls(
    recording: Recording, *, items: Sequence[Item], taps: Sequence[int] | None = None
) -> list[Control]:
    """Everything that a recording shows about itself.

    Args:
        recording: The recording.
        items: The prompts that are measured.
        taps: The layers that the drafter reads; all recorded ones when None.
    """
    layers = recording.plan.taps if taps is None else tuple(taps)
    finite = _finite(recording, items, layers)
    if finite.verdict == "failed":  # nothing more can be said of numbers that are none
        return [finite, _own(items), _degenerate(recording, items), _target_files(recording)]
    return [
        finite,
        _varying(recording, items, layers),
        _different(recording, items, layers),
        _prefixes(recording, items, layers),
        _final_state(recording, items),
        _own(items),
        _degenerate(recording, items),
        _target_files(recording),
    ]


def _outputs(
    recording: Recording, item: Item, layers: Sequence[int]
) -> Iterator[tuple[int, Float[Tensor, "T H"]]]:
    """The recorded outputs of the layers, as far as the item holds them."""
    held = recording.tensors(item).outputs
    return ((layer, as_torch(held[layer])) for layer in layers if layer in held)


def _final(recording: Recording, item: Item) -> list[Float[Tensor, "T H"]]:
    """The item's final state, as a list of one, or of none where it holds none."""
    final = recording.tensors(item).final
    return [] if final is None else [as_torch(final)]


def _finite(recording: Recording, items: Sequence[Item], layers: Sequence[int]) -> Control:
    wrong = []
    for item in items:
        parts: list[tuple[int | str, Tensor]] = [*_outputs(recording, item, layers)]
        parts += [("final", state) for state in _final(recording, item)]
        wrong += [
            f"{_tap(name)} of {item.id}: {int((~states.isfinite()).sum())} values"
            for name, states in parts
            if not bool(states.isfinite().all())
        ]
    return _nowhere(
        "features-finite",
        wrong,
        expectation="no recorded value is NaN or infinite",
        fine=f"none is, in {len(items)} prompt(s)",
        advice="record again, with --dtype float32 if the target overflowed",
    )


def _varying(recording: Recording, items: Sequence[Item], layers: Sequence[int]) -> Control:
    """A tap says something else at every position."""
    wrong = []
    for item in items:
        for layer, states in _outputs(recording, item, layers):
            if not bool(states.any()):
                wrong.append(f"{_tap(layer)} of {item.id} is zero throughout")
                continue
            tokens = as_torch(recording.tensors(item).tokens)
            # The embedding of a token is the same wherever it stands; deeper layers know the position.
            repeated = (states[1:] == states[:-1]).all(dim=1) & (tokens[1:] != tokens[:-1])
            share = float(repeated.float().mean())
            if share > _REPEATED_ROWS:
                wrong.append(f"{_tap(layer)} of {item.id} repeats its row at {share:.0%} of the positions")
    return _nowhere(
        "features-vary",
        wrong,
        expectation="every tap changes from position to position",
        fine=f"every tap does, in {len(items)} prompt(s)",
        advice="these are no features: record the target again",
    )


def _different(recording: Recording, items: Sequence[Item], layers: Sequence[int]) -> Control:
    """Taps differ from each other, and the last layer's is the final state."""
    tolerance = _TOLERANCE.get(recording.plan.dtype, 0.01)
    last = recording.target.num_layers - 1
    wrong = []
    for item in items:
        states = [(layer, x.float()) for layer, x in _outputs(recording, item, layers)]
        final = _final(recording, item)
        for (one, a), (two, b) in itertools.combinations(states, 2):
            if _apart(a, b) < 1e-4:
                wrong.append(f"{_tap(one)} and {_tap(two)} of {item.id} are equal")
        for layer, x in states if final else ():
            same = _apart(x, final[0].float()) < (tolerance if layer == last else 1e-4)
            if layer == last and not same:
                wrong.append(f"{_tap(layer)} of {item.id} is the last layer's and not the final state")
            elif layer != last and same:
                wrong.append(f"{_tap(layer)} of {item.id} equals the final state")
    return _nowhere(
        "taps-differ",
        wrong,
        expectation="no two taps are equal, and the last layer's, where it is tapped, is the final state",
        fine=f"so it is in {len(items)} prompt(s)",
        advice="a tap was recorded under another's name: record the target again",
    )


def _prefixes(recording: Recording, items: Sequence[Item], layers: Sequence[int]) -> Control:
    """What two prompts begin with alike has the same features in both, and what follows has others."""
    expectation = (
        "prompts that begin alike have the same features so far, and others from the first other token on"
    )
    # In the order of their tokens, neighbours share the longest beginnings.
    ordered = sorted(items, key=lambda item: as_torch(recording.tensors(item).tokens).tolist())
    wrong: list[str] = []
    compared = 0
    for one, two in itertools.pairwise(ordered):
        shared = _shared(as_torch(recording.tensors(one).tokens), as_torch(recording.tensors(two).tokens))
        # The embedding of a token is the same wherever it stands; deeper layers know what came before.
        deep = [layer for layer in layers if layer >= 0]
        compared += bool(shared and deep)
        for (layer, a), (_, b) in zip(
            _outputs(recording, one, deep), _outputs(recording, two, deep), strict=False
        ):
            wrong += _unlike(
                a, b, shared, dtype=recording.plan.dtype, what=f"{_tap(layer)} of {two.id} and {one.id}"
            )
    if not compared and not wrong:
        return Control("prefix-features", expectation, "no two prompts begin alike", "skipped")
    return _nowhere(
        "prefix-features",
        wrong,
        expectation=expectation,
        fine=f"so it is in {compared} pair(s) of prompts",
        advice="the features are another request's, shifted, or cut by a cached prefix: record the target again",
    )


def _unlike(
    a: Float[Tensor, "T H"], b: Float[Tensor, "T2 H"], shared: int, *, dtype: str, what: str
) -> list[str]:
    """How two prompts' features contradict that their first `shared` tokens are the same and the next is not."""
    wrong = []
    if shared:
        off = _apart_by_row(a[:shared].float(), b[:shared].float())
        if float(off.max()) > _TOLERANCE.get(dtype, 0.01):
            wrong.append(
                f"{what} differ at position {int(off.argmax())}, though the tokens so far are the same"
            )
    if shared < min(len(a), len(b)) and torch.equal(a[shared], b[shared]):
        wrong.append(f"{what} are equal at position {shared}, though the tokens differ there")
    return wrong


def _final_state(recording: Recording, items: Sequence[Item]) -> Control:
    """The recorded final state gives the references through norm and head, read as it was recorded."""
    expectation = "the recorded final state, through the target's norm and head, gives the reference tokens"
    without = [item.id for item in items if not item.has_final]
    if without:
        measured = f"{len(without)} of {len(items)} prompt(s) were imported without a final state"
        return Control("final-state", expectation, measured, "skipped")
    try:
        weight, head = as_torch(recording.end("norm")), as_torch(recording.end("head"))
    except RecordingError as exc:
        return Control("final-state", expectation, str(exc), "skipped")
    shares: dict[str, float] = {}
    chosen = {item.id: _spread(item, max(1, _HEAD_ROWS // len(items))) for item in items}
    stored = "before the norm" if recording.plan.last_layer == BEFORE_NORM else "after the norm already"
    for name in sorted(_READINGS, key=lambda name: name != stored):
        hits = total = 0
        for item in items:
            tensors = recording.tensors(item)
            tokens, (final,) = as_torch(tensors.tokens).long(), _final(recording, item)
            at, wanted = _reading(name, chosen[item.id], length=len(tokens))
            states = final[at]
            if name != "after the norm already":
                states = normed(states, weight, eps=recording.target.norm_eps)
            hits += int(_gives(states, head, tokens[wanted]).sum())
            total += len(at)
        shares[name] = hits / total if total else 0.0
        if name == stored and shares[name] >= _REPRODUCED:
            break
    given = shares[stored]
    best = max(shares, key=lambda name: shares[name])
    near = sum(item.near_ties or 0 for item in items) / max(1, sum(item.completion_len for item in items))
    verdict: Verdict = "passed" if given + near >= _REPRODUCED else "failed"
    advice = None
    if verdict == "failed" and shares[best] >= _REPRODUCED:
        advice = f"the stored state is {best}: record the target again"
    elif verdict == "failed":
        advice = (
            "the references are not this target's own greedy text, or the recording is damaged: record again"
        )
    told = ", ".join(f"{share:.1%} {name}" for name, share in shares.items() if name != stored)
    return Control(
        "final-state",
        expectation,
        f"{given:.1%} of {sum(map(len, chosen.values()))} tokens do" + (f"; {told}" if told else ""),
        verdict,
        {"reproduced": given, "readings": shares},
        advice,
    )


#: How a stored state may have to be read: as it should be, and three ways in which recordings go wrong.
_READINGS = ("before the norm", "after the norm already", "one position late", "one position early")


def _reading(name: str, at: Int[Tensor, " R"], *, length: int) -> tuple[Int[Tensor, " K"], Int[Tensor, " K"]]:
    """Which states give which tokens in that reading; `at` are positions whose next token is a reference."""
    moved = {"one position late": 1, "one position early": -1}.get(name, 0)
    inside = (at + moved >= 0) & (at + moved < length)
    return (at + moved)[inside], (at + 1)[inside]


def _spread(item: Item, count: int) -> Int[Tensor, " R"]:
    """Positions before completion tokens, evenly over the completion."""
    places = torch.linspace(item.prompt_len - 1, item.length - 2, min(count, item.completion_len))
    positions: Tensor = places.long().unique()
    return positions


def _gives(states: Float[Tensor, "R H"], head: Float[Tensor, "V H"], wanted: Int[Tensor, " R"]) -> Tensor:
    """Whether the token is the head's first choice, up to equal scores."""
    logits = states.to(head.dtype) @ head.T
    behind: Tensor = logits.max(dim=1).values - logits.gather(1, wanted[:, None])[:, 0]
    return torch.eq(behind, 0)


def _own(items: Sequence[Item]) -> Control:
    """As measured when the target was recorded: how far the references are its own first choice."""
    unknown = [item.id for item in items if item.agreed is None]
    if unknown:
        measured = (
            f"not known of {len(unknown)} of {len(items)} prompt(s): no final state was imported with them"
        )
        return Control(
            "references-own", "the references are the target's own greedy text", measured, "skipped"
        )
    tokens = sum(item.completion_len for item in items)
    others = tokens - sum(item.agreed or 0 for item in items)
    near = sum(item.near_ties or 0 for item in items)
    far = (others - near) / tokens if tokens else 0.0
    verdict: Verdict = "failed" if far > _FAR_FAILED else "caution" if far > _FAR_CAUTION else "passed"
    return Control(
        "references-own",
        "the references are the target's own greedy text",
        f"{others} of {tokens} reference tokens are not its first choice, {near} of them near-ties",
        verdict,
        {"tokens": tokens, "others": others, "near_ties": near, "far": far},
        "online decoding would commit another text: the equality with it holds no more. Let the target write the "
        "completions (leave completion_ids out)"
        if verdict != "passed"
        else None,
    )


def _degenerate(recording: Recording, items: Sequence[Item]) -> Control:
    shares = {}
    for item in items:
        tokens = as_torch(recording.tensors(item).tokens)[item.prompt_len :]
        shares[item.id] = repetition_share(tokens.numpy())
    loops = {name: share for name, share in shares.items() if share > DEGENERATE_SHARE}
    return Control(
        "references-degenerate",
        "the references do not loop",
        f"{len(loops)} of {len(items)} completion(s) do"
        + (
            ": " + _listed([f"{name} ({share:.0%} of its tokens)" for name, share in loops.items()])
            if loops
            else ""
        ),
        "caution" if loops else "passed",
        {"repetition_share": shares},
        "any drafter predicts a loop: read the numbers without these prompts too" if loops else None,
    )


def _target_files(recording: Recording) -> Control:
    """The target's small files, where it is at hand, are those that were recorded; its weights are not newer."""
    expectation = "the target at hand is the one that was recorded"
    folder = Path(recording.target.path)
    try:
        weights = weight_files(folder)
    except TargetError:
        return Control("target-files", expectation, f"the target is not at {folder}", "skipped")
    said: Mapping[str, Mapping[str, Any]] = recording.produced.get("target_files") or {}
    small = [*config_files(folder), *tokenizer_files(folder)]
    changed = [p.name for p in small if p.name in said and sha256_file(p) != said[p.name]["sha256"]]
    changed += [p.name for p in weights if p.name in said and p.stat().st_size != said[p.name]["bytes"]]
    gone = [name for name in said if not (folder / name).is_file()]
    recorded = (recording.path / MANIFEST).stat().st_mtime
    newer = [p.name for p in weights if p.stat().st_mtime > recorded]
    problems = [f"{name} changed" for name in changed] + [f"{name} is gone" for name in gone]
    cautions = [f"{name} is newer than the recording" for name in newer if name not in changed]
    verdict: Verdict = "failed" if problems else "caution" if cautions else "passed"
    return Control(
        "target-files",
        expectation,
        _listed(problems + cautions)
        if problems or cautions
        else "its configs and tokenizer are the same, its weights no newer",
        verdict,
        {"changed": changed, "gone": gone, "newer": newer},
        "record the target again"
        if problems
        else "`draftgauge check` compares what it computes"
        if cautions
        else None,
    )


def _nowhere(slug: str, wrong: Sequence[str], *, expectation: str, fine: str, advice: str) -> Control:
    """A control that passes where no place is wrong, and names the places where one is."""
    if not wrong:
        return Control(slug, expectation, fine, "passed")
    return Control(slug, expectation, _listed(wrong), "failed", {"places": list(wrong)}, advice)


def _shared(a: Int[Tensor, " T"], b: Int[Tensor, " T2"]) -> int:
    """How many tokens two sequences begin with alike."""
    end = min(len(a), len(b))
    differ = (a[:end] != b[:end]).nonzero()
    return int(differ[0]) if len(differ) else end


def _apart(a: Float[Tensor, "T H"], b: Float[Tensor, "T H"]) -> float:
    """The difference of two states relative to their size, over all positions."""
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


def _apart_by_row(a: Float[Tensor, "T H"], b: Float[Tensor, "T H"]) -> Float[Tensor, " T"]:
    off: Tensor = (a - b).norm(dim=1) / b.norm(dim=1).clamp(min=1e-12)
    return off


def _tap(name: int | str) -> str:
    return name if isinstance(name, str) else f"tap {name}"


def _listed(texts: Sequence[str]) -> str:
    rest = len(texts) - _NAMED
    return "; ".join(texts[:_NAMED]) + (f"; and {rest} more" if rest > 0 else "")
