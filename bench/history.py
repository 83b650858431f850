"""The history of the ratios: `bench/history.jsonl`, a line a run; and docs/performance.md, which is made of it.

    python bench/history.py             write docs/performance.md from the history
    python bench/history.py --check     only say whether it is current

A line holds the date, facts of the machine, what was left out, and the records. Runs are compared where the CPU's
model, the number of cores and the memory agree: a ratio is steadier than seconds, but not the same everywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from bench.records import RATIOS, Record  # noqa: E402 - as a script it stands in the wrong folder first
from bench.stages import WORDS  # noqa: E402

HISTORY, PAGE = ROOT / "bench" / "history.jsonl", ROOT / "docs" / "performance.md"
#: Less than this is the noise of a machine that does something else as well.
NOTEWORTHY = 0.2
#: Runs of one machine that the page shows beside each other.
SHOWN_RUNS = 6
_SAME = ("cpu", "cores", "memory_gib")

Entry = Mapping[str, Any]

_HEAD = """# Performance

<!-- Written by bench/history.py from bench/history.jsonl: run `make bench`. -->

Speed is kept as ratios, each against a rival or a limit that is measured in the same run on the same machine, so
that a number says something on another one. `make bench` measures them (minutes), prints them beside the last ones of
the same machine, adds a line to `bench/history.jsonl` and writes this page. `make bench-stage` (root, three hosts out
of namespaces) and `make bench-true-scale` (13 GB outside the repository, about ten minutes) add theirs to the same
history. A ratio that is more than 20 % worse than the last is named; nothing fails, since a machine that does
something else as well can do that too. Parts are tried alone, and not kept, with `python bench/run.py tree read`.
"""
_CURVES: Mapping[str, tuple[str, str]] = {
    "curve-prompts": ("`eval`, tiny model", "prompts"),
    "curve-record": ("`record`, tiny model, given completions", "prompts"),
    "curve-runs": ("`draftgauge runs --json`, start included", "runs"),
    "curve-length-all": ("measuring 64 anchors together, tiny model", "tokens of context"),
    "curve-length-walk": ("walking over 64 anchors, tiny model", "tokens of context"),
}


def machine() -> dict[str, Any]:
    """Facts of this machine and of what runs on it; no names of hosts, no paths."""
    told = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.+)$", told.read_text(), re.MULTILINE) if told.is_file() else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    import torch

    return {
        "cpu": model[1].strip() if model else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / (1 << 30)),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "draftgauge": metadata.version("draftgauge"),
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The short name of the commit, marked where files differ from it; None outside a clone."""
    words = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def entry_of(records: Iterable[Record], *, left_out: Mapping[str, str], on: Mapping[str, Any]) -> Entry:
    """A line of the history; `left_out` says why a bench is not among them."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": dict(on),
        "left_out": dict(left_out),
        "records": [record.as_dict() for record in records],
    }


def read_history(path: Path = HISTORY) -> list[Entry]:
    """All lines, oldest first; none where there is no file yet."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def same_machine(one: Entry, other: Entry) -> bool:
    """Whether two lines' values can be compared."""
    return all(one["machine"].get(fact) == other["machine"].get(fact) for fact in _SAME)


def record_in(entry: Entry, name: str) -> Mapping[str, Any] | None:
    """A line's record of a ratio; None where it was not measured."""
    return next((record for record in entry["records"] if record["name"] == name), None)


def last_record(entries: Sequence[Entry], entry: Entry, name: str) -> Mapping[str, Any] | None:
    """The newest record of a ratio on the machine of `entry`; None where there is none."""
    mine = (record_in(earlier, name) for earlier in reversed(entries) if same_machine(earlier, entry))
    return next((record for record in mine if record is not None), None)


def change(now: Mapping[str, Any], last: Mapping[str, Any]) -> float:
    """By how much a value changed, as a share of the last."""
    return float(now["value"] / last["value"] - 1) if last["value"] else float(now["value"] > 0)


def is_worse(record: Mapping[str, Any], changed: float) -> bool:
    """Whether a change is to the worse, and more than noise."""
    return (changed if record["better"] == "lower" else -changed) > NOTEWORTHY


def misses_aim(record: Mapping[str, Any]) -> bool:
    """Whether a value does not reach what is stated for it."""
    aim, value = record["aim"], record["value"]
    return aim is not None and (value < aim if record["better"] == "higher" else value > aim)


def comparison(entry: Entry, entries: Sequence[Entry]) -> str:
    """The records of a run beside the last ones of the same machine, and what got worse in words."""
    rows = [("name", "value", "aim", "last", "change", "against")]
    said = []
    for record in entry["records"]:
        last, name = last_record(entries, entry, record["name"]), record["name"]
        aim = "" if record["aim"] is None else _number(record["aim"])
        before, changed = (
            ("", "") if last is None else (_number(last["value"]), f"{change(record, last):+.0%}")
        )
        rows.append((name, _number(record["value"]), aim, before, changed, record["against"]))
        if last is not None and is_worse(record, change(record, last)):
            said.append(
                f"{name} is more than {NOTEWORTHY:.0%} worse than last on this machine: "
                f"{before}, now {_number(record['value'])} ({record['better']} is better)"
            )
        if misses_aim(record):
            said.append(f"{name} is {_number(record['value'])}, its aim is {aim}")
    said += [f"left out: {name}: {why}" for name, why in entry["left_out"].items()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*(line.rstrip() for line in lines), *said])


def keep(
    records: Sequence[Record], *, left_out: Mapping[str, str], path: Path = HISTORY, page_path: Path = PAGE
) -> None:
    """Prints a run beside the last, adds it to the history, and writes the page anew."""
    entries = read_history(path)
    entry = entry_of(records, left_out=left_out, on=machine())
    print(comparison(entry, entries))
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry, ensure_ascii=False) + "\n")
    page_path.write_text(page([*entries, entry]), encoding="utf-8")


def show(records: Sequence[Record]) -> None:
    """Prints some ratios beside the last, and keeps nothing."""
    print(comparison(entry_of(records, left_out={}, on=machine()), read_history()))


# --- the page ---------------------------------------------------------------------------------------------


def page(entries: Sequence[Entry]) -> str:
    """The whole of docs/performance.md."""
    machines: list[list[Entry]] = []
    for entry in entries:
        mine = next((some for some in machines if same_machine(some[0], entry)), None)
        if mine is None:
            machines.append([entry])
        else:
            mine.append(entry)
    parts = [_HEAD, _what()]
    if not machines:
        parts.append("## Measured\n\nNo run has been kept yet: `make bench` keeps the first.\n")
    return "\n".join([*parts, *(_machine(some) for some in machines)])


def _what() -> str:
    rows = [
        (f"`{r.name}`", r.what, r.against, r.better, "" if r.aim is None else _number(r.aim))
        for r in RATIOS.values()
    ]
    return f"## What is measured\n\n{_table(('ratio', 'of', 'against', 'better', 'aim'), rows)}"


def _machine(entries: Sequence[Entry]) -> str:
    """Everything about one machine; `entries` oldest first."""
    said = entries[-1]["machine"]
    newest = {name: _newest(entries, name) for name in RATIOS}
    measured = {name: at for name, at in newest.items() if at is not None}
    rows = []
    for name, at in measured.items():
        record, facts = _at(entries[at], name), entries[at]["machine"]
        reached = "" if record["aim"] is None else ("no" if misses_aim(record) else "yes")
        value, aim = _number(record["value"]), "" if record["aim"] is None else _number(record["aim"])
        rows.append((f"`{name}`", value, aim, reached, entries[at]["date"][:10], facts["commit"] or ""))
    parts = [
        f"## {said['cpu']}, {said['cores']} cores, {said['memory_gib']} GiB\n",
        f"The newest value of every ratio; Python {said['python']}, torch {said['torch']}, "
        f"{said['threads']} threads.\n",
        _table(("ratio", "value", "aim", "reached", "date", "commit"), rows),
        _left_out(entries[-1], measured),
        _over_time(entries[-SHOWN_RUNS:], list(measured)),
        _curves({name: _at(entries[at], name) for name, at in measured.items() if name in _CURVES}),
        _stages(_at(entries[measured["stages"]], "stages") if "stages" in measured else None),
    ]
    return "\n".join(part for part in parts if part)


def _newest(entries: Sequence[Entry], name: str) -> int | None:
    """The place of the last line that has a ratio."""
    return next((i for i in reversed(range(len(entries))) if record_in(entries[i], name)), None)


def _at(entry: Entry, name: str) -> Mapping[str, Any]:
    record = record_in(entry, name)
    assert record is not None
    return record


def _left_out(entry: Entry, measured: Iterable[str]) -> str:
    """What the last run left out and no earlier one measured either."""
    lacking = {
        name: why
        for name, why in entry["left_out"].items()
        if not any(ratio.startswith(f"{name}-") for ratio in measured)
    }
    return "".join(f"Not measured here: {name}: {why}.\n" for name, why in lacking.items())


def _over_time(entries: Sequence[Entry], names: Sequence[str]) -> str:
    if len(entries) < 2:
        return ""
    head = (
        "ratio",
        *(f"{entry['date'][:10]} {entry['machine']['commit'] or ''}".strip() for entry in entries),
    )
    rows = []
    for name in names:
        here = [record_in(entry, name) for entry in entries]
        rows.append((f"`{name}`", *("" if r is None else _number(r["value"]) for r in here)))
    return f"### History\n\n{_table(head, rows)}"


def _curves(records: Mapping[str, Mapping[str, Any]]) -> str:
    """What a unit costs at every size."""
    if not records:
        return ""
    parts = [
        "### Cost curves\n\nMilliseconds a unit at every size; a unit is a prompt, a run or an anchor.\n"
    ]
    for name, record in records.items():
        what, unit = _CURVES[name]
        sizes = record["raw"]["seconds_per_unit"]
        head = (f"`{name}`: {what}; {unit}", *(f"{int(size):,}" for size in sizes))
        parts.append(_table(head, [("ms", *(_number(1e3 * seconds) for seconds in sizes.values()))]))
    parts.append(
        "With few prompts or runs the fixed costs are divided by few: starting, opening, the controls. An anchor's "
        "attention reads the context below it, so that its cost grows with the length in a straight line.\n"
    )
    return "\n".join(parts)


def _stages(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return ""
    raw = record["raw"]
    rows = [
        (name, f"{share:.1%}", WORDS[name])
        for name, share in sorted(raw["shares"].items(), key=lambda pair: -pair[1])
    ]
    measured = f"{raw['prompts']} prompts, {raw['anchors']} anchors, {_number(raw['seconds'])} s in all"
    return (
        f"### Where the time goes\n\nOne `eval` of the demo's drafter in a process of its own: {measured}. A stage's "
        "time is without that of the stages inside it; what controls draft is counted as controls.\n\n"
        f"{_table(('stage', 'share', 'what it does'), rows)}"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _number(value: float) -> str:
    """Three digits, without an exponent, and no more of a whole number's digits lost.

    Example:
        `0.01234` is `0.0123`, `59.31` is `59.3`, `1234.5` is `1234`.
    """
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    text = f"{value:.3g}"
    return f"{value:.6f}".rstrip("0").rstrip(".") if "e" in text else text


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only say whether the page is current")
    entries = read_history()
    if not parser.parse_args().check:
        PAGE.write_text(page(entries), encoding="utf-8")
        return 0
    current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page(entries)
    if not current:
        print(
            "docs/performance.md is not what the history says: run `python bench/history.py`", file=sys.stderr
        )
    return 0 if current else 1


if __name__ == "__main__":
    sys.exit(main())
