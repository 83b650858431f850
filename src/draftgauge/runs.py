"""The run directory: what was measured, on what, and the counts it rests on.

    runs/<name>/run.json        plan, digests, versions, machine; written last: its presence means complete
    runs/<name>/checkpoint/     hard links to the checkpoint's files, or absent where links are impossible
    runs/<name>/blocks.parquet  one row per prompt and anchor: ranks, tree positions, lists, streaks
    runs/<name>/summary.json    every estimate, every count, every caveat

A run is published whole and never overwritten. Its layout lives here and nowhere else. Knows nothing of
torch, and nothing of how a number is computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from draftgauge.errors import RunError, StoreError
from draftgauge.store import PARTIAL, keep, publish_directory, sha256_file, sha256_json, sweep, write_json

#: Version of the layout and of `summary.json`. 1: first.
FORMAT_VERSION = 1
KIND = "draftgauge run"
MANIFEST, SUMMARY, BLOCKS, CHECKPOINT = "run.json", "summary.json", "blocks.parquet", "checkpoint"
#: In a run that was copied without the checkpoint that it keeps: the place where that lies.
ELSEWHERE = "checkpoint.elsewhere"

_PACKAGES = ("draftgauge", "torch", "numpy", "numba", "transformers", "pyarrow")
#: Without these nothing can be said of a run.
_MANIFEST_KEYS, _SUMMARY_KEYS = ("plan", "plan_digest", "started"), ("policies", "prompts")
_AGAIN = "remove the run's folder and evaluate again"


@dataclass(frozen=True)
class Plan:
    """Everything that can change a number, and nothing else; its digest is the run's identity.

    `policies` are slugs; `anchors` is `all` or `walk`; `wiring` is the wiring as plain values;
    `trained_block_size` is the one that the checkpoint was trained with, where that is known; `instrument`
    is the version of draftgauge.
    """

    checkpoint_digest: str
    recording_digest: str
    wiring: Mapping[str, Any]
    prompts: tuple[str, ...]
    policies: tuple[str, ...]
    anchors: str
    dtype: str
    max_blocks: int | None
    trained_block_size: int | None
    target_digest: str
    template: str
    instrument: str

    @property
    def digest(self) -> str:
        """SHA-256 over all fields."""
        return sha256_json(dataclasses.asdict(self))


_PLAN_FIELDS = tuple(field.name for field in dataclasses.fields(Plan))


@dataclass(frozen=True)
class Run:
    """A complete run: `manifest` is run.json, `summary` is summary.json, both as plain values."""

    path: Path
    manifest: Mapping[str, Any]
    summary: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def plan(self) -> Plan:
        """What was asked."""
        value = dict(self.manifest["plan"])
        return Plan(**{**value, "prompts": tuple(value["prompts"]), "policies": tuple(value["policies"])})

    @property
    def failed_controls(self) -> list[str]:
        """The controls that failed; empty where the run is trusted, or was made before controls were."""
        return list(self.summary.get("trust", {}).get("failed", ()))

    def blocks(self, columns: Sequence[str] | None = None, *, prompt: str | None = None) -> pa.Table:
        """The blocks, one row per prompt and anchor; only these columns, or this prompt's rows, where named."""
        chosen = None if prompt is None else [("prompt", "==", prompt)]
        return pq.read_table(self.path / BLOCKS, columns=columns, filters=chosen)


class BlockWriter:
    """Writes the blocks of one prompt after the other, so that no run has to fit in memory.

    To be used in a `with` block, which finishes the file.
    """

    def __init__(self, where: Path | BytesIO) -> None:
        self._where = where
        self._writer: pq.ParquetWriter | None = None

    def write(self, prompt: str, columns: Mapping[str, np.ndarray]) -> None:
        """Adds the rows of one prompt; arrays [A] become columns, [A, ...] columns of flat lists."""
        rows = len(next(iter(columns.values())))
        arrays = {"prompt": pa.array([prompt] * rows, pa.string())}
        arrays |= {name: _column(array) for name, array in columns.items()}
        self.write_rows(pa.table(arrays))

    def write_rows(self, rows: pa.Table) -> None:
        """Adds the rows of one prompt, as another writer made them."""
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._where, rows.schema, compression="zstd")
        self._writer.write_table(rows)

    def __enter__(self) -> BlockWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()


def _column(array: np.ndarray) -> pa.Array:
    flat = pa.array(array.reshape(-1), from_pandas=True)
    if array.ndim == 1:
        return flat
    return pa.FixedSizeListArray.from_arrays(flat, int(np.prod(array.shape[1:])))


def flat_lists(column: pa.ChunkedArray) -> np.ndarray:
    """A column of flat lists as an array [A, ...], as it was written."""
    return np.asarray(column.combine_chunks().flatten()).reshape(len(column), column.type.list_size)


def run_path(root: Path, plan: Plan, *, label: str, name: str | None = None) -> Path:
    """Where a run of this plan lies: under `name`, or under a name made of `label` and the plan's digest.

    Raises:
        RunError: No listing would find a run of that name.
    """
    if name is not None and (not name or name != Path(name).name or name.startswith(".")):
        raise RunError(f"a run cannot be called {name!r}; give --name a plain name that starts without a dot")
    return root / (name or f"{label}-{plan.digest[:8]}")


@contextlib.contextmanager
def new_run(
    path: Path,
    plan: Plan,
    *,
    facts: Mapping[str, Any],
    checkpoint: Sequence[Path],
    started: float | None = None,
) -> Iterator[Path]:
    """Yields the folder to write blocks and summary into; publishes the run when the block ends cleanly.

    The checkpoint's files are kept first. What killed processes left unfinished beside it is removed.

    Args:
        path: The run's folder; must not exist.
        plan: What is measured.
        facts: More for run.json: sources, sizes, the key map.
        checkpoint: The checkpoint's files, to be kept by hard links.
        started: When the work began, in seconds of the epoch; now, when None.

    Raises:
        RunError: `path` exists already.
    """
    started = time.time() if started is None else started
    sweep(path.parent)
    try:
        with publish_directory(path) as folder:
            kept = _keep_checkpoint(folder / CHECKPOINT, checkpoint)
            files = _stamps(folder / CHECKPOINT)  # now, so that a later edit differs from them
            yield folder
            manifest = {
                "kind": KIND,
                "version": FORMAT_VERSION,
                "status": "complete",
                "plan": dataclasses.asdict(plan),
                "plan_digest": plan.digest,
                "checkpoint_kept": kept,
                "checkpoint_files": files,
                "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
                "duration_s": time.time() - started,
                "versions": {name: package_version(name) for name in _PACKAGES},
                "machine": {"platform": platform.platform(), "python": platform.python_version()},
                "argv": sys.argv,
                **facts,
            }
            write_json(folder / MANIFEST, manifest)
    except StoreError as exc:
        raise RunError(f"run {path.name}: {exc}") from exc


def open_run(path: str | Path) -> Run:
    """The complete run in folder `path`.

    Raises:
        RunError: The folder is no complete run, is damaged, or is of a version not known here.
    """
    folder = Path(path)
    manifest = _read(folder / MANIFEST)
    if manifest is None:
        raise RunError(f"{path} holds no {MANIFEST}: it is no complete run; `draftgauge runs` lists those")
    if manifest.get("kind") != KIND:
        raise RunError(f"{folder / MANIFEST} is of kind {manifest.get('kind')!r}, expected {KIND!r}")
    summary = _read(folder / SUMMARY)
    if summary is None:
        raise RunError(f"{folder / SUMMARY} is missing; {_AGAIN}")
    for name, value, keys in ((MANIFEST, manifest, _MANIFEST_KEYS), (SUMMARY, summary, _SUMMARY_KEYS)):
        if value.get("version") != FORMAT_VERSION:
            raise RunError(
                f"{folder / name} has version {value.get('version')!r}, expected {FORMAT_VERSION}; open it with "
                "the draftgauge that wrote it, or evaluate again into another --runs folder"
            )
        if lacking := [key for key in keys if key not in value]:
            raise RunError(f"{folder / name} lacks {', '.join(lacking)}; {_AGAIN}")
    if not isinstance(manifest["plan"], dict) or set(manifest["plan"]) != set(_PLAN_FIELDS):
        raise RunError(
            f"{folder / MANIFEST}: its plan has not the fields {', '.join(_PLAN_FIELDS)}; {_AGAIN}"
        )
    return Run(folder, manifest, summary)


def find_run(root: Path, plan: Plan, *, name: str | None = None) -> Run | None:
    """The run below `root` that already answers this plan, under `name` if one is given; None if there is none."""
    for run in list_runs(root):
        if run.manifest["plan_digest"] == plan.digest and name in (None, run.name):
            return run
    return None


def list_runs(root: Path) -> list[Run]:
    """The complete runs below `root`, oldest first; what cannot be read is left out."""
    return [run for run in found_runs(root).values() if isinstance(run, Run)]


def found_runs(root: Path) -> dict[str, Run | str]:
    """What lies below `root`, by folder: the complete runs, oldest first, then why the others cannot be read.

    Unfinished runs are none of either.

    Example of the result: `{"step_4000-1a2b3c4d": Run(...), "old": "old/run.json has version 0, expected 1; ..."}`.
    """
    readable: dict[str, Run] = {}
    unreadable: dict[str, str] = {}
    for manifest in sorted(root.glob(f"*/{MANIFEST}")):
        name = manifest.parent.name
        if name.startswith(PARTIAL):
            continue
        try:
            readable[name] = open_run(manifest.parent)
        except RunError as exc:
            unreadable[name] = str(exc)
    oldest = sorted(readable.items(), key=lambda found: (str(found[1].manifest["started"]), found[0]))
    return {**dict(oldest), **unreadable}


def changed_files(run: Run) -> list[str]:
    """The kept files of the checkpoint that may not be what was measured any more; empty where they surely are.

    A kept file is a hard link: who edits the original in place edits it too. Equal stamps prove that nobody did;
    others, or none as in older runs, only that its content has to be looked at again.
    """
    if run.manifest.get("checkpoint_kept") in (None, "reference") or (run.path / ELSEWHERE).exists():
        return []
    said = run.manifest.get("checkpoint_files")
    if said is None:
        return list(run.manifest["checkpoint"]["files"])
    now = _stamps(run.path / CHECKPOINT, digests=False)
    return [name for name in said if not _untouched(said[name], now.get(name))]


def _stamps(kept: Path, *, digests: bool = True) -> dict[str, dict[str, Any]]:
    """What an edit of a kept file moves; for JSON, which no digest of weights covers, what it holds as well."""
    stamps: dict[str, dict[str, Any]] = {}
    for file in sorted(kept.glob("*")):
        stat = file.stat()
        stamps[file.name] = {
            "size": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "ctime_ns": stat.st_ctime_ns,
            "inode": stat.st_ino,
            "links": stat.st_nlink,
        }
        if digests and file.suffix == ".json":
            stamps[file.name]["sha256"] = sha256_file(file)
    return stamps


def _untouched(said: Mapping[str, Any], now: Mapping[str, Any] | None) -> bool:
    """Whether a file's stamps show that nobody wrote to it."""
    if now is None or any(said[name] != now[name] for name in ("size", "mtime_ns", "inode")):
        return False
    # A link more or less (another run keeps the file, the trainer rotates its saves) moves ctime as an edit does.
    return bool(said["ctime_ns"] == now["ctime_ns"] or said["links"] != now["links"])


def _keep_checkpoint(target: Path, files: Sequence[Path]) -> str:
    """Keeps the checkpoint's bytes reachable without copying them."""
    target.mkdir()
    how = {keep(file, target / file.name) for file in files}
    if "hard link" not in how:
        target.rmdir()
    return "; ".join(sorted(how))


def package_version(package: str) -> str | None:
    """The version of an installed package, as in `"0.1.0"`; None for one that is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as exc:
        raise RunError(f"{path} is not readable: {exc}; {_AGAIN}") from exc
    if not isinstance(value, dict):
        raise RunError(f"{path} holds no JSON object; {_AGAIN}")
    return value
