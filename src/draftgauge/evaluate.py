"""Measures a checkpoint against a recording: plan -> recording -> blocks -> counts -> run directory.

The main path, read downward. What each step means stands where it is done: `checkpoint` opens the file,
`configs` reads its wiring, `replay` drafts and ranks, `acceptance` and `summary` count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from draftgauge import acceptance
from draftgauge.acceptance import Policy
from draftgauge.caveats import Facts, as_json, caveats
from draftgauge.checkpoint import Checkpoint, digest, open_checkpoint, require_finite, require_tensors, verify
from draftgauge.measure import ALWAYS, DEFAULT_POLICIES, blocks_of, columns_of, measure, tree_budget
from draftgauge.pairing import open_drafter, require_fit
from draftgauge.progress import Progress, silent
from draftgauge.recording import Item, Recording, open_recording
from draftgauge.runs import (
    BLOCKS,
    FORMAT_VERSION,
    SUMMARY,
    BlockWriter,
    Plan,
    Run,
    find_run,
    new_run,
    open_run,
    run_name,
)
from draftgauge.stated import Stated, used_wiring, wiring_of
from draftgauge.store import write_json
from draftgauge.summary import PromptBlocks, summarise
from draftgauge.wiring import Wiring, tensor_shapes


@dataclass(frozen=True)
class Options:
    """How to measure: what the user states about the drafter, what to report, on how much, in which dtype."""

    stated: Stated = field(default_factory=Stated)
    policies: tuple[Policy, ...] = DEFAULT_POLICIES
    anchors: Literal["all", "walk"] = "all"
    num_prompts: int | None = None
    max_blocks: int | None = None
    dtype: str = "float32"
    state_dict: str | None = None


def evaluate(
    checkpoint_path: str | Path,
    recording_path: str | Path,
    options: Options = Options(),
    *,
    root: Path = Path("runs"),
    name: str | None = None,
    progress: Progress = silent,
) -> Run:
    """Measures a drafter checkpoint on a recording and keeps the result as a run.

    The same question is answered once: a run that already has this plan is returned as it is.

    Args:
        checkpoint_path: A drafter directory, a trainer's step directory, a `.pt` or a `.safetensors` file.
        recording_path: A recording's folder.
        options: Policies, dtype, limits, and what the user states about the wiring.
        root: The folder that holds runs.
        name: The run's name; made of the checkpoint's name and the plan's digest when None.
        progress: Shows the work.

    Raises:
        CheckpointError: The file is damaged, incomplete, or lacks tensors.
        WiringError: The wiring is not known completely, or impossible.
        RecordingError: The recording is damaged or does not hold what the drafter reads.
        RunError: A run of that name exists with another plan.
    """
    checkpoint = open_checkpoint(checkpoint_path, state_dict=options.state_dict)
    trained = wiring_of(checkpoint, options.stated)
    wiring = used_wiring(trained, options.stated)
    recording = open_recording(recording_path)
    items = recording.items[: options.num_prompts]
    policies = tuple(sorted({*options.policies, *ALWAYS}))
    require_fit(wiring, recording)
    tree_budget(policies)
    require_tensors(checkpoint, tensor_shapes(wiring))
    require_finite(checkpoint)
    checksums = verify(checkpoint)
    plan = Plan(
        checkpoint_digest=digest(checkpoint),
        recording_digest=recording.digest,
        wiring=wiring.as_dict(),
        prompts=tuple(item.id for item in items),
        policies=tuple(policy.slug for policy in policies),
        anchors=options.anchors,
        dtype=options.dtype,
        max_blocks=options.max_blocks,
        trained_block_size=trained.block_size,
        target_digest=recording.plan.target_digest,
        template=recording.plan.template,
    )
    if name is None and (existing := find_run(root, plan)) is not None:
        return existing
    path = root / (name or run_name(_label(checkpoint), plan))
    facts = _facts(checkpoint, recording, wiring)
    with new_run(path, plan, facts=facts, checkpoint=checkpoint.files) as folder:
        drafter = open_drafter(checkpoint, wiring, recording, dtype=options.dtype)
        blocks: dict[str, PromptBlocks] = {}
        writer = BlockWriter(folder / BLOCKS)
        drafts = measure(
            drafter,
            recording,
            items=items,
            policies=policies,
            dtype=options.dtype,
            anchors=options.anchors,
            max_blocks=options.max_blocks,
            progress=progress,
        )
        for item, drafted in drafts:
            blocks[item.id] = PromptBlocks(item.category, blocks_of(drafted, item, policies))
            writer.write(item.id, columns_of(drafted, blocks[item.id].blocks, policies))
        writer.close()
        summary = summarise(blocks, policies, every_anchor=options.anchors == "all")
        found = caveats(_caveat_facts(checkpoint, recording, items, blocks, plan, absent=checksums.absent))
        summary |= {"version": FORMAT_VERSION, "caveats": as_json(found), "reference": _reference(items)}
        write_json(folder / SUMMARY, summary)
    return open_run(path)


def _label(checkpoint: Checkpoint) -> str:
    """What a run of this checkpoint is called: the step's folder, or the file."""
    path = checkpoint.path
    return path.parent.name if path.name == "checkpoint.pt" else path.stem


def _facts(checkpoint: Checkpoint, recording: Recording, wiring: Wiring) -> dict[str, Any]:
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


def _reference(items: Sequence[Item]) -> dict[str, Any]:
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


def _caveat_facts(
    checkpoint: Checkpoint,
    recording: Recording,
    items: Sequence[Item],
    blocks: Mapping[str, PromptBlocks],
    plan: Plan,
    *,
    absent: int,
) -> Facts:
    reference = _reference(items)
    unreachable = sum(
        int((prompt.blocks.ranks[:, 0] == acceptance.UNREACHABLE).sum()) for prompt in blocks.values()
    )
    return Facts(
        prompts_asked=max(int(recording.produced.get("prompts_asked", 0)), len(items)),
        prompts_recorded=len(recording.items),
        prompts_evaluated=len(items),
        block_size=int(plan.wiring["block_size"]),
        trained_block_size=plan.trained_block_size,
        unused={use.stored: use.reason for use in checkpoint.key_map if use.status == "unused"},
        opaque_classes=checkpoint.opaque_classes,
        checksums_absent=absent,
        dtype=plan.dtype,
        recorded_dtype=recording.plan.dtype,
        tokens=reference["tokens"],
        agreed=reference["agreed"],
        near_ties=reference["near_ties"],
        max_blocks=plan.max_blocks,
        anchors=plan.anchors,
        unreachable_tokens=unreachable,
        stored_in=checkpoint.kind,
    )
