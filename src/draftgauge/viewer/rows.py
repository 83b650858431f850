"""What a list says of a run or a recording: a few plain values out of its manifests.

Of a run, `run.json` and `summary.json` are read and nothing else, and of these only the fields named here; of a
recording, `recording.json`. Knows nothing of pages.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from draftgauge.errors import RunError
from draftgauge.recording import Recording, open_recording
from draftgauge.runs import FORMAT_VERSION, KIND, MANIFEST, SUMMARY, Plan, open_run

_PLAN_FIELDS = {field.name for field in dataclasses.fields(Plan)}


class Estimate(msgspec.Struct, frozen=True):
    """A value with its interval, as `summary.json` has it."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


class _Policy(msgspec.Struct):
    label: str = ""
    tau_response: Estimate = Estimate()


class _Trust(msgspec.Struct):
    trusted: bool
    failed: list[str] = []


class _Caveat(msgspec.Struct):
    slug: str = ""
    severity: str = "note"


class _Summary(msgspec.Struct):
    version: int
    policies: dict[str, _Policy]
    prompts: dict[str, msgspec.Raw]
    trust: _Trust | None = None
    caveats: list[_Caveat] = []


class _Checkpoint(msgspec.Struct):
    path: str = ""
    step: int | None = None


class _Recording(msgspec.Struct):
    path: str = ""
    prompts: str | None = None


class _Manifest(msgspec.Struct):
    kind: str
    version: int
    plan: dict[str, Any]
    plan_digest: str
    started: str
    checkpoint: _Checkpoint = msgspec.field(default_factory=_Checkpoint)
    recording: _Recording = msgspec.field(default_factory=_Recording)


_MANIFESTS, _SUMMARIES = msgspec.json.Decoder(_Manifest), msgspec.json.Decoder(_Summary)


@dataclass(frozen=True)
class RunRow:
    """A run as a list shows it.

    `key` is its folder below the one that is viewed. `trusted` is None where no controls were run. `family` names
    the checkpoints that it is one of: one place with another number, measured in the same way.
    """

    key: str
    started: str
    plan_digest: str
    checkpoint: str
    step: int | None
    recording: str
    prompts: int
    prompt_set: str
    policy: str
    tau: Estimate
    trusted: bool | None
    failed: tuple[str, ...]
    warnings: tuple[str, ...]
    family: tuple[str, ...]

    @property
    def name(self) -> str:
        """The folder's own name."""
        return PurePosixPath(self.key).name

    @property
    def verdict(self) -> str:
        """What its controls say: `trusted`, `not trusted` or `no controls`."""
        return {True: "trusted", False: "not trusted", None: "no controls"}[self.trusted]


@dataclass(frozen=True)
class RecordingRow:
    """A recording as a list shows it. `agreement` is None where that is not known."""

    key: str
    target: str
    architecture: str
    taps: tuple[int, ...]
    prompts: int
    failed: int
    tokens: int
    agreement: float | None
    near_ties: int | None
    prompt_set: str
    template: str
    dtype: str

    @property
    def name(self) -> str:
        """The folder's own name."""
        return PurePosixPath(self.key).name


def read_run(path: Path, *, key: str) -> RunRow:
    """The row of the run in a folder.

    Raises:
        RunError: It is damaged, foreign, or of a version not known here.
    """
    try:
        manifest = _MANIFESTS.decode((path / MANIFEST).read_bytes())
        summary = _SUMMARIES.decode((path / SUMMARY).read_bytes())
    except (OSError, msgspec.MsgspecError, RecursionError) as exc:
        open_run(path)  # says what is wrong, in its own words
        raise RunError(f"{path.name} is not what a run of version {FORMAT_VERSION} holds: {exc}") from exc
    ours = (manifest.kind, manifest.version, summary.version) == (KIND, FORMAT_VERSION, FORMAT_VERSION)
    if not ours or set(manifest.plan) != _PLAN_FIELDS:
        open_run(path)
        raise RunError(f"{path.name} is not what a run of version {FORMAT_VERSION} holds")
    return _run_row(key, manifest, summary)


def _run_row(key: str, manifest: _Manifest, summary: _Summary) -> RunRow:
    plan, trust = manifest.plan, summary.trust
    headline = summary.policies.get("chain") or next(iter(summary.policies.values()), _Policy())
    recording = PurePosixPath(manifest.recording.path).name
    same = (plan["recording_digest"], plan["template"], plan["dtype"], plan["anchors"], plan["max_blocks"])
    return RunRow(
        key=key,
        started=manifest.started,
        plan_digest=manifest.plan_digest,
        checkpoint=manifest.checkpoint.path,
        step=manifest.checkpoint.step,
        recording=recording or str(plan["recording_digest"])[:16],
        prompts=len(summary.prompts),
        prompt_set=manifest.recording.prompts or "",
        policy=headline.label,
        tau=headline.tau_response,
        trusted=None if trust is None else trust.trusted,
        failed=() if trust is None else tuple(trust.failed),
        warnings=tuple(caveat.slug for caveat in summary.caveats if caveat.severity == "warning"),
        family=(
            without_step(manifest.checkpoint.path, manifest.checkpoint.step),
            *map(str, same),
            _block_size(plan),
        ),
    )


def _block_size(plan: Mapping[str, Any]) -> str:
    wiring = plan["wiring"]
    return str(wiring.get("block_size")) if isinstance(wiring, dict) else ""


def without_step(path: str, step: int | None) -> str:
    """A checkpoint's path with its step left open: equal for the saves of one training.

    Example:
        `"exp2/step_04000/checkpoint.pt"` of step 4000 gives `"exp2/step_*/checkpoint.pt"`.
    """
    return path if step is None else re.sub(rf"(?<!\d)0*{step}(?!\d)", "*", path)


def read_recording(path: Path, *, key: str) -> RecordingRow:
    """The row of the recording in a folder.

    Raises:
        RecordingError: It is damaged, incomplete, foreign, or of a version not known here.
    """
    return recording_row(open_recording(path), key=key)


def recording_row(recording: Recording, *, key: str) -> RecordingRow:
    """The row of an opened recording."""
    ties = [item.near_ties for item in recording.items if item.near_ties is not None]
    return RecordingRow(
        key=key,
        target=recording.target.path,
        architecture=recording.target.architecture,
        taps=recording.plan.taps,
        prompts=len(recording.items),
        failed=len(recording.failed),
        tokens=sum(item.completion_len for item in recording.items),
        agreement=recording.agreement,
        near_ties=sum(ties) if len(ties) == len(recording.items) else None,
        prompt_set=str(recording.produced.get("prompts") or ""),
        template=recording.plan.template,
        dtype=recording.plan.dtype,
    )
