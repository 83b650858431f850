"""The whole use in one path: stage a checkpoint to its recording, check and evaluate it there, bring the run back.

Every step is skipped where its result is there already, so the same command goes on after any interruption. The
numbers are made by the same command line at the far side; here they are only fetched, compared and kept. Knows
nothing of how bytes move.
"""

from __future__ import annotations

import json
import posixpath
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from draftgauge.beside import beside, read_stored
from draftgauge.compare import compare_runs
from draftgauge.errors import FleetError, InputError, RunError, StoreError
from draftgauge.fleet.cargo import Cargo, describe
from draftgauge.fleet.places import WORKSTATION, Place, Spot
from draftgauge.fleet.plans import RECORD_OPTIONS, FleetPlan, eval_words, trainer_state, wiring_words
from draftgauge.fleet.reach import Reach
from draftgauge.fleet.remote import Answer, draftgauge_at
from draftgauge.fleet.stage import landing, plan_staging, stage
from draftgauge.gates import Judgement, judge, parse_gate
from draftgauge.runs import Run, open_run
from draftgauge.store import sha256_json, write_json

Meter = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
#: As much of the end of a trainer's log is searched for its last line with a step.
LOG_BYTES = 1 << 16
_MANIFEST_BYTES = 64 << 20


@dataclass(frozen=True)
class Step:
    """One step that was done: what, at which place, in how many seconds, and whether its result was there."""

    name: str
    place: str
    seconds: float
    text: str
    skipped: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "step": self.name,
            "place": self.place,
            "seconds": round(self.seconds, 1),
            "text": self.text,
            "skipped": self.skipped,
        }


@dataclass
class Log:
    """The steps done so far; each is said as it ends."""

    said: Callable[[str], None]
    meter: Meter
    steps: list[Step] = field(default_factory=list)

    @contextmanager
    def step(self, name: str, place: Place) -> Iterator[Callable[..., None]]:
        """A step; the function that it yields takes its text, and whether it was skipped."""
        begun = time.monotonic()
        done: dict[str, Any] = {"text": "", "skipped": False}

        def tell(text: str, *, skipped: bool = False) -> None:
            done.update(text=text, skipped=skipped)

        yield tell
        step = Step(name, place.name, time.monotonic() - begun, done["text"], done["skipped"])
        self.steps.append(step)
        self.said(f"{step.name} at {step.place}: {step.text}")


def run_plan(reach: Reach, plan: FleetPlan, log: Log) -> dict[str, Any]:
    """Measures the checkpoint that a plan names; returns the outcome, which is also kept in its results folder.

    Raises:
        FleetError: Something given is wrong, or a place refuses; the place and its last lines are named.
        UnfinishedError: A machine or connection stopped it; the same call goes on.
    """
    if plan.table.checkpoint is None:
        raise FleetError(f"{plan.path}: `checkpoint` is missing; give PLACE:PATH of the drafter to measure")
    source = plan.spot(plan.table.checkpoint)
    with log.step("look", source.place) as tell:
        cargo = describe(reach, source, whole=plan.table.whole, state_dict=plan.table.eval.state_dict)
        tell(f"{source}: {cargo.what}" + ("" if cargo.step is None else f", step {cargo.step}"))
    return measure(reach, plan, cargo, log)


def measure(reach: Reach, plan: FleetPlan, cargo: Cargo, log: Log) -> dict[str, Any]:
    """Measures what was looked at.

    Raises:
        FleetError: Something given is wrong, or a place refuses.
        UnfinishedError: A machine or connection stopped it; the same call goes on.
    """
    place = plan.recording.place
    if cargo.is_slim and cargo.source.place != place:  # what arrives there is one set of weights
        table = msgspec.structs.replace(plan.table.eval, state_dict=None)
        plan = replace(plan, table=msgspec.structs.replace(plan.table, eval=table))
    label = _label(cargo)
    name = f"{label}-{sha256_json([cargo.fingerprint, plan.digest])[:8]}"
    trainer = _trainer(reach, plan, log)
    checkpoint = _checkpoint_there(reach, plan, cargo, label, log)
    recording = _recording(reach, plan, checkpoint, log)
    wiring = _wiring_there(reach, plan)
    failed = _check(reach, plan, (checkpoint, recording, wiring), name, log) if plan.table.check else []
    words: tuple[str, ...] = ("eval", checkpoint.path, "--recording", recording.path)
    words += (*eval_words(plan.table.eval), *wiring)
    words += ("--runs", _work(plan, place).below("runs").path, "--name", name)
    if isinstance(trainer.get("step"), int) and trainer["step"] > 0:
        words += ("--trainer-step", str(trainer["step"]))
    run = _run(reach, plan, words, name, log)
    return _outcome(plan, run, cargo, {"trainer": trainer, "failed_check": failed}, log)


def _label(cargo: Cargo) -> str:
    stem = posixpath.splitext(cargo.source.name)[0]
    return f"step_{cargo.step}" if cargo.step is not None else stem


def _work(plan: FleetPlan, place: Place) -> Spot:
    """Where our folders lie at a place."""
    if place.work is not None:
        return Spot(place, place.work)
    if place.name == WORKSTATION:
        return Spot(place, str(plan.results / "work"))
    raise FleetError(
        f"{plan.fleet.path}: {place.name} has no `work`; give the folder that checkpoints and runs are put into"
    )


# --- the steps -------------------------------------------------------------------------------------------


def _trainer(reach: Reach, plan: FleetPlan, log: Log) -> dict[str, Any]:
    """Where training is now, from the end of its log; empty where no log was named or nothing in it matches."""
    if plan.table.trainer is None:
        return {}
    spot = plan.spot(plan.table.trainer.log)
    with log.step("read the trainer's log", spot.place) as tell:
        text = reach.call(spot.place, "text", path=spot.path, limit=LOG_BYTES)["text"]
        if text is None:
            raise FleetError(f"{plan.path}: trainer.log: {spot} does not exist")
        state = trainer_state(plan, text)
        tell(", ".join(f"{key} {value}" for key, value in state.items()) or "no line matches trainer.pattern")
    return state


def _checkpoint_there(reach: Reach, plan: FleetPlan, cargo: Cargo, label: str, log: Log) -> Spot:
    """The checkpoint at the recording's place; where it is there already it is used as it lies."""
    place = plan.recording.place
    with log.step("stage", place) as tell:
        if cargo.source.place == place:
            tell(f"{cargo.source} is at this place already", skipped=True)
            return cargo.source
        suffix = posixpath.splitext(cargo.name)[1] if cargo.outputs[0][0] == "" else ""
        name = f"{label}-{cargo.fingerprint[:8]}{suffix}"
        target = landing(cargo, _work(plan, place).below("checkpoints", name), inside=False)
        staging = plan_staging(reach, cargo, target)
        with log.meter(f"stage {name}", cargo.nbytes) as moved:
            staged = stage(reach, staging, moved=moved)
        if staged.moved_bytes:
            tell(f"{staged.moved_bytes} of {cargo.nbytes} bytes, {staging.route}")
        else:
            tell(f"{target} is there already", skipped=True)
    return target


def _recording(reach: Reach, plan: FleetPlan, checkpoint: Spot, log: Log) -> Spot:
    """The recording to measure on: the given one, or where asked and possible one with the missing prompts."""
    given, asked = plan.recording, plan.table.complete
    text = reach.call(given.place, "text", path=given.below("recording.json").path, limit=_MANIFEST_BYTES)[
        "text"
    ]
    if text is None:
        raise FleetError(f"{given} is no complete recording: it has no recording.json")
    if asked is None:
        return given
    words: tuple[str, ...] = ("record", "--target", asked.target, "--prompts", asked.prompts)
    words += ("--checkpoint", checkpoint.path, "--template", asked.template)
    words += ("--max-new-tokens", str(asked.max_new_tokens), "--recordings", posixpath.dirname(given.path))
    words += (*wiring_words(plan.table.eval, RECORD_OPTIONS), *_wiring_there(reach, plan))
    with log.step("complete the recording", given.place) as tell:
        try:
            answer = draftgauge_at(reach, given.place, words, said=log.said)
        except FleetError as exc:
            held = len(json.loads(text).get("items", ()))
            tell(f"not possible, so the {held} prompts of the given recording are measured: {exc}")
            return given
        found = Spot(given.place, str(answer.value["path"]))
        tell(f"{found} holds {len(answer.value['items'])} prompts")
        return found


def _wiring_there(reach: Reach, plan: FleetPlan) -> tuple[str, ...]:
    """The option that names the wiring file, whose text is put beside our other files at the place."""
    if plan.wiring is None:
        return ()
    place = plan.recording.place
    spot = _work(plan, place).below("wirings", f"{sha256_json(plan.wiring)[:16]}.toml")
    reach.call(place, "note", path=spot.path, text=plan.wiring)
    return ("--wiring", spot.path)


def _check(
    reach: Reach, plan: FleetPlan, what: tuple[Spot, Spot, tuple[str, ...]], name: str, log: Log
) -> list[str]:
    """The controls that fail at the recording's place; a control that fails there makes the result not trusted."""
    checkpoint, recording, wiring = what
    kept = plan.results / "checks" / f"{name}.json"
    with log.step("check", recording.place) as tell:
        if kept.exists():
            value = json.loads(kept.read_text(encoding="utf-8"))
            tell(_checked(value), skipped=True)
            return list(value["failed"])
        words = (
            "check",
            checkpoint.path,
            "--recording",
            recording.path,
            *wiring_words(plan.table.eval),
            *wiring,
        )
        answer = draftgauge_at(reach, recording.place, words, said=log.said)
        write_json(kept, answer.value)
        tell(_checked(answer.value))
    return list(answer.value["failed"])


def _checked(value: Mapping[str, Any]) -> str:
    return "trusted" if value["trusted"] else f"NOT TRUSTED: {', '.join(value['failed'])} failed"


def _run(reach: Reach, plan: FleetPlan, words: tuple[str, ...], name: str, log: Log) -> Run:
    """Evaluates at the recording's place, and brings the run here without the checkpoint that it keeps."""
    place = plan.recording.place
    here = Spot(plan.fleet.places[WORKSTATION], str(plan.results / "runs" / name))
    if (Path(here.path) / "run.json").exists():
        with log.step("evaluate", place) as tell:
            tell(f"{here} is there already", skipped=True)
        return open_run(Path(here.path))
    with log.step("evaluate", place) as tell:
        answer: Answer = draftgauge_at(reach, place, words, said=log.said)
        there = Spot(place, str(answer.value["path"]))
        tell(f"{there}" + (", NOT TRUSTED" if answer.code else ""))
    with log.step("bring back", here.place) as tell:
        cargo = describe(reach, there)
        with log.meter(f"bring {name}", cargo.nbytes) as moved:
            stage(reach, plan_staging(reach, cargo, here), moved=moved)
        tell(f"{here}, {cargo.nbytes} bytes")
    return open_run(Path(here.path))


# --- the outcome -----------------------------------------------------------------------------------------


def _outcome(plan: FleetPlan, run: Run, cargo: Cargo, found: Mapping[str, Any], log: Log) -> dict[str, Any]:
    """What is kept and shown of one measurement; where a part is not possible, the reason stands in its place."""
    chain = run.summary["policies"]["chain"]
    failed = list(dict.fromkeys([*run.failed_controls, *found["failed_check"]]))
    outcome: dict[str, Any] = {
        "name": run.name,
        "run": str(run.path),
        "checkpoint": str(cargo.source),
        "fingerprint": cargo.fingerprint,
        "saved_step": cargo.step,
        "trainer": dict(found["trainer"]),
        "tau": chain["tau_response"],
        "trusted": not failed,
        "failed": failed,
        "comparison": None,
        "comparison_reason": None,
        "beside": None,
        "gates": [],
    }
    baseline = plan.table.baseline
    if baseline.run is not None:
        try:
            outcome["comparison"] = compare_runs(run, open_run(plan.local(baseline.run)))
        except RunError as exc:
            outcome["comparison_reason"] = str(exc)
    if baseline.stored is not None:
        stored = plan.local(baseline.stored)
        outcome["beside"] = beside(run, read_stored(stored), path=stored)
    outcome["gates"] = [judged_gate(plan, text, run) for text in baseline.gates]
    outcome["steps"] = [step.as_dict() for step in log.steps]
    return outcome


def judged_gate(plan: FleetPlan, text: str, run: Run) -> dict[str, Any]:
    """A gate's judgement as data; a baseline's path in it is relative to the plan file.

    A gate that this run does not answer is not decided, with the reason: the measurement was made all the same.

    Raises:
        InputError: The gate is not understood.
    """
    gate = parse_gate(text)
    if gate.baseline is not None:
        gate = replace(gate, baseline=plan.local(str(gate.baseline)))
    try:
        return judge(gate, run).as_dict()
    except InputError as exc:
        return Judgement(text, None, str(exc)).as_dict()


def keep_outcome(plan: FleetPlan, outcome: Mapping[str, Any], report: str) -> Path:
    """Writes the outcome and its report beside the run; an earlier report of the same run is replaced.

    Raises:
        StoreError: They cannot be written.
    """
    folder = plan.results / "reports"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (
            (f"{outcome['name']}.txt", report),
            (f"{outcome['name']}.json", json.dumps(outcome)),
        ):
            partial = folder / f".partial-{name}"
            partial.write_text(text + "\n", encoding="utf-8")
            partial.replace(folder / name)
    except OSError as exc:
        raise StoreError(
            f"{folder} cannot be written: {exc.strerror}; make room or choose `results`"
        ) from exc
    return folder / f"{outcome['name']}.txt"
