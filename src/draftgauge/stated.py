"""A checkpoint's wiring, from what its file says and what the user states.

Knows neither torch nor recordings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from draftgauge.checkpoint import Checkpoint
from draftgauge.configs import read_wiring
from draftgauge.errors import WiringError
from draftgauge.wiring import Wiring, validate


@dataclass(frozen=True)
class Stated:
    """What the user states about a drafter: wiring fields, how to name their source, the block size to use."""

    wiring: Mapping[str, Any] = field(default_factory=dict)
    source: str = "given"
    block_size: int | None = None


def wiring_of(checkpoint: Checkpoint, stated: Stated = Stated()) -> Wiring:
    """The wiring that the checkpoint was trained with, as far as file and user say.

    Raises:
        WiringError: A field is unknown; the message lists all that are, with what would state them.
    """
    given = dict(stated.wiring)
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}

    def read(fields: Mapping[str, Any]) -> Wiring:
        return read_wiring(
            config=checkpoint.config,
            config_source=checkpoint.config_source,
            shapes=shapes,
            given=fields,
            given_source=stated.source,
        )

    try:
        return read(given)
    except WiringError:
        if stated.block_size is None or "block_size" in given:
            raise
        # Nobody else says the block size: then the one to use is the only one that is known.
        return read({**given, "block_size": stated.block_size})


def used_wiring(trained: Wiring, stated: Stated) -> Wiring:
    """The wiring to measure with: the trained one, but for a block size that the user asks for."""
    if stated.block_size is None or stated.block_size == trained.block_size:
        return trained
    provenance = {**trained.provenance, "block_size": f"--block-size (trained: {trained.block_size})"}
    return validate(replace(trained, block_size=stated.block_size, provenance=provenance))
