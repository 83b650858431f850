"""A checkpoint's wiring, from what its file says and what the user states.

Knows neither torch nor recordings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from draftgauge.checkpoint import Checkpoint
from draftgauge.configs import SHORTHANDS, described_fields, read_wiring
from draftgauge.errors import WiringError
from draftgauge.wiring import FIELDS, Wiring, tensor_shapes, validate


@dataclass(frozen=True)
class Stated:
    """What the user states about a drafter.

    `wiring` holds fields by name and `source` says where they stand, as in `"--wiring mine.toml"`.
    `block_size` is the one to measure with, which need not be the trained one. `options` holds the fields
    that an option of the command line states; they come before `wiring`, each its own source.
    """

    wiring: Mapping[str, Any] = field(default_factory=dict)
    source: str = "given"
    block_size: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def wiring_of(checkpoint: Checkpoint, stated: Stated = Stated()) -> Wiring:
    """The wiring that the checkpoint was trained with, as far as file and user say.

    Raises:
        WiringError: A field is unknown; the message lists all that are, with what would state them.
    """
    options = dict(stated.options)
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}

    def read() -> Wiring:
        wiring = read_wiring(
            config=checkpoint.config,
            config_source=checkpoint.config_source,
            shapes=shapes,
            given={**stated.wiring, **options},
            given_source=stated.source,
        )
        sources = {name: f"--{name.replace('_', '-')}" for name in options}
        return replace(wiring, provenance={**wiring.provenance, **sources})

    try:
        return read()
    except WiringError:
        if stated.block_size is None or "block_size" in {*options, *stated.wiring}:
            raise
        # Nobody else says the block size: then the one to use is the only one that is known.
        options["block_size"] = stated.block_size
        return read()


def used_wiring(trained: Wiring, stated: Stated) -> Wiring:
    """The wiring to measure with: the trained one, but for a block size that the user asks for.

    Raises:
        WiringError: Nothing can be drafted with that block size.
    """
    if stated.block_size is None or stated.block_size == trained.block_size:
        return trained
    provenance = {**trained.provenance, "block_size": f"--block-size (trained: {trained.block_size})"}
    return validate(replace(trained, block_size=stated.block_size, provenance=provenance))


def overridden(checkpoint: Checkpoint, stated: Stated, *, wiring: Wiring) -> dict[str, tuple[Any, Any]]:
    """The fields in which the user's word stands against the checkpoint's own: the file's value, and the stated.

    A field that the file leaves to a default of its format is not overridden. `wiring` is what the two together
    gave.

    Example:
        `{"rope_theta": (100000.0, 10000.0)}`.
    """
    said = described_fields(checkpoint.config, source=checkpoint.config_source)
    given = {**stated.wiring, **stated.options}
    # Where the file describes every layer in full, a shorthand speaks against that.
    names = dict.fromkeys("attention" if name in SHORTHANDS and name not in said else name for name in given)
    used = {name: getattr(wiring, name) if name in FIELDS else given[name] for name in names}
    return {name: (said[name], used[name]) for name in names if name in said and said[name] != used[name]}


def unused_tensors(checkpoint: Checkpoint, wiring: Wiring) -> dict[str, str]:
    """The stored tensors that take no part in the drafter's function, and why.

    Example:
        `{"verifier_norm.weight": "not part of the drafter's function: the verifier's own"}`.
    """
    read = tensor_shapes(wiring)
    return {
        use.stored: use.reason if use.canonical is None else "the wiring does not read it"
        for use in checkpoint.key_map
        if use.canonical is None or use.canonical not in read
    }
