"""Measures a checkpoint against a recording: plan -> recording -> blocks -> counts -> run directory.

The main path, read downward. What each step means stands where it is done: `checkpoint` opens the file,
`configs` reads its wiring, `replay` drafts and ranks, `acceptance` and `summary` count.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from draftgauge.acceptance import Policy
from draftgauge.caveats import as_json, caveats
from draftgauge.checkpoint import Checkpoint, digest, open_checkpoint, require_finite, require_tensors, verify
from draftgauge.errors import InputError
from draftgauge.measure import (
    ALWAYS,
    DEFAULT_POLICIES,
    blocks_of,
    columns_of,
    measure,
    require_measurable,
)
from draftgauge.pairing import DTYPES, open_drafter, require_fit
from draftgauge.progress import Progress, silent
from draftgauge.recording import open_recording
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
from draftgauge.sources import caveat_facts, label_of, reference_facts, source_facts
from draftgauge.stated import Stated, used_wiring, wiring_of
from draftgauge.store import write_json
from draftgauge.summary import PromptBlocks, summarise
from draftgauge.wiring import Wiring, tensor_shapes


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
    path = run_path(root, plan, label=label_of(checkpoint), name=name)
    if (existing := find_run(root, plan, name=name)) is not None:
        return existing
    facts = source_facts(checkpoint, recording, wiring)
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
        known = caveat_facts(checkpoint, wiring, recording, blocks, plan, unverified=unverified)
        summary |= {"reference": reference_facts(items), "caveats": as_json(caveats(known))}
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
