"""What a server that speculates counts on given prompts, to be held against a replay of the same references.

vLLM counts over all requests, so its counters are read before and after; SGLang counts with every answer. Knows
nothing of replays.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from draftgauge.engines.answers import Answer, Engine
from draftgauge.engines.counters import Counters, read_counters
from draftgauge.engines.counts import RequestCounts, Served, summed
from draftgauge.errors import EngineError, PromptError
from draftgauge.progress import Progress, silent

_WARM_UP_TOKENS = 8
_READS = 40


def fetch_served(
    engine: Engine,
    prompts: Mapping[str, Sequence[int]],
    *,
    max_new_tokens: int,
    concurrency: int = 1,
    pause_s: float = 0.1,
    progress: Progress = silent,
) -> Served:
    """The counts of a speculating server on prompts given as token ids, by id.

    One more request goes before them and is not counted: the first of a server is compiled for, and drafts nothing
    in some versions.

    Args:
        engine: The server; it must speculate.
        prompts: Token ids of every prompt, by the prompt's id.
        max_new_tokens: The longest completion.
        concurrency: Requests at a time; with 1, rounds are not changed by what else is in the batch.
        pause_s: Between two looks at counters that are not at rest yet.
        progress: Told of every prompt.

    Raises:
        PromptError: There are no prompts.
        EngineError: The server does not speculate or shows no counts, or others used it meanwhile.
        ConnectionLostError: It does not answer.
    """
    if not prompts:
        raise PromptError("there are no prompts to ask; expected at least one")

    def ask() -> list[RequestCounts]:
        return _ask_all(engine, prompts, max_new_tokens, concurrency, progress)

    engine.complete(next(iter(prompts.values())), max_new_tokens=min(_WARM_UP_TOKENS, max_new_tokens))
    return COUNTED[engine.kind](engine, ask, pause_s)


def _ask_all(
    engine: Engine,
    prompts: Mapping[str, Sequence[int]],
    max_new_tokens: int,
    concurrency: int,
    progress: Progress,
) -> list[RequestCounts]:
    """The counts of every request as its answer gives them, with the ids that came back."""

    def ask(ids: Sequence[int]) -> Answer:
        return engine.complete(ids, max_new_tokens=max_new_tokens)

    pool = ThreadPoolExecutor(concurrency, thread_name_prefix="draftgauge-engine")
    try:
        answers = progress(pool.map(ask, prompts.values()), label="serve", total=len(prompts), unit="prompt")
        return [
            replace(
                answer.counts,
                id=name,
                completion_ids=answer.token_ids,
                completion_tokens=len(answer.token_ids),
            )
            for name, answer in zip(prompts, answers, strict=True)
        ]
    finally:
        pool.shutdown(cancel_futures=True)


def _by_request(engine: Engine, ask: Callable[[], list[RequestCounts]], _: float) -> Served:
    """SGLang: every answer has its counts."""
    rows = ask()
    if all(row.rounds is None for row in rows):
        raise EngineError(
            f"{engine.url} says nothing of verifications (spec_verify_ct): it does not speculate; start SGLang with "
            "--speculative-algorithm and a drafter"
        )
    silent_rows = sum(row.rounds is None for row in rows)
    doubts = [f"{silent_rows} of {len(rows)} answers have no counts"] if silent_rows else []
    doubts += [
        f"{row.id}: the histogram counts {sum(row.histogram)} rounds, spec_verify_ct {row.rounds}"
        for row in rows
        if row.histogram is not None and sum(row.histogram) != row.rounds
    ]
    return summed(rows, convention="sglang_request", source="SGLang meta_info", doubts=doubts)


def _by_counters(engine: Engine, ask: Callable[[], list[RequestCounts]], pause_s: float) -> Served:
    """vLLM: the difference of its counters, with a row for each request where it counts these too."""
    before = _at_rest(engine, pause_s)
    rows = ask()
    ours = sum(row.completion_tokens or 0 for row in rows)
    moved = _at_rest(engine, pause_s, after=before, generated=ours).since(before)
    if not moved.rounds:
        raise EngineError(
            f"{engine.url} drafted nothing on {len(rows)} prompts; start vLLM with --speculative-config and a drafter"
        )
    if moved.generated_tokens is not None and moved.generated_tokens != ours:
        raise EngineError(
            f"{engine.url} generated {moved.generated_tokens} tokens while our requests got {ours}: others use it, "
            "and its counters hold their rounds too; measure on a server of your own"
        )
    told = all(row.rounds is not None for row in rows)
    whole = summed(rows, convention="pooled", source="vLLM counters", doubts=_doubts(engine, moved, rows))
    return replace(
        whole,
        rounds=moved.rounds,
        drafted_tokens=moved.drafted_tokens,
        accepted_tokens=moved.accepted_tokens,
        accepted_per_depth=moved.accepted_per_depth,
        histogram=whole.histogram if told else _histogram(moved),
    )


def _at_rest(
    engine: Engine, pause_s: float, *, after: Counters | None = None, generated: int = 0
) -> Counters:
    """The counters once they do not move any more, and hold the tokens that were generated; the server is late."""
    last: Counters | None = None
    for _ in range(_READS):
        text = engine.metrics()
        if text is None:
            raise EngineError(f"{engine.url} has no /metrics; start vLLM without --disable-log-stats")
        now = read_counters(text)
        seen = now.since(after).generated_tokens if after is not None else None
        if now == last and (seen is None or seen >= generated):
            if now.generated_tokens is None and now.rounds is None:
                raise EngineError(
                    f"{engine.url} shows no counters of vLLM in /metrics; its counts cannot be read"
                )
            return now
        last = now
        time.sleep(pause_s)
    raise EngineError(
        f"{engine.url}: the counters in /metrics kept moving, or stayed below our own tokens, through {_READS} "
        "looks; measure on a server of your own, started without --disable-log-stats"
    )


def _doubts(engine: Engine, moved: Counters, rows: Sequence[RequestCounts]) -> list[str]:
    doubts = []
    if moved.generated_tokens is None:
        doubts.append("the server does not count generated tokens, so traffic of others would not be seen")
    if not engine.facts.get("configuration_shown"):
        doubts.append(
            "the server does not show its configuration, so simulated acceptance cannot be ruled out"
        )
    ours = sum(row.completion_tokens or 0 for row in rows)
    # A round commits its accepted tokens and one more; each prefill gives the first. Ends cut some off.
    if moved.rounds is not None and moved.accepted_tokens is not None:
        most = moved.rounds + moved.accepted_tokens + len(rows)
        if ours > most:
            doubts.append(
                f"{ours} tokens came back, but the counters explain only {most}: some were not drafted for"
            )
    if all(row.rounds is not None for row in rows) and sum(row.rounds or 0 for row in rows) != moved.rounds:
        doubts.append("the rounds of the requests do not add up to the counter")
    return doubts


def _histogram(moved: Counters) -> tuple[int, ...] | None:
    """Rounds by accepted tokens: the differences of how many reached each depth."""
    if moved.rounds is None or moved.accepted_per_depth is None:
        return None
    reached = (moved.rounds, *moved.accepted_per_depth, 0)
    counts = [here - deeper for here, deeper in itertools.pairwise(reached)]
    return None if min(counts) < 0 else tuple(counts)


#: How each kind of engine counts.
COUNTED: Mapping[str, Callable[[Engine, Callable[[], list[RequestCounts]], float], Served]] = {
    "sglang": _by_request,
    "openai": _by_counters,
}
