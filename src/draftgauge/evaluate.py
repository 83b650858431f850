"""Measures a checkpoint against a recording: plan -> recording -> blocks -> counts -> run directory.

The main path, read downward. What each step means stands where it is done: `checkpoint` opens the file,
`configs` reads its wiring, `replay` drafts and ranks, `acceptance` and `summary` count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftgauge.acceptance import Policy
from draftgauge.caveats import Facts, as_json, caveats
from draftgauge.checkpoint import Checkpoint, digest, open_checkpoint, require_finite, require_tensors, verify
from draftgauge.errors import InputError
from draftgauge.measure import (
    ALWAYS,
    DEFAULT_POLICIES,
    blocks_of,
    columns_of,
    measure,
    require_measurable,
    vocabulary_misses,
)
from draftgauge.pairing import DTYPES, open_drafter, require_fit
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
    package_version,
    run_path,
)
from draftgauge.stated import Stated, unused_tensors, used_wiring, wiring_of
from draftgauge.store import write_json
from draftgauge.summary import PromptBlocks, summarise
from draftgauge.wiring import Wiring, tensor_shapes

#: Files whose names say nothing about the checkpoint in them; their folder's does.
_NAMELESS = ("checkpoint", "training_state", "model", "pytorch_model")


@dataclass(frozen=True)
class Options:
    """How to measure: what the user states about the drafter, what to report, on how much, in which dtype.

    Raises:
        InputError: An option has a value that nothing can be measured with.
    """

    stated: Stated = field(default_factory=Stated)
    policies: tuple[Policy, ...] = DEFAULT_POLICIES
    anchors: str = "all"
    num_prompts: int | None = None
    max_blocks: int | None = None
    dtype: str = "float32"
    state_dict: str | None = None

    def __post_init__(self) -> None:
        require_measurable(self.policies, anchors=self.anchors, max_blocks=self.max_blocks)
        if self.dtype not in DTYPES:
            raise InputError(f"dtype {self.dtype!r} is not computed in; expected {' or '.join(DTYPES)}")
        if self.num_prompts is not None and self.num_prompts < 1:
            raise InputError(f"num_prompts is {self.num_prompts}; expected 1 or more, or none for no limit")


def evaluate_checkpoint(
    checkpoint_path: str | Path,
    recording_path: str | Path,
    options: Options = Options(),
    *,
    root: str | Path = "runs",
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
        RunError: A run of that name exists with another plan, or no run can have that name.
    """
    checkpoint = open_checkpoint(checkpoint_path, state_dict=options.state_dict)
    trained = wiring_of(checkpoint, options.stated)
    wiring = used_wiring(trained, options.stated)
    recording = open_recording(recording_path)
    items = recording.items[: options.num_prompts]
    policies = tuple(sorted({*options.policies, *ALWAYS}))
    require_fit(wiring, recording)
    unverified = _require_sound(checkpoint, wiring, progress=progress)
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
        instrument=str(package_version("draftgauge")),
    )
    root = Path(root)
    path = run_path(root, plan, label=_label(checkpoint), name=name)
    if (existing := find_run(root, plan, name=name)) is not None:
        return existing
    facts = _facts(checkpoint, recording, wiring)
    with new_run(path, plan, facts=facts, checkpoint=checkpoint.files) as folder:
        drafter = open_drafter(checkpoint, wiring, recording=recording, dtype=options.dtype)
        _require_unchanged(checkpoint)
        drafts = measure(
            drafter,
            recording,
            items=items,
            policies=policies,
            anchors=options.anchors,
            max_blocks=options.max_blocks,
            progress=progress,
        )
        found: dict[str, PromptBlocks] = {}
        with BlockWriter(folder / BLOCKS) as writer:
            for item, drafted in drafts:
                found[item.id] = PromptBlocks(item.category, blocks_of(drafted, item, policies=policies))
                writer.write(item.id, columns_of(drafted, found[item.id].blocks, policies=policies))
        blocks = {item.id: found[item.id] for item in items}
        summary = summarise(blocks, policies, every_anchor=options.anchors == "all")
        known = _caveat_facts(checkpoint, wiring, recording, blocks, plan, unverified=unverified)
        summary |= {"reference": _reference(items), "caveats": as_json(caveats(known))}
        write_json(folder / SUMMARY, {"version": FORMAT_VERSION, **summary})
    return open_run(path)


def _require_sound(checkpoint: Checkpoint, wiring: Wiring, *, progress: Progress) -> int:
    """Makes sure that the weights are whole and what the wiring reads; how many records carry no checksum."""
    require_tensors(checkpoint, tensor_shapes(wiring))
    names = checkpoint.tensors
    require_finite(checkpoint, progress(names, label="check weights", total=len(names), unit="tensor"))
    return verify(checkpoint).absent


def _require_unchanged(checkpoint: Checkpoint) -> None:
    """Makes sure that the files which the network was just loaded from are those that the plan names."""
    for file, seen in checkpoint.fingerprints.items():
        seen.require_unchanged(file)


def _label(checkpoint: Checkpoint) -> str:
    """What a run of this checkpoint is called: its folder, or its file where that has a name of its own."""
    path = checkpoint.path.resolve()
    if path.is_dir():
        return path.name
    return path.parent.name if path.stem in _NAMELESS else path.stem


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
    wiring: Wiring,
    recording: Recording,
    blocks: Mapping[str, PromptBlocks],
    plan: Plan,
    *,
    unverified: int,
) -> Facts:
    reference = _reference([item for item in recording.items if item.id in blocks])
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
