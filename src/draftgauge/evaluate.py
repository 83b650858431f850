"""Measures a checkpoint against a recording: plan -> recording -> blocks -> counts -> run directory.

The main path, read downward. What each step means stands where it is done: `checkpoint` opens the file,
`configs` reads its wiring, `replay` drafts and ranks, `acceptance` and `summary` count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draftgauge.acceptance import Policy
from draftgauge.caveats import as_json, caveats
from draftgauge.check import block_size_effect, quick_controls
from draftgauge.checkpoint import Checkpoint, digest
from draftgauge.errors import InputError
from draftgauge.measure import (
    ALWAYS,
    DEFAULT_POLICIES,
    blocks_of,
    columns_of,
    measure,
    require_measurable,
)
from draftgauge.pairing import DTYPES, Pair, open_drafter, open_pair, require_sound
from draftgauge.progress import Progress, silent
from draftgauge.recording import Item, reference_digest
from draftgauge.replay import Drafted
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
from draftgauge.sources import (
    Known,
    caveat_facts,
    label_of,
    reference_facts,
    source_facts,
)
from draftgauge.stated import Stated
from draftgauge.store import write_json
from draftgauge.summary import PromptBlocks, summarise
from draftgauge.trust import outcome


@dataclass(frozen=True)
class Options:
    """How to measure: what the user states about the drafter, what to report, on how much, in which dtype.

    `prompts` are ids, of which the first `num_prompts` are taken; `trainer_step` is where training is now.

    Raises:
        InputError: An option has a value that nothing can be measured with.
    """

    stated: Stated = field(default_factory=Stated)
    policies: tuple[Policy, ...] = DEFAULT_POLICIES
    anchors: str = "all"
    num_prompts: int | None = None
    prompts: tuple[str, ...] | None = None
    max_blocks: int | None = None
    dtype: str = "float32"
    state_dict: str | None = None
    trainer_step: int | None = None

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

    The same question is answered once: a run that already has this plan is returned as it is. Whether its
    controls passed stands in `summary["trust"]`.

    Args:
        checkpoint_path: A drafter directory, a trainer's step directory, a `.pt` or a `.safetensors` file, or the
            address of one.
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
    pair = open_pair(
        checkpoint_path,
        recording_path,
        stated=options.stated,
        state_dict=options.state_dict,
        num_prompts=options.num_prompts,
        prompts=options.prompts,
        progress=progress,
    )
    policies = tuple(sorted({*options.policies, *ALWAYS}))
    unverified = require_sound(pair.checkpoint, pair.wiring, progress=progress)
    plan = _plan(pair, policies, options)
    root = Path(root)
    path = run_path(root, plan, label=label_of(pair.checkpoint), name=name)
    if (existing := find_run(root, plan, name=name)) is not None:
        return existing
    facts = source_facts(pair)
    with new_run(path, plan, facts=facts, checkpoint=pair.checkpoint.files) as folder:
        drafter = open_drafter(pair.checkpoint, pair.wiring, recording=pair.recording, dtype=options.dtype)
        _require_unchanged(pair.checkpoint)
        drafts = measure(
            drafter,
            pair.recording,
            items=pair.items,
            policies=policies,
            anchors=options.anchors,
            max_blocks=options.max_blocks,
            progress=progress,
        )
        blocks = _write_blocks(folder, drafts, policies=policies, pair=pair)
        summary = summarise(blocks, policies, every_anchor=options.anchors == "all")
        controls = quick_controls(pair, drafter, blocks=sum(len(p.blocks.anchors) for p in blocks.values()))
        summary |= {"reference": reference_facts(pair.items), "trust": outcome(controls)}
        known = Known(
            unverified_records=unverified,
            stated=options.stated,
            trainer_step=options.trainer_step,
            controls=controls,
            block_size_effect=block_size_effect(pair, drafter),
        )
        facts_known = caveat_facts(pair, plan, blocks, summary, known=known)
        summary["caveats"] = as_json(caveats(facts_known))
        write_json(folder / SUMMARY, {"version": FORMAT_VERSION, **summary})
    return open_run(path)


def _plan(pair: Pair, policies: Sequence[Policy], options: Options) -> Plan:
    return Plan(
        checkpoint_digest=digest(pair.checkpoint),
        recording_digest=pair.recording.digest,
        wiring=pair.wiring.as_dict(),
        prompts=tuple(item.id for item in pair.items),
        policies=tuple(policy.slug for policy in policies),
        anchors=options.anchors,
        dtype=options.dtype,
        max_blocks=options.max_blocks,
        trained_block_size=pair.trained.block_size,
        target_digest=pair.recording.plan.target_digest,
        template=pair.recording.plan.template,
        instrument=str(package_version("draftgauge")),
    )


def _write_blocks(
    folder: Path, drafts: Iterable[tuple[Item, Drafted]], *, policies: Sequence[Policy], pair: Pair
) -> dict[str, PromptBlocks]:
    """Keeps every block on disk as it comes; the blocks by prompt, in the recording's order."""
    found: dict[str, PromptBlocks] = {}
    with BlockWriter(folder / BLOCKS) as writer:
        for item, drafted in drafts:
            found[item.id] = PromptBlocks(
                category=item.category,
                blocks=blocks_of(drafted, item, policies=policies),
                reference_sha256=reference_digest(pair.recording, item),
                conversation=item.conversation,
            )
            writer.write(item.id, columns_of(drafted, found[item.id].blocks, policies=policies))
    return {item.id: found[item.id] for item in pair.items}


def _require_unchanged(checkpoint: Checkpoint) -> None:
    """Makes sure that the files which the network was just loaded from are those that the plan names."""
    for file, seen in checkpoint.fingerprints.items():
        seen.require_unchanged(file)
