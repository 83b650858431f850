"""Gates: conditions on a run that a script can stop at.

    tau>=2.0                               the chain's tau by response
    ddtree16.tau_pooled > 2.5              any policy's tau, streak, tau_pooled, streak_pooled, all_anchor_streak
    not worse than RUN by 0.05             the chain's tau, paired by prompt with another run
    ddtree16.tau not worse than RUN by 0   any policy's tau or streak

Not worse means that the 95 % interval of the paired difference excludes a loss of that much. What cannot be
decided, or rests on a run that is not trusted, has not passed. Knows nothing of exit codes.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftgauge.acceptance import Policy
from draftgauge.compare import compare_runs
from draftgauge.errors import InputError
from draftgauge.runs import Run, open_run
from draftgauge.stats import FEWEST_PROMPTS

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
_PAIRED = ("tau", "streak")
_OPTIONS = {"chain": "--chain-lengths", "ddtree": "--budgets", "coverage": "--coverage"}
_NUMBER = r"(?P<bound>\d+(?:\.\d*)?|\.\d+)"
_NAME = r"(?:(?P<policy>[a-z]+\d*)\.)?(?P<quantity>[a-z_]+)"
_LEVEL = re.compile(rf"{_NAME}\s*(?P<compares>>=|<=|>|<)\s*{_NUMBER}")
_NOT_WORSE = re.compile(rf"(?:{_NAME}\s+)?not\s+worse\s+than\s+(?P<baseline>.+)\s+by\s+{_NUMBER}")
_GRAMMAR = 'expected one as in "tau>=2.0", "ddtree16.tau_pooled > 2.5" or "not worse than runs/NAME by 0.05"'


@dataclass(frozen=True)
class Gate:
    """A condition: a policy's quantity `compares` to a bound, or loses no more than it against a baseline.

    One of `compares` (`>=`, `<=`, `>`, `<`) and `baseline` is None.
    """

    text: str
    policy: Policy
    quantity: str
    bound: float
    compares: str | None
    baseline: Path | None


@dataclass(frozen=True)
class Judgement:
    """Whether a gate passed, and the sentence that says why; `passed` is None where that cannot be decided.

    `value`, `low` and `high` are what was judged, with its interval: of a gate against a baseline, the difference.

    Example:
        `Judgement("tau>=2.0", True, "tau of the chain is 2.163 [1.98, 2.35]", 2.1631, 1.981, 2.347)`
    """

    gate: str
    passed: bool | None
    text: str
    value: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def verdict(self) -> str:
        """The outcome in a word."""
        return {True: "passed", False: "FAILED", None: "NOT DECIDED"}[self.passed]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def parse_gate(text: str) -> Gate:
    """The gate that a text states.

    Raises:
        InputError: It is none.
    """
    found = _NOT_WORSE.fullmatch(text.strip()) or _LEVEL.fullmatch(text.strip())
    if found is None:
        raise InputError(f"gate {text!r} is not understood; {_GRAMMAR}")
    said = found.groupdict()
    quantity = said["quantity"] or "tau"
    if quantity not in _QUANTITIES:
        raise InputError(
            f"gate {text!r} asks for {quantity!r}, which is none of {', '.join(_QUANTITIES)}; {_GRAMMAR}"
        )
    if "baseline" in said and quantity not in _PAIRED:
        raise InputError(f"gate {text!r}: two runs are paired by {' or '.join(_PAIRED)}, not by {quantity}")
    try:
        policy = Policy.parse(said["policy"] or "chain")
    except InputError as exc:
        raise InputError(f"gate {text!r}: {exc}") from exc
    baseline = Path(said["baseline"]) if "baseline" in said else None
    return Gate(text, policy, quantity, float(said["bound"]), said.get("compares"), baseline)


def judge(gate: Gate, run: Run) -> Judgement:
    """Whether the run passes the gate.

    Raises:
        InputError: The run, or the baseline, has no such policy.
        RunError: The baseline is no run, or cannot be compared with.
    """
    _require_policy(gate, run)
    if run.failed_controls:
        return _untrusted(gate, "this run", run)
    if gate.baseline is not None:
        return _not_worse(gate, run, open_run(gate.baseline))
    return _level(gate, run)


def require_answerable(gate: Gate, policies: Iterable[Policy]) -> None:
    """Makes sure, before a measurement of `policies`, that it will answer the gate.

    Raises:
        InputError: The gate asks for a policy that is not measured.
        RunError: The baseline is no run.
    """
    if gate.policy not in policies:
        raise InputError(
            f"gate {gate.text!r}: {gate.policy.slug} is not measured; add it with {_OPTIONS[gate.policy.kind]}"
        )
    if gate.baseline is not None:
        open_run(gate.baseline)


def _level(gate: Gate, run: Run) -> Judgement:
    """The run's own value against the bound."""
    what = f"{gate.quantity} of the {gate.policy.label}"
    estimate = run.summary["policies"][gate.policy.slug].get(_QUANTITIES[gate.quantity])
    if estimate is None:
        return Judgement(gate.text, None, f"{what} was not measured: it needs --anchors all")
    value, low, high = estimate["value"], estimate["low"], estimate["high"]
    if value is None:
        return Judgement(gate.text, None, f"{what} is not known: {estimate['reason']}")
    passed = _OPERATORS[gate.compares or ">="](value, gate.bound)
    text = f"{what} is {_shown(value, gate.bound)}"
    if low is not None and high is not None:
        text += f" [{low:.2f}, {high:.2f}]"
        if passed and low < gate.bound < high:
            text += f"; its interval reaches beyond {gate.bound:g}"
    return Judgement(gate.text, passed, text, value, low, high)


def _not_worse(gate: Gate, run: Run, baseline: Run) -> Judgement:
    """Passes only where the interval of the paired difference excludes a loss of the margin."""
    comparison = compare_runs(run, baseline)
    _require_policy(gate, baseline)
    if baseline.failed_controls:
        return _untrusted(gate, f"the baseline {baseline.name}", baseline)
    paired = comparison["policies"][gate.policy.slug][_QUANTITIES[gate.quantity]]
    difference = paired["difference"]
    n = difference["n"]
    what = f"{gate.quantity} of the {gate.policy.label} against {baseline.name} on {n} prompt(s)"
    value, low, high = difference["value"], difference["low"], difference["high"]
    if n >= FEWEST_PROMPTS and paired["verdict"] == "equal":
        return Judgement(gate.text, True, f"{what}: the same on every prompt", value)
    if low is None or high is None:
        text = f"{what}: {value:+.3f}, which decides nothing: {difference['reason']}; measure on more prompts"
        return Judgement(gate.text, None, text, value)
    text = f"{what}: {value:+.3f} [{low:+.3f}, {high:+.3f}]"
    if low > -gate.bound:
        return Judgement(gate.text, True, text, value, low, high)
    if high < -gate.bound:
        text += f", a loss of more than {gate.bound:g}"
    else:
        text += f": a loss of {gate.bound:g} is not excluded; more prompts make the interval narrower"
    return Judgement(gate.text, False, text, value, low, high)


def _require_policy(gate: Gate, run: Run) -> None:
    if gate.policy.slug not in run.summary["policies"]:
        raise InputError(
            f"gate {gate.text!r}: {run.name} has no {gate.policy.slug}; it has {', '.join(run.summary['policies'])}. "
            f"Measure it with {_OPTIONS[gate.policy.kind]}"
        )


def _untrusted(gate: Gate, which: str, run: Run) -> Judgement:
    failed = ", ".join(run.failed_controls)
    return Judgement(
        gate.text, None, f"{which} is not trusted: {failed} failed, so its numbers decide nothing"
    )


def _shown(value: float, bound: float) -> str:
    """The value with three decimals, or as many more as show on which side of the bound it lies."""
    for places in range(3, 16):
        text = f"{value:.{places}f}"
        if (float(text) > bound) == (value > bound) and (float(text) < bound) == (value < bound):
            return text
    return str(value)
