"""What a run was measured from, as plain values: its sources, its references, what its caveats rest on.

Only reads what the measured things say of themselves; measures and writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftgauge.caveats import Facts
from draftgauge.checkpoint import Checkpoint
from draftgauge.measure import vocabulary_misses
from draftgauge.recording import Item, Recording
from draftgauge.runs import Plan
from draftgauge.stated import unused_tensors
from draftgauge.summary import PromptBlocks
from draftgauge.wiring import Wiring

#: Files whose names say nothing about the checkpoint in them; their folder's does.
_NAMELESS = ("checkpoint", "training_state", "model", "pytorch_model")


def label_of(checkpoint: Checkpoint) -> str:
    """What a run of this checkpoint is called: its folder, or its file where that has a name of its own."""
    path = checkpoint.path.resolve()
    if path.is_dir():
        return path.name
    return path.parent.name if path.stem in _NAMELESS else path.stem


def source_facts(checkpoint: Checkpoint, recording: Recording, wiring: Wiring) -> dict[str, Any]:
    """What run.json says about the sources, beside the plan."""
    return {
        "checkpoint": {
            "path": str(checkpoint.path.resolve()),
            "kind": checkpoint.kind,
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
        "provenance": dict(wiring.provenance),
    }


def reference_facts(items: Sequence[Item]) -> dict[str, Any]:
    """How far the references are the target's own first choice."""
    tokens = sum(item.completion_len for item in items)
    agreed = sum(item.agreed for item in items)
    return {
        "tokens": tokens,
        "agreed": agreed,
        "near_ties": sum(item.near_ties for item in items),
        "reference_agreement": agreed / tokens if tokens else None,
        "worst_gap": max((item.worst_gap for item in items), default=None),
    }


def caveat_facts(
    checkpoint: Checkpoint,
    wiring: Wiring,
    recording: Recording,
    blocks: Mapping[str, PromptBlocks],
    plan: Plan,
    *,
    unverified: int,
) -> Facts:
    """What `caveats` decides from; `unverified` records of the weights carry no checksum."""
    reference = reference_facts([item for item in recording.items if item.id in blocks])
    misses = [vocabulary_misses(prompt.blocks) for prompt in blocks.values()]
    return Facts(
        prompts_asked=max(int(recording.produced.get("prompts_asked", 0)), len(recording.items)),
        prompts_recorded=len(recording.items),
        prompts_evaluated=len(blocks),
        block_size=wiring.block_size,
        trained_block_size=plan.trained_block_size,
        unused=unused_tensors(checkpoint, wiring),
        opaque_classes=checkpoint.opaque_classes,
        checksums_absent=unverified,
        dtype=plan.dtype,
        recorded_dtype=recording.plan.dtype,
        tokens=reference["tokens"],
        agreed=reference["agreed"],
        near_ties=reference["near_ties"],
        max_blocks=plan.max_blocks,
        anchors=plan.anchors,
        drafted_tokens=sum(drafted for drafted, _ in misses),
        unreachable_tokens=sum(lacking for _, lacking in misses),
        stored_in=checkpoint.kind,
    )
