"""The measuring instrument for speculative-decoding drafters.

Record a target once, replay any drafter checkpoint against the recording, and read an acceptance that equals
online decoding, round for round. The verbs of the command line are functions here:

    import draftgauge as dg

    run = dg.evaluate_checkpoint("step_4000", "recordings/1f2e3d4c5b6a7980")
    print(run.summary["policies"]["chain"]["tau_response"])

Names are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftgauge.acceptance import Policy as Policy
    from draftgauge.check import check_checkpoint as check_checkpoint
    from draftgauge.checkpoint import Checkpoint as Checkpoint
    from draftgauge.checkpoint import open_checkpoint as open_checkpoint
    from draftgauge.compare import compare_runs as compare_runs
    from draftgauge.crosscheck import Question as Question
    from draftgauge.crosscheck import crosscheck_checkpoint as crosscheck_checkpoint
    from draftgauge.diagnose import diagnose_checkpoint as diagnose_checkpoint
    from draftgauge.errors import DraftgaugeError as DraftgaugeError
    from draftgauge.evaluate import Options as Options
    from draftgauge.evaluate import evaluate_checkpoint as evaluate_checkpoint
    from draftgauge.exporting import export_checkpoint as export_checkpoint
    from draftgauge.importing import ImportRequest as ImportRequest
    from draftgauge.importing import import_features as import_features
    from draftgauge.picking import pick_recording as pick_recording
    from draftgauge.prompts import read_prompts as read_prompts
    from draftgauge.record import Request as Request
    from draftgauge.record import fill_recording as fill_recording
    from draftgauge.record import record_target as record_target
    from draftgauge.recording import Recording as Recording
    from draftgauge.recording import open_recording as open_recording
    from draftgauge.runs import Run as Run
    from draftgauge.runs import list_runs as list_runs
    from draftgauge.runs import open_run as open_run
    from draftgauge.stated import Stated as Stated
    from draftgauge.wiring import Wiring as Wiring

_HOMES = {
    "Policy": "acceptance",
    "check_checkpoint": "check",
    "Checkpoint": "checkpoint",
    "open_checkpoint": "checkpoint",
    "compare_runs": "compare",
    "crosscheck_checkpoint": "crosscheck",
    "Question": "crosscheck",
    "diagnose_checkpoint": "diagnose",
    "DraftgaugeError": "errors",
    "Options": "evaluate",
    "evaluate_checkpoint": "evaluate",
    "export_checkpoint": "exporting",
    "ImportRequest": "importing",
    "import_features": "importing",
    "pick_recording": "picking",
    "read_prompts": "prompts",
    "Request": "record",
    "record_target": "record",
    "fill_recording": "record",
    "Recording": "recording",
    "open_recording": "recording",
    "Run": "runs",
    "list_runs": "runs",
    "open_run": "runs",
    "Stated": "stated",
    "Wiring": "wiring",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    """Loads a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module 'draftgauge' has no attribute {name!r}")
    return getattr(importlib.import_module(f"draftgauge.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """The public names too, before they are loaded."""
    return sorted({*globals(), *__all__})
