"""Gates: conditions on a run that a script can stop at.

    tau>=2.0                      the chain's tau by response
    ddtree16.tau_pooled > 2.5     any policy's tau, streak, tau_pooled, streak_pooled or all_anchor_streak
    not worse than RUN by 0.05    paired with another run; the interval must exclude a loss of more than 0.05

A gate that cannot be decided has not passed.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftgauge.acceptance import Policy
from draftgauge.compare import compare_runs
from draftgauge.errors import InputError
from draftgauge.runs import Run, open_run

_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
#: What a gate may ask for, and where it stands in `summary.json`.
_QUANTITIES: Mapping[str, str] = {
    "tau": "tau_response",
    "tau_pooled": "tau_pooled",
    "streak": "streak_response",
    "streak_pooled": "streak_pooled",
    "all_anchor_streak": "all_anchor_streak",
}
_NAME = r"(?:(?P<policy>[a-z]+\d*)\.)?(?P<quantity>[a-z_]+)"
_LEVEL = re.compile(rf"\s*{_NAME}\s*(?P<operator>>=|<=|>|<)\s*(?P<bound>[\d.]+)\s*")
_NOT_WORSE = re.compile(rf"\s*(?:{_NAME}\s+)?not worse than\s+(?P<baseline>.+?)\s+by\s+(?P<bound>[\d.]+)\s*")
_GRAMMAR = 'as in "tau>=2.0", "ddtree16.tau_pooled > 2.5" or "not worse than runs/NAME by 0.05"'


@dataclass(frozen=True)
class Gate:
    """A condition: a quantity of a policy against a bound, or against a baseline run with a margin."""

    text: str
    policy: str
    quantity: str
    bound: float
    compares: str | None
    baseline: Path | None


@dataclass(frozen=True)
class Judgement:
    """Whether a gate passed, and why, as in `Judgement("tau>=2.0", True, "tau of chain is 2.163")`."""

    gate: str
    passed: bool
    text: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"gate": self.gate, "passed": self.passed, "text": self.text}


def parse_gate(text: str) -> Gate:
    """The gate that a text states.

    Raises:
        InputError: It is none.
    """
    level, against = _LEVEL.fullmatch(text), _NOT_WORSE.fullmatch(text)
    found = against or level
    if found is None:
        raise InputError(f"gate {text!r} is not understood; expected one {_GRAMMAR}")
    quantity = found["quantity"] or "tau"
    if quantity not in _QUANTITIES:
        raise InputError(f"gate {text!r}: {quantity!r} is not one of {', '.join(_QUANTITIES)}")
    if against is not None and quantity not in ("tau", "streak"):
        raise InputError(f"gate {text!r}: runs are compared by tau or streak, not by {quantity}")
    try:
        bound, policy = float(found["bound"]), Policy.parse(found["policy"] or "chain").slug
    except ValueError:
        raise InputError(f"gate {text!r}: {found['bound']!r} is no number; expected one {_GRAMMAR}") from None
    baseline = None if against is None else Path(against["baseline"])
    compares = None if against is not None or level is None else level["operator"]
    return Gate(text, policy, quantity, bound, compares, baseline)


def judge(gate: Gate, run: Run) -> Judgement:
    """Whether the run passes the gate.

    Raises:
        InputError: The run has no such policy.
        RunError: The baseline is no run, or cannot be compared with.
    """
    if gate.policy not in run.summary["policies"]:
        known = ", ".join(run.summary["policies"])
        raise InputError(f"gate {gate.text!r}: the run has no policy {gate.policy!r}; it has {known}")
    if gate.baseline is not None:
        return _not_worse(gate, run, open_run(gate.baseline))
    estimate = run.summary["policies"][gate.policy].get(_QUANTITIES[gate.quantity], {})
    value = estimate.get("value")
    if value is None or gate.compares is None:
        reason = estimate.get("reason") or "it needs all anchors"
        return Judgement(gate.text, False, f"{gate.quantity} of {gate.policy} is not known: {reason}")
    passed = _OPERATORS[gate.compares](value, gate.bound)
    return Judgement(gate.text, passed, f"{gate.quantity} of {gate.policy} is {value:.4f}")


def _not_worse(gate: Gate, run: Run, baseline: Run) -> Judgement:
    """Passes only where the interval of the paired difference excludes a loss of more than the margin."""
    comparison = compare_runs(run, baseline)
    if gate.policy not in comparison["policies"]:
        raise InputError(f"gate {gate.text!r}: {baseline.name} has no policy {gate.policy!r}")
    difference = comparison["policies"][gate.policy][f"{gate.quantity}_response"]["difference"]
    what = f"{gate.quantity} of {gate.policy} against {baseline.name} on {difference['n']} prompt(s)"
    if difference["low"] is None:
        same = difference["value"] == 0 and difference["n"] > 0
        reason = "no prompt differs" if same else f"cannot be decided: {difference['reason']}"
        return Judgement(gate.text, same, f"{what}: {reason}")
    passed = difference["low"] > -gate.bound
    interval = f"[{difference['low']:+.3f}, {difference['high']:+.3f}]"
    return Judgement(
        gate.text,
        passed,
        f"{what}: {difference['value']:+.3f} {interval}"
        + ("" if passed else f": a loss of more than {gate.bound:g} is not excluded"),
    )
