"""The runs of a folder as one table, a row for each run and policy, for whoever reads CSV or Parquet.

What stands in `run.json` and `summary.json`, flat: nothing is computed here and nothing rounded. A value that is
absent there is null here. Knows nothing of how a table is read or drawn.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from draftgauge.acceptance import CONVENTIONS
from draftgauge.errors import InputError, StoreError
from draftgauge.runs import Run
from draftgauge.store import publish_file

#: Several slugs in one cell are separated so; no slug holds it.
SEPARATOR = ";"

#: What every row of a run repeats, by column.
_OF_RUN: Mapping[str, tuple[pa.DataType, Callable[[Run], Any]]] = {
    "run": (pa.string(), operator.attrgetter("name")),
    "step": (pa.int64(), lambda run: run.manifest.get("checkpoint", {}).get("step")),
    "started": (pa.string(), lambda run: run.manifest["started"]),
    "trusted": (pa.bool_(), lambda run: run.summary.get("trust", {}).get("trusted")),
    "failed_controls": (pa.string(), lambda run: SEPARATOR.join(run.failed_controls)),
    "caveats": (pa.string(), lambda run: SEPARATOR.join(c["slug"] for c in run.summary.get("caveats", ()))),
    "prompts": (pa.int64(), lambda run: len(run.summary["prompts"])),
    "checkpoint": (pa.string(), lambda run: run.manifest.get("checkpoint", {}).get("path")),
    "plan_digest": (pa.string(), lambda run: run.manifest["plan_digest"]),
    "checkpoint_digest": (pa.string(), lambda run: run.plan.checkpoint_digest),
    "recording_digest": (pa.string(), lambda run: run.plan.recording_digest),
    "target_digest": (pa.string(), lambda run: run.plan.target_digest),
    "template": (pa.string(), lambda run: run.plan.template),
    "block_size": (pa.int64(), lambda run: run.plan.wiring.get("block_size")),
    "trained_block_size": (pa.int64(), lambda run: run.plan.trained_block_size),
    "predicts_from_anchor": (pa.bool_(), lambda run: run.plan.wiring.get("predicts_from_anchor")),
    "anchors": (pa.string(), lambda run: run.plan.anchors),
    "max_blocks": (pa.int64(), lambda run: run.plan.max_blocks),
    "dtype": (pa.string(), lambda run: run.plan.dtype),
    "instrument": (pa.string(), lambda run: run.plan.instrument),
}
_ESTIMATES = ("tau_response", "tau_pooled", "streak_response", "streak_pooled", "all_anchor_streak")
_COUNTS = (
    *("rounds", "accepted", "committed", "completion_tokens"),
    *("ended_not_covered", "ended_not_selected", "ended_depth", "ended_reference"),
)
SCHEMA = pa.schema(
    [
        pa.field("run", pa.string()),
        pa.field("policy", pa.string()),
        *(pa.field(name + end, pa.float64()) for name in _ESTIMATES for end in ("", "_low", "_high")),
        pa.field("design_effect", pa.float64()),
        pa.field("units", pa.int64()),
        *(pa.field(name, pa.int64()) for name in _COUNTS),
        *(pa.field(f"as_{name}", pa.float64()) for name in CONVENTIONS),
        *(pa.field(name, kind) for name, (kind, _) in _OF_RUN.items() if name != "run"),
    ]
)


def results_table(runs: Iterable[Run]) -> pa.Table:
    """One row for each run and policy: estimates with intervals, counts, conventions, and what was asked.

    Columns are those of `SCHEMA`: `tau_response`, `tau_response_low`, `tau_response_high` and so on; `as_pooled` is
    what the convention `pooled` counts; several slugs in one cell are separated by `;`.

    Example of a row: `{"run": "step_4000-1a2b3c4d", "policy": "ddtree16", "tau_response": 2.61, "step": 4000, ...}`.
    """
    rows = [row for run in runs for row in _rows(run)]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def require_table(path: Path) -> None:
    """Makes sure, before the work that a table is made of, that one can be written under this name.

    Raises:
        InputError: The name ends in neither `.csv` nor `.parquet`.
        StoreError: The file exists already.
    """
    if path.suffix not in _WRITERS:
        raise InputError(
            f"{path} ends in {path.suffix!r}; name the table {' or '.join(f'NAME{s}' for s in _WRITERS)}"
        )
    if path.exists():
        raise StoreError(f"{path} exists already and is never overwritten; choose another name")


def write_results(path: Path, runs: Iterable[Run]) -> None:
    """Writes the table as its name says, `.csv` or `.parquet`; a value that is absent is an empty cell of a CSV.

    Raises:
        InputError: As `require_table`.
        StoreError: As `require_table`; or it cannot be written.
    """
    require_table(path)
    table = results_table(runs)
    with publish_file(path) as partial:
        _WRITERS[path.suffix](table, partial)


_WRITERS: Mapping[str, Callable[[pa.Table, Path], Any]] = {
    ".csv": pyarrow.csv.write_csv,
    ".parquet": pq.write_table,
}


def _rows(run: Run) -> Iterable[dict[str, Any]]:
    same = {name: read(run) for name, (_, read) in _OF_RUN.items()}
    for slug, policy in run.summary["policies"].items():
        estimates = {name: policy.get(name) or {} for name in _ESTIMATES}
        yield {
            **same,
            "policy": slug,
            **{name: estimate.get("value") for name, estimate in estimates.items()},
            **{f"{name}_{end}": e.get(end) for name, e in estimates.items() for end in ("low", "high")},
            "design_effect": policy["design_effect"],
            "units": policy.get("units"),
            **{name: policy["counts"][name] for name in _COUNTS},
            **{f"as_{name}": value for name, value in policy["conventions"].items()},
        }
