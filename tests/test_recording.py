"""Recordings on disk: what is complete, what is damaged, and what does not fit."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftgauge.errors import RecordingError
from draftgauge.recording import (
    ENDS,
    MANIFEST,
    Item,
    Recording,
    RecordingPlan,
    TargetRecord,
    complete_recording,
    found_recordings,
    list_recordings,
    open_recording,
    verify_items,
)
from draftgauge.store import PARTIAL, sha256_file
from draftgauge.tensorfile import read_safetensors, write_safetensors

PLAN = RecordingPlan(
    target_digest="a" * 64,
    tokenizer_digest="b" * 64,
    template="chat",
    prompts_digest="c" * 64,
    rendered_digest="d" * 64,
    taps=(3, -1),
    dtype="float32",
    max_new_tokens=16,
)
TAPS, TOKENS, HIDDEN = 2, 5, 4


def item_file(path: Path, seed: int) -> None:
    noise = np.random.default_rng(seed)
    tensors = {
        "tokens": np.arange(TOKENS, dtype=np.int32),
        "taps": noise.normal(size=(TAPS, TOKENS, HIDDEN)).astype(np.float32),
        "final": noise.normal(size=(TOKENS, HIDDEN)).astype(np.float32),
    }
    write_safetensors(path, tensors)


def made(folder: Path, *, items: tuple[str, ...] = ("a", "b"), **target: Any) -> Recording:
    """A complete recording of made-up numbers: prompts of 2 tokens, completions of 3."""
    folder.mkdir(parents=True)
    write_safetensors(
        folder / "ends.safetensors",
        {name: np.full((7, HIDDEN), i, np.float32) for i, name in enumerate(ENDS)},
    )
    zeros, ones, twos = (
        hashlib.sha256(np.full((7, HIDDEN), i, "<f4").tobytes()).hexdigest() for i in range(3)
    )
    ends = {
        name: {"file": "ends.safetensors", "name": name, "sha256": digest}
        for name, digest in zip(ENDS, (zeros, ones, twos), strict=True)
    }
    described = TargetRecord(
        path="target",
        digest=PLAN.target_digest,
        architecture="Qwen3ForCausalLM",
        num_layers=4,
        hidden_size=HIDDEN,
        vocab_size=7,
        norm_eps=1e-6,
        stop_token_ids=(6,),
        ends=ends,
    )
    recorded = []
    for seed, name in enumerate(items):
        file = folder / f"{seed:05d}.safetensors"
        item_file(file, seed)
        recorded.append(
            Item(
                id=name,
                category=None,
                file=file.name,
                sha256=sha256_file(file),
                prompt_len=2,
                length=TOKENS,
                stopped=False,
                agreed=3 - seed,
                near_ties=0,
                worst_gap=0.25 * seed,
                text="",
            )
        )
    return complete_recording(
        folder,
        plan=PLAN,
        target=dataclasses.replace(described, **target),
        items=recorded,
        failed={"c": "the prompt is empty"},
        produced={"prompts": "p.jsonl"},
    )


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    recording = made(tmp_path / "recording")
    again = open_recording(str(tmp_path / "recording"))
    assert again == recording
    assert (again.plan, again.target.stop_token_ids, again.failed) == (
        PLAN,
        (6,),
        {"c": "the prompt is empty"},
    )
    assert [(item.id, item.completion_len, item.worst_gap) for item in again.items] == [
        ("a", 3, 0.0),
        ("b", 3, 0.25),
    ]
    tensors = again.tensors(again.item("b"))
    assert tensors.tokens.mapped().view(np.int32).tolist() == [0, 1, 2, 3, 4]
    assert (tensors.taps.shape, tensors.final.shape) == ((2, 5, 4), (5, 4))


@pytest.mark.parametrize(("items", "agreement"), [(("a", "b"), 5 / 6), (("a",), 1.0), ((), None)])
def test_agreement_is_absent_without_tokens(
    items: tuple[str, ...], agreement: float | None, tmp_path: Path
) -> None:
    assert made(tmp_path / "recording", items=items).agreement == agreement


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(RecordingPlan)])
def test_the_name_of_a_recording_sees_every_field_of_its_plan(field: str) -> None:
    value = getattr(PLAN, field)
    other = {str: "other", int: 17, tuple: (-1, 3)}[type(value)]
    digest = dataclasses.replace(PLAN, **{field: other}).digest
    assert digest != PLAN.digest
    assert len(digest) == 16


def test_what_was_not_asked_for_leaves_the_name_as_it_was_before_it_could_be() -> None:
    later = ("around", "last_layer", "source")
    before = {k: v for k, v in dataclasses.asdict(PLAN).items() if k not in later} | {"version": 1}
    text = json.dumps(before, sort_keys=True)
    assert PLAN.digest == hashlib.sha256(text.encode()).hexdigest()[:16]


def test_a_manifest_from_before_the_newer_fields_is_read(tmp_path: Path) -> None:
    special = {"<pad>": 5, "<mask>": 3, "<eos>": 5}
    recording = made(tmp_path / "recording", rope_theta=1e6, special_tokens=special)
    assert open_recording(recording.path).target.special_token_ids == (3, 5)
    value = json.loads((recording.path / MANIFEST).read_text())
    del value["plan"]["around"], value["target"]["rope_theta"], value["target"]["special_tokens"]
    for item in value["items"]:
        del item["around"]
    (recording.path / MANIFEST).write_text(json.dumps(value))
    older = open_recording(recording.path)
    assert older == dataclasses.replace(
        recording, target=dataclasses.replace(recording.target, rope_theta=None, special_tokens={})
    )
    assert older.target.special_token_ids == ()


def test_the_identity_of_a_recording_sees_the_items_bytes(tmp_path: Path) -> None:
    one, other = made(tmp_path / "one"), made(tmp_path / "other")
    assert one.digest == other.digest
    changed = (dataclasses.replace(one.items[0], sha256="0" * 64), one.items[1])
    assert dataclasses.replace(one, items=changed).digest != one.digest


def test_taps_are_found_by_layer_in_any_order(tmp_path: Path) -> None:
    recording = made(tmp_path / "recording")
    assert recording.tap_rows([-1, 3]) == [1, 0]
    with pytest.raises(RecordingError) as caught:
        recording.tap_rows([1, 3, 5])
    assert "reads taps [1, 3, 5]" in str(caught.value)
    assert str(caught.value).endswith("holds [3, -1]: [1, 5] missing; record again with --taps 1,3,5")


def test_a_layer_beside_the_taps_names_the_option_that_keeps_it(tmp_path: Path) -> None:
    recording = made(tmp_path / "recording")
    for taps, helps in (([3, 0], True), ([2, 0], True), ([3, 1], False), ([0, 1], False)):
        with pytest.raises(RecordingError) as caught:
            recording.tap_rows(taps)
        assert ("or with --taps-around, which keeps" in str(caught.value)) is helps


def widened(recording: Recording, *, held: int = 2) -> Recording:
    """The recording with layers 0 and 2 kept beside the taps for its first prompt; its file holds `held` of them."""
    first, *others = recording.items
    path = recording.path / first.file
    plain = {
        name: stored.to_float32() for name, stored in read_safetensors(path)[0].items() if name != "tokens"
    }
    tokens = np.arange(TOKENS, dtype=np.int32)
    beside = np.arange(held * TOKENS * HIDDEN, dtype=np.float32).reshape(held, TOKENS, HIDDEN)
    write_safetensors(path, {"tokens": tokens, **plain, "around": beside})
    first = dataclasses.replace(first, sha256=sha256_file(path), around=(0, 2))
    plan = dataclasses.replace(recording.plan, around=(0, 2))
    return dataclasses.replace(recording, plan=plan, items=(first, *others))


def test_every_recorded_layer_is_found_where_it_lies(tmp_path: Path) -> None:
    plain = made(tmp_path / "recording")
    taps = plain.tensors(plain.items[0]).taps.to_float32()
    recording = widened(plain)
    first, second = recording.items
    assert (recording.recorded_taps(first), recording.recorded_taps(second)) == ((3, -1, 0, 2), (3, -1))
    outputs = recording.tensors(first).outputs
    assert list(outputs) == [3, -1, 0, 2]
    beside = np.arange(40, dtype=np.float32).reshape(2, TOKENS, HIDDEN)
    for layer, expected in zip(outputs, [*taps, *beside], strict=True):
        assert outputs[layer].to_float32().tolist() == expected.tolist()
    assert list(recording.tensors(second).outputs) == [3, -1]


def test_layers_that_an_item_does_not_hold_are_named(tmp_path: Path) -> None:
    recording = widened(made(tmp_path / "recording"))
    first, second = recording.items
    recording.require_recorded([2, -1, 0], item=first)
    with pytest.raises(RecordingError) as caught:
        recording.require_recorded([0, -1], item=second)
    assert "of prompt b holds [3, -1]: [0] missing" in str(caught.value)
    assert "kept for the first prompts only (a); or record again with --taps 0,-1" in str(caught.value)


def test_layers_beside_the_taps_have_the_shape_that_the_manifest_says(tmp_path: Path) -> None:
    recording = widened(made(tmp_path / "recording"), held=1)
    with pytest.raises(RecordingError, match=r"around is \(1, 5, 4\), the manifest says \(2, 5, 4\)"):
        recording.tensors(recording.items[0])


def test_an_unknown_item_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="has no item 'z'; it holds a, b"):
        made(tmp_path / "recording").item("z")


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def without_taps(path: Path) -> None:
    write_safetensors(path, {"tokens": np.arange(TOKENS, dtype=np.int32)})


def shorter(path: Path) -> None:
    write_safetensors(
        path,
        {
            "tokens": np.arange(TOKENS, dtype=np.int32),
            "taps": np.zeros((TAPS, TOKENS - 1, HIDDEN), np.float32),
            "final": np.zeros((TOKENS, HIDDEN), np.float32),
        },
    )


def edited(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove, "is not a readable item: "),
        (truncate, "is not a readable item: "),
        (without_taps, "is not a readable item: 'taps'; record it again"),
        (shorter, r"taps is \(2, 4, 4\), the manifest says \(2, 5, 4\); record the prompt again"),
    ],
)
def test_a_damaged_item_is_refused(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    recording = made(tmp_path / "recording")
    damage(recording.path / recording.items[1].file)
    assert recording.tensors(recording.items[0]).tokens.shape == (TOKENS,)
    with pytest.raises(RecordingError, match=message):
        recording.tensors(recording.items[1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove, "00001.safetensors cannot be read: No such file or directory; record it again"),
        (truncate, "00001.safetensors has digest .{16}, recorded was .{16}: it was damaged or edited"),
        (edited, "00001.safetensors has digest .{16}, recorded was .{16}: it was damaged or edited"),
    ],
)
def test_items_are_those_that_were_recorded(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    recording = made(tmp_path / "recording")
    assert list(verify_items(recording, recording.items)) == list(recording.items)
    damage(recording.path / recording.items[1].file)
    checked = verify_items(recording, recording.items)
    assert next(checked) == recording.items[0]
    with pytest.raises(RecordingError, match=message):
        next(checked)


def test_ends_are_read_where_they_lie(tmp_path: Path) -> None:
    recording = made(tmp_path / "recording")
    assert [float(recording.end(name).to_float32()[0, 0]) for name in ENDS] == [0.0, 1.0, 2.0]
    for name in ENDS:
        recording.verify_end(name)


def test_an_end_that_changed_is_refused(tmp_path: Path) -> None:
    recording = made(tmp_path / "recording")
    edited(recording.path / "ends.safetensors")  # the last byte is the norm's
    recording.verify_end("head")
    with pytest.raises(
        RecordingError, match=r"the target's norm has digest .{16}, recorded was .{16}: the target"
    ):
        recording.verify_end("norm")


def test_an_end_that_is_not_at_hand_names_the_option(tmp_path: Path) -> None:
    gone = {
        "head": {"file": str(tmp_path / "gone.safetensors"), "name": "lm_head.weight", "sha256": "0" * 64}
    }
    recording = made(tmp_path / "recording", ends=gone)
    with pytest.raises(
        RecordingError, match=r"head is read in place from .*; record with --portable to keep it"
    ):
        recording.end("head")


def rewritten(folder: Path, **changes: Any) -> None:
    value = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(value | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: remove(f / MANIFEST),
            "holds no recording.json: it was not finished: repeat its `draftgauge record",
        ),
        (lambda f: (f / MANIFEST).write_text("{"), "recording.json is not readable JSON"),
        (lambda f: (f / MANIFEST).write_text("[]"), "recording.json holds no JSON object"),
        (
            lambda f: rewritten(f, kind="draftgauge run"),
            "is 'draftgauge run' version 1; expected 'draftgauge rec",
        ),
        (
            lambda f: rewritten(f, version=2),
            "is 'draftgauge recording' version 2; expected 'draftgauge recording'",
        ),
        (lambda f: rewritten(f, plan={"taps": [1]}), "does not have the fields of version 1"),
        (lambda f: rewritten(f, items=[{"id": "a"}]), "does not have the fields of version 1"),
        (lambda f: rewritten(f, target={}), "does not have the fields of version 1: 'stop_token_ids'"),
    ],
)
def test_folders_that_are_no_complete_recording(
    damage: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    damage(made(tmp_path / "recording").path)
    with pytest.raises(RecordingError, match=message):
        open_recording(tmp_path / "recording")


def test_folders_that_are_none_at_all(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="gone is not a folder; `draftgauge recordings` lists"):
        open_recording(tmp_path / "gone")
    with pytest.raises(RecordingError, match=r"holds no recording.json: it is empty"):
        open_recording(tmp_path)


def test_a_folder_of_recordings_names_them(tmp_path: Path) -> None:
    made(tmp_path / "one")
    with pytest.raises(RecordingError, match=r"it is a folder of recordings; give one of them: one$"):
        open_recording(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("a")
    with pytest.raises(RecordingError, match=r"holds no recording.json: what is in it is not a recording$"):
        open_recording(tmp_path / "notes")


def test_complete_recordings_are_listed_by_name(tmp_path: Path) -> None:
    assert list_recordings(tmp_path / "nowhere") == []
    for name in ("two", "one", f"{PARTIAL}17-three"):
        made(tmp_path / name)
    (tmp_path / "unfinished").mkdir()
    item_file(tmp_path / "unfinished" / "00000.safetensors", 0)
    assert [recording.path.name for recording in list_recordings(tmp_path)] == ["one", "two"]


def test_a_damaged_or_foreign_recording_is_named_and_the_others_are_listed(tmp_path: Path) -> None:
    for name in ("good", "cut", "bytes", "lacking"):
        made(tmp_path / name)
    (tmp_path / "cut" / MANIFEST).write_text("{")
    (tmp_path / "bytes" / MANIFEST).write_bytes(b"\xff")
    lacking = json.loads((tmp_path / "lacking" / MANIFEST).read_text())
    (tmp_path / "lacking" / MANIFEST).write_text(json.dumps({**lacking, "plan": []}))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / MANIFEST).write_text('{"kind": "something else", "version": 1}')
    found = found_recordings(tmp_path)
    assert list(found) == ["bytes", "cut", "foreign", "good", "lacking"]
    assert [recording.path.name for recording in list_recordings(tmp_path)] == ["good"]
    reasons = {name: str(reason) for name, reason in found.items() if name != "good"}
    assert "is not readable JSON" in reasons["cut"]
    assert "is not readable JSON" in reasons["bytes"]
    assert "'something else' version 1" in reasons["foreign"]
    assert "does not have the fields of version 1" in reasons["lacking"]
