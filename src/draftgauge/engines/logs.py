"""Counts of speculation out of what engines and benchmarks leave behind, recognised by content.

Six forms are read. vLLM: the log lines `SpecDecoding metrics: ...`, the JSON of `vllm bench serve --save-result`, and
answers with `metrics.speculative_decoding`. SGLang: answers with `meta_info`. DDTree: results with the lengths of
every round. Spec-Bench: its JSON lines of answers. What a form does not say is None, never 0.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftgauge.engines.counts import (
    CONVENTIONS,
    RequestCounts,
    Served,
    of_rounds,
    of_sglang,
    of_vllm,
    summed,
)
from draftgauge.errors import EngineError

_LENGTHS = ("acceptance_lengths", "acceptance_length")
_LINE = re.compile(
    r"SpecDecoding metrics: .*?Mean acceptance length: (?P<mean>[\d.]+).*?Accepted: (?P<accepted>\d+) tokens, "
    r"Drafted: (?P<drafted>\d+) tokens, Per-position acceptance rate: (?P<rates>[\d.]+(?:, [\d.]+)*)"
)


def read_log(path: Path, *, method: str | None = None) -> Served:
    """The counts in a file that an engine or a benchmark wrote.

    Args:
        path: A log, a JSON file, or JSON lines.
        method: Which of several that one file holds: DDTree's results have one for the chain and each budget.

    Raises:
        EngineError: The file cannot be read, is of no known form, or holds several methods and none is named.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as exc:
        raise EngineError(f"{path} cannot be read: {exc.strerror}; check the path and its rights") from exc
    rows = _rows(text)
    for form in FORMS:
        read = form(rows, str(path), method) if rows else None
        if read is not None:
            return read
    lines = list(_LINE.finditer(text))
    if lines:
        return _of_lines(lines)
    raise EngineError(
        f"{path} is of no known form: expected vLLM's log lines 'SpecDecoding metrics: ...', the JSON of vllm bench "
        "serve, answers of vLLM or SGLang with their counts, DDTree results as JSON, or Spec-Bench answers"
    )


def _rows(text: str) -> list[dict[str, Any]]:
    """The objects of a JSON file or of JSON lines; none where it is neither."""
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        try:
            value = [json.loads(line) for line in text.split("\n") if line.strip()]
        except (json.JSONDecodeError, RecursionError):
            return []
    return list(_objects(value))


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _objects(item)


def _name(row: Mapping[str, Any], *, index: int) -> str:
    """The id that a row gives itself, or its place in the file, counted from 1."""
    for key in ("id", "question_id", "request_id", "task_id"):
        if isinstance(row.get(key), str | int):
            return str(row[key])
    return str(index)


def _all_told(found: Sequence[RequestCounts | None], *, convention: str, source: str) -> Served | None:
    """The sum over the rows that have counts, with a doubt about the others; None where none has any."""
    assert convention in CONVENTIONS
    told = [row for row in found if row is not None]
    if not told:
        return None
    without = len(found) - len(told)
    doubts = [f"{without} of {len(found)} rows have no counts and are left out"] if without else []
    return summed(told, convention=convention, source=source, doubts=doubts)


def _bench(rows: Sequence[Mapping[str, Any]], where: str, _: str | None) -> Served | None:
    """`vllm bench serve --save-result`: the counters' differences and rates per position, of one run a file."""
    found = [row for row in rows if "spec_decode_num_drafts" in row]
    if not found:
        return None
    if len(found) > 1:
        raise EngineError(f"{where} holds {len(found)} runs of vllm bench; give a file of one run")
    said = found[0]
    rounds = said["spec_decode_num_drafts"]
    rates = said.get("spec_decode_per_position_acceptance_rates") or None
    return Served(
        "pooled",
        "vllm bench",
        requests=said.get("completed"),
        rounds=rounds,
        drafted_tokens=said.get("spec_decode_draft_tokens"),
        accepted_tokens=said.get("spec_decode_accepted_tokens"),
        completion_tokens=said.get("total_output_tokens"),
        # The rates are printed in full: a count over the rounds, and so a whole number again.
        accepted_per_depth=None if rates is None else tuple(round(rate * rounds) for rate in rates),
        doubts=(
            "the counters are the server's: requests of others, and of the warm-up, would be among them",
        ),
    )


def _vllm(rows: Sequence[Mapping[str, Any]], _: str, __: str | None) -> Served | None:
    """Answers of vLLM: `metrics.speculative_decoding` in each, or these objects by themselves."""

    def counted(row: Mapping[str, Any], index: int) -> RequestCounts | None:
        metrics = row.get("metrics")
        said = metrics.get("speculative_decoding") if isinstance(metrics, dict) else row
        if not isinstance(said, dict) or "num_spec_steps" not in said:
            return None
        usage = row.get("usage")
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        return of_vllm(said, name=_name(row, index=index), completion_tokens=tokens)

    found = [counted(row, index) for index, row in enumerate(rows, start=1)]
    return _all_told(found, convention="pooled", source="vLLM answers")


def _sglang(rows: Sequence[Mapping[str, Any]], _: str, __: str | None) -> Served | None:
    """SGLang's answers: `meta_info` in each, with `spec_verify_ct`."""

    def counted(row: Mapping[str, Any], index: int) -> RequestCounts | None:
        meta = row.get("meta_info")
        if not isinstance(meta, dict) or meta.get("spec_verify_ct") is None:
            return None
        ids = row.get("output_ids")
        counts = of_sglang(meta, name=_name({**meta, **row}, index=index))
        return replace(counts, completion_ids=tuple(ids) if isinstance(ids, list) else None)

    found = [counted(row, index) for index, row in enumerate(rows, start=1)]
    return _all_told(found, convention="sglang_request", source="SGLang answers")


def _spec_bench(rows: Sequence[Mapping[str, Any]], where: str, _: str | None) -> Served | None:
    """Spec-Bench: `choices[0].accept_lengths`, a list over all turns of a question, the bonus counted."""

    def counted(row: Mapping[str, Any], index: int) -> RequestCounts | None:
        choices = row.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(first, dict) or "accept_lengths" not in first:
            return None
        tokens = first.get("new_tokens")
        tokens = sum(tokens) if isinstance(tokens, list) else tokens
        name = _name(row, index=index)
        return _of_lengths(first["accept_lengths"], where=f"{where}, {name}", name=name, tokens=tokens)

    found = [counted(row, index) for index, row in enumerate(rows, start=1)]
    return _all_told(found, convention="pooled", source="Spec-Bench")


def _ddtree(rows: Sequence[Mapping[str, Any]], where: str, method: str | None) -> Served | None:
    """DDTree, dflash and their like: `acceptance_lengths` of every round, the bonus counted.

    Either in each row, or under `responses`, each of which has one such object for every method. The reference saves
    these with torch; they are read once they are written as JSON.
    """
    responses: list[Mapping[str, Any]] = [r for row in rows for r in _objects(row.get("responses"))] or [
        *rows
    ]
    methods = sorted({key for r in responses for key, value in r.items() if _lengths(value) is not None})
    if methods and method is None and len(methods) > 1:
        raise EngineError(f"{where} holds the methods {', '.join(methods)}; name one of them as method")
    if methods and method is not None and method not in methods:
        raise EngineError(f"{where} holds no method {method!r}; it holds {', '.join(methods)}")
    chosen = method or (methods[0] if methods else None)

    def counted(row: Mapping[str, Any], index: int) -> RequestCounts | None:
        said = row if chosen is None else row.get(chosen)
        lengths = _lengths(said)
        if lengths is None or not isinstance(said, dict):
            return None
        name = _name(row, index=index)
        tokens = said.get("num_output_tokens")
        return _of_lengths(lengths, where=f"{where}, {name}", name=name, tokens=tokens)

    found = [counted(row, index) for index, row in enumerate(responses, start=1)]
    source = "DDTree results" if chosen is None else f"DDTree results, {chosen}"
    return _all_told(found, convention="ddtree", source=source)


def _lengths(value: Any) -> list[Any] | None:
    """The per-round lengths in an object; a single number is an average and none of them."""
    found = (value.get(key) for key in _LENGTHS) if isinstance(value, dict) else ()
    return next((lengths for lengths in found if isinstance(lengths, list)), None)


def _of_lengths(lengths: Any, *, where: str, name: str, tokens: Any) -> RequestCounts:
    """The counts of rounds that are told with their bonus."""
    if not isinstance(lengths, list) or not all(type(n) is int for n in lengths):
        raise EngineError(f"{where}: the accepted lengths are not whole numbers; expected one for each round")
    if lengths and min(lengths) < 1:
        raise EngineError(
            f"{where}: a round is said to have committed {min(lengths)} tokens; this form counts the bonus token, "
            "so at least 1 was expected. Lengths without it are another quantity and are not converted"
        )
    counted = tokens if type(tokens) is int and tokens >= 0 else None
    return of_rounds([n - 1 for n in lengths], name=name, completion_tokens=counted)


#: Every form of rows, each of which says None of a file that is not of it.
FORMS: tuple[Callable[[Sequence[Mapping[str, Any]], str, str | None], Served | None], ...] = (
    _bench,
    _vllm,
    _sglang,
    _spec_bench,
    _ddtree,
)


@dataclass(frozen=True)
class _Interval:
    """One log line: tokens accepted and drafted since the line before, and rates per position as printed."""

    accepted: int
    drafted: int
    mean: str
    rates: tuple[str, ...]

    def depths(self, rounds: int) -> tuple[int, ...] | None:
        """How many of so many rounds accepted each depth, if that gives every printed number."""
        counts = tuple(round(float(rate) * rounds) for rate in self.rates)
        printed = tuple(
            f"{count / rounds:.{_digits(rate)}f}" for count, rate in zip(counts, self.rates, strict=True)
        )
        mean = f"{1 + self.accepted / rounds:.{_digits(self.mean)}f}"
        fits = printed == self.rates and mean == self.mean and sum(counts) == self.accepted
        return counts if fits else None

    def rounds(self) -> int | None:
        """The one number of rounds that gives every printed number; None where several do."""
        least = math.ceil(self.drafted / len(self.rates))
        if not self.accepted:
            return None
        half = 10.0 ** -_digits(self.mean)
        length = float(self.mean) - 1
        low = max(least, math.floor(self.accepted / (length + half)))
        high = min(
            self.drafted, math.ceil(self.accepted / (length - half)) if length > half else self.drafted
        )
        fit = [rounds for rounds in range(max(low, 1), high + 1) if self.depths(rounds) is not None]
        return fit[0] if len(fit) == 1 else None


def _digits(printed: str) -> int:
    return len(printed.partition(".")[2])


def _of_lines(lines: Sequence[re.Match[str]]) -> Served:
    """The log lines of vLLM, each of one interval.

    The rounds are not printed. They are taken where only one number of them gives the printed mean and rates.
    """
    intervals = [
        _Interval(
            int(found["accepted"]), int(found["drafted"]), found["mean"], tuple(found["rates"].split(", "))
        )
        for found in lines
    ]
    rounds = [interval.rounds() for interval in intervals]
    doubts = ["a server does not print its last interval, so the log may end before the requests did"]
    depths = None
    known = [n for n in rounds if n is not None]
    if len(known) == len(rounds):
        counted = [interval.depths(n) or () for interval, n in zip(intervals, known, strict=True)]
        width = max(map(len, counted))
        depths = tuple(sum(row[i] for row in counted if i < len(row)) for i in range(width))
    else:
        full = [interval.drafted / len(interval.rates) for interval in intervals]
        doubts.append(
            f"rounds are not printed, and {len(rounds) - len(known)} of {len(rounds)} intervals fit several numbers; "
            f"if every round drafted in full there were {sum(full):g}"
        )
    return Served(
        "pooled",
        "vLLM log",
        rounds=sum(known) if depths is not None else None,
        drafted_tokens=sum(interval.drafted for interval in intervals),
        accepted_tokens=sum(interval.accepted for interval in intervals),
        accepted_per_depth=depths,
        doubts=tuple(doubts),
    )
