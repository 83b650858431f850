"""Makes a recording of features that another project stored, without loading the target.

What the files do not say is asked for, and then measured where it can be: the state that is said to be the last
layer's must give the references through the target's norm and head, and how it has to be read for that (before the
norm or after it, the norm's weight as stored or one more) is what the recording says. Knows nothing of drafters.

Letters: T positions, H hidden size, V vocabulary, R rows.
"""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from draftgauge.errors import BeingWrittenError, CheckpointError, PromptError, RecordingError
from draftgauge.featurefiles import Features, feature_sources, ids_of, open_features, source_name, states_of
from draftgauge.features import as_stored, as_torch, normed
from draftgauge.layouts import Layout, layout_of
from draftgauge.matching import Reference, References
from draftgauge.progress import Progress, silent
from draftgauge.prompts import PromptSet
from draftgauge.recording import (
    AFTER_NORM,
    BEFORE_NORM,
    ENDS_FILE,
    MANIFEST,
    Item,
    Recording,
    RecordingPlan,
    TargetRecord,
    complete_recording,
    open_recording,
)
from draftgauge.rendering import TEMPLATE_SWITCHES
from draftgauge.store import locked, publish_file, sha256_file, sha256_json
from draftgauge.target import NEAR_TIE_GAP, load_tokenizer, special_tokens
from draftgauge.targetends import TargetFacts, describe_target
from draftgauge.targetfiles import function_digests, joint_digest, tokenizer_digests
from draftgauge.tensorfile import read_safetensors, write_safetensors

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
#: Rows of the head's product that tell how a state has to be read, over all sequences.
_HEAD_ROWS = 512
_LOGIT_ROWS = 256
#: A state that is read rightly gives at least so many of the references, also where another model wrote them.
_RECOGNISED = 0.3
#: How the last layer's state may have been stored. The moved readings are only to say what is wrong.
_PLAIN, _PLUS_ONE, _AFTER = "before the norm", "before a norm that scales by one more", "after the norm"
_LATE, _EARLY = "one position late", "one position early"


@dataclass(frozen=True)
class ImportRequest:
    """What to import.

    `taps` are the layers that the recording is to hold, counted from 0, in the drafter's order. `layers` says which
    layers the states of a stored tensor are, side by side, for files that have no known form (or against it).
    `template` is the one that the prompts were rendered with; None tries all of them. `portable` copies the target's
    head and embedding into the recording.
    """

    taps: tuple[int, ...]
    layers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    template: str | None = None
    portable: bool = False


@dataclass(frozen=True)
class _Reading:
    """How the last layer's state has to be read, and which share of the references every reading gave."""

    last_layer: str
    plus_one: bool
    shares: Mapping[str, float]


def import_features(
    source: Path,
    target_path: Path,
    *,
    prompts: PromptSet | None = None,
    request: ImportRequest,
    root: Path = Path("recordings"),
    progress: Progress = silent,
) -> Recording:
    """A recording of the features in `source`; the same question is answered once.

    Args:
        source: A file, a folder of files, or a DeepSpec cache.
        target_path: The target's Hugging Face directory; of its weights only the ends are read.
        prompts: The prompts that the features are of. Not needed where the files hold a loss mask.
        request: Taps, and what else the files do not say.
        root: The folder that holds recordings.
        progress: Shows the work.

    Raises:
        RecordingError: Nothing can be imported, or the stored last state does not give the references however it is
            read.
        TargetError: The target's ends are not at hand.
    """
    facts = describe_target(target_path)
    references = References(prompts, load_tokenizer(target_path), template=request.template)
    with tempfile.TemporaryDirectory(prefix="draftgauge-import-") as room:
        sequences = _Sequences(source, facts, request, Path(room))
        found, failed = _survey(sequences, references, progress=progress)
        if not found:
            reasons = "\n".join(f"  {name}: {why}" for name, why in list(failed.items())[:8])
            raise RecordingError(f"nothing in {source} can be imported:\n{reasons or '  it holds no file'}")
        reading = _read_last(sequences, found, facts)
        plan, digests = _plan(sequences, found, facts, request, reading, references, progress=progress)
        folder = root / plan.digest
        if (folder / MANIFEST).is_file():
            return open_recording(folder)
        with locked(folder):
            target = _target(
                facts, folder, plan=plan, reading=reading, references=references, request=request
            )
            norm = as_torch(
                read_safetensors(folder / target.ends["norm"]["file"])[0][target.ends["norm"]["name"]]
            )
            items = []
            for i, reference in progress(
                list(enumerate(found)), label="import", total=len(found), unit="prompt"
            ):
                path = folder / f"{i:05d}.safetensors"
                if not path.is_file():  # else a killed import wrote it, of the same source
                    _write(
                        sequences, reference, path, plan=plan, facts=facts, norm=norm, references=references
                    )
                items.append(_stored_item(path))
            missing = references.without_features([reference.id for reference in found])
            produced = {
                "prompts": source.name if prompts is None else prompts.name,
                "prompts_asked": len(found) + len(missing),
                "imported": _origin(sequences, found, reading, references),
                "near_tie_gap": NEAR_TIE_GAP[plan.dtype],
                "template_switches": references.switches(TEMPLATE_SWITCHES),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "target_files": {
                    name: {"bytes": (target_path / name).stat().st_size, "sha256": digest}
                    for name, digest in digests.items()
                },
            }
            return complete_recording(
                folder, plan=plan, target=target, items=items, failed=failed | missing, produced=produced
            )


@dataclass(frozen=True)
class _Sequences:
    """The sequences of a source, opened one at a time."""

    source: Path
    facts: TargetFacts
    request: ImportRequest
    room: Path

    def each(self, path: Path) -> Iterator[Features]:
        """Those of one file, for as long as each is looked at."""
        root = self.source if self.source.is_dir() else self.source.parent
        with open_features(path, root=root, room=self.room) as found:
            yield from found

    def named(self, reference: Reference) -> Iterator[Features]:
        """The one that a reference was found in."""
        for features in self.each(reference.path):
            if features.name == reference.sequence:
                yield features
                return

    def layout(self, features: Features) -> Layout:
        """Where the taps and the last layer's state lie in a sequence."""
        hidden, layers = self.facts.hidden_size, self.request.layers
        last = self.facts.num_layers - 1
        return layout_of(features, self.request.taps, stated=layers, hidden_size=hidden, last_layer=last)


# --- what is there --------------------------------------------------------------------------------------


def _survey(
    sequences: _Sequences, references: References, *, progress: Progress
) -> tuple[list[Reference], dict[str, str]]:
    """The references that the files hold features of, and why other files hold none."""
    paths = feature_sources(sequences.source)
    root = sequences.source if sequences.source.is_dir() else sequences.source.parent
    found: list[Reference] = []
    failed: dict[str, str] = {}
    for path in progress(paths, label="look at", total=len(paths), unit="file"):
        name = source_name(path, root=root)
        try:
            for features in sequences.each(path):
                name = features.name
                found += _references_in(sequences, features, references, path)
        except (RecordingError, CheckpointError, PromptError, BeingWrittenError) as exc:
            failed[name] = str(exc)
    twice = {r.id for r in found if sum(other.id == r.id for other in found) > 1}
    if twice:
        raise RecordingError(
            f"{sequences.source} holds features of {', '.join(sorted(twice)[:8])} more than once; leave one of each"
        )
    return references.sorted(found), failed


def _references_in(
    sequences: _Sequences, features: Features, references: References, path: Path
) -> list[Reference]:
    layout = sequences.layout(features)
    tokens = None if features.tokens is None else ids_of(features.tokens)
    mask = None if features.loss_mask is None else ids_of(features.loss_mask)
    name, part = layout.taps[0]
    rows = features.states[name].numel // features.width(name)
    found = references.find(features.name, tokens, mask=mask, rows=rows, stops=sequences.facts.stop_token_ids)
    for name, part in {*layout.taps, *([] if layout.last is None else [layout.last])}:
        states_of(features, name, part=part, length=found[0].rows, hidden_size=sequences.facts.hidden_size)
    vocabulary = sequences.facts.vocab_size
    if any(max(reference.tokens) >= vocabulary or min(reference.tokens) < 0 for reference in found):
        raise RecordingError(
            f"{features.path} holds token ids outside the target's vocabulary of {vocabulary}; give the target that "
            "they are of"
        )
    return [replace(r, path=path, sequence=features.name, has_last=layout.last is not None) for r in found]


# --- how the last state is read -------------------------------------------------------------------------


def _read_last(sequences: _Sequences, found: Sequence[Reference], facts: TargetFacts) -> _Reading:
    """The reading of the last layer's state that gives the references.

    Raises:
        RecordingError: None does.
    """
    held = [reference for reference in found if reference.has_last]
    if not held:
        return _Reading(BEFORE_NORM, plus_one=False, shares={})
    weight, head = as_torch(facts.ends["norm"]), as_torch(facts.ends["head"])
    hits = dict.fromkeys((_PLAIN, _PLUS_ONE, _AFTER, _LATE, _EARLY), 0)
    total = 0
    for reference in held[:32]:
        for features in sequences.named(reference):
            last = _last_state(sequences, features, reference)
            at = _spread(reference, max(1, _HEAD_ROWS // min(32, len(held))))
            total += len(at)
            for name, (states, after) in _readings(last, at, weight=weight, eps=facts.norm_eps).items():
                wanted = torch.tensor(reference.tokens)[after]
                hits[name] += _given(states, head, wanted)
    shares = {name: count / total for name, count in hits.items()}
    best = max(shares, key=lambda name: shares[name])
    if shares[best] < _RECOGNISED or best in (_LATE, _EARLY):
        told = ", ".join(f"{share:.1%} {name}" for name, share in shares.items())
        why = f"the states are stored {best}" if shares[best] >= _RECOGNISED else "no reading gives them"
        raise RecordingError(
            f"the state that is said to be the last layer's does not give the references through the norm and head "
            f"of {facts.path}: {why} ({told} of {total} tokens). The target or its revision is another, the tensor "
            "is another layer's, or the states are another sequence's"
        )
    return _Reading(AFTER_NORM if best == _AFTER else BEFORE_NORM, best == _PLUS_ONE, shares)


def _readings(
    last: Float[Tensor, "T H"], at: Int[Tensor, " R"], *, weight: Float[Tensor, " H"], eps: float
) -> dict[str, tuple[Float[Tensor, "K H"], Int[Tensor, " K"]]]:
    """The states that give the next tokens in every reading, and where these tokens are."""
    late, early = at[at + 1 < len(last)], at[at >= 1]
    return {
        _PLAIN: (normed(last[at], weight, eps=eps), at + 1),
        _PLUS_ONE: (normed(last[at], weight + 1, eps=eps), at + 1),
        _AFTER: (last[at], at + 1),
        _LATE: (normed(last[late + 1], weight, eps=eps), late + 1),
        _EARLY: (normed(last[early - 1], weight, eps=eps), early + 1),
    }


def _spread(reference: Reference, count: int) -> Int[Tensor, " R"]:
    places = torch.linspace(reference.start - 1, len(reference.tokens) - 2, count)
    positions: Tensor = places.long().unique()
    return positions


def _given(states: Float[Tensor, "R H"], head: Float[Tensor, "V H"], wanted: Int[Tensor, " R"]) -> int:
    logits = states.to(head.dtype) @ head.T
    return int((logits.max(dim=1).values == logits.gather(1, wanted[:, None])[:, 0]).sum())


def _last_state(sequences: _Sequences, features: Features, reference: Reference) -> Float[Tensor, "T H"]:
    last = sequences.layout(features).last
    assert last is not None
    return _tensor(features, _state(sequences, features, last, reference), last[0])


def _state(
    sequences: _Sequences, features: Features, place: tuple[str, int], reference: Reference
) -> Shaped[np.ndarray, "T H"]:
    name, part = place
    hidden = sequences.facts.hidden_size
    rows = states_of(features, name, part=part, length=reference.rows, hidden_size=hidden)
    return np.asarray(rows[: len(reference.tokens)])


def _tensor(features: Features, rows: Shaped[np.ndarray, "T H"], name: str) -> Float[Tensor, "T H"]:
    plain = torch.from_numpy(np.ascontiguousarray(rows))
    return plain.view(torch.bfloat16) if features.states[name].dtype == "BF16" else plain


# --- what is written ------------------------------------------------------------------------------------


def _plan(
    sequences: _Sequences,
    found: Sequence[Reference],
    facts: TargetFacts,
    request: ImportRequest,
    reading: _Reading,
    references: References,
    *,
    progress: Progress,
) -> tuple[RecordingPlan, dict[str, str]]:
    """What the recording is the answer to, and the digests of the target's files."""
    dtypes = {
        f.states[name].dtype
        for r in found
        for f in sequences.named(r)
        for name, _ in sequences.layout(f).taps
    }
    if len(dtypes) > 1:
        raise RecordingError(f"{sequences.source} holds states of several types, {', '.join(sorted(dtypes))}")
    files, texts = function_digests(facts.path, progress=progress), tokenizer_digests(facts.path)
    paths = sorted(
        {path for r in found for f in sequences.named(r) for path in f.fingerprints if path.is_file()}
    )
    shown = progress(paths, label="hash features", total=len(paths), unit="file")
    sources = {str(path.name): sha256_file(path) for path in shown}
    plan = RecordingPlan(
        target_digest=joint_digest(files),
        tokenizer_digest=joint_digest(texts),
        template=references.template,
        prompts_digest=references.digest or sha256_json([[r.id, r.tokens, r.start] for r in found]),
        rendered_digest=sha256_json({r.id: list(r.tokens[: r.start]) for r in found}),
        taps=request.taps,
        dtype=_DTYPES[dtypes.pop()],
        max_new_tokens=max(len(r.tokens) - r.start for r in found),
        last_layer=reading.last_layer,
        source=sha256_json(sources),
    )
    return plan, files | texts


def _target(
    facts: TargetFacts,
    folder: Path,
    *,
    plan: RecordingPlan,
    reading: _Reading,
    references: References,
    request: ImportRequest,
) -> TargetRecord:
    """The target as the recording names it; a norm that scales by one more is kept as what it computes."""
    copied = [end for end in facts.ends if request.portable or (end == "norm" and reading.plus_one)]
    (folder / ENDS_FILE).unlink(missing_ok=True)
    if copied:
        tensors = {end: as_torch(facts.ends[end]) for end in copied}
        if reading.plus_one:
            tensors["norm"] = tensors["norm"] + 1
        with publish_file(folder / ENDS_FILE) as partial:
            write_safetensors(partial, {end: as_stored(tensor) for end, tensor in tensors.items()})
    stored = read_safetensors(folder / ENDS_FILE)[0] if copied else {}
    ends = {}
    for end, tensor in facts.ends.items():
        place = stored.get(end, tensor)
        file = ENDS_FILE if end in stored else str(place.path.resolve())
        ends[end] = {"file": file, "name": place.name, "sha256": place.sha256()}
    return TargetRecord(
        path=str(facts.path.resolve()),
        digest=plan.target_digest,
        architecture=facts.architecture,
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        norm_eps=facts.norm_eps,
        stop_token_ids=facts.stop_token_ids,
        ends=ends,
        rope_theta=facts.rope_theta,
        special_tokens=special_tokens(references.tokenizer),
    )


def _write(
    sequences: _Sequences,
    reference: Reference,
    path: Path,
    *,
    plan: RecordingPlan,
    facts: TargetFacts,
    norm: Float[Tensor, " H"],
    references: References,
) -> None:
    """One item: its states taken apart, and how far the references are the target's first choice."""
    for features in sequences.named(reference):
        layout = sequences.layout(features)
        taps = [_tensor(features, _state(sequences, features, p, reference), p[0]) for p in layout.taps]
        tensors = {
            "tokens": as_stored(torch.tensor(reference.tokens, dtype=torch.int32)),
            "taps": as_stored(torch.stack(taps)),
        }
        measured: dict[str, Any] = {"agreed": None, "near_ties": None, "worst_gap": None}
        if layout.last is not None:
            last = _last_state(sequences, features, reference)
            tensors["final"] = as_stored(last)
            states = last if plan.last_layer == AFTER_NORM else normed(last, norm, eps=facts.norm_eps)
            gaps = _gaps(states, as_torch(facts.ends["head"]), reference)
            near = NEAR_TIE_GAP[plan.dtype]
            measured = {
                "agreed": sum(gap == 0 for gap in gaps),
                "near_ties": sum(0 < gap < near for gap in gaps),
                "worst_gap": max(gaps, default=0.0),
            }
        features.require_unchanged()
    facts_of = {
        "id": reference.id,
        "category": reference.category,
        "prompt_len": reference.start,
        "length": len(reference.tokens),
        "stopped": reference.tokens[-1] in facts.stop_token_ids,
        **measured,
        "text": references.text(reference.tokens[reference.start :]),
        **({} if reference.conversation is None else {"conversation": reference.conversation}),
    }
    with publish_file(path) as partial:
        write_safetensors(partial, tensors, metadata={"item": json.dumps(facts_of)})


def _gaps(states: Float[Tensor, "T H"], head: Float[Tensor, "V H"], reference: Reference) -> list[float]:
    """By how much each reference token's logit is below the largest; 0 where it is the first choice."""
    tokens, gaps = torch.tensor(reference.tokens), []
    for start in range(reference.start, len(reference.tokens), _LOGIT_ROWS):
        stop = min(start + _LOGIT_ROWS, len(reference.tokens))
        logits = (states[start - 1 : stop - 1].to(head.dtype) @ head.T).float()
        given = logits.gather(1, tokens[start:stop, None])[:, 0]
        gaps += (logits.max(dim=1).values - given).tolist()
    return gaps


def _stored_item(path: Path) -> Item:
    facts = json.loads(read_safetensors(path)[1]["item"])
    return Item(file=path.name, sha256=sha256_file(path), **facts)


def _origin(
    sequences: _Sequences, found: Sequence[Reference], reading: _Reading, references: References
) -> dict[str, Any]:
    """Where it was imported from, what was said, and what of it was measured."""
    forms = sorted({features.form.name for reference in found for features in sequences.named(reference)})
    return {
        "source": str(sequences.source.resolve()),
        "forms": forms,
        "layers": {name: list(layers) for name, layers in sequences.request.layers.items()},
        "last_state": None
        if not reading.shares
        else {"read": reading.last_layer, "norm_plus_one": reading.plus_one, "shares": dict(reading.shares)},
        "template": references.how,
    }
