"""Tau by where in its response a round starts: whether a drafter gets better or worse as the text goes on.

Reads three columns of a run's blocks and walks them as decoding does. Knows nothing of how it is shown.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from draftgauge.runs import Run
from draftgauge.stats import ratio
from draftgauge.summary import units_of

#: Where the stretches begin, in tokens after the first; each ends where the next begins.
EDGES = (0, 32, 64, 128, 256, 512, 1024, 2048)


def tau_by_place(run: Run, slug: str = "chain") -> list[dict[str, Any]]:
    """One policy's tau in each stretch of the responses, pooled over the rounds that start in it.

    Example of the result: `[{"from": 0, "to": 32, "tau": {"value": 1.9, "low": 1.7, ...}, "rounds": 160}, ...]`;
    stretches without a round are left out, `to` is None for the last.
    """
    table = run.blocks(["prompt", "anchor", f"streak_{slug}"])
    names, anchors, streaks = (
        table.column(name).to_numpy() for name in ("prompt", "anchor", f"streak_{slug}")
    )
    committed = np.zeros((len(run.summary["prompts"]), len(EDGES)), np.int64)
    rounds = np.zeros_like(committed)
    turns = [
        0,
        *(np.flatnonzero(names[1:] != names[:-1]) + 1).tolist(),
        len(names),
    ]  # a prompt's rows are together
    rows_of = {names[a]: slice(a, b) for a, b in itertools.pairwise(turns) if a < b}
    for i, (name, prompt) in enumerate(run.summary["prompts"].items()):
        rows = rows_of.get(name, slice(0))
        streak_at = dict(zip(anchors[rows].tolist(), streaks[rows].tolist(), strict=True))
        start, last = prompt["prompt_tokens"], prompt["prompt_tokens"] + prompt["completion_tokens"] - 1
        at = start
        while at in streak_at:
            bucket = np.searchsorted(EDGES, at - start, side="right") - 1
            rounds[i, bucket] += 1
            committed[i, bucket] += min(streak_at[at] + 1, last - at)
            at += streak_at[at] + 1
    return [
        _stretch(run, committed[:, b], rounds[:, b], bucket=b)
        for b in range(len(EDGES))
        if rounds[:, b].any()
    ]


def _stretch(run: Run, committed: np.ndarray, rounds: np.ndarray, *, bucket: int) -> dict[str, Any]:
    place = {name: i for i, name in enumerate(run.summary["prompts"])}
    units = units_of({name: p.get("conversation") for name, p in run.summary["prompts"].items()})
    pairs = [(sum(committed[place[n]] for n in unit), sum(rounds[place[n]] for n in unit)) for unit in units]
    known = [(int(tokens), int(count)) for tokens, count in pairs if count]
    tau = ratio([tokens for tokens, _ in known], [count for _, count in known])
    end = EDGES[bucket + 1] if bucket + 1 < len(EDGES) else None
    return {"from": EDGES[bucket], "to": end, "tau": tau.as_dict(), "rounds": int(rounds.sum())}
