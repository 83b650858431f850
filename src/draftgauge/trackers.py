"""Runs in the trackers that people already look at: TensorBoard, Weights & Biases, MLflow, Trackio.

One step for each checkpoint, at the step that it was saved at, under the same names everywhere. Checkpoints that
were measured alike and lie in one folder are one series, a line in the tracker. The run is complete on disk before
anything is logged: a tracker that fails loses nothing. Knows nothing of how a run is made.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from draftgauge.errors import InputError, UnfinishedError
from draftgauge.runs import Run
from draftgauge.store import sha256_json

#: Everything is logged below this name, and to a project or experiment of this name where none is configured.
PREFIX = "draftgauge"
_ESTIMATES = ("tau_response", "tau_pooled", "streak_response")


@dataclass(frozen=True)
class Entry:
    """What is logged of one run: `scalars` at `step` of `series`; `shared` is the series' own, `run` the run's."""

    series: str
    step: int
    scalars: Mapping[str, float]
    shared: Mapping[str, str]
    run: Mapping[str, str]


Tracker = Callable[[Entry, Path], None]


def require_tracker(name: str) -> Tracker:
    """The tracker of this name, whose package is installed.

    Raises:
        InputError: It is not, or there is no such tracker.
    """
    if name not in TRACKERS:
        raise InputError(f"tracker {name!r} is not known; expected {', '.join(TRACKERS)}")
    package, tracker = TRACKERS[name]
    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"--log-to {name} needs the package {package}, which is not installed: pip install 'draftgauge[{name}]'"
        )
    return tracker


def log_run(run: Run, tracker: Tracker) -> None:
    """Logs a complete run; what the tracker prints goes to stderr, what it keeps in files beside the run.

    Raises:
        InputError: The run has no step.
        UnfinishedError: The tracker failed; the run is complete, and logging it again is all that is left to do.
    """
    entry = entry_of(run)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            tracker(entry, run.path.parent)
    except Exception as exc:  # whatever a tracker's library raises, the run is there
        raise UnfinishedError(
            f"{run.name} was measured and is kept in {run.path}, and was not logged ({type(exc).__name__}: {exc}); "
            f"`draftgauge runs --runs {run.path.parent} --log-to ...` logs it again"
        ) from exc


def entry_of(run: Run) -> Entry:
    """What a run logs.

    Example of the scalars: `{"draftgauge/chain/tau_response": 1.7, "draftgauge/chain/tau_response_low": 1.6, ...,
    "draftgauge/depth3/survival": 0.2, "draftgauge/trusted": 1.0}`; what is absent in the run is left out.

    Raises:
        InputError: Nothing says the step of its checkpoint.
    """
    step, path = run.manifest["checkpoint"]["step"], _place(run)
    if step is None:
        raise InputError(
            f"{run.name} has no step, so a tracker has no place for it: neither the checkpoint {path} nor its name "
            "says one; call the file or folder step_N"
        )
    shared = _shared(run)
    return Entry(
        series=f"{_folder(path, step).name or PREFIX}-{sha256_json(shared)[:8]}",
        step=step,
        scalars=_scalars(run.summary),
        shared=shared,
        run={
            "run": run.name,
            "plan_digest": run.manifest["plan_digest"],
            "checkpoint": path,
            "checkpoint_digest": run.plan.checkpoint_digest,
            "started": run.manifest["started"],
            "failed_controls": ", ".join(run.failed_controls),
            "caveats": ", ".join(caveat["slug"] for caveat in run.summary["caveats"]),
        },
    )


def _shared(run: Run) -> dict[str, str]:
    """What is the same for all checkpoints of a series: where they lie, and how they are measured."""
    plan = run.plan
    return {
        "checkpoints": str(_folder(_place(run), run.manifest["checkpoint"]["step"])),
        "recording_digest": plan.recording_digest,
        "prompts_digest": sha256_json(list(plan.prompts)),
        "target_digest": plan.target_digest,
        "template": plan.template,
        "wiring_digest": sha256_json(dict(plan.wiring)),
        "block_size": str(plan.wiring["block_size"]),
        "dtype": plan.dtype,
        "anchors": plan.anchors,
        "max_blocks": str(plan.max_blocks),
        "instrument": plan.instrument,
    }


def _place(run: Run) -> str:
    """Where the checkpoint lay: its address, or its path."""
    checkpoint = run.manifest["checkpoint"]
    return str(checkpoint.get("url") or checkpoint["path"])


def _folder(path: str, step: int) -> PurePath:
    """The folder that holds the checkpoints: above the part of the path that names the step, else above the file.

    Example:
        `training/step_4000/checkpoint.pt` at step 4000 lies in the series of `training`.
    """
    whole = PurePath(path)
    for part in (whole, *whole.parents):
        if step in map(int, re.findall(r"\d+", part.name)):
            return part.parent
    return whole.parent


def _scalars(summary: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, Any] = {}
    for slug, policy in summary["policies"].items():
        for name in _ESTIMATES:
            for end, key in (("", "value"), ("_low", "low"), ("_high", "high")):
                found[f"{PREFIX}/{slug}/{name}{end}"] = policy[name][key]
    for depth, survival in enumerate((summary["per_depth"] or {"survival": ()})["survival"], 1):
        found[f"{PREFIX}/depth{depth}/survival"] = survival
    found[f"{PREFIX}/trusted"] = summary.get("trust", {}).get("trusted")
    return {name: float(value) for name, value in found.items() if value is not None}


def _lines(facts: Mapping[str, str]) -> Iterable[str]:
    return (f"{name}: {value}" for name, value in facts.items())


def _tensorboard(entry: Entry, folder: Path) -> None:
    """One event file for each run in the series' folder; a run whose file is there has been logged."""
    from tensorboardX import SummaryWriter

    where = folder / "tensorboard" / entry.series
    # Files are read in the order of their names, which begin with the second that they are written in.
    suffix = f".{entry.step:012d}.{entry.run['plan_digest'][:16]}"
    if any(where.glob(f"*{suffix}")):
        return
    with SummaryWriter(str(where), filename_suffix=suffix) as writer:
        for name, value in entry.scalars.items():
            writer.add_scalar(name, value, entry.step)
        facts = "\n".join(f"    {line}" for line in _lines({**entry.run, **entry.shared}))
        writer.add_text(f"{PREFIX}/run", facts, entry.step)


def _wandb(entry: Entry, folder: Path) -> None:
    """One run of W&B for each series, resumed; where WANDB_RUN_ID names another, as a trainer's, to that."""
    import wandb

    identity = {} if os.environ.get("WANDB_RUN_ID") else {"id": sha256_json(dict(entry.shared))[:16]}
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PREFIX),
        name=os.environ.get("WANDB_NAME", entry.series),
        dir=os.environ.get("WANDB_DIR", str(folder)),
        resume="allow",
        config={PREFIX: dict(entry.shared)},
        **identity,
    )
    try:
        # A step of its own: W&B drops what is logged at a step below the last one.
        run.define_metric(f"{PREFIX}/*", step_metric=f"{PREFIX}/step")
        run.log(
            {f"{PREFIX}/step": entry.step, **entry.scalars, f"{PREFIX}/run": "\n".join(_lines(entry.run))}
        )
    finally:
        run.finish()


def _mlflow(entry: Entry, folder: Path) -> None:
    """One run of MLflow for each series, found again by its tag; where is what MLFLOW_TRACKING_URI says."""
    import mlflow

    if not os.environ.get("MLFLOW_EXPERIMENT_NAME") and not os.environ.get("MLFLOW_EXPERIMENT_ID"):
        mlflow.set_experiment(PREFIX)
    tag, series = f"{PREFIX}.series", f"{entry.series}-{sha256_json(dict(entry.shared))[8:16]}"
    found = mlflow.search_runs(filter_string=f"tags.`{tag}` = '{series}'", output_format="list")
    known = {"run_id": found[0].info.run_id} if found else {"run_name": entry.series}
    with mlflow.start_run(**known):
        mlflow.set_tags({tag: series, f"{PREFIX}.step_{entry.step}": "\n".join(_lines(entry.run))})
        if not found:
            mlflow.log_params({f"{PREFIX}.{name}": value for name, value in entry.shared.items()})
        mlflow.log_metrics(dict(entry.scalars), step=entry.step)


def _trackio(entry: Entry, folder: Path) -> None:
    """One run of Trackio for each series, resumed; kept where TRACKIO_DIR says."""
    import trackio

    trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", PREFIX),
        name=entry.series,
        resume="allow",
        config=dict(entry.shared),
        embed=False,
        auto_log_cpu=False,
        auto_log_gpu=False,
    )
    try:
        trackio.log({**entry.scalars, f"{PREFIX}/run": "\n".join(_lines(entry.run))}, step=entry.step)
    finally:
        trackio.finish()


#: By name: the package that has to be installed, and what logs an entry to it.
TRACKERS: Mapping[str, tuple[str, Tracker]] = {
    "tensorboard": ("tensorboardX", _tensorboard),
    "wandb": ("wandb", _wandb),
    "mlflow": ("mlflow", _mlflow),
    "trackio": ("trackio", _trackio),
}
