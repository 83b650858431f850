"""Compares two runs where they are comparable: paired by prompt, on what both measured.

Works on run directories alone. Refuses what would be meaningless, naming each field that differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftgauge.errors import RunError
from draftgauge.runs import Run
from draftgauge.stats import paired_difference, paired_ratio_difference, resolvable_difference

#: What must be equal for a difference to mean anything, and how to say it.
_MUST_MATCH: Mapping[str, str] = {
    "target": "target",
    "template": "template",
    "block_size": "block size",
    "predicts_from_anchor": "anchor row",
    "max_blocks": "--max-blocks",
    "temperature": "temperature",
}
#: What may differ and is said.
_MAY_DIFFER: Mapping[str, str] = {
    "recording": "recording",
    "checkpoint": "checkpoint",
    "dtype": "compute dtype",
    "anchors": "anchors",
    "instrument": "draftgauge version",
    "trained_block_size": "trained block size",
}


def compare_runs(run: Run, baseline: Run) -> dict[str, Any]:
    """How `run` differs from `baseline`, per policy, as paired differences over the prompts of both.

    Prompts are the same where their references are, token for token, also in two recordings.

    Example of the result: `{"policies": {"chain": {"tau_response": {"run": 1.7, "baseline": 1.4,
    "difference": {"value": 0.3, "low": 0.2, ...}}}}, "dropped": {"lru_cache": "only in step_4000-1a2b"},
    "same": [...], "different": {"checkpoint": {"run": "1a2b...", "baseline": "5e6f..."}}}`.

    Raises:
        RunError: The runs are not comparable; all reasons are listed.
    """
    ours, theirs = _identity(run), _identity(baseline)
    blocking = [
        f"{words}: {_short(ours[key])} in {run.name}, {_short(theirs[key])} in {baseline.name}"
        for key, words in _MUST_MATCH.items()
        if ours[key] != theirs[key]
    ]
    prompts, dropped = _shared_prompts(run, baseline)
    if not prompts:
        blocking.append("prompts: none has the same reference in both")
    if blocking:
        raise RunError(
            "the two runs cannot be compared, they differ in\n  " + "\n  ".join(blocking) + "\n"
            f"Measure one of them as the other was: `draftgauge eval CHECKPOINT --like {baseline.path}`"
        )
    policies = [slug for slug in run.summary["policies"] if slug in baseline.summary["policies"]]
    either = {**run.summary["policies"], **baseline.summary["policies"]}
    return {
        "run": run.name,
        "baseline": baseline.name,
        "prompts": prompts,
        "dropped": dropped,
        "dropped_policies": [slug for slug in either if slug not in policies],
        "same": [words for key, words in {**_MUST_MATCH, **_MAY_DIFFER}.items() if ours[key] == theirs[key]],
        "different": {
            words: {"run": ours[key], "baseline": theirs[key]}
            for key, words in _MAY_DIFFER.items()
            if ours[key] != theirs[key]
        }
        | _wiring_differences(run.plan.wiring, baseline.plan.wiring),
        "untrusted": {r.name: r.failed_controls for r in (run, baseline) if r.failed_controls},
        "policies": {slug: _policy(run, baseline, slug, prompts) for slug in policies},
    }


def _shared_prompts(run: Run, baseline: Run) -> tuple[list[str], dict[str, str]]:
    """The prompts whose references are the same in both runs, and why the others are left out."""
    ours, theirs = run.summary["prompts"], baseline.summary["prompts"]
    same_recording = run.plan.recording_digest == baseline.plan.recording_digest
    prompts, dropped = [], {}
    for name in {**ours, **theirs}:
        if name not in ours or name not in theirs:
            dropped[name] = f"only in {run.name if name in ours else baseline.name}"
            continue
        said = [side[name].get("reference_sha256") for side in (ours, theirs)]
        if same_recording or (None not in said and said[0] == said[1]):
            prompts.append(name)
        elif None in said:
            dropped[name] = "another recording, and one run is from before references were identified"
        else:
            dropped[name] = "its reference text is another in the two recordings"
    return prompts, dropped


def _policy(run: Run, baseline: Run, slug: str, prompts: list[str]) -> dict[str, Any]:
    """One policy on the shared prompts: both runs' values and the paired differences."""
    ours = [run.summary["prompts"][name]["policies"][slug] for name in prompts]
    theirs = [baseline.summary["prompts"][name]["policies"][slug] for name in prompts]
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a["rounds"] and b["rounds"]]
    value: dict[str, Any] = {"label": run.summary["policies"][slug]["label"]}
    for quantity, count in (("tau", "committed"), ("streak", "accepted")):
        a, b = [p[quantity] for p, _ in pairs], [p[quantity] for _, p in pairs]
        value[f"{quantity}_response"] = {
            "run": sum(a) / len(a) if a else None,
            "baseline": sum(b) / len(b) if b else None,
            "difference": paired_difference(a, b).as_dict(),
            "resolvable": resolvable_difference([x - y for x, y in zip(a, b, strict=True)]),
        }
        counts = [[p[key] for p in side] for side in (ours, theirs) for key in (count, "rounds")]
        value[f"{quantity}_pooled"] = {
            "run": sum(counts[0]) / sum(counts[1]) if sum(counts[1]) else None,
            "baseline": sum(counts[2]) / sum(counts[3]) if sum(counts[3]) else None,
            "difference": paired_ratio_difference(*counts).as_dict(),
        }
    value["prompts"] = {
        name: {"run": a["tau"], "baseline": b["tau"]}
        for name, a, b in zip(prompts, ours, theirs, strict=True)
    }
    return value


def _identity(run: Run) -> dict[str, Any]:
    """What decides whether a run can be compared with another."""
    plan = run.plan
    return {
        "recording": plan.recording_digest,
        "target": plan.target_digest,
        "template": plan.template,
        "block_size": plan.wiring["block_size"],
        "predicts_from_anchor": plan.wiring["predicts_from_anchor"],
        "max_blocks": plan.max_blocks,
        "checkpoint": plan.checkpoint_digest,
        "dtype": plan.dtype,
        "anchors": plan.anchors,
        "trained_block_size": plan.trained_block_size,
        "instrument": plan.instrument,
        "temperature": "greedy",
    }


def _wiring_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The fields in which the two drafters are wired differently, each with both values."""
    return {
        f"wiring: {name}": {"run": value, "baseline": theirs.get(name)}
        for name, value in ours.items()
        if value != theirs.get(name)
    }


def _short(value: Any) -> str:
    """A digest is recognised by its beginning."""
    text = str(value)
    return text[:16] if len(text) == 64 else text
