"""Hidden states from the file that vLLM's hidden-state connector writes, once its writer has let it go.

The file holds `hidden_states` [T, S, H] and `token_ids` [T]; while `PATH.lock` is held (flock) it may be incomplete.
It is the server's, and stays where it is.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import numpy as np
import tenacity

from draftgauge.engines.answers import Observed
from draftgauge.engines.calls import Patience
from draftgauge.errors import AnswerError, BeingWrittenError, CheckpointError
from draftgauge.tensorfile import ITEM_BYTES, Array, StoredTensor, read_safetensors

_UNSIGNED = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}
_SIGNED = {"I64": "<i8", "I32": "<i4", "U32": "<u4", "U64": "<u8", "I16": "<i2", "U16": "<u2"}


def read_states(path: Path, *, patience: Patience, remedy: str) -> Observed:
    """The states in a file of the connector, after waiting for its writer.

    Raises:
        BeingWrittenError: The lock is still held after all tries.
        AnswerError: The file is not there, is damaged, or holds something else.
    """
    _wait_for_writer(path, patience)
    if not path.is_file():
        raise AnswerError(
            f"the server wrote its hidden states to {path}, which is not there: that folder must be on a disk that "
            "both the server and this machine see, under one name"
        )
    try:
        tensors = read_safetensors(path)[0]
        states, ids = tensors.get("hidden_states"), tensors.get("token_ids")
        if states is None or ids is None or len(states.shape) != 3 or len(ids.shape) != 1:
            found = ", ".join(f"{stored.name} {list(stored.shape)}" for stored in tensors.values())
            raise AnswerError(
                f"{path} holds {found or 'nothing'}; expected hidden_states [T, S, H], token_ids [T]"
            )
        if ids.dtype not in _SIGNED:
            raise AnswerError(f"token_ids in {path} has type {ids.dtype}; expected whole numbers")
        return Observed(
            _array(states, _UNSIGNED[ITEM_BYTES[states.dtype]]),
            states.dtype,
            _array(ids, _SIGNED[ids.dtype]),
            remedy=remedy,
        )
    except CheckpointError as exc:
        raise AnswerError(f"the server's file of hidden states cannot be read: {exc}") from exc


def _array(stored: StoredTensor, code: str) -> Array:
    """A tensor's elements, read and not mapped: the file is another's and may go."""
    data = b"".join(stored.blocks())
    return np.frombuffer(data, code).reshape(stored.shape)


def _wait_for_writer(path: Path, patience: Patience) -> None:
    """Returns once nobody holds the lock beside `path`, or there is none."""

    def is_held() -> bool:
        try:
            handle = os.open(path.with_name(f"{path.name}.lock"), os.O_RDONLY)
        except FileNotFoundError:
            return False
        except PermissionError as exc:
            raise AnswerError(
                f"{path}.lock may not be read here; give this user the right to read it"
            ) from exc
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False

    def give_up(_: tenacity.RetryCallState) -> bool:
        raise BeingWrittenError(
            f"{path} is still being written: its lock was held through {patience.attempts} tries; see to the server, "
            "then give the same command again"
        )

    tenacity.Retrying(
        retry=tenacity.retry_if_result(bool),
        stop=tenacity.stop_after_attempt(patience.attempts),
        wait=tenacity.wait_exponential(multiplier=patience.wait_s, max=patience.longest_s),
        retry_error_callback=give_up,
    )(is_held)
