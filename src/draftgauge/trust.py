"""Controls: what must be true of a measurement, what was found, and the verdict, as data with stable names.

A control says its expectation before it says what was measured. Knows nothing of how anything is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

#: `caution` is what a reader must know though it may be right; `undecided`, what this much data cannot tell;
#: `skipped`, what could not be tried here, for the reason that `measured` gives.
Verdict = Literal["passed", "caution", "undecided", "skipped", "failed"]


@dataclass(frozen=True)
class Control:
    """One control, as in `Control("context-zeroed", "acceptance falls ...", "streak 1.41 -> 0.02", "passed")`.

    `values` holds the numbers of `measured` for JSON. `advice` says what a failure or caution points at and
    what to do.
    """

    slug: str
    expectation: str
    measured: str
    verdict: Verdict
    values: Mapping[str, Any] = field(default_factory=dict)
    advice: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def outcome(controls: Iterable[Control]) -> dict[str, Any]:
    """The controls as they stand in `summary.json`, with the verdict on all: trusted unless one failed.

    Example:
        `{"trusted": False, "failed": ["context-zeroed"], "controls": [...]}`.
    """
    found = list(controls)
    failed = [control.slug for control in found if control.verdict == "failed"]
    return {"trusted": not failed, "failed": failed, "controls": [control.as_dict() for control in found]}


def worst_first(controls: Sequence[Control]) -> list[Control]:
    """The controls in the order in which a reader needs them: the worst first, and of those the most telling.

    A fault often fails several controls; the one that names it comes before those that only suffer from it.
    """
    return sorted(
        controls,
        key=lambda control: (
            _WORST.index(control.verdict),
            control.slug in _SUFFERS,
            control.slug not in _NAMES,
        ),
    )


_WORST: tuple[Verdict, ...] = ("failed", "caution", "undecided", "passed", "skipped")
#: Controls that fail for one cause only.
_NAMES = ("context-moved-later", "context-moved-earlier")
#: Controls that fail whenever acceptance is low, whatever made it so.
_SUFFERS = ("context-zeroed", "context-shuffled", "context-swapped", "floor")
