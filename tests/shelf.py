"""Folders as the viewer finds them: runs, recordings, the series of a watch; and the viewer itself."""

import contextlib
import dataclasses
import html
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import uvicorn

from draftgauge.runs import KIND, MANIFEST, SUMMARY, Run
from draftgauge.viewer.app import Report
from draftgauge.viewer.library import Library
from draftgauge.viewer.serving import Bound, bind, serve
from tests.test_runs import PLAN

HOSTILE = "<script>alert(1)</script>\u202egnp.\"><img src=x onerror=alert(2)>'&amp;{{7*7}}"


def manifest(
    *, checkpoint: str = "/train/step_7/model.pt", step: int | None = 7, started: str = "", **said: Any
) -> dict[str, Any]:
    """run.json, of which fields of the plan and others may be said."""
    plan = dataclasses.asdict(PLAN) | {name: said.pop(name) for name in list(said) if name in vars(PLAN)}
    return {
        "kind": KIND,
        "version": 1,
        "plan": plan,
        "plan_digest": "0123456789abcdef" * 4,
        "started": started or "2026-11-30T17:04:09Z",
        "duration_s": 1.5,
        "checkpoint": {"path": checkpoint, "step": step, "files": [Path(checkpoint).name]},
        "recording": {
            "path": "/kept/recordings/1f2e3d4c5b6a7980",
            "prompts": "builtin:coding10",
            "target": "/t",
        },
        **said,
    }


def summary(tau: float | None = 1.5, *, trusted: bool | None = True, **said: Any) -> dict[str, Any]:
    """summary.json, as far as a list reads it."""
    estimate = {
        "value": tau,
        "low": tau and tau - 0.2,
        "high": tau and tau + 0.3,
        "n": 2,
        "unit": "tokens/round",
    }
    failed = [] if trusted else ["context-zeroed"]
    trust = {} if trusted is None else {"trust": {"trusted": trusted, "failed": failed, "controls": []}}
    policies = {"chain": {"label": "chain", "tau_response": {**estimate, "reason": None}}}
    caveats = [{"slug": "few-prompts", "severity": "warning", "text": "2 prompts"}]
    return {
        "version": 1,
        "policies": policies,
        "prompts": {"a": {}, "b": {}},
        "caveats": caveats,
        **trust,
        **said,
    }


def put_run(folder: Path, **said: Any) -> Path:
    """A run's two manifests, without its blocks; `tau` and `trusted` go into the summary."""
    about = {name: said.pop(name) for name in ("tau", "trusted") if name in said}
    folder.mkdir(parents=True)
    (folder / SUMMARY).write_text(json.dumps(summary(**about)))
    (folder / MANIFEST).write_text(json.dumps(manifest(**said)))
    return folder


def put_training(root: Path, taus: dict[int, float], *, place: str = "/train/exp2") -> None:
    """The runs of one training's checkpoints, by step."""
    for hour, (step, tau) in enumerate(taus.items()):
        put_run(
            root / f"step_{step}-1a2b3c4d",
            tau=tau,
            step=step,
            checkpoint=f"{place}/step_{step}/model.pt",
            started=f"2026-11-30T{hour:02}:04:09Z",
        )


def watch_row(step: int, tau: float | None, **said: Any) -> dict[str, Any]:
    """A row of a watch's series."""
    return {
        "source": f"trainer:/runs/exp7/step_{step}",
        "identity": f"{step:016x}",
        "when": "2026-11-30T17:04:09Z",
        "saved_step": step,
        "trainer": {"loss": "1.2"},
        "tau": None
        if tau is None
        else {"value": tau, "low": tau - 0.1, "high": tau + 0.2, "n": 9, "unit": "x"},
        "difference": None,
        "trusted": None if tau is None else True,
        "gates_passed": False,
        "run": None,
        "reason": "" if tau is not None else "the file is cut short",
        "refused": False,
        **said,
    }


def put_series(folder: Path, *rows: dict[str, Any]) -> Path:
    """Appends rows to the series of a watch's results."""
    path = folder / "watch" / "series.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def put_recording(folder: Path) -> Path:
    """The tiny target's recording."""
    from tests.tiny import recording  # not above: it loads torch

    return Path(shutil.copytree(recording().path, folder))


def plain_report(runs: Any, *, baseline: Run | None = None, prompts: Any = ()) -> str:
    """Stands in for the report of runs: names them."""
    names = ", ".join(run.name for run in runs)
    against = f" against {baseline.name}" if baseline else ""
    said = "<h1>" + html.escape(f"{names}{against} [{','.join(prompts)}]") + "</h1>"
    return f"<!doctype html><html lang=en><title>Report</title><body><main>{said}</main></body></html>"


@contextlib.contextmanager
def served(
    folder: Path, *, report: Report = plain_report, host: str = "127.0.0.1", token: bool = False
) -> Iterator[httpx2.Client]:
    """A client of the viewer of a folder, which runs in a thread while the block does."""
    bound = bind(host, 0, token=token)
    with serving(bound, folder, report=report), httpx2.Client(base_url=bound.url.partition("?")[0]) as client:
        yield client


@contextlib.contextmanager
def serving(bound: Bound, folder: Path, *, report: Report = plain_report) -> Iterator[Bound]:
    """Serves at an address while the block runs."""
    servers: list[uvicorn.Server] = []
    arguments = {"library": Library(folder), "report": report, "ready": servers.append}
    thread = threading.Thread(target=serve, args=(bound,), kwargs=arguments)
    thread.start()
    try:
        while not servers or not servers[0].started:
            assert thread.is_alive(), "the server ended before it began"
            time.sleep(0.005)
        yield bound
    finally:
        for server in servers:
            server.should_exit = True
        thread.join()
