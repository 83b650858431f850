"""What is kept of a target: token ids, tap features and the final state of every prompt, and where from.

    recordings/<digest>/recording.json      written last: its presence means complete
    recordings/<digest>/<item>.safetensors  tokens [T], taps [taps, T, H], final [T, H] before the norm (or
                                            after it, or none, where an imported file holds that or none),
                                            around [n, T, H]: layers beside the taps, first few items only

The digest names the inputs (target weights, tokenizer, template, prompts, taps, dtype, lengths), so the same
question is recorded once, and a recording cannot be mistaken for another. Knows nothing of torch or models;
`target` fills a recording, `replay` reads it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftgauge.errors import CheckpointError, RecordingError
from draftgauge.store import PARTIAL, sha256_file, sha256_json, write_json
from draftgauge.tensorfile import StoredTensor, read_safetensors

#: Version of the layout. 1: first.
FORMAT_VERSION = 1
KIND = "draftgauge recording"
MANIFEST, ENDS_FILE = "recording.json", "ends.safetensors"

#: The target's tensors that a drafter borrows, and the norm that stands before the head.
ENDS = ("embedding", "head", "norm")
#: What a recording may hold of the last layer (`RecordingPlan.last_layer`).
BEFORE_NORM, AFTER_NORM = "before the norm", "after the norm"


@dataclass(frozen=True)
class TargetRecord:
    """Which target was recorded, how it was read, and where its two ends lie.

    `digest` is over the bytes of the weights and configs. `ends` maps each of `ENDS` to the file (relative to
    the recording, or absolute), the tensor's name in it and the SHA-256 of its bytes. `rope_theta` is None where
    layers differ in it; it and `special_tokens` (id by text) are not known of older recordings.
    """

    path: str
    digest: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    norm_eps: float
    stop_token_ids: tuple[int, ...]
    ends: Mapping[str, Mapping[str, str]]
    rope_theta: float | None = None
    special_tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def special_token_ids(self) -> tuple[int, ...]:
        """The ids that no plain text has: ends of turns, padding, masks; ascending."""
        return tuple(sorted(set(self.special_tokens.values())))


@dataclass(frozen=True)
class RecordingPlan:
    """Everything that decides what a recording contains; its digest is the recording's name.

    `around` are the layers beside the taps that the first few items hold too. `last_layer` says what stands for
    the output of the last layer: its state before the final norm, or after it, as files from elsewhere may hold;
    `source` is the digest of such files, or of the recording that this one completes, and empty for all others.
    """

    target_digest: str
    tokenizer_digest: str
    template: str
    prompts_digest: str
    rendered_digest: str
    taps: tuple[int, ...]
    dtype: str
    max_new_tokens: int
    around: tuple[int, ...] = ()
    last_layer: str = BEFORE_NORM
    source: str = ""

    @property
    def digest(self) -> str:
        """The first 16 hex digits of the SHA-256 over all fields that are asked for."""
        # A field at its default is left out, so that recordings from before it keep their names.
        fields = dataclasses.fields(self)
        asked = {f.name: value for f in fields if (value := getattr(self, f.name)) != f.default}
        return sha256_json({**asked, "version": FORMAT_VERSION})[:16]


@dataclass(frozen=True)
class Item:
    """One recorded prompt and its completion.

    Tokens x[0..length) of which the first `prompt_len` are the prompt. `agreed` of the `length - prompt_len`
    reference tokens are the target's argmax in the recorded pass; `near_ties` of the others lie within the
    near-tie gap, and `worst_gap` is the largest logit gap among them (0 where all agree). All three are None where
    the item has no final state to tell by. `around` are the layers that its file holds beside the taps;
    `conversation` is the conversation that it is one turn of.
    """

    id: str
    category: str | None
    file: str
    sha256: str
    prompt_len: int
    length: int
    stopped: bool
    agreed: int | None
    near_ties: int | None
    worst_gap: float | None
    text: str
    around: tuple[int, ...] = ()
    conversation: str | None = None

    @property
    def has_final(self) -> bool:
        """Whether its file holds the target's final state."""
        return self.agreed is not None

    @property
    def completion_len(self) -> int:
        """Reference tokens of the completion."""
        return self.length - self.prompt_len

    def length_within(self, max_blocks: int | None) -> int:
        """Tokens up to the last reference that the first so many anchors draft for; all of them for None.

        Example:
            A prompt of 10 tokens, 20 in all, 3 blocks: anchors 10, 11, 12 and the token at 13, so 14.
        """
        return self.length if max_blocks is None else min(self.length, self.prompt_len + max_blocks + 1)


@dataclass(frozen=True)
class ItemTensors:
    """The mapped tensors of one item; `tokens` int32 [T], `taps` [taps, T, H], `final` [T, H] or None.

    `outputs` maps each recorded layer, the taps first and then those around them, to its output [T, H].
    """

    tokens: StoredTensor
    taps: StoredTensor
    final: StoredTensor | None
    outputs: Mapping[int, StoredTensor]


@dataclass(frozen=True)
class Recording:
    """A complete recording. `failed` maps the ids of prompts that could not be recorded to the reason."""

    path: Path
    plan: RecordingPlan
    target: TargetRecord
    items: tuple[Item, ...]
    failed: Mapping[str, str]
    produced: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Identity of what was recorded: the plan's inputs and every item's content."""
        return sha256_json([self.plan.digest, [item.sha256 for item in self.items]])

    @property
    def agreement(self) -> float | None:
        """Share of reference tokens that are the target's own first choice; None where that is not known."""
        agreed = [item.agreed for item in self.items if item.agreed is not None]
        tokens = sum(item.completion_len for item in self.items)
        return sum(agreed) / tokens if tokens and len(agreed) == len(self.items) else None

    def item(self, item_id: str) -> Item:
        """The item of a prompt's id.

        Raises:
            RecordingError: The recording has no such item.
        """
        try:
            return self._by_id[item_id]
        except KeyError:
            known = ", ".join(self._by_id)
            raise RecordingError(f"{self.path} has no item {item_id!r}; it holds {known}") from None

    @functools.cached_property
    def _by_id(self) -> dict[str, Item]:
        return {item.id: item for item in self.items}

    def tensors(self, item: Item) -> ItemTensors:
        """The item's tensors, mapped.

        Raises:
            RecordingError: The file is missing, damaged, or has other shapes than the manifest says.
        """
        path = self.path / item.file
        names = ["tokens", "taps"] + ["final"] * item.has_final + ["around"] * bool(item.around)
        try:
            stored, _ = read_safetensors(path)
            held = {name: stored[name] for name in names}
        except (CheckpointError, KeyError, OSError) as exc:
            raise RecordingError(f"{path} is not a readable item: {exc}; record it again") from exc
        hidden = self.target.hidden_size
        shapes = {
            "tokens": (item.length,),
            "taps": (len(self.plan.taps), item.length, hidden),
            "final": (item.length, hidden),
            "around": (len(item.around), item.length, hidden),
        }
        for name, tensor in held.items():
            if tensor.shape != shapes[name]:
                raise RecordingError(
                    f"{path}: {name} is {tensor.shape}, the manifest says {shapes[name]}; record the prompt again"
                )
        outputs = {tap: _row(held["taps"], row) for row, tap in enumerate(self.plan.taps)}
        outputs |= {tap: _row(held["around"], row) for row, tap in enumerate(item.around)}
        return ItemTensors(held["tokens"], held["taps"], held.get("final"), outputs)

    def end(self, name: str) -> StoredTensor:
        """One of the target's `ENDS`, read in place.

        Raises:
            RecordingError: The file is not readable here (`verify_end` says whether it changed).
        """
        place = self.target.ends[name]
        path = self.path / place["file"]
        try:
            stored = read_safetensors(path)[0][place["name"]]
        except (CheckpointError, KeyError, OSError) as exc:
            raise RecordingError(
                f"the target's {name} is read in place from {path}, which is not readable here: {exc}; "
                "record with --portable to keep it inside the recording"
            ) from exc
        return stored

    def verify_end(self, name: str) -> None:
        """Makes sure that one of the target's `ENDS` has the bytes that were recorded.

        Raises:
            RecordingError: It is not readable here, or changed: the recording is stale.
        """
        actual = self.end(name).sha256()
        expected = self.target.ends[name]["sha256"]
        if actual != expected:
            raise RecordingError(
                f"the target's {name} has digest {actual[:16]}, recorded was {expected[:16]}: the target at "
                f"{self.target.path} changed since; record it again"
            )

    def verify_ends(self) -> None:
        """Makes sure of all of the target's `ENDS`; those that are one tensor are read once.

        Raises:
            RecordingError: As `verify_end`.
        """
        places = {name: self.target.ends[name] for name in ENDS}
        distinct = {(p["file"], p["name"], p["sha256"]): name for name, p in places.items()}
        for name in distinct.values():
            self.verify_end(name)

    def tap_rows(self, taps: Sequence[int]) -> list[int]:
        """Where each of `taps` lies in the items' `taps` tensor.

        Raises:
            RecordingError: A tap was not recorded.
        """
        self._require_taps(taps, self.plan.taps, what=f"the recording {self.path}")
        return [self.plan.taps.index(tap) for tap in taps]

    def recorded_taps(self, item: Item) -> tuple[int, ...]:
        """All layers whose outputs the item holds: the taps, then those around them."""
        return self.plan.taps + item.around

    def require_recorded(self, taps: Sequence[int], *, item: Item) -> None:
        """Makes sure that the item holds the outputs of all `taps`.

        Raises:
            RecordingError: It does not hold one.
        """
        what = f"the recording {self.path}" + f" of prompt {item.id}" * bool(self.plan.around)
        self._require_taps(taps, self.recorded_taps(item), what=what)

    def _require_taps(self, taps: Sequence[int], held: Sequence[int], *, what: str) -> None:
        missing = [tap for tap in taps if tap not in held]
        if not missing:
            return
        again = f"record again with --taps {','.join(map(str, taps))}"
        if set(missing) <= set(self.plan.around):
            with_them = ", ".join(item.id for item in self.items if item.around)
            again = f"layers around the taps are kept for the first prompts only ({with_them}); or {again}"
        elif all(min(abs(layer - tap) for tap in self.plan.taps) == 1 for layer in missing):
            again += ", or with --taps-around, which keeps the layers beside every tap for a few prompts"
        raise RecordingError(
            f"the drafter reads taps {list(taps)}, {what} holds {list(held)}: {missing} missing; {again}"
        )


def _row(stored: StoredTensor, row: int) -> StoredTensor:
    """One entry of a tensor's first dimension, where it lies."""
    shape = stored.shape[1:]
    nbytes = stored.nbytes // stored.shape[0]
    return dataclasses.replace(
        stored, name=f"{stored.name}[{row}]", shape=shape, offset=stored.offset + row * nbytes
    )


def open_recording(path: str | Path) -> Recording:
    """The complete recording in folder `path`.

    Raises:
        RecordingError: The folder is no recording, is incomplete, or is of a version not known here.
    """
    folder = Path(path)
    manifest = folder / MANIFEST
    if not folder.is_dir():
        raise RecordingError(f"{path} is not a folder; `draftgauge recordings` lists what is here")
    if not manifest.is_file():
        raise RecordingError(f"{path} holds no {MANIFEST}: {_why_none(folder)}")
    value = _read_json(manifest)
    if value.get("kind") != KIND or value.get("version") != FORMAT_VERSION:
        raise RecordingError(
            f"{manifest} is {value.get('kind')!r} version {value.get('version')!r}; "
            f"expected {KIND!r} version {FORMAT_VERSION}"
        )
    try:
        target = {**value["target"], "stop_token_ids": tuple(value["target"]["stop_token_ids"])}
        plan = {**value["plan"], "taps": tuple(value["plan"]["taps"])}
        plan["around"] = tuple(plan.get("around", ()))
        return Recording(
            path=folder,
            plan=RecordingPlan(**plan),
            target=TargetRecord(**target),
            items=tuple(Item(**{**item, "around": tuple(item.get("around", ()))}) for item in value["items"]),
            failed=value["failed"],
            produced=value["produced"],
        )
    except (KeyError, TypeError, AttributeError) as exc:
        raise RecordingError(
            f"{manifest} does not have the fields of version {FORMAT_VERSION}: {exc}"
        ) from exc


def _why_none(folder: Path) -> str:
    """Why a folder is no recording, with what helps."""
    if any(folder.glob("*.safetensors")):
        return "it was not finished: repeat its `draftgauge record` command"
    inside = sorted(manifest.parent.name for manifest in folder.glob(f"*/{MANIFEST}"))
    if inside:
        return f"it is a folder of recordings; give one of them: {', '.join(inside)}"
    return "it is empty" if not any(folder.iterdir()) else "what is in it is not a recording"


def complete_recording(
    folder: Path,
    *,
    plan: RecordingPlan,
    target: TargetRecord,
    items: Sequence[Item],
    failed: Mapping[str, str],
    produced: Mapping[str, Any],
) -> Recording:
    """Writes the manifest, which makes the folder a complete recording."""
    value = {
        "kind": KIND,
        "version": FORMAT_VERSION,
        "plan": dataclasses.asdict(plan),
        "target": dataclasses.asdict(target),
        "items": [dataclasses.asdict(item) for item in items],
        "failed": dict(failed),
        "produced": dict(produced),
    }
    write_json(folder / MANIFEST, value)
    return open_recording(folder)


def verify_items(recording: Recording, items: Sequence[Item]) -> Iterator[Item]:
    """Yields the items whose bytes are those that were recorded.

    Raises:
        RecordingError: An item's digest differs: the file was damaged or edited.
    """
    for item in items:
        path = recording.path / item.file
        try:
            actual = sha256_file(path)
        except OSError as exc:
            raise RecordingError(f"{path} cannot be read: {exc.strerror or exc}; record it again") from exc
        if actual != item.sha256:
            raise RecordingError(
                f"{path} has digest {actual[:16]}, recorded was {item.sha256[:16]}: it was "
                "damaged or edited; record it again into a fresh folder"
            )
        yield item


def reference_digest(recording: Recording, item: Item) -> str:
    """SHA-256 over an item's token ids and the prompt's length: equal where two recordings say the same."""
    tokens = recording.tensors(item).tokens
    sha = hashlib.sha256(f"{item.prompt_len} {tokens.dtype} ".encode())
    for block in tokens.blocks():
        sha.update(block)
    return sha.hexdigest()


def list_recordings(root: Path) -> list[Recording]:
    """The complete recordings below `root`, by name; what cannot be read is left out."""
    return [found for found in found_recordings(root).values() if isinstance(found, Recording)]


def found_recordings(root: Path) -> dict[str, Recording | str]:
    """What lies below `root`, by folder: the complete recording, or why it cannot be read.

    Unfinished recordings are none of either.
    """
    found: dict[str, Recording | str] = {}
    for manifest in sorted(root.glob(f"*/{MANIFEST}")):
        name = manifest.parent.name
        if name.startswith(PARTIAL):
            continue
        try:
            found[name] = open_recording(manifest.parent)
        except RecordingError as exc:
            found[name] = str(exc)
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise RecordingError(f"{path} is not readable JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise RecordingError(f"{path} holds no JSON object")
    return value
