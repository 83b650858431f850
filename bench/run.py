"""Speed as ratios, each against a stated rival or limit in the same run: all benches in one command.

    python bench/run.py                 all, kept in bench/history.jsonl and docs/performance.md
    python bench/run.py tree read       some of them, only printed

`records.RATIOS` says what each ratio is of, and against what.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench import curves, history, opening, real, start, tree
from bench.records import Record

#: Of the replay bench: online decoding is what takes the time.
REPLAY_PROMPTS = 3
#: What this command does not run, and why.
ELSEWHERE: Mapping[str, str] = {
    "stage": "needs root and three hosts out of namespaces: `make bench-stage`",
    "true-scale": "needs 13 GB outside the repository and about ten minutes: `make bench-true-scale`",
}


def benches(replay_prompts: int) -> dict[str, Callable[[], Iterable[Record]]]:
    """Every bench by its name, in the order to run them."""
    return {
        "start": start.bench_start,
        "open": opening.bench_open,
        "tree": tree.bench_tree,
        "record": real.bench_record,
        "read": real.bench_read,
        "stages": real.bench_stages,
        "page": real.bench_page,
        "curves": curves.bench_curves,
        "replay": lambda: real.bench_replay(replay_prompts),
    }


def main() -> None:
    """Runs the benches that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", nargs="*", help="some of them; nothing is kept then")
    parser.add_argument("--prompts", type=int, help="of the replay bench, which has to be named")
    options = parser.parse_args()
    known = benches(options.prompts or REPLAY_PROMPTS)
    if unknown := sorted(set(options.which) - set(known)):
        parser.error(f"unknown bench {', '.join(unknown)}; expected {', '.join(known)}")
    if options.prompts is not None and "replay" not in options.which:
        parser.error("--prompts is of the replay bench: name it, and nothing is kept")
    records = []
    for name in options.which or known:
        print(f"{name} ...", file=sys.stderr, flush=True)
        records += known[name]()
    if options.which:
        history.show(records)
    else:
        history.keep(records, left_out=ELSEWHERE)
    print(f"peak memory of this process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")


if __name__ == "__main__":
    main()
