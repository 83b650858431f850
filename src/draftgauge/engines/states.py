"""Hidden states of references, computed by an engine and kept in files of the vLLM shape.

`hs_{i}.safetensors` holds `hidden_states` [T, S, H] and `token_ids` [T] of row i of the references, and in its
metadata the row's id. Of which layers they are only the user knows, who started the server: no engine says it.

Letters: T tokens of a sequence, S places whose state the server returns, H width of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from draftgauge.engines.answers import Engine, Observed
from draftgauge.engines.references import read_references
from draftgauge.errors import AnswerError, CheckpointError, PromptError, StoreError
from draftgauge.progress import Progress, silent
from draftgauge.store import locked, publish_file, sha256_json
from draftgauge.tensorfile import Array, read_safetensors, write_safetensors


@dataclass(frozen=True)
class States:
    """A folder of hidden states: how many were computed now, how many it had, and why the others are missing."""

    path: Path
    asked: int
    there: int
    failed: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {"path": str(self.path), "asked": self.asked, "there": self.there, "failed": dict(self.failed)}


def fetch_states(
    engine: Engine,
    references: Path,
    *,
    folder: Path,
    slots: int = 1,
    concurrency: int = 2,
    progress: Progress = silent,
) -> States:
    """Has an engine compute the hidden states of every row of a references file that `folder` does not hold yet.

    Args:
        engine: Who is asked; the server must be started for it (docs/engines.md).
        references: What `fetch_references` wrote.
        folder: Where the files are put.
        slots: How many layers stand side by side in one row; SGLang returns them so, vLLM apart (1).
        concurrency: Requests at a time.
        progress: Told of every row.

    Returns:
        What was computed, and which rows failed and why.

    Raises:
        PromptError: The references cannot be read.
        StoreError: The folder is being written, or holds the states of something else.
        EngineError: The server does not return hidden states.
        UnfinishedError: The server does not answer, or does not finish a file; the same command goes on.
    """
    rows = read_references(references)
    if not rows:
        raise PromptError(f"{references} holds no references; ask for some first")
    with locked(folder):
        missing = [(i, row) for i, row in enumerate(rows) if not _is_there(folder / file_of(i), row)]

        def compute(place: tuple[int, dict[str, Any]]) -> tuple[str, str | None]:
            index, row = place
            try:
                _write(engine, row, path=folder / file_of(index), slots=slots)
            except AnswerError as exc:
                return row["id"], str(exc)
            return row["id"], None

        failed = _all_of(compute, missing, concurrency=concurrency, progress=progress)
    return States(folder, asked=len(missing) - len(failed), there=len(rows) - len(missing), failed=failed)


def file_of(index: int) -> str:
    """The name of the file for row `index` of the references, counted from 0."""
    return f"hs_{index}.safetensors"


def _all_of(compute: Any, missing: Sequence[Any], *, concurrency: int, progress: Progress) -> dict[str, str]:
    """Why rows failed; the first error of the server itself ends all."""
    pool = ThreadPoolExecutor(concurrency, thread_name_prefix="draftgauge-engine")
    try:
        waiting = [pool.submit(compute, place) for place in missing]
        done = progress(as_completed(waiting), label="states", total=len(waiting), unit="prompt")
        failed = dict(future.result() for future in done)
    finally:
        pool.shutdown(cancel_futures=True)
    order = [row["id"] for _, row in missing]
    return {name: failed[name] for name in order if failed[name] is not None}


def _tokens(row: Mapping[str, Any]) -> list[int]:
    return [*row["prompt_ids"], *row["completion_ids"]]


def _is_there(path: Path, row: Mapping[str, Any]) -> bool:
    """Whether the states of a row are kept already."""
    if not path.exists():
        return False
    try:
        metadata = read_safetensors(path)[1]
    except CheckpointError as exc:
        raise StoreError(f"{path} is not one of ours: {exc}; choose another folder") from exc
    if (metadata.get("id"), metadata.get("tokens_sha256")) != (row["id"], sha256_json(_tokens(row))):
        raise StoreError(
            f"{path} holds the states of another row ({metadata.get('id')}), expected {row['id']}; "
            "choose another folder"
        )
    return True


def _write(engine: Engine, row: Mapping[str, Any], *, path: Path, slots: int) -> None:
    tokens = _tokens(row)
    seen = _fitted(engine.observe(tokens), tokens)
    T, S, width = seen.states.shape
    if width % slots:
        raise AnswerError(
            f"a row of {width} numbers cannot be {slots} layers side by side; state how many there are"
        )
    states = np.ascontiguousarray(seen.states.reshape(T, S * slots, width // slots))
    kept: dict[str, Array | tuple[str, Array]] = {
        "hidden_states": (seen.dtype, states),
        "token_ids": np.asarray(tokens, np.int64),
    }
    metadata = {
        "id": row["id"],
        "prompt_len": str(len(row["prompt_ids"])),
        "tokens_sha256": sha256_json(tokens),
        "engine": engine.kind,
    }
    with publish_file(path) as partial:
        write_safetensors(partial, kept, metadata=metadata)


def _fitted(seen: Observed, tokens: Sequence[int]) -> Observed:
    """The states of exactly these tokens; that of the one that is generated after them is left out."""
    T, read = len(tokens), seen.states.shape[0]
    if read < T:
        raise AnswerError(
            f"the server returned hidden states of {read} of {T} tokens: its prefix cache skipped the others; "
            f"{seen.remedy}"
        )
    if read > T + 1:
        raise AnswerError(
            f"the server returned {read} rows of hidden states for {T} tokens and one generated token"
        )
    if seen.token_ids is not None and seen.token_ids[:T].tolist() != list(tokens):
        raise AnswerError(
            "the server's hidden states are of other token ids than those sent; check its folder"
        )
    return Observed(seen.states[:T], seen.dtype, seen.token_ids, remedy=seen.remedy)
