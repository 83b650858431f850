"""Looks at folders that may hold what a drafter is to be measured on, and says which one to take, and why.

Recordings are taken as they are; features of other projects have to be imported first, and are looked at as far as
that can be told without the target. Reads descriptions only, without torch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftgauge.checkpoint import open_checkpoint
from draftgauge.errors import DraftgaugeError, RecordingError, TargetError
from draftgauge.featurefiles import Features, feature_sources, open_features
from draftgauge.fit import require_fit
from draftgauge.recording import MANIFEST, Recording, open_recording
from draftgauge.stated import Stated, used_wiring, wiring_of
from draftgauge.store import PARTIAL
from draftgauge.targetfiles import weight_files
from draftgauge.wiring import Wiring


@dataclass(frozen=True)
class Candidate:
    """One folder that was looked at.

    `kind` is `recording`, `features`, `empty` or `unreadable`. `fits` says whether the drafter can be measured on it,
    for features once they are imported; `lacks` why not, or what it does not hold. `made` is when it was made, in
    seconds of the epoch, and `behind_target` whether the target's weights are newer; both None where nothing says so.
    """

    path: str
    kind: str
    fits: bool
    lacks: str
    prompts: int
    prompts_asked: int
    agreement: float | None = None
    made: float | None = None
    behind_target: bool | None = None
    form: str | None = None


def pick_recording(
    checkpoint_path: str | Path,
    folders: Sequence[Path],
    stated: Stated = Stated(),  # noqa: B008
    *,
    state_dict: str | None = None,
    target: Path | None = None,
) -> dict[str, Any]:
    """What each folder holds for a checkpoint, and which one to take.

    Args:
        checkpoint_path: The drafter.
        folders: Recordings, folders of recordings, features of other projects, or anything else.
        stated: What the checkpoint does not say of its wiring.
        state_dict: Which weights in a `.pt` that holds several.
        target: The target's directory, if at hand: features are compared with the age of its weights.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        WiringError: Its wiring is not known completely.

    Example of the result: `{"candidates": [{"path": "recordings/1f2e", "kind": "recording", "fits": True, ...}],
    "take": "recordings/1f2e", "why": "it covers 10 of 10 prompts, the most of 2 that fit", "command": None}`.
    """
    wiring = used_wiring(wiring_of(open_checkpoint(checkpoint_path, state_dict=state_dict), stated), stated)
    candidates = [c for folder in folders for c in _candidates(folder, wiring, target=target)]
    fit = sorted((c for c in candidates if c.fits), key=_worth, reverse=True)
    best = fit[0] if fit else None
    return {
        "taps": list(wiring.taps),
        "candidates": [asdict(candidate) for candidate in candidates],
        "take": None if best is None else best.path,
        "why": _why(best, fit, candidates),
        "command": None
        if best is None or best.kind == "recording"
        else f"draftgauge recordings import {best.path} --target TARGET --checkpoint {checkpoint_path}",
    }


def _worth(candidate: Candidate) -> tuple[Any, ...]:
    """What is to be preferred: what is not stale, covers more, can be taken at once, is verified, is newer."""
    return (
        not candidate.behind_target,
        candidate.prompts,
        candidate.kind == "recording",
        candidate.agreement or 0.0,
        candidate.made or 0.0,
    )


def _why(best: Candidate | None, fit: Sequence[Candidate], every: Sequence[Candidate]) -> str:
    if best is None:
        return f"none of the {len(every)} folder(s) fits" if every else "no folder was given"
    covers = f"it covers {best.prompts} of {best.prompts_asked} prompt(s)"
    if len(fit) == 1:
        return f"{covers}, and no other fits"
    second = fit[1]
    reasons = (
        (bool(second.behind_target) and not best.behind_target, "the next is older than its target"),
        (best.prompts > second.prompts, f"the next {second.prompts}"),
        (best.kind != second.kind, "the next has to be imported first"),
        (
            (best.agreement or 0.0) > (second.agreement or 0.0),
            "the next's references agree less with its target",
        ),
        (True, "it is the newest"),
    )
    return f"{covers}; {next(reason for holds, reason in reasons if holds)}"


def _candidates(folder: Path, wiring: Wiring, *, target: Path | None) -> list[Candidate]:
    """A folder as one candidate, or as those that are in it."""
    if not folder.exists():
        return [_nothing(folder, "unreadable", "it does not exist")]
    if folder.is_dir() and not any(folder.iterdir()):
        return [_nothing(folder, "empty", "it is empty")]
    if (folder / MANIFEST).is_file():
        return [_recorded(folder, wiring)]
    inside = sorted(m.parent for m in folder.glob(f"*/{MANIFEST}") if not m.parent.name.startswith(PARTIAL))
    if inside:
        return [_recorded(each, wiring) for each in inside]
    return [_stored(folder, wiring, target=target)]


def _nothing(folder: Path, kind: str, why: str) -> Candidate:
    return Candidate(str(folder), kind, fits=False, lacks=why, prompts=0, prompts_asked=0)


def _recorded(folder: Path, wiring: Wiring) -> Candidate:
    try:
        recording = open_recording(folder)
    except RecordingError as exc:
        return _nothing(folder, "unreadable", str(exc))
    lacks = _unfit(recording, wiring)
    made = (folder / MANIFEST).stat().st_mtime
    asked = max(int(recording.produced.get("prompts_asked", 0)), len(recording.items))
    return Candidate(
        path=str(folder),
        kind="recording",
        fits=not lacks,
        lacks=lacks or _missing(recording),
        prompts=len(recording.items),
        prompts_asked=asked,
        agreement=recording.agreement,
        made=made,
        behind_target=_behind(Path(recording.target.path), made),
    )


def _unfit(recording: Recording, wiring: Wiring) -> str:
    try:
        require_fit(wiring, recording)
        for end in recording.target.ends:
            recording.end(end)
    except RecordingError as exc:
        return str(exc)
    return ""


def _missing(recording: Recording) -> str:
    """The prompts that it was asked for and does not hold."""
    names = list(recording.failed)
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"prompts without features: {', '.join(names[:8])}{more}" if names else ""


def _behind(target: Path, made: float) -> bool | None:
    """Whether the target's weights are newer; None where they are not at hand."""
    try:
        return max(path.stat().st_mtime for path in weight_files(target)) > made
    except (TargetError, OSError):
        return None


def _stored(folder: Path, wiring: Wiring, *, target: Path | None) -> Candidate:
    """Features of another project: how many sequences, and whether they are wide enough for the taps."""
    sources = feature_sources(folder)
    found: list[str] = []
    refused: list[str] = []
    form = None
    with tempfile.TemporaryDirectory(prefix="draftgauge-look-") as room:
        for path in sources:
            try:
                with open_features(path, root=folder, room=Path(room)) as sequences:
                    for features in sequences:
                        form = features.form.description
                        lacks = _narrow(features, wiring)
                        (refused if lacks else found).append(lacks or features.name)
            except DraftgaugeError as exc:
                refused.append(str(exc))
    if not found and not refused:
        return _nothing(folder, "unreadable", "it holds neither a recording nor features")
    made = max(path.stat().st_mtime for path in sources)
    return Candidate(
        path=str(folder),
        kind="features" if form else "unreadable",
        fits=bool(found),
        lacks="; ".join(refused[:3]) + (f"; and {len(refused) - 3} more" if len(refused) > 3 else ""),
        prompts=len(found),
        prompts_asked=len(found) + len(refused),
        made=made,
        behind_target=None if target is None else _behind(target, made),
        form=form,
    )


def _narrow(features: Features, wiring: Wiring) -> str:
    """What a sequence lacks of the drafter's taps, as far as widths tell; empty where they suffice."""
    hidden, taps = wiring.hidden_size, len(wiring.taps)
    form = features.form
    if form.taps is not None and form.taps in features.states:
        states = features.width(form.taps) / hidden - form.last_with_taps
        exact = features.layers is None
        if (states != taps) if exact else not set(wiring.taps) <= set(features.layers or ()):
            held = f"{states:g} taps" if exact else f"taps {list(features.layers or ())}"
            return f"{features.name}: {form.taps} holds {held}, the drafter reads {list(wiring.taps)}"
        return ""
    states = sum(features.width(name) for name in features.states) / hidden
    if states < taps or states != int(states):
        return f"{features.name}: its tensors hold {states:g} states, the drafter reads {taps} taps"
    return ""
