"""Recording a target: what lies on disk, what happens when it is killed, and what the same question gives."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftgauge.drafters import as_torch
from draftgauge.errors import RecordingError, StoreError
from draftgauge.prompts import Prompt, PromptSet
from draftgauge.record import Request, record_target
from draftgauge.recording import ENDS, MANIFEST, Recording, list_recordings, open_recording
from draftgauge.store import PARTIAL, locked, sha256_file
from draftgauge.target import load_target, observe
from draftgauge.tensorfile import write_safetensors
from tests.golden import tensors_of
from tests.test_target import tokenizer_in

TinyTarget = Callable[..., Path]
E2E = Path(__file__).parent / "golden_e2e"
GOLDEN = {name: json.loads((E2E / f"draftA8_{name}.json").read_text()) for name in ("P1", "P33", "P5")}
PROMPTS = PromptSet("golden", tuple(Prompt(n, prompt_ids=tuple(g["prompt_ids"])) for n, g in GOLDEN.items()))
REQUEST = Request(taps=(1, 3), max_new_tokens=40)

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "w100 {{ m.content }} w101 {% endfor %}"
    "{% if enable_thinking is defined %}{{ 'w102' if enable_thinking else 'w103' }}{% endif %}"
)


class Labels:
    """A progress that shows nothing and remembers which work was done, and how much of it."""

    def __init__(self) -> None:
        self.total: dict[str, int] = {}

    def __call__(
        self, items: Iterable[Any], *, label: str, total: int | None = None, unit: str = "it"
    ) -> Iterable[Any]:
        self.total[label] = total or 0
        return items


def recorded(
    folder: Path, prompts: PromptSet = PROMPTS, request: Request = REQUEST, **more: Any
) -> Recording:
    return record_target(folder, prompts, request=request, root=folder.parent / "recordings", **more)


def tokens_of(recording: Recording, name: str) -> list[int]:
    return as_torch(recording.tensors(recording.item(name)).tokens).tolist()


def contents(folder: Path) -> dict[str, str]:
    """The digest of every file of a recording."""
    return {path.name: sha256_file(path) for path in sorted(folder.iterdir()) if path.is_file()}


def only(**prompt: Any) -> PromptSet:
    return PromptSet("one", (Prompt("p", **prompt),))


def functions_called(call: Callable[[], object]) -> set[str]:
    """The names of all Python functions that run during the call."""
    names: set[str] = set()
    sys.setprofile(lambda frame, event, _: names.add(frame.f_code.co_name) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


# --- what is recorded ----------------------------------------------------------------------------------


def test_greedy_completions_and_what_the_target_showed(tiny_target: TinyTarget) -> None:
    folder = tiny_target("targetA")
    recording = recorded(folder)
    assert [item.id for item in recording.items] == ["P1", "P33", "P5"]
    assert recording.failed == {}
    assert recording.agreement == 1.0
    assert recording.path.name == recording.plan.digest
    target = load_target(folder)
    for item in recording.items:
        assert tokens_of(recording, item.id) == GOLDEN[item.id]["target_greedy_ids"]
        assert (item.completion_len, item.agreed, item.near_ties, item.worst_gap) == (40, 40, 0, 0.0)
        assert (item.prompt_len, item.stopped, item.text) == (len(GOLDEN[item.id]["prompt_ids"]), False, "")
        seen = observe(target, tokens_of(recording, item.id), taps=(1, 3))
        tensors = recording.tensors(item)
        assert torch.equal(as_torch(tensors.taps), seen.taps)
        assert torch.equal(as_torch(tensors.final), seen.final)
    assert recording.target.architecture == "Qwen3ForCausalLM"
    assert (recording.target.num_layers, recording.target.hidden_size, recording.target.vocab_size) == (
        6,
        64,
        256,
    )
    assert recording.produced["prompts_asked"] == 3


def test_a_recording_is_open_to_whoever_reads_the_folder(tiny_target: TinyTarget) -> None:
    recording = recorded(tiny_target("targetA"))
    assert open_recording(recording.path) == recording
    assert list_recordings(recording.path.parent) == [recording]
    names = {"00000.safetensors", "00001.safetensors", "00002.safetensors", MANIFEST, ".lock"}
    assert set(contents(recording.path)) == names


def test_generation_ends_at_the_stop_token(tiny_target: TinyTarget) -> None:
    recording = recorded(tiny_target("targetA", stops=[23]))
    assert recording.target.stop_token_ids == (23,)
    for item in recording.items:
        whole = GOLDEN[item.id]["target_greedy_ids"]
        end = whole.index(23, item.prompt_len) + 1
        assert tokens_of(recording, item.id) == whole[:end]
        assert (item.stopped, item.length, item.agreed) == (True, end, end - item.prompt_len)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_batch_changes_no_byte(batch_size: int, tiny_target: TinyTarget) -> None:
    folder = tiny_target("targetA")
    one = recorded(folder)
    other = record_target(
        folder,
        PROMPTS,
        request=dataclasses.replace(REQUEST, batch_size=batch_size),
        root=folder.parent / "other",
    )
    assert [item.sha256 for item in one.items] == [item.sha256 for item in other.items]
    assert other.digest == one.digest


def test_completions_that_the_file_gives_are_kept_and_measured(tiny_target: TinyTarget) -> None:
    folder = tiny_target("targetA")
    prompt, own = tuple(GOLDEN["P5"]["prompt_ids"]), tuple(GOLDEN["P5"]["target_greedy_ids"][5:])
    # The target's own text but for one token: that one disagrees, what follows may.
    foreign = (*own[:10], (own[10] + 1) % 256, *own[11:])
    prompts = PromptSet(
        "given",
        (
            Prompt("own", prompt_ids=prompt, completion_ids=own),
            Prompt("foreign", prompt_ids=prompt, completion_ids=foreign),
        ),
    )
    recording = recorded(folder, prompts, dataclasses.replace(REQUEST, max_new_tokens=5))
    assert tokens_of(recording, "own") == [*prompt, *own]
    assert tokens_of(recording, "foreign") == [*prompt, *foreign]
    assert recording.item("own").agreed == 40
    target = load_target(folder)
    with torch.inference_mode():
        logits = target.model(torch.tensor([[*prompt, *foreign]])).logits[0, 4:-1]
    gaps = logits.max(dim=1).values - logits.gather(1, torch.tensor(foreign)[:, None])[:, 0]
    item = recording.item("foreign")
    assert item.agreed == int((logits.argmax(dim=1) == torch.tensor(foreign)).sum()) < 40
    assert item.worst_gap == pytest.approx(float(gaps.max()), abs=1e-4)
    assert item.near_ties == 0
    agreement = recording.agreement
    assert agreement is not None
    assert agreement == (40 + item.agreed) / 80


# How far below the best logit the reference's lies, as a share of it, and what that is counted as.
@pytest.mark.parametrize(("share", "agreed", "near_ties"), [(0.0, 2, 0), (1e-5, 1, 1), (0.01, 1, 0)])
def test_a_reference_just_below_the_best_token_is_a_near_tie(
    share: float, agreed: int, near_ties: int, tiny_target: TinyTarget
) -> None:
    folder = tiny_target("targetA")
    prompt, (first, second) = GOLDEN["P5"]["prompt_ids"], GOLDEN["P5"]["target_greedy_ids"][5:7]
    arrays = {name: stored.to_float32() for name, stored in tensors_of("targetA").items()}
    arrays["lm_head.weight"][200] = arrays["lm_head.weight"][second] * (1 - share)
    write_safetensors(folder / "model.safetensors", arrays)
    best = float(load_target(folder).model(torch.tensor([[*prompt, first]])).logits[0, -1, second])
    recording = recorded(folder, only(prompt_ids=tuple(prompt), completion_ids=(first, 200)))
    (item,) = recording.items
    assert (item.agreed, item.near_ties) == (agreed, near_ties)
    assert item.worst_gap == pytest.approx(best * share, abs=1e-5)


def test_a_given_completion_ends_where_the_targets_would(tiny_target: TinyTarget) -> None:
    prompts = only(prompt_ids=(5, 9), completion_ids=(7, 8, 23, 11))
    recording = recorded(tiny_target("targetA", stops=[23]), prompts)
    assert tokens_of(recording, "p") == [5, 9, 7, 8, 23]
    assert recording.items[0].stopped


def test_taps_are_recorded_in_the_order_asked_for_with_the_embedding_among_them(
    tiny_target: TinyTarget,
) -> None:
    folder = tiny_target("targetB")
    recording = recorded(folder, only(prompt_ids=(7, 9)), Request(taps=(4, -1, 0), max_new_tokens=3))
    tensors = recording.tensors(recording.items[0])
    taps, final = as_torch(tensors.taps), as_torch(tensors.final)
    table = as_torch(tensors_of("targetB")["model.embed_tokens.weight"])
    assert torch.equal(taps[1], table[as_torch(tensors.tokens).long()])
    assert torch.equal(taps[0], final)  # the last layer, before the norm
    target = load_target(folder)
    with torch.inference_mode():
        states = target.model(as_torch(tensors.tokens).long()[None], output_hidden_states=True).hidden_states
    torch.testing.assert_close(taps[2], states[1][0], rtol=0, atol=1e-6)
    torch.testing.assert_close(target.decoder.norm(final), states[-1][0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("taps", "around"),
    [((1, 3), (0, 2, 4)), ((0, 5), (-1, 1, 4)), ((-1,), (0,)), ((2, 3), (1, 4)), ((4, 5), (3,))],
)
def test_the_layers_beside_the_taps_are_recorded(
    taps: tuple[int, ...], around: tuple[int, ...], tiny_target: TinyTarget
) -> None:
    folder = tiny_target("targetA")
    request = Request(taps=taps, taps_around=True, max_new_tokens=3)
    recording = recorded(folder, request=request)
    assert recording.plan.around == around
    assert {item.around for item in recording.items} == {around}
    item = recording.item("P5")
    target = load_target(folder)
    outputs = recording.tensors(item).outputs
    seen = observe(target, tokens_of(recording, "P5"), taps=(*taps, *around))
    assert list(outputs) == [*taps, *around]
    for layer, expected in zip(outputs, seen.taps, strict=True):
        assert torch.equal(as_torch(outputs[layer]), expected)


def seven() -> PromptSet:
    """Seven prompts, of which the second cannot be recorded."""
    ids = [(3,), (300,), (4,), (5, 6), (7,), (8,), (9,)]
    return PromptSet("seven", tuple(Prompt(f"p{i}", prompt_ids=some) for i, some in enumerate(ids)))


def test_only_the_first_prompts_that_can_be_recorded_hold_the_layers_beside(tiny_target: TinyTarget) -> None:
    folder = tiny_target("targetA")
    request = Request(taps=(1, 3), taps_around=True, max_new_tokens=3, batch_size=2)
    wide, plain = (
        recorded(folder, seven(), dataclasses.replace(request, taps_around=on)) for on in (True, False)
    )
    assert [item.id for item in wide.items if item.around] == ["p0", "p2", "p3", "p4", "p5"]
    assert wide.path != plain.path
    # What holds no layers beside the taps is byte for byte what is recorded without asking for them.
    assert {i.id for i, j in zip(wide.items, plain.items, strict=True) if i.sha256 == j.sha256} == {"p6"}
    assert {item.around for item in plain.items} == {()}
    whole = contents(wide.path)
    for name in (MANIFEST, "00002.safetensors", "00006.safetensors"):
        (wide.path / name).unlink()
    again = recorded(folder, seven(), request)
    assert (again, contents(again.path)) == (wide, whole)


def test_what_may_explain_a_number_later_is_kept(tiny_target: TinyTarget) -> None:
    folder = tiny_target("targetA")
    tokenizer_in(folder, chat_template=TEMPLATE)
    recording = recorded(folder, request=dataclasses.replace(REQUEST, max_new_tokens=2))
    assert recording.target.rope_theta == 10000.0
    assert recording.target.special_tokens == {"<unk>": 0, "w2": 2}
    assert recording.produced["template_switches"] == ["enable_thinking"]
    files = recording.produced["target_files"]
    assert list(files)[:3] == ["model.safetensors", "config.json", "generation_config.json"]
    assert {"tokenizer.json", "tokenizer_config.json"} < set(files)
    for name, said in files.items():
        assert said == {"bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)}


def test_a_target_without_tokenizer_has_no_special_tokens(tiny_target: TinyTarget) -> None:
    recording = recorded(tiny_target("targetA"), request=dataclasses.replace(REQUEST, max_new_tokens=2))
    assert (recording.target.special_tokens, recording.produced["template_switches"]) == ({}, [])


def test_bfloat16_is_recorded_as_it_was_computed(tiny_target: TinyTarget) -> None:
    folder = tiny_target("targetA")
    recording = recorded(folder, request=dataclasses.replace(REQUEST, dtype="bfloat16"))
    assert recording.plan.dtype == "bfloat16"
    item = recording.item("P5")
    tensors = recording.tensors(item)
    assert (tensors.taps.dtype, tensors.final.dtype, tensors.tokens.dtype) == ("BF16", "BF16", "I32")
    seen = observe(load_target(folder, dtype="bfloat16"), tokens_of(recording, "P5"), taps=(1, 3))
    assert seen.taps.dtype == torch.bfloat16
    assert torch.equal(as_torch(tensors.taps), seen.taps)
    assert recording.tensors(item).final.to_float32().shape == (item.length, 64)
    # The file holds other values than a model that was narrowed to bfloat16.
    assert {recording.target.ends[name]["file"] for name in ENDS} == {"ends.safetensors"}
    head = as_torch(tensors_of("targetA")["lm_head.weight"])
    assert torch.equal(as_torch(recording.end("head")), head.bfloat16())


# --- the target's ends ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "head"), [("targetA", "lm_head.weight"), ("targetB", "model.embed_tokens.weight")]
)
def test_ends_are_found_in_the_targets_own_file(name: str, head: str, tiny_target: TinyTarget) -> None:
    folder = tiny_target(name)
    recording = recorded(folder)
    where = {end: (place["file"], place["name"]) for end, place in recording.target.ends.items()}
    file = str(folder.resolve() / "model.safetensors")
    assert where == {
        "embedding": (file, "model.embed_tokens.weight"),
        "head": (file, head),
        "norm": (file, "model.norm.weight"),
    }
    for end, (_, stored) in where.items():
        recording.verify_end(end)
        assert torch.equal(as_torch(recording.end(end)), as_torch(tensors_of(name)[stored]))


@pytest.mark.parametrize("name", ["targetA", "targetB"])
def test_a_portable_recording_needs_no_target(name: str, tiny_target: TinyTarget, tmp_path: Path) -> None:
    folder = tiny_target(name)
    recording = recorded(folder, request=dataclasses.replace(REQUEST, portable=True))
    shutil.rmtree(folder)
    moved = open_recording(shutil.move(recording.path, tmp_path / "moved"))
    for end, stored in {
        "embedding": "model.embed_tokens.weight",
        "head": "lm_head.weight" if name == "targetA" else "model.embed_tokens.weight",
        "norm": "model.norm.weight",
    }.items():
        moved.verify_end(end)
        assert torch.equal(as_torch(moved.end(end)), as_torch(tensors_of(name)[stored]))


def test_a_target_that_changed_is_noticed(tiny_target: TinyTarget) -> None:
    folder = tiny_target("targetA")
    recording = recorded(folder)
    arrays = {name: stored.to_float32() for name, stored in tensors_of("targetA").items()}
    arrays["lm_head.weight"] *= 2
    write_safetensors(folder / "model.safetensors", arrays)
    recording.verify_end("norm")
    with pytest.raises(RecordingError, match="the target's head has digest"):
        recording.verify_end("head")


# --- the same question ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_the_same_question_is_answered_without_the_model(dtype: str | None, tiny_target: TinyTarget) -> None:
    folder, request = tiny_target("targetA"), dataclasses.replace(REQUEST, dtype=dtype)
    answers: list[Recording] = []

    def ask() -> None:
        answers.append(recorded(folder, request=request))

    assert "load_target" in functions_called(ask)
    before = {path: path.stat() for path in answers[0].path.iterdir()}
    assert not {"load_target", "generate", "observe"} & functions_called(ask)
    assert answers[0] == answers[1]
    assert {path: path.stat() for path in answers[0].path.iterdir()} == before


def other_weights(folder: Path) -> None:
    arrays = {name: stored.to_float32() for name, stored in tensors_of("targetA").items()}
    arrays["model.norm.weight"] *= 2
    write_safetensors(folder / "model.safetensors", arrays)


def other_base(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_theta": 500.0}))


@pytest.mark.parametrize(
    "change",
    [
        other_weights,
        other_base,
        lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": [23]}'),
        tokenizer_in,
        lambda folder: tokenizer_in(folder, chat_template="{{ messages }}"),
    ],
)
def test_another_target_is_another_question(change: Callable[[Path], Any], tiny_target: TinyTarget) -> None:
    folder = tiny_target("targetA")
    first = recorded(folder)
    change(folder)
    assert recorded(folder).path != first.path


@pytest.mark.parametrize(
    "request_",
    [
        dataclasses.replace(REQUEST, taps=(1,)),
        dataclasses.replace(REQUEST, dtype="bfloat16"),
        dataclasses.replace(REQUEST, max_new_tokens=20),
        dataclasses.replace(REQUEST, template="raw"),
    ],
)
def test_another_request_is_another_question(request_: Request, tiny_target: TinyTarget) -> None:
    folder = tiny_target("targetA")
    assert recorded(folder, request=request_).path != recorded(folder).path


def test_a_recording_that_reads_ends_in_place_is_not_passed_off_as_portable(tiny_target: TinyTarget) -> None:
    folder = tiny_target("targetA")
    portable = dataclasses.replace(REQUEST, portable=True)
    path = recorded(folder).path
    with pytest.raises(
        RecordingError, match="is complete, but the target's embedding, head, norm are read in pl"
    ):
        recorded(folder, request=portable)
    shutil.rmtree(path)
    assert recorded(folder, request=portable).path == path
    assert recorded(folder).path == path  # a portable one also answers who does not ask for it


# --- killed, and repeated ------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [["00001.safetensors"], ["00000.safetensors", "00002.safetensors"]])
@pytest.mark.parametrize("batch_size", [16, 2])
def test_what_was_killed_completes_to_the_same_bytes(
    lost: list[str], batch_size: int, tiny_target: TinyTarget
) -> None:
    folder = tiny_target("targetA")
    request, labels = dataclasses.replace(REQUEST, batch_size=batch_size), Labels()
    first = recorded(folder, request=request, progress=labels)
    assert labels.total["record"] == 3
    whole = contents(first.path)
    untouched = {n: (first.path / n).stat() for n in whole if n.endswith("s") and n not in lost}
    for name in (MANIFEST, *lost):
        (first.path / name).unlink()
    (first.path / f"{PARTIAL}17-00001.safetensors").write_text("half")
    again = recorded(folder, request=request, progress=labels)
    assert labels.total["record"] == len(lost)
    assert again.digest == first.digest
    assert contents(again.path) == whole
    assert {n: (first.path / n).stat() for n in untouched} == untouched


KILLED = """
import os, sys, json
from pathlib import Path
from draftgauge.prompts import Prompt, PromptSet
from draftgauge.record import Request, record_target

def die_at_the_second(items, *, label, total=None, unit="it"):
    for i, item in enumerate(items):
        if label == "record" and i == 1:
            os._exit(9)
        yield item

prompts = PromptSet("golden", tuple(Prompt(n, prompt_ids=tuple(ids)) for n, ids in json.loads(sys.argv[2]).items()))
record_target(Path(sys.argv[1]), prompts, request=Request(taps=(1, 3), max_new_tokens=40),
       root=Path(sys.argv[1]).parent / "recordings", progress=die_at_the_second)
"""


def test_a_killed_process_leaves_what_the_next_one_completes(tiny_target: TinyTarget, tmp_path: Path) -> None:
    folder = tiny_target("targetA")
    ids = json.dumps({prompt.id: prompt.prompt_ids for prompt in PROMPTS.prompts})
    command = [sys.executable, "-c", KILLED, str(folder), ids]
    killed = subprocess.run(command, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert killed.returncode == 9
    assert list_recordings(tmp_path / "recordings") == []
    (path,) = (tmp_path / "recordings").iterdir()
    done = {file.name: file.stat() for file in path.glob("0*.safetensors")}
    assert len(done) == 1
    with pytest.raises(RecordingError, match="it was not finished: repeat its `draftgauge record` command"):
        open_recording(path)
    completed = recorded(folder)
    assert completed.path == path
    assert {name: (path / name).stat() for name in done} == done
    fresh = record_target(folder, PROMPTS, request=REQUEST, root=tmp_path / "fresh")
    assert completed.digest == fresh.digest


def test_a_damaged_item_of_an_unfinished_recording_is_named(tiny_target: TinyTarget) -> None:
    folder = tiny_target("targetA")
    path = recorded(folder).path
    (path / MANIFEST).unlink()
    item = path / "00001.safetensors"
    item.write_bytes(item.read_bytes()[:-1])
    with pytest.raises(
        RecordingError, match=r"00001.safetensors is damaged: .+; remove it and repeat the command"
    ):
        recorded(folder)


def test_a_recording_that_another_process_writes_is_left_to_it(tiny_target: TinyTarget) -> None:
    folder = tiny_target("targetA")
    path = recorded(folder).path
    (path / MANIFEST).unlink()
    with locked(path), pytest.raises(StoreError, match="is being written by another process; wait for it or"):
        recorded(folder)
