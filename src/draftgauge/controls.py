"""Controls on the drafter: it reads its context, sees nothing that it must not, and is neither too good nor idle.

Each control changes what the drafter reads and compares on the same anchors: acceptance that rests on the context
must fall when the context is destroyed. Knows nothing of runs, and judges no number but its own.

Letters: T positions, F features, A anchors, D depth, H hidden size, N anchors of a trial.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from draftgauge.drafters import Drafter
from draftgauge.features import Recorded, read_item
from draftgauge.recording import Item, Recording
from draftgauge.stats import Change
from draftgauge.trials import Trial, choose_anchors, paired_change, streaks_of
from draftgauge.trust import Control, Verdict

#: A context that carries the acceptance costs at least this share of it when it is destroyed.
_SHARE_THAT_FALLS = 0.2
#: Blocks that say whether acceptance is too good to be true.
_ENOUGH_BLOCKS = 20
#: An embedding row whose norm is this many times smaller or larger than the table's median was hardly trained.
_ODD_NORM = 5.0
_LEAK_ANCHORS = 4
#: A prompt on which so many tokens would typically be accepted tells whether its context is its own.
_ENOUGH_ACCEPTED = 10


@dataclass(frozen=True)
class _Bench:
    """The drafter on its trial: what each changed context is compared with."""

    drafter: Drafter
    trial: Trial
    read: Callable[[Item], Recorded]
    base: Int32[np.ndarray, " N"]

    def streaks(self, changed: Callable[[Item, Recorded], Recorded]) -> Int32[np.ndarray, " N"]:
        """The streaks when every item is read as `changed` gives it."""
        return streaks_of(self.drafter, self.trial, read=lambda item: changed(item, self.read(item)))

    def with_context(self, changed: Callable[[Item, Recorded], Recorded]) -> Change:
        """The paired change of the streak when every item is read as `changed` gives it."""
        return paired_change(self.trial, self.base, self.streaks(changed))


def drafter_controls(
    drafter: Drafter, recording: Recording, *, items: Sequence[Item], count: int, seed: int = 0
) -> list[Control]:
    """The controls that cost a few blocks each, which every run carries.

    Args:
        drafter: The drafter, in the dtype that the run computes in.
        recording: What it is measured on.
        items: The prompts that are measured.
        count: How many anchors each control drafts at.
        seed: Of the choice of anchors and of what is shuffled.
    """
    bench = _bench(drafter, recording, items, count=count, seed=seed)
    if bench is None:
        return [_too_short("context-zeroed", drafter), _mask_token(drafter, recording)]
    return [
        _falls(
            bench,
            bench.with_context(lambda _, seen: replace(seen, features=torch.zeros_like(seen.features))),
            slug="context-zeroed",
            changed="the context is zeroed",
        ),
        _falls(
            bench,
            bench.with_context(lambda _, seen: _shuffled(seen, seed=seed)),
            slug="context-shuffled",
            changed="the positions of the context are shuffled",
        ),
        _no_leak(bench, seed=seed),
        _floor(bench),
        _ceiling(bench),
        _mask_token(drafter, recording),
    ]


def context_controls(
    drafter: Drafter, recording: Recording, *, items: Sequence[Item], count: int, seed: int = 0
) -> list[Control]:
    """Further controls of the context: another prompt's, and the own one moved by one position."""
    bench = _bench(drafter, recording, items, count=count, seed=seed)
    if bench is None:
        return [_too_short("context-swapped", drafter)]
    found: list[Control] = []
    if len(items) > 1:
        other = {item.id: items[(i + 1) % len(items)] for i, item in enumerate(items)}
        swapped = bench.streaks(lambda item, seen: _with_features_of(seen, bench.read(other[item.id])))
        change = paired_change(bench.trial, bench.base, swapped)
        found = [
            _falls(bench, change, slug="context-swapped", changed="the context is another prompt's"),
            _every_prompt(bench, swapped),
        ]
    return [*found, _moved(bench, later=True), _moved(bench, later=False)]


def _bench(
    drafter: Drafter, recording: Recording, items: Sequence[Item], *, count: int, seed: int
) -> _Bench | None:
    """The drafter and its streaks on a trial; None where no completion is as long as a block."""
    depth = drafter.wiring.depth
    if all(item.completion_len <= depth for item in items):
        return None
    dtype = drafter.ends.embedding.dtype

    def read(item: Item) -> Recorded:
        return read_item(recording, item, wiring=drafter.wiring, dtype=dtype)

    trial = choose_anchors(items, room=depth, count=count, seed=seed)
    return _Bench(drafter, trial, read, streaks_of(drafter, trial, read=read))


def _too_short(slug: str, drafter: Drafter) -> Control:
    depth = drafter.wiring.depth
    return Control(
        slug,
        "acceptance falls when the context is destroyed",
        f"no completion is longer than a block of depth {depth}",
        "skipped",
        advice="record longer completions (--max-new-tokens)",
    )


def _falls(bench: _Bench, change: Change, *, slug: str, changed: str) -> Control:
    """Acceptance must fall when the context is destroyed."""
    base = float(bench.base.mean())
    verdict: Verdict = "undecided"
    if change.low is not None and change.high is not None:
        if change.high < 0:
            verdict = "passed"
        elif base > 0 and change.low > -_SHARE_THAT_FALLS * base:
            verdict = "failed"
    advice = {
        "failed": "the drafter does not read its context as it is wired: run `draftgauge diagnose`, and compare the "
        "taps, their order and fc.weight with the trainer's",
        "undecided": "there is no acceptance that could fall: run `draftgauge diagnose`"
        if not base
        else "more anchors or more prompts would decide",
    }.get(verdict)
    return Control(
        slug,
        f"acceptance falls when {changed}",
        _measured(base, change),
        verdict,
        _values(base, change),
        advice,
    )


def _every_prompt(bench: _Bench, swapped: Int32[np.ndarray, " N"]) -> Control:
    """On every prompt acceptance is better with its own context than with another's."""
    typical = float(bench.base.mean())
    told, foreign = 0, []
    for i in np.unique(bench.trial.index):
        mine = bench.trial.index == i
        if typical * mine.sum() < _ENOUGH_ACCEPTED:
            continue
        told += 1
        own, other = int(bench.base[mine].sum()), int(swapped[mine].sum())
        if own <= other:
            foreign.append(f"{bench.trial.items[i].id} (accepted {own} with its own, {other} with another's)")
    verdict: Verdict = "failed" if foreign else "passed" if told else "undecided"
    return Control(
        "context-by-prompt",
        "on every prompt more is accepted with its own context than with another prompt's",
        f"so it is on {told - len(foreign)} of {told} prompt(s)"
        + (f"; not on {', '.join(foreign)}" if foreign else ""),
        verdict,
        {"prompts": told, "foreign": foreign},
        "the features of these prompts are another request's: record the target again" if foreign else None,
    )


def _moved(bench: _Bench, *, later: bool) -> Control:
    """Acceptance must fall when every feature stands one position away from its own."""
    change = bench.with_context(lambda _, seen: _shifted(seen, later=later))
    base = float(bench.base.mean())
    way = "later" if later else "earlier"
    verdict: Verdict = "undecided"
    if change.low is not None and change.high is not None:
        verdict = "passed" if change.high < 0 else "failed" if change.low > 0 else "undecided"
    advice = None
    if verdict == "failed" and later:
        advice = "the recorded features stand one position too early: record the target again"
    elif verdict == "failed":
        advice = (
            "the recorded features stand one position too late; or the drafter was trained to see the anchor's own "
            "feature, which does not exist yet when a block is drafted"
        )
    return Control(
        f"context-moved-{way}",
        f"acceptance falls when every feature is moved one position {way}",
        _measured(base, change),
        verdict,
        _values(base, change),
        advice,
    )


def _measured(base: float, change: Change) -> str:
    if change.low is None or change.high is None:
        few = f"on {change.n} stretch(es) of text, too few for an interval"
        return f"streak {base:.3f} -> {base + change.value:.3f} {few}"
    return (
        f"streak {base:.3f} -> {base + change.value:.3f} (change {change.value:+.3f} "
        f"[{change.low:+.3f}, {change.high:+.3f}])"
    )


def _values(base: float, change: Change) -> dict[str, float | int | None]:
    return {
        "baseline": base,
        "variant": base + change.value,
        "change": change.value,
        "low": change.low,
        "high": change.high,
        "units": change.n,
    }


def _shuffled(seen: Recorded, *, seed: int) -> Recorded:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(seen.features), generator=generator)
    return replace(seen, features=seen.features[order])


def _with_features_of(seen: Recorded, other: Recorded) -> Recorded:
    """The sequence with the features of another one, from the beginning again where that is shorter."""
    rows = torch.arange(len(seen.features)) % len(other.features)
    return replace(seen, features=other.features[rows])


def _shifted(seen: Recorded, *, later: bool) -> Recorded:
    """Every feature at its neighbour's position; the one at the open end stays."""
    rows = torch.arange(len(seen.features)) + (-1 if later else 1)
    return replace(seen, features=seen.features[rows.clamp(0, len(rows) - 1)])


@torch.inference_mode()
def _no_leak(bench: _Bench, *, seed: int) -> Control:
    """What does not exist yet when a block is drafted must not change the block."""
    first = bench.trial.index == bench.trial.index[0]
    anchors = torch.from_numpy(bench.trial.anchors[first][:_LEAK_ANCHORS])
    seen = bench.read(bench.trial.items[int(bench.trial.index[0])])
    honest = _blocks(bench.drafter, seen, anchors)
    generator = torch.Generator().manual_seed(seed)
    moved = 0
    for i, anchor in enumerate(anchors.tolist()):
        features, tokens = seen.features.clone(), seen.tokens.clone()
        noise = torch.randn(features[anchor:].shape, generator=generator).to(features.dtype)
        features[anchor:] = noise * features.float().std().to(features.dtype)
        tokens[anchor + 1 :] = tokens[anchor + 1 :].flip(0)
        blind = _blocks(bench.drafter, replace(seen, features=features, tokens=tokens), anchors)
        moved += not torch.equal(blind[i], honest[i])
    return Control(
        "no-leak",
        "a block does not change with the anchor's own feature, later features or later tokens",
        f"{len(anchors) - moved} of {len(anchors)} blocks are bit for bit the same when those are noise",
        "failed" if moved else "passed",
        {"blocks": len(anchors), "changed": moved},
        "the drafter's network sees the future: this is an error of draftgauge, please report it"
        if moved
        else None,
    )


def _blocks(drafter: Drafter, seen: Recorded, anchors: Int[Tensor, " A"]) -> Float[Tensor, "A D H"]:
    """The drafted states at the anchors, all against one context, as replay drafts them."""
    context = drafter.context(seen.features[: int(anchors[-1]) + 1])
    return drafter.draft(context, anchors=anchors, anchor_tokens=seen.tokens[anchors])


def _floor(bench: _Bench) -> Control:
    """The drafter must do better than two guesses that need no drafter."""
    following, own = _tokens_around(bench)
    hits = float((bench.base >= 1).mean())
    commonest = float(np.unique(following, return_counts=True)[1].max() / len(following))
    repeated = float((following == own).mean())
    best = max(commonest, repeated)
    guesses = f"always the commonest next token {commonest:.1%}, the anchor again {repeated:.1%}"
    return Control(
        "floor",
        "the first draft token is right more often than a guess that needs no drafter",
        f"right at {hits:.1%} of {len(following)} anchors; {guesses}",
        "passed" if hits > best else "caution",
        {"hits": hits, "commonest": commonest, "repeated": repeated, "anchors": len(following)},
        None if hits > best else "the drafter is hardly trained, or wired wrongly: run `draftgauge diagnose`",
    )


def _tokens_around(bench: _Bench) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]]:
    """The reference token after each anchor of the trial, and the anchor's own."""
    following, own = np.zeros(len(bench.trial), dtype=int), np.zeros(len(bench.trial), dtype=int)
    for i in np.unique(bench.trial.index):
        mine = bench.trial.index == i
        tokens = bench.read(bench.trial.items[i]).tokens.numpy()
        following[mine] = tokens[bench.trial.anchors[mine] + 1]
        own[mine] = tokens[bench.trial.anchors[mine]]
    return following, own


def _ceiling(bench: _Bench) -> Control:
    """Not every block is accepted whole."""
    depth, count = bench.drafter.wiring.depth, len(bench.trial)
    whole, first = int((bench.base == depth).sum()), int((bench.base >= 1).sum())
    too_good = count >= _ENOUGH_BLOCKS and whole == count
    suspicious = count >= _ENOUGH_BLOCKS and first == count
    return Control(
        "ceiling",
        "not every block is accepted whole",
        f"{whole} of {count} blocks are accepted whole, the first token in {first}",
        "failed" if too_good else "caution" if suspicious else "passed",
        {"whole": whole, "first": first, "anchors": count, "depth": depth},
        "too good to be true: the anchor's own feature or the labels leak into the features, or the references are "
        "this drafter's own text, or they loop"
        if too_good or suspicious
        else None,
    )


def _mask_token(drafter: Drafter, recording: Recording) -> Control:
    """The mask row is one that training can have meant."""
    table = drafter.ends.embedding
    own = drafter.wiring.mask_embedding
    token = drafter.wiring.mask_token_id
    sample = table[:: max(1, len(table) // 4096)].float().norm(dim=1)
    median = float(sample.median())
    row = _mask_row(drafter)
    norm = float(row.float().norm())
    named: Mapping[int | None, str] = {i: text for text, i in recording.target.special_tokens.items()}
    what = "the drafter's own mask embedding" if own else f"token {token}"
    if not own and token in named:
        what += f" ({named[token]})"
    problems = []
    if not own and token in recording.target.stop_token_ids:
        problems.append("it is a stop token of the target: the id may have fallen back to pad or eos")
    if not median / _ODD_NORM <= norm <= median * _ODD_NORM:
        problems.append("its norm is far from the table's: the row may never have been trained")
    twins = 0 if own else int((table == row).all(dim=1).sum()) - 1
    if twins > 0:
        problems.append(f"{twins} other row(s) of the embedding equal it: rows that were never trained do")
    return Control(
        "mask-token",
        "the mask is a row of its own, within the embedding's usual size",
        f"{what} has norm {norm:.3g}, the median row {median:.3g}" + "".join(f"; {p}" for p in problems),
        "caution" if problems else "passed",
        {"token": token, "norm": norm, "median_norm": median, "equal_rows": twins},
        "compare mask_token_id with the trainer's; `draftgauge diagnose` tries others" if problems else None,
    )


def _mask_row(drafter: Drafter) -> Float[Tensor, " H"]:
    if drafter.wiring.mask_embedding:
        own: Tensor = getattr(drafter, "mask_embedding")  # noqa: B009 - the wiring says that there is one
        return own.detach()
    return drafter.ends.embedding[drafter.wiring.mask_token_id]
