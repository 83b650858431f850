"""Measures a checkpoint against a recording: plan -> recording -> blocks -> counts -> run directory.

The main path, read downward. What each step means stands where it is done: `checkpoint` opens the file,
`configs` reads its wiring, `shards` divides, `replay` drafts and ranks, `parts` keeps what is measured,
`acceptance` and `summary` count.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draftgauge.acceptance import Policy
from draftgauge.caveats import as_json, caveats
from draftgauge.check import block_size_effect, quick_controls
from draftgauge.checkpoint import digest
from draftgauge.drafters import DFlash
from draftgauge.errors import InputError, UnfinishedError
from draftgauge.measure import ALWAYS, DEFAULT_POLICIES, require_measurable
from draftgauge.pairing import (
    AUTO,
    DTYPES,
    Pair,
    fastest_dtype,
    open_drafter,
    open_pair,
    require_sound,
)
from draftgauge.parts import Parts
from draftgauge.progress import Progress, silent
from draftgauge.recording import reference_digest
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
from draftgauge.shards import Shard, Task, blocks_in, blocks_of_shard, measure_shard, shards_of
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
from draftgauge.workers import Lost, Workers, run_pieces


@dataclass(frozen=True)
class Options:
    """How to measure: what the user states about the drafter, what to report, on how much, in which dtype.

    `prompts` are ids, of which the first `num_prompts` are taken; `trainer_step` is where training is now; `dtype`
    may be `auto`, which measures what this machine is fastest in.

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
        if self.dtype not in (*DTYPES, AUTO):
            raise InputError(
                f"dtype {self.dtype!r} is not computed in; expected {', '.join(DTYPES)} or {AUTO}"
            )
        if self.num_prompts is not None and self.num_prompts < 1:
            raise InputError(f"num_prompts is {self.num_prompts}; expected 1 or more, or none for no limit")


def evaluate_checkpoint(
    checkpoint_path: str | Path,
    recording_path: str | Path,
    options: Options = Options(),
    *,
    root: str | Path = "runs",
    name: str | None = None,
    workers: Workers = Workers(),  # noqa: B008
    progress: Progress = silent,
) -> Run:
    """Measures a drafter checkpoint on a recording and keeps the result as a run.

    The same question is answered once: a run that already has this plan is returned as it is, and what was killed
    goes on where it stopped. Whether its controls passed stands in `summary["trust"]`.

    Args:
        checkpoint_path: A drafter directory, a trainer's step directory, a `.pt` or a `.safetensors` file, or the
            address of one.
        recording_path: A recording's folder.
        options: Policies, dtype, limits, and what the user states about the wiring.
        root: The folder that holds runs.
        name: The run's name; made of the checkpoint's name and the plan's digest when None.
        workers: Who measures the shards; the blocks are the same whoever does. Prompts that were lost with workers
            twice are left out, and the run is marked incomplete.
        progress: Shows the work.

    Raises:
        CheckpointError: The file is damaged, incomplete, or lacks tensors.
        WiringError: The wiring is not known completely, or impossible.
        RecordingError: The recording is damaged or does not hold what the drafter reads.
        RunError: A run of that name exists with another plan, or no run can have that name.
        UnfinishedError: Every shard was lost with its workers.
    """
    asked = _ask(checkpoint_path, recording_path, options, root=Path(root), name=name, progress=progress)
    if (existing := find_run(asked.root, asked.plan, name=name)) is not None:
        return existing
    with Parts(asked.root, asked.plan, checkpoint=asked.pair.checkpoint.files) as parts:
        lost = _measure(asked, parts, asked.shards, workers=workers, progress=progress)
        run = _publish(asked, parts, lost=lost)
        if not lost:
            parts.discard()
    return run


def evaluate_share(
    checkpoint_path: str | Path,
    recording_path: str | Path,
    options: Options = Options(),
    *,
    share: tuple[int, int],
    root: str | Path = "runs",
    name: str | None = None,
    progress: Progress = silent,
) -> Run | None:
    """Measures one share of a measurement that several jobs divide, as in an array of a batch system.

    Every job measures its own shards; the one that finds all of them measured puts the run together, with the same
    bytes of blocks as one job for all. Shares meet in `root`, which all jobs must see.

    Args:
        checkpoint_path: As for `evaluate_checkpoint`.
        recording_path: As for `evaluate_checkpoint`.
        options: As for `evaluate_checkpoint`, the same for all shares.
        share: Which one, counted from 1, of how many.
        root: As for `evaluate_checkpoint`.
        name: As for `evaluate_checkpoint`.
        progress: Shows the work.

    Returns:
        The run, or None while shares of others are not measured.

    Raises:
        InputError: There is no such share; otherwise as `evaluate_checkpoint`.
    """
    if options.dtype == AUTO:
        raise InputError(
            f"shares may run on different machines: state --dtype {' or '.join(DTYPES)}, not {AUTO}"
        )
    number, of = share
    if not 1 <= number <= of:
        raise InputError(f"share {number}/{of} does not exist; shares are counted from 1/{of} to {of}/{of}")
    asked = _ask(checkpoint_path, recording_path, options, root=Path(root), name=name, progress=progress)
    if (existing := find_run(asked.root, asked.plan, name=name)) is not None:
        return existing
    with Parts(asked.root, asked.plan, checkpoint=asked.pair.checkpoint.files) as parts:
        _measure(asked, parts, asked.shards[number - 1 :: of], workers=Workers(), progress=progress)
        if not all(parts.has(shard.index) for shard in asked.shards):
            return None
        run = _publish(asked, parts, lost={})
        parts.discard()
    return run


@dataclass(frozen=True)
class _Asked:
    """A measurement that is planned.

    `unverified` records of the weights carry no checksum; `rates` are what the dtype was chosen from, if it was.
    """

    pair: Pair
    plan: Plan
    options: Options
    policies: tuple[Policy, ...]
    unverified: int
    rates: Mapping[str, float]
    root: Path
    name: str | None
    started: float

    @functools.cached_property
    def shards(self) -> list[Shard]:
        return shards_of(self.pair.items, self.plan)

    @functools.cached_property
    def drafter(self) -> DFlash:
        """The network, opened when it is first needed: where others measure, only the controls need it."""
        pair = self.pair
        drafter = open_drafter(pair.checkpoint, pair.wiring, recording=pair.recording, dtype=self.plan.dtype)
        for file, seen in pair.checkpoint.fingerprints.items():  # loaded is what the plan names
            seen.require_unchanged(file)
        return drafter


def _ask(
    checkpoint_path: str | Path,
    recording_path: str | Path,
    options: Options,
    *,
    root: Path,
    name: str | None,
    progress: Progress,
) -> _Asked:
    """Opens both sides, makes sure that they can be measured, and writes down what is asked."""
    started = time.time()
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
    rates: Mapping[str, float] = {}
    if options.dtype == AUTO:
        dtype, rates = fastest_dtype(pair.checkpoint, pair.wiring)
        options = dataclasses.replace(options, dtype=dtype)
    plan = _plan(pair, policies, options)
    run_path(root, plan, label=label_of(pair.checkpoint), name=name)  # before the work, not after it
    return _Asked(pair, plan, options, policies, unverified, rates, root, name, started)


def _measure(
    asked: _Asked, parts: Parts, shards: Sequence[Shard], *, workers: Workers, progress: Progress
) -> dict[str, str]:
    """Measures the shards that nobody measured yet; the prompts that were lost with their workers, and why."""
    missing = [shard for shard in shards if not parts.has(shard.index)]
    lost: dict[str, str] = {}

    def prompts() -> Iterator[str]:
        for place, result in _results(asked, missing, workers=workers):
            shard = missing[place]
            if isinstance(result, Lost):
                lost.update(dict.fromkeys(shard.prompts, result.reason))
            else:
                parts.add(shard.index, result)
            yield from shard.prompts

    total = sum(len(shard.prompts) for shard in missing)
    for _ in progress(prompts(), label="evaluate", total=total, unit="prompt"):
        pass
    return lost


def _results(
    asked: _Asked, shards: Sequence[Shard], *, workers: Workers
) -> Iterator[tuple[int, bytes | Lost]]:
    """The blocks of every shard, by its place, as they are measured."""
    pair, options = asked.pair, asked.options
    if workers.here:
        for place, shard in enumerate(shards):
            yield place, blocks_of_shard(pair, asked.drafter, shard=shard, plan=asked.plan)
        return
    task = Task(
        pair.checkpoint.path.resolve(),
        pair.recording.path.resolve(),
        options.stated,
        options.state_dict,
        asked.plan,
        threads=workers.threads,
    )
    yield from run_pieces(functools.partial(measure_shard, task), shards, workers=workers)


def _publish(asked: _Asked, parts: Parts, *, lost: Mapping[str, str]) -> Run:
    """The run, made of its parts: blocks, numbers, controls and caveats.

    Where prompts were lost it is the run of the others, under a plan and a name of its own.
    """
    pair, plan, name = asked.pair, asked.plan, asked.name
    facts = source_facts(pair) | ({"dtype_rates": dict(asked.rates)} if asked.rates else {})
    if lost:
        pair = dataclasses.replace(pair, items=tuple(item for item in pair.items if item.id not in lost))
        plan = dataclasses.replace(plan, prompts=tuple(item.id for item in pair.items))
        name = None if name is None else f"{name}-incomplete"
        facts |= {"status": "incomplete", "lost": dict(lost)}
        if not pair.items:
            raise UnfinishedError(
                f"every prompt was lost with its workers: {next(iter(lost.values()))}. The same command tries again"
            )
    if (existing := find_run(asked.root, plan, name=name)) is not None:
        return existing
    path = run_path(asked.root, plan, label=label_of(pair.checkpoint), name=name)
    with new_run(path, plan, facts=facts, checkpoint=parts.checkpoint, started=asked.started) as folder:
        blocks = _write_blocks(folder, parts, asked=asked, pair=pair)
        summary = summarise(blocks, asked.policies, every_anchor=plan.anchors == "all")
        drafted = sum(len(prompt.blocks.anchors) for prompt in blocks.values())
        controls = quick_controls(pair, asked.drafter, blocks=drafted)
        summary |= {"reference": reference_facts(pair.items), "trust": outcome(controls)}
        known = Known(
            unverified_records=asked.unverified,
            stated=asked.options.stated,
            trainer_step=asked.options.trainer_step,
            controls=controls,
            block_size_effect=block_size_effect(pair, asked.drafter, blocks=drafted),
            lost=lost,
        )
        summary["caveats"] = as_json(caveats(caveat_facts(pair, plan, blocks, summary, known=known)))
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


def _write_blocks(folder: Path, parts: Parts, *, asked: _Asked, pair: Pair) -> dict[str, PromptBlocks]:
    """Joins the parts on disk, in the recording's order; the blocks by prompt."""
    kept = {item.id for item in pair.items}
    found: dict[str, PromptBlocks] = {}
    with BlockWriter(folder / BLOCKS) as writer:
        for shard in asked.shards:
            if kept.isdisjoint(shard.prompts):
                continue
            table = parts.read(shard.index)
            for item, rows, blocks in blocks_in(table, shard, recording=pair.recording, plan=asked.plan):
                found[item.id] = PromptBlocks(
                    category=item.category,
                    blocks=blocks,
                    reference_sha256=reference_digest(pair.recording, item),
                    conversation=item.conversation,
                )
                writer.write_rows(rows)
    return found
