"""Importing features of other projects: the same integers as recording, and what is measured and refused."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from draftgauge.errors import DraftgaugeError, RecordingError, TargetError
from draftgauge.evaluate import Options, evaluate_checkpoint
from draftgauge.features import as_stored, as_torch
from draftgauge.importing import ImportRequest, import_features
from draftgauge.prompts import Prompt, PromptSet
from draftgauge.record import Request, record_target
from draftgauge.recording import AFTER_NORM, BEFORE_NORM, Recording
from draftgauge.runs import Run
from draftgauge.stated import Stated
from draftgauge.tensorfile import read_safetensors, write_safetensors
from tests import foreign, tiny

LAYERS: Mapping[str, tuple[int, ...]] = {"aux_hidden": (1,), "tap_hidden": (3,), "last_hidden": (5,)}


def imported(source: Path, root: Path, *, prompts: PromptSet | None = None, **said: Any) -> Recording:
    target = said.pop("target", tiny.workshop() / "target")
    request = ImportRequest(**{"taps": (1, 3), **said})
    return import_features(source, target, prompts=prompts, request=request, root=root)


def target_of(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor], **config: Any) -> Path:
    """The tiny target with its tensors changed."""
    target = tiny.target_dir(folder, stops=[tiny.STOP], **config)
    stored = read_safetensors(target / "model.safetensors")[0]
    tensors = {name: as_stored(change(name, as_torch(t).clone())) for name, t in stored.items()}
    write_safetensors(target / "model.safetensors", tensors)
    return target


def recorded(target: Path) -> Recording:
    request = Request(taps=(1, 3, 5), max_new_tokens=tiny.NEW_TOKENS)
    return record_target(target, tiny.prompt_set(), request=request, root=target.parent / "recordings")


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    folder = tmp_path_factory.mktemp("bfloat16") / "target"
    return recorded(target_of(folder, lambda _, t: t.bfloat16(), dtype="bfloat16"))


def uneven(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A final norm whose weights differ: before it and after it are not the same up to a factor."""
    generator = torch.Generator().manual_seed(3)
    return torch.rand(tensor.shape, generator=generator) * 3 if name == "model.norm.weight" else tensor


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return recorded(target_of(tmp_path_factory.mktemp("skewed") / "target", uneven))


def integers(run: Run) -> dict[str, Any]:
    """All that is counted: every block, and every policy's counts."""
    table = run.blocks().to_pydict()
    names = [name for name in table if "log_prob" not in name]
    rows = sorted(zip(*(table[name] for name in names), strict=True), key=lambda row: (row[0], row[1]))
    return {"rows": rows, "counts": {s: p["counts"] for s, p in run.summary["policies"].items()}}


def measured(recording: Recording, root: Path) -> dict[str, Any]:
    drafter = tiny.workshop() / "drafter"
    return integers(evaluate_checkpoint(drafter, recording.path, root=root))


@pytest.mark.parametrize("form", [*foreign.WRITERS, "deepspec"])
def test_import_then_evaluate_is_record_then_evaluate(form: str, bfloat16: Recording, tmp_path: Path) -> None:
    known = bfloat16 if form == "deepspec" else tiny.recording()
    source = foreign.stored(form, tmp_path / "features", known)
    said = {"layers": LAYERS} if form == "loose" else {}
    made = imported(
        source, tmp_path / "recordings", prompts=tiny.prompt_set(), target=Path(known.target.path), **said
    )
    assert [item.id for item in made.items] == [item.id for item in known.items]
    assert made.failed == {}
    assert measured(made, tmp_path / "ours") == measured(known, tmp_path / "theirs")
    for ours, theirs in zip(made.items, known.items, strict=True):
        one, two = made.tensors(ours), known.tensors(theirs)
        assert torch.equal(as_torch(one.tokens), as_torch(two.tokens))
        for tap in (1, 3):
            assert torch.equal(as_torch(one.outputs[tap]), as_torch(two.outputs[tap]))
        assert (ours.prompt_len, ours.stopped) == (theirs.prompt_len, theirs.stopped)
        if form != "specforge_gz":  # which holds no last state
            assert ours.agreed == theirs.agreed


@pytest.mark.parametrize("form", ["specforge", "modelopt", "loose"])
@pytest.mark.parametrize("after_norm", [True, False])
def test_how_the_last_state_is_to_be_read_is_measured(
    form: str, after_norm: bool, skewed: Recording, tmp_path: Path
) -> None:
    source = foreign.stored(form, tmp_path / "features", skewed, after_norm=after_norm)
    said = {"layers": LAYERS} if form == "loose" else {}
    made = imported(
        source, tmp_path / "recordings", prompts=tiny.prompt_set(), target=Path(skewed.target.path), **said
    )
    assert made.plan.last_layer == (AFTER_NORM if after_norm else BEFORE_NORM)
    shares = made.produced["imported"]["last_state"]["shares"]
    assert shares[made.plan.last_layer] == 1.0
    assert max(share for name, share in shares.items() if name != made.plan.last_layer) < 1.0
    assert made.agreement == 1.0


def test_a_last_layer_after_the_norm_is_not_given_for_one_before_it(
    skewed: Recording, tmp_path: Path
) -> None:
    source = foreign.stored("modelopt", tmp_path / "features", skewed, taps=(1, 3), after_norm=True)
    said: dict[str, Any] = {"prompts": tiny.prompt_set(), "taps": (1, 5), "target": Path(skewed.target.path)}
    said["layers"] = {"aux_hidden_states": (1, 3), "hidden_states": (5,)}
    made = imported(source, tmp_path / "recordings", **said)
    drafter = tiny.drafter_dir(
        tmp_path / "before",
        dflash_config={**tiny.drafter_config()["dflash_config"], "target_layer_ids": [1, 5]},
    )
    before = Options(stated=Stated(wiring={"tap_after_final_norm": False}))
    with pytest.raises(
        RecordingError, match=r"holds the last layer, 5, after the final norm, and the drafter reads"
    ):
        evaluate_checkpoint(drafter, made.path, before, root=tmp_path / "runs")
    after = evaluate_checkpoint(drafter, made.path, root=tmp_path / "runs")
    raw = imported(foreign.stored("modelopt", tmp_path / "raw", skewed), tmp_path / "recordings", **said)
    assert raw.plan.last_layer == BEFORE_NORM
    assert integers(after) == integers(evaluate_checkpoint(drafter, raw.path, root=tmp_path / "others"))


def test_a_norm_that_scales_by_one_more_is_found_by_measurement(skewed: Recording, tmp_path: Path) -> None:
    """The target's file holds w - 1, as some architectures store their norms; what it computes is the same."""
    target = target_of(tmp_path / "target", lambda n, t: uneven(n, t) - 1 if n == "model.norm.weight" else t)
    source = foreign.stored("vllm", tmp_path / "features", skewed)
    made = imported(source, tmp_path / "recordings", prompts=tiny.prompt_set(), target=target)
    assert made.produced["imported"]["last_state"]["norm_plus_one"] is True
    assert made.target.ends["norm"]["file"] == "ends.safetensors"
    assert made.agreement == 1.0
    assert torch.allclose(as_torch(made.end("norm")), as_torch(skewed.end("norm")), atol=1e-6)


def test_features_without_a_last_state_say_that_the_references_are_not_verified(tmp_path: Path) -> None:
    source = foreign.stored("specforge_gz", tmp_path / "features", tiny.recording())
    made = imported(source, tmp_path / "recordings")
    assert made.agreement is None
    run = evaluate_checkpoint(tiny.workshop() / "drafter", made.path, root=tmp_path / "runs")
    assert "references-unverified" in {caveat["slug"] for caveat in run.summary["caveats"]}
    verdicts = {c["slug"]: c["verdict"] for c in run.summary["trust"]["controls"]}
    assert verdicts["final-state"] == verdicts["references-own"] == "skipped"
    assert run.summary["reference"]["reference_agreement"] is None


def test_prompts_without_features_are_said(tmp_path: Path) -> None:
    source = foreign.stored("vllm", tmp_path / "features", tiny.recording(), names=["one", "long"])
    made = imported(source, tmp_path / "recordings", prompts=tiny.prompt_set())
    assert [item.id for item in made.items] == ["one", "long"]
    assert made.failed == dict.fromkeys(
        ("five", "pair", "three", "four"), "no features of it are in the source"
    )
    assert made.produced["prompts_asked"] == 6


def test_the_same_question_is_answered_once_and_other_features_are_another(tmp_path: Path) -> None:
    root = tmp_path / "recordings"
    first = imported(
        foreign.stored("vllm", tmp_path / "a", tiny.recording()), root, prompts=tiny.prompt_set()
    )
    again = imported(tmp_path / "a", root, prompts=tiny.prompt_set())
    assert (again.path, again.digest) == (first.path, first.digest)
    other = foreign.stored("vllm", tmp_path / "b", tiny.recording(), after_norm=True)
    assert imported(other, root, prompts=tiny.prompt_set()).path != first.path


def test_a_damaged_file_costs_itself_alone(tmp_path: Path) -> None:
    source = foreign.stored("vllm", tmp_path / "features", tiny.recording())
    whole = (source / "hs_long.safetensors").read_bytes()
    (source / "hs_long.safetensors").write_bytes(whole[: len(whole) // 2])
    (source / "notes.pt").write_bytes(b"not a torch file")
    made = imported(source, tmp_path / "recordings", prompts=tiny.prompt_set())
    assert "long" not in {item.id for item in made.items}
    assert "truncated or still being written" in made.failed["hs_long"]
    assert "notes" in made.failed


def test_a_file_whose_writer_holds_its_lock_is_left_for_later(tmp_path: Path) -> None:
    from filelock import FileLock

    source = foreign.stored("vllm", tmp_path / "features", tiny.recording(), names=["one", "long"])
    with FileLock(source / "hs_one.safetensors.lock"):
        made = imported(source, tmp_path / "recordings", prompts=tiny.prompt_set())
    assert made.failed["hs_one"].endswith("is held; import again later")
    assert [item.id for item in made.items] == ["long"]


Change = Mapping[str, Any]


def changed(recording: Recording, name: str, folder: Path, **tensors: Any) -> Path:
    """One item as vLLM stores it, with other tensors."""
    _, tokens, _, taps, last = foreign.parts(recording, recording.item(name), (1, 3))
    states = torch.cat((taps, last[None])).permute(1, 0, 2).contiguous()
    made = {"hidden_states": states, "token_ids": tokens} | {k: f(states, tokens) for k, f in tensors.items()}
    folder.mkdir()
    write_safetensors(folder / f"hs_{name}.safetensors", {k: as_stored(t) for k, t in made.items()})
    return folder


WRONG: Mapping[str, tuple[Change, str]] = {
    "rows of a cached prefix missing": (
        {"hidden_states": lambda states, _: states[5:]},
        "a server's prefix cache shortens what it returns",
    ),
    "one tap too few": (
        {"hidden_states": lambda states, _: states[:, 1:].contiguous()},
        "the drafter reads 2 taps, [1, 3]; ",
    ),
    "transposed": (
        {"hidden_states": lambda states, _: states.permute(1, 2, 0).contiguous()},
        "It looks transposed",
    ),
    "another target's width": (
        {"hidden_states": lambda states, _: states[..., :60].contiguous()},
        "the drafter reads 2 taps",
    ),
    "ids out of range": ({"token_ids": lambda _, tokens: tokens + 1000}, "begins with none of the 6 prompts"),
    "another sequence's": (
        {"hidden_states": lambda states, _: states.roll(7, dims=0)},
        "does not give the references through the norm and head",
    ),
    "shifted by one": (
        {"hidden_states": lambda states, _: torch.cat((states[1:], states[-1:]))},
        "the states are stored one position early",
    ),
    "no floats": ({"hidden_states": lambda states, _: states.long()}, "holds no hidden states"),
    "token ids that are none": (
        {"token_ids": lambda _, tokens: tokens.float()[:, None]},
        "is F32; expected whole numbers",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_features_are_refused_by_name_with_what_was_expected(what: str, tmp_path: Path) -> None:
    change, message = WRONG[what]
    source = changed(tiny.recording(), "long", tmp_path / "features", **change)
    with pytest.raises(DraftgaugeError) as caught:
        imported(source, tmp_path / "recordings", prompts=tiny.prompt_set())
    assert message in str(caught.value)
    assert not (tmp_path / "recordings").exists() or not [*(tmp_path / "recordings").glob("*/recording.json")]


def test_what_a_loose_file_does_not_say_is_asked_for(tmp_path: Path) -> None:
    source = foreign.stored("loose", tmp_path / "features", tiny.recording())
    with pytest.raises(RecordingError) as caught:
        imported(source, tmp_path / "recordings", prompts=tiny.prompt_set())
    assert "aux_hidden [1, " in str(caught.value)
    assert "--layers aux_hidden=N --layers tap_hidden=N --layers last_hidden=N, layers counted from 0" in str(
        caught.value
    )
    with pytest.raises(RecordingError, match=r"--layers aux_hidden=1,3 says 2 layer\(s\) of 64; in"):
        imported(source, tmp_path / "recordings", prompts=tiny.prompt_set(), layers={"aux_hidden": (1, 3)})
    with pytest.raises(RecordingError, match=r"gives \[1\]: \[3\] missing"):
        imported(source, tmp_path / "recordings", prompts=tiny.prompt_set(), layers={"aux_hidden": (1,)})
    with pytest.raises(RecordingError, match=r"holds no states 'aux'; it holds aux_hidden"):
        imported(source, tmp_path / "recordings", prompts=tiny.prompt_set(), layers={"aux": (1,)})


def test_a_sequence_that_nothing_says_the_prompt_of_is_refused(tmp_path: Path) -> None:
    source = foreign.stored("vllm", tmp_path / "features", tiny.recording())
    with pytest.raises(
        RecordingError, match="does not say where its prompt ends, having no loss_mask; give the"
    ):
        imported(source, tmp_path / "recordings")
    assert (
        imported(foreign.stored("modelopt", tmp_path / "masked", tiny.recording()), tmp_path / "r").agreement
        == 1
    )


def test_a_target_of_which_only_the_ends_are_there_is_enough(tmp_path: Path) -> None:
    target = tiny.target_dir(tmp_path / "target", stops=[tiny.STOP])
    stored = read_safetensors(target / "model.safetensors")[0]
    ends = {n: t for n, t in stored.items() if "layers" not in n}
    write_safetensors(
        target / "part.safetensors", {n: as_stored(as_torch(t).clone()) for n, t in ends.items()}
    )
    (target / "model.safetensors").unlink()
    source = foreign.stored("vllm", tmp_path / "features", tiny.recording())
    made = imported(source, tmp_path / "recordings", prompts=tiny.prompt_set(), target=target, portable=True)
    assert {end["file"] for end in made.target.ends.values()} == {"ends.safetensors"}
    assert measured(made, tmp_path / "ours") == measured(tiny.recording(), tmp_path / "theirs")
    (target / "part.safetensors").unlink()
    with pytest.raises(TargetError, match="holds no embedding and no head and no norm in its 0 safetensors"):
        imported(source, tmp_path / "others", prompts=tiny.prompt_set(), target=target)


def test_the_template_is_measured(tmp_path: Path) -> None:
    from tests.test_record import TEMPLATE
    from tests.test_target import tokenizer_in

    target = tiny.target_dir(tmp_path / "target", stops=[tiny.STOP])
    tokenizer_in(target, chat_template=TEMPLATE)
    words = PromptSet(
        "words", (Prompt("a", messages=(("user", "w5 w7"),)), Prompt("b", messages=(("user", "w9"),)))
    )
    request = Request(taps=(1, 3), max_new_tokens=8, template="chat-no-thinking")
    recorded = record_target(target, words, request=request, root=tmp_path / "recorded")
    source = foreign.stored("vllm", tmp_path / "features", recorded)
    made = imported(source, tmp_path / "recordings", prompts=words, target=target)
    assert made.plan.template == "chat-no-thinking"
    assert made.produced["imported"]["template"].startswith("measured: 2 sequence(s)")
    assert [i.text for i in made.items] == [i.text for i in recorded.items]
    with pytest.raises(RecordingError, match=r"begins with none of the 2 prompts \(templates tried: raw\)"):
        imported(source, tmp_path / "others", prompts=words, target=target, template="raw")


def test_a_conversation_is_imported_turn_by_turn(tmp_path: Path) -> None:
    one, two = (foreign.parts(tiny.recording(), tiny.recording().item(n), (1, 3)) for n in ("long", "five"))
    _, tokens, _, taps, last = one
    mask = torch.zeros(len(tokens), dtype=torch.long)
    mask[[24, 25, 26, 30, 31, 32, 33]] = 1
    (tmp_path / "features").mkdir()
    foreign.modelopt(tmp_path / "features", "talk", tokens, mask, taps, last)
    foreign.modelopt(tmp_path / "features", *two)
    made = imported(tmp_path / "features", tmp_path / "recordings")
    assert [(i.id, i.conversation, i.prompt_len, i.length) for i in made.items if i.conversation] == [
        ("talk/1", "talk", 24, 27),
        ("talk/2", "talk", 30, 34),
    ]
    run = evaluate_checkpoint(tiny.workshop() / "drafter", made.path, root=tmp_path / "runs")
    assert run.summary["policies"]["chain"]["units"] == 2


def test_the_manifest_of_an_import_says_where_it_is_from(tmp_path: Path) -> None:
    source = foreign.stored("vllm", tmp_path / "features", tiny.recording())
    made = imported(source, tmp_path / "recordings", prompts=tiny.prompt_set())
    said = json.loads((made.path / "recording.json").read_text())["produced"]["imported"]
    assert said["source"] == str(source)
    assert said["forms"] == ["vllm"]
    assert dataclasses.asdict(made.plan)["source"]
