"""Expanding draft trees of 1024 nodes, against a plain Python heap on the same anchors."""

from __future__ import annotations

import heapq
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

from bench.records import Record, found

SECONDS_PER_SIDE = 3.0


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


def bench_tree(anchors: int = 512) -> Iterator[Record]:
    """Expanding to 1024 nodes at every anchor, against the plain heap on the same anchors."""
    from draftgauge.acceptance import NO_REFERENCE
    from draftgauge.tree import expand, reference_order

    generator = np.random.default_rng(0)
    logits = generator.standard_normal((anchors, 15, 4096)).astype(np.float32) * 3
    ordered = -np.sort(-logits, axis=2)[:, :, :1024]
    lists = np.ascontiguousarray(ordered - np.log(np.exp(logits).sum(axis=2, keepdims=True)))
    # References that are never inside make every expansion run to its full budget.
    ranks = np.full((anchors, 15), 1023, dtype=np.int32)
    ranks[:, 0] = 0
    reference_order(lists[:2], ranks=ranks[:2], budget=1024)
    assert expand(lists[0], budget=1024).ranks[-1] == plain_heap(lists[0], 1024)[-1][-1]
    assert ranks.max() < NO_REFERENCE
    ours = _seconds_per_item(lambda i: expand(lists[i], budget=1024), len(lists))
    replayed = _seconds_per_item(
        lambda i: reference_order(lists[i : i + 1], ranks=ranks[i : i + 1], budget=1024), len(lists)
    )
    theirs = _seconds_per_item(lambda i: plain_heap(lists[i], 1024), len(lists))
    raw = {"whole_s": ours, "position_s": replayed, "heap_s": theirs}
    yield found("tree", theirs / ours, **raw)
    yield found("tree-position", theirs / replayed, **raw)


def _seconds_per_item(work: Callable[[int], object], count: int) -> float:
    times = []
    deadline = time.perf_counter() + SECONDS_PER_SIDE
    for i in range(count):
        started = time.perf_counter()
        work(i)
        times.append(time.perf_counter() - started)
        if time.perf_counter() > deadline:
            break
    return statistics.median(times)
