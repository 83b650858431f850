"""Compares two runs where they are comparable: paired by prompt, on what both measured.

Works on run directories alone; turns of one conversation are one unit. Says what the two have in common and what
not, and refuses what would be meaningless, naming each field that differs. Values meet under their own names
only, so that conventions never mix. Knows nothing of rendering.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftgauge.errors import RunError
from draftgauge.runs import Run
from draftgauge.stats import (
    Estimate,
    paired_difference,
    paired_ratio_difference,
    resolvable_difference,
)
from draftgauge.summary import units_of

#: What must be equal for a difference to mean anything.
_MUST_MATCH: Mapping[str, Callable[[Run], Any]] = {
    "target": lambda run: run.plan.target_digest,
    "template": lambda run: run.plan.template,
    "block size": lambda run: run.plan.wiring["block_size"],
    "anchor row": lambda run: (
        "predicts" if run.plan.wiring["predicts_from_anchor"] else "re-reads the anchor"
    ),
    "--max-blocks": lambda run: run.plan.max_blocks or "no limit",
    "temperature": lambda _: "greedy",
}
#: What may differ and is said.
_MAY_DIFFER: Mapping[str, Callable[[Run], Any]] = {
    "recording": lambda run: run.plan.recording_digest,
    "checkpoint": lambda run: run.plan.checkpoint_digest,
    "compute dtype": lambda run: run.plan.dtype,
    "anchors": lambda run: run.plan.anchors,
    "draftgauge version": lambda run: run.plan.instrument,
    "trained block size": lambda run: run.plan.trained_block_size or "not known",
}
#: What no option of `eval` makes equal.
_FIXED = ("target", "anchor row")


def compare_runs(run: Run, baseline: Run) -> dict[str, Any]:
    """How `run` differs from `baseline`, per policy, as paired differences over the prompts of both.

    Prompts are the same where their references are, token for token, also in two recordings. A run that is not
    trusted is compared and marked.

    Example of the result: `{"policies": {"chain": {"tau_response": {"run": 1.7, "baseline": 1.4, "verdict":
    "higher", "difference": {"value": 0.3, "low": 0.2, ...}}}}, "dropped": {"lru_cache": "only in step_4000-1a2b"},
    "same": {"template": "chat", ...}, "different": {"checkpoint": {"run": "1a2b...", "baseline": "5e6f..."}}}`.

    Raises:
        RunError: The runs are not comparable; all reasons are listed.
    """
    names = _names(run, baseline)
    prompts, dropped = _shared_prompts(run, baseline, names)
    policies = [slug for slug in run.summary["policies"] if slug in baseline.summary["policies"]]
    _require_comparable(run, baseline, names=names, prompts=prompts, policies=policies)
    dropped_policies = {
        slug: f"only in {names[slug not in run.summary['policies']]}"
        for slug in {**run.summary["policies"], **baseline.summary["policies"]}
        if slug not in policies
    }
    every = {**_MUST_MATCH, **_MAY_DIFFER}
    ours, theirs = ({name: said(r) for name, said in every.items()} for r in (run, baseline))
    same = {name: value for name, value in ours.items() if value == theirs[name]}
    same |= {} if dropped else {"prompts": len(prompts), "references": "token for token"}
    same |= {} if dropped_policies else {"policies": ", ".join(policies)}
    return {
        "run": names[0],
        "baseline": names[1],
        "prompts": prompts,
        "dropped": dropped,
        "dropped_policies": dropped_policies,
        "same": same | {"convention": "each value under its own name"},
        "different": {
            name: {"run": value, "baseline": theirs[name]}
            for name, value in ours.items()
            if value != theirs[name]
        }
        | _wiring_differences(run.plan.wiring, baseline.plan.wiring),
        "trust": {"run": _trust(run), "baseline": _trust(baseline)},
        "policies": {slug: _policy(run, baseline, slug, prompts) for slug in policies},
    }


def _names(run: Run, baseline: Run) -> tuple[str, str]:
    """What the two are called: their names, or their paths where the names are equal."""
    if run.name != baseline.name:
        return run.name, baseline.name
    return str(run.path), str(baseline.path)


def _shared_prompts(run: Run, baseline: Run, names: tuple[str, str]) -> tuple[list[str], dict[str, str]]:
    """The prompts whose references are the same in both runs, and why the others are left out."""
    ours, theirs = run.summary["prompts"], baseline.summary["prompts"]
    same_recording = run.plan.recording_digest == baseline.plan.recording_digest
    prompts, dropped = [], {}
    for name in {**ours, **theirs}:
        if name not in ours or name not in theirs:
            dropped[name] = f"only in {names[name not in ours]}"
            continue
        said = [side[name].get("reference_sha256") for side in (ours, theirs)]
        if not same_recording and None in said:
            dropped[name] = "another recording, and one run is from before references were identified"
        elif not same_recording and said[0] != said[1]:
            dropped[name] = "its reference is another text in the two recordings"
        elif not any(policy["rounds"] for policy in ours[name]["policies"].values()):
            dropped[name] = "its completion is too short for a round"
        else:
            prompts.append(name)
    return prompts, dropped


def _require_comparable(
    run: Run, baseline: Run, *, names: tuple[str, str], prompts: Sequence[str], policies: Sequence[str]
) -> None:
    """Refuses what would be meaningless, with every reason and with what helps."""
    blocking = {
        name: f"{_short(said(run))} in {names[0]}, {_short(said(baseline))} in {names[1]}"
        for name, said in _MUST_MATCH.items()
        if said(run) != said(baseline)
    }
    if not prompts:
        counts = [len(side.summary["prompts"]) for side in (run, baseline)]
        blocking["prompts"] = (
            f"none has the same reference in both ({counts[0]} in {names[0]}, {counts[1]} in {names[1]})"
        )
    if not policies:
        blocking["policies"] = "none was measured in both"
    if not blocking:
        return
    listed = "\n  ".join(f"{name}: {reason}" for name, reason in blocking.items())
    advice = f"Measure one as the other was: `draftgauge eval CHECKPOINT --like {baseline.path}`"
    if "block size" in blocking:
        advice += f", or with `--block-size {baseline.plan.wiring['block_size']}`"
    if fixed := [name for name in _FIXED if name in blocking]:
        advice = f"No option makes the {' or the '.join(fixed)} equal: compare with a run that has the same"
    raise RunError(f"the two runs cannot be compared, they differ in\n  {listed}\n{advice}")


def _trust(run: Run) -> dict[str, Any]:
    """Whether a run's controls passed; None where an earlier version ran none."""
    said = run.summary.get("trust")
    return {"trusted": None if said is None else said["trusted"], "failed": run.failed_controls}


def _policy(run: Run, baseline: Run, slug: str, prompts: list[str]) -> dict[str, Any]:
    """One policy on the shared prompts: both runs' values and the differences, paired by prompt or conversation."""
    units = units_of({name: run.summary["prompts"][name].get("conversation") for name in prompts})
    ours, theirs = ([_unit(side, unit, slug) for unit in units] for side in (run, baseline))
    value: dict[str, Any] = {"label": run.summary["policies"][slug]["label"]}
    for quantity, count in (("tau", "committed"), ("streak", "accepted")):
        a, b = ([prompt[quantity] for prompt in side] for side in (ours, theirs))
        differences = [x - y for x, y in zip(a, b, strict=True)]
        difference = paired_difference(a, b)
        value[f"{quantity}_response"] = {
            "run": sum(a) / len(a),
            "baseline": sum(b) / len(b),
            "difference": difference.as_dict(),
            "verdict": _verdict(difference, differences),
            "resolvable": resolvable_difference(differences),
        }
        value[f"{quantity}_pooled"] = _pooled(ours, theirs, count)
    value["prompts"] = {
        name: {
            side: of.summary["prompts"][name]["policies"][slug]["tau"]
            for side, of in (("run", run), ("baseline", baseline))
        }
        for name in prompts
    }
    return value


def _unit(run: Run, names: Sequence[str], slug: str) -> dict[str, Any]:
    """What one prompt, or all turns of one conversation, won."""
    prompts = [run.summary["prompts"][name]["policies"][slug] for name in names]
    counts = {what: sum(p[what] for p in prompts) for what in ("rounds", "committed", "accepted")}
    return counts | {
        quantity: counts[what] / counts["rounds"]
        for quantity, what in (("tau", "committed"), ("streak", "accepted"))
    }


def _pooled(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], count: str
) -> dict[str, Any]:
    """Counts per round, pooled over the prompts, of both runs."""
    (a, rounds_a), (b, rounds_b) = (
        ([prompt[count] for prompt in side], [prompt["rounds"] for prompt in side]) for side in (ours, theirs)
    )
    return {
        "run": sum(a) / sum(rounds_a),
        "baseline": sum(b) / sum(rounds_b),
        "difference": paired_ratio_difference(a, rounds_a, b, rounds_b).as_dict(),
    }


def _verdict(difference: Estimate, differences: Sequence[float]) -> str:
    """What the difference says: higher, lower, equal on every prompt, not resolved, or undecided for its reason."""
    if not any(differences):
        return "equal"
    if difference.low is None or difference.high is None:
        return "undecided"
    if difference.low > 0:
        return "higher"
    return "lower" if difference.high < 0 else "not resolved"


def _wiring_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The fields in which the two drafters are wired differently, each with both values."""
    return {
        f"wiring: {name}": {"run": ours.get(name), "baseline": theirs.get(name)}
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    }


def _short(value: Any) -> str:
    """A digest is recognised by its beginning."""
    text = str(value)
    return text[:16] if len(text) == 64 else text
