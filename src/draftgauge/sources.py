"""What a run was measured from, as plain values: its sources, its references, what its caveats rest on.

Only reads what the measured things say of themselves; measures and writes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from draftgauge.caveats import Facts
from draftgauge.checkpoint import Checkpoint
from draftgauge.measure import vocabulary_misses
from draftgauge.pairing import Pair
from draftgauge.recording import Item
from draftgauge.repetition import DEGENERATE_SHARE
from draftgauge.runs import Plan
from draftgauge.stated import Stated, overridden, unused_tensors
from draftgauge.stats import outliers
from draftgauge.summary import PromptBlocks
from draftgauge.trust import Control

#: Files of our own trainer beside its saves: what is trained, and where it is.
TRAIN_CLAIM, TRAIN_LOG = "train.json", "train.jsonl"
#: Files whose names say nothing about the checkpoint in them; their folder's does.
_NAMELESS = ("checkpoint", "training_state", "model", "pytorch_model")


def label_of(checkpoint: Checkpoint) -> str:
    """What a run of this checkpoint is called: its folder, or its file where that has a name of its own."""
    if checkpoint.origin.url is not None:
        place = PurePosixPath(urlsplit(checkpoint.origin.url).path)
        name = place.stem if checkpoint.path.is_file() else place.name
        return (place.parent.name if name in _NAMELESS else name).partition("@")[0]
    path = checkpoint.path.resolve()
    if path.is_dir():
        return path.name
    return path.parent.name if path.stem in _NAMELESS else path.stem


@dataclass(frozen=True)
class Known:
    """What caveats rest on besides the sources and the numbers.

    `unverified_records` of the weights carry no checksum; `trainer_step` is where training is now, where
    somebody says so; `block_size_effect` as `check.block_size_effect` gives it; `lost` maps prompts that were lost
    with their workers to why.
    """

    unverified_records: int
    stated: Stated
    trainer_step: int | None
    controls: Sequence[Control]
    block_size_effect: tuple[float, float, int, int] | None
    lost: Mapping[str, str] = field(default_factory=dict)


def source_facts(pair: Pair) -> dict[str, Any]:
    """What run.json says about the sources, beside the plan."""
    checkpoint, recording = pair.checkpoint, pair.recording
    return {
        "checkpoint": {
            "path": str(checkpoint.path.resolve()),
            "url": checkpoint.origin.url,
            "revision": checkpoint.origin.revision,
            "kind": checkpoint.kind,
            "state_dict": checkpoint.state_dict,
            "step": checkpoint.step,
            "bytes": checkpoint.bytes_file,
            "files": [path.name for path in checkpoint.files],
            "key_map": [vars(use) for use in checkpoint.key_map],
        },
        "recording": {
            "path": str(recording.path.resolve()),
            "prompts": recording.produced.get("prompts"),
            "target": recording.target.path,
        },
        "provenance": dict(pair.wiring.provenance),
    }


def trainer_step(checkpoint: Checkpoint, said: int | None) -> int | None:
    """Where training is now: as somebody says, or as the log of our own trainer does; None if nobody knows."""
    if said is not None:
        return said
    path = checkpoint.path.resolve()
    log = (path if path.is_dir() else path.parent).parent / TRAIN_LOG
    try:
        *_, last = (
            log.read_text(encoding="utf-8").splitlines() if (log.parent / TRAIN_CLAIM).is_file() else [""]
        )
        return int(json.loads(last)["step"])
    except (OSError, ValueError, KeyError, TypeError):  # no log of ours, or a line that is just being written
        return None


def reference_facts(items: Sequence[Item]) -> dict[str, Any]:
    """How far the references are the target's own first choice."""
    tokens = sum(item.completion_len for item in items)
    known = all(item.has_final for item in items)
    agreed = sum(item.agreed or 0 for item in items) if known else None
    return {
        "tokens": tokens,
        "agreed": agreed,
        "near_ties": sum(item.near_ties or 0 for item in items) if known else None,
        "reference_agreement": agreed / tokens if tokens and agreed is not None else None,
        "worst_gap": max((item.worst_gap or 0.0 for item in items), default=None) if known else None,
    }


def caveat_facts(
    pair: Pair, plan: Plan, blocks: Mapping[str, PromptBlocks], summary: Mapping[str, Any], *, known: Known
) -> Facts:
    """What `caveats` decides from."""
    checkpoint, recording, reference = pair.checkpoint, pair.recording, summary["reference"]
    misses = [vocabulary_misses(prompt.blocks) for prompt in blocks.values()]
    by_slug = {control.slug: control for control in known.controls}
    return Facts(
        prompts_asked=max(int(recording.produced.get("prompts_asked", 0)), len(recording.items)),
        prompts_recorded=len(recording.items),
        prompts_evaluated=len(blocks),
        lost=known.lost,
        block_size=pair.wiring.block_size,
        trained_block_size=plan.trained_block_size,
        block_size_effect=known.block_size_effect,
        overridden=overridden(checkpoint, known.stated, wiring=pair.trained),
        unused=unused_tensors(checkpoint, pair.wiring),
        opaque_classes=checkpoint.opaque_classes,
        checksums_absent=known.unverified_records,
        step=checkpoint.step,
        trainer_step=trainer_step(checkpoint, known.trainer_step),
        dtype=plan.dtype,
        recorded_dtype=recording.plan.dtype,
        template=plan.template,
        template_switches=recording.produced.get("template_switches", ()),
        target_change=_complaint(by_slug.get("target-files")),
        tokens=reference["tokens"],
        agreed=reference["agreed"],
        near_ties=reference["near_ties"],
        max_blocks=plan.max_blocks,
        anchors=plan.anchors,
        drafted_tokens=sum(drafted for drafted, _ in misses),
        unreachable_tokens=sum(lacking for _, lacking in misses),
        stored_in=checkpoint.kind,
        mutable_url="" if checkpoint.origin.pinned else str(checkpoint.origin.url),
        revision=checkpoint.origin.revision or "",
        failed_controls=_slugs(known.controls, "failed"),
        undecided_controls=_slugs(known.controls, "undecided"),
        **_apart(summary, by_slug.get("references-degenerate")),
    )


def _apart(summary: Mapping[str, Any], loops: Control | None) -> dict[str, Any]:
    """The prompts that stand apart, and what the chain's tau is without them."""
    taus = {name: prompt["policies"]["chain"]["tau"] for name, prompt in _with_chain(summary).items()}
    taus = {name: tau for name, tau in taus.items() if tau is not None}
    shares: Mapping[str, float] = {} if loops is None else loops.values["repetition_share"]
    degenerate = {name: share for name, share in shares.items() if share > DEGENERATE_SHARE}
    names = list(taus)
    apart = [names[i] for i in outliers(list(taus.values()))]
    far = {name: taus[name] for name in apart if name not in degenerate}
    rest = [tau for name, tau in taus.items() if name not in degenerate and name not in far]
    chain = summary["policies"].get("chain", {})
    return {
        "degenerate": degenerate,
        "outliers": far,
        "tau": chain.get("tau_response", {}).get("value"),
        "tau_without": sum(rest) / len(rest) if rest else None,
        "conventions": chain.get("conventions", {}),
    }


def _with_chain(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: prompt for name, prompt in summary["prompts"].items() if "chain" in prompt["policies"]}


def _slugs(controls: Sequence[Control], verdict: str) -> list[str]:
    return [control.slug for control in controls if control.verdict == verdict]


def _complaint(control: Control | None) -> str | None:
    """What a control says where it did not pass."""
    return control.measured if control is not None and control.verdict in ("failed", "caution") else None
