"""Where each layer's state lies in a stored sequence: as the user says, or as the file's form does.

Knows neither targets nor prompts, and no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftgauge.errors import RecordingError
from draftgauge.featurefiles import Features


@dataclass(frozen=True)
class Layout:
    """Where the taps, in the drafter's order, and the last layer's state lie: tensor, and place in it."""

    taps: tuple[tuple[str, int], ...]
    last: tuple[str, int] | None


def layout_of(
    features: Features,
    taps: Sequence[int],
    *,
    stated: Mapping[str, Sequence[int]],
    hidden_size: int,
    last_layer: int,
) -> Layout:
    """Where a sequence holds the taps.

    Args:
        features: The sequence.
        taps: Layers counted from 0, in the drafter's order.
        stated: The layers that each tensor's states are, by the tensor's name; empty to go by the form.
        hidden_size: Values of one state.
        last_layer: The target's last layer: its state is looked for too.

    Raises:
        RecordingError: The sequence does not hold what is said, lacks a tap, or has no form and nothing is said.
    """
    if stated:
        places = _stated_places(features, stated, hidden=hidden_size)
        missing = [tap for tap in taps if tap not in places]
        if missing:
            raise RecordingError(
                f"the drafter reads taps {list(taps)}; what was said of {features.path.name} gives {sorted(places)}: "
                f"{missing} missing. Say where they are with --layers TENSOR=N,N"
            )
        return Layout(tuple(places[tap] for tap in taps), places.get(last_layer))
    if features.form.taps is None:
        raise RecordingError(_ask(features, taps, hidden=hidden_size))
    return _known_places(features, taps, hidden=hidden_size)


def widths(features: Features, hidden_size: int) -> str:
    """The tensors of states, each with its shape and how many states it holds at a position."""
    return ", ".join(
        f"{name} {list(stored.shape)} ({features.width(name) / hidden_size:g} state(s) wide)"
        for name, stored in features.states.items()
    )


def _stated_places(
    features: Features, stated: Mapping[str, Sequence[int]], *, hidden: int
) -> dict[int, tuple[str, int]]:
    places: dict[int, tuple[str, int]] = {}
    for name, layers in stated.items():
        if name not in features.states:
            raise RecordingError(
                f"{features.path} holds no states {name!r}; it holds {widths(features, hidden)}"
            )
        if features.width(name) != len(layers) * hidden:
            raise RecordingError(
                f"--layers {name}={','.join(map(str, layers))} says {len(layers)} layer(s) of {hidden}; in "
                f"{features.path} {widths(features, hidden)}"
            )
        places |= {layer: (name, part) for part, layer in enumerate(layers)}
    return places


def _known_places(features: Features, taps: Sequence[int], *, hidden: int) -> Layout:
    """As the form says; the taps' ids are the user's word, in the order of the states."""
    form = features.form
    assert form.taps is not None
    count = features.width(form.taps) // hidden - form.last_with_taps
    said = features.layers
    order = list(range(len(taps))) if said is None else [said.index(t) if t in said else -1 for t in taps]
    if (said is None and count != len(taps)) or -1 in order:
        held = f"{count} tap(s)" if said is None else f"taps {list(said)}"
        raise RecordingError(
            f"the drafter reads {len(taps)} taps, {list(taps)}; {features.path} holds {held} "
            f"({widths(features, hidden)}, target's hidden size {hidden}).{features.turned(form.taps)} Give the taps "
            "that were stored, or say with --layers TENSOR=N,N which layers each tensor holds"
        )
    last = (form.taps, count) if form.last_with_taps else None
    if form.last is not None and form.last in features.states:
        last = (form.last, 0)
    return Layout(tuple((form.taps, part) for part in order), last)


def _ask(features: Features, taps: Sequence[int], *, hidden: int) -> str:
    return (
        f"{features.path} has no form that is known, so nothing says which tensor is which tap: it holds "
        f"{widths(features, hidden)}, the drafter reads {list(taps)}. Say it for each tensor, as in "
        + " ".join(f"--layers {n}={','.join('N' * (features.width(n) // hidden))}" for n in features.states)
        + ", layers counted from 0"
    )
