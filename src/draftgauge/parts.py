"""The parts of a run that is not complete: what was measured so far, so that the same command goes on from there.

    runs/.unfinished-<plan>/00003.parquet   the blocks of one shard, published whole
    runs/.unfinished-<plan>/checkpoint/     hard links: a trainer that rotates its saves cannot take them away

The folder's name is made of the plan, and a shard of a plan always gives the same blocks: whoever measured a part,
and when, makes no difference. Several processes may work on one plan. Knows nothing of how a part is measured.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from draftgauge.errors import StoreError
from draftgauge.runs import CHECKPOINT, BlockWriter, Plan
from draftgauge.store import keep, publish_file


class Parts:
    """The parts of one plan's run below `root`; to be used in a `with` block.

    Args:
        root: The folder that holds runs.
        plan: What is measured.
        checkpoint: The checkpoint's files, kept by hard links while the run is unfinished.

    Raises:
        StoreError: The folder cannot be written.
    """

    def __init__(self, root: Path, plan: Plan, *, checkpoint: Sequence[Path]) -> None:
        self._folder = root / f".unfinished-{plan.digest[:16]}"
        self._originals = tuple(checkpoint)
        self._handle = -1

    def __enter__(self) -> Parts:
        kept = self._folder / CHECKPOINT
        try:
            kept.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as exc:
            raise StoreError(
                f"{self._folder} cannot be written: {exc.strerror or exc}; check the path and its rights"
            ) from exc
        with contextlib.suppress(
            OSError
        ):  # some file systems have no locks: then nothing is removed but by hand
            fcntl.flock(self._handle, fcntl.LOCK_SH)
        for file in self._originals:
            with contextlib.suppress(StoreError):  # another process of this plan kept it
                keep(file, kept / file.name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not any(self._folder.glob("*.parquet")):
            self.discard()
        os.close(self._handle)

    @property
    def checkpoint(self) -> tuple[Path, ...]:
        """The checkpoint's files, as links that nobody else removes where links are possible."""
        kept = [self._folder / CHECKPOINT / file.name for file in self._originals]
        return tuple(
            link if link.exists() else file for link, file in zip(kept, self._originals, strict=True)
        )

    def add(self, index: int, blocks: bytes) -> None:
        """Keeps the blocks of one shard; where another process was faster, its blocks are the same and stay."""
        path = self._path(index)
        if path.exists():
            return
        try:
            with publish_file(path) as partial:
                partial.write_bytes(blocks)
        except StoreError:
            if not path.exists():
                raise

    def read(self, index: int) -> pa.Table:
        """The blocks of one shard.

        Raises:
            StoreError: They are not there, or damaged.
        """
        path = self._path(index)
        try:
            return pq.read_table(path)
        except (OSError, pa.ArrowInvalid) as exc:
            raise StoreError(
                f"{path}, a part of an unfinished run, cannot be read: {exc}; remove it, and the same command "
                "measures it again"
            ) from exc

    def has(self, index: int) -> bool:
        """Whether a shard was measured."""
        return self._path(index).is_file()

    def discard(self) -> None:
        """Removes all parts, unless another process works on the same plan: the last one does it then."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, index: int) -> Path:
        return self._folder / f"{index:05d}.parquet"


def packed(blocks: Mapping[str, Mapping[str, np.ndarray]]) -> bytes:
    """The columns of some prompts' blocks as the bytes of a Parquet file, a row group for each prompt."""
    sink = BytesIO()
    with BlockWriter(sink) as writer:
        for prompt, columns in blocks.items():
            writer.write(prompt, columns)
    return sink.getvalue()
