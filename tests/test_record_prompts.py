"""Recording a target: prompts and requests that are refused, and how conversations are rendered."""

from collections.abc import Mapping
from typing import Any

import pytest

from draftgauge.errors import PromptError, TargetError
from draftgauge.prompts import Prompt, PromptSet
from draftgauge.record import Request
from draftgauge.recording import ENDS, list_recordings, open_recording
from draftgauge.tensorfile import write_safetensors
from tests.golden import tensors_of
from tests.test_record import TEMPLATE, TinyTarget, only, recorded, tokens_of
from tests.test_target import tokenizer_in

WORDS = (("user", "w5 w7"),)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ({"prompt_ids": (300,)}, "a token id is outside the target's vocabulary of 256"),
        (
            {"prompt_ids": (3,), "completion_ids": (4, 256)},
            "a token id is outside the target's vocabulary of 256",
        ),
        ({"prompt_ids": (3,) * 500}, "500 prompt tokens and 40 new ones exceed the target's 512 positions"),
        (
            {"prompt_ids": (3,) * 500, "completion_ids": (4,) * 13},
            "500 prompt tokens and 13 new ones exceed the target's 512 positions",
        ),
        (
            {"prompt_ids": (3,), "completion_ids": (4,)},
            "the completion has 1 token(s); a round needs at least 2",
        ),
        (
            {"prompt_ids": (3,), "completion_ids": (23, 4)},
            "the completion has 1 token(s); a round needs at least 2",
        ),
        ({"messages": WORDS}, "the target has no tokenizer; give prompt_ids"),
    ],
)
def test_prompts_that_cannot_be_recorded_are_listed_with_the_reason(
    prompt: dict[str, Any], reason: str, tiny_target: TinyTarget
) -> None:
    prompts = PromptSet("two", (Prompt("bad", **prompt), Prompt("good", prompt_ids=(5, 9))))
    recording = recorded(tiny_target("targetA", stops=[23]), prompts)
    assert [item.id for item in recording.items] == ["good"]
    assert recording.failed == {"bad": reason}
    assert recording.produced["prompts_asked"] == 2
    assert open_recording(recording.path).failed == recording.failed


def test_no_prompt_at_all_is_an_error_that_lists_the_reasons(tiny_target: TinyTarget) -> None:
    prompts = PromptSet("p.jsonl", (Prompt("a", prompt_ids=(300,)), Prompt("b", messages=WORDS)))
    folder = tiny_target("targetA")
    with pytest.raises(PromptError) as caught:
        recorded(folder, prompts)
    assert str(caught.value).startswith("none of the 2 prompts of p.jsonl was recorded: ")
    assert "b: the target has no tokenizer" in str(caught.value)
    assert "a: a token id is outside" in str(caught.value)
    assert list_recordings(folder.parent / "recordings") == []


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (
            Request(taps=(1, 6)),
            TargetError,
            r"taps \[6\] do not exist: .* has layer outputs 0 to 5, and -1 for the",
        ),
        (Request(taps=(-2,)), TargetError, r"taps \[-2\] do not exist"),
        (Request(taps=(1, 1)), TargetError, r"taps \[1, 1\] must name at least one layer, and none twice"),
        (Request(taps=()), TargetError, r"taps \[\] must name at least one layer"),
        (
            Request(taps=(1,), dtype="float64"),
            TargetError,
            "dtype 'float64' of target .* is not computed with",
        ),
        (
            Request(taps=(1,), template="chatml"),
            PromptError,
            "template 'chatml' is unknown; expected one of chat, ",
        ),
    ],
)
def test_requests_that_are_refused(
    request_: Request, error: type[Exception], message: str, tiny_target: TinyTarget
) -> None:
    with pytest.raises(error, match=message):
        recorded(tiny_target("targetA"), request=request_)


def test_a_folder_without_weights_is_no_target(tiny_target: TinyTarget) -> None:
    folder = tiny_target("targetA")
    (folder / "model.safetensors").unlink()
    with pytest.raises(TargetError, match="holds no weights"):
        recorded(folder)
    with pytest.raises(TargetError, match=r"is not a Hugging Face directory with a config.json"):
        recorded(folder.parent / "nowhere")


def test_hidden_states_that_overflow_are_refused(tiny_target: TinyTarget) -> None:
    folder = tiny_target("targetA")
    arrays = {name: stored.to_float32() for name, stored in tensors_of("targetA").items()}
    arrays["model.layers.4.mlp.down_proj.weight"] *= 1e38
    arrays["model.layers.4.mlp.up_proj.weight"] *= 1e6
    write_safetensors(folder / "model.safetensors", arrays)
    given = only(prompt_ids=(5, 9), completion_ids=(7, 8))
    with pytest.raises(
        TargetError, match=r"hidden states on prompt p are not finite \(float32\); record with"
    ):
        recorded(folder, given)


# --- templates -----------------------------------------------------------------------------------------


# Renders w100 w<content> w101, and w102 or w103 where thinking is asked for or ruled out.
@pytest.mark.parametrize(
    ("template", "ids"),
    [
        ("chat", [100, 5, 7, 101]),
        ("chat-thinking", [100, 5, 7, 101, 102]),
        ("chat-no-thinking", [100, 5, 7, 101, 103]),
        ("raw", [5, 7]),
    ],
)
def test_a_conversation_is_rendered_as_asked(template: str, ids: list[int], tiny_target: TinyTarget) -> None:
    folder = tiny_target("targetA")
    tokenizer_in(folder, chat_template=TEMPLATE)
    request = Request(taps=(1,), max_new_tokens=4, template=template)
    recording = recorded(folder, only(messages=WORDS), request)
    (item,) = recording.items
    assert tokens_of(recording, "p")[: item.prompt_len] == ids
    words = [f"w{i}" for i in tokens_of(recording, "p")[item.prompt_len :]]
    assert item.text.split() == [{"w0": "<unk>", "w1": "<s>"}.get(word, word) for word in words]


SYSTEM: tuple[tuple[str, str], ...] = (("system", "w3"), *WORDS)


@pytest.mark.parametrize(
    ("template", "chat_template", "reason"),
    [
        ("chat", None, "the tokenizer has no chat template; use --template raw or give prompt_ids"),
        ("chat", TEMPLATE, "the chat template refuses the conversation: no system role here"),
        ("raw", TEMPLATE, "--template raw takes one message, the prompt has 2"),
    ],
)
def test_a_conversation_that_cannot_be_rendered_is_listed(
    template: str, chat_template: str | None, reason: str, tiny_target: TinyTarget
) -> None:
    folder = tiny_target("targetA")
    tokenizer_in(folder, chat_template=chat_template)
    prompts = PromptSet("two", (Prompt("bad", messages=SYSTEM), Prompt("good", prompt_ids=(5, 9))))
    recording = recorded(folder, prompts, Request(taps=(1,), max_new_tokens=4, template=template))
    assert recording.failed == {"bad": reason}


def test_an_empty_prompt_is_listed(tiny_target: TinyTarget) -> None:
    folder = tiny_target("targetA")
    tokenizer_in(folder)
    prompts = PromptSet("two", (Prompt("bad", messages=(("user", ""),)), Prompt("good", prompt_ids=(5, 9))))
    recording = recorded(folder, prompts, Request(taps=(1,), max_new_tokens=4, template="raw"))
    assert recording.failed == {"bad": "the prompt is empty"}


def test_the_names_of_the_ends_are_those_of_a_recording(tiny_target: TinyTarget) -> None:
    ends: Mapping[str, Any] = recorded(tiny_target("targetA")).target.ends
    assert tuple(ends) == ENDS


def test_every_turn_of_a_conversation_is_an_item_after_the_targets_own_answer(
    tiny_target: TinyTarget,
) -> None:
    folder = tiny_target("targetA", stops=[23])
    tokenizer_in(folder, chat_template=TEMPLATE)
    talk = Prompt("81", category="writing", messages=WORDS, follow_ups=("w9", "w11 w12"))
    prompts = PromptSet("two", (talk, Prompt("alone", prompt_ids=(5, 9))))
    request = Request(taps=(1, 3), max_new_tokens=4)
    recording = recorded(folder, prompts, request)
    assert [item.id for item in recording.items] == ["81/1", "81/2", "81/3", "alone"]
    assert [item.conversation for item in recording.items] == ["81", "81", "81", None]
    assert {item.category for item in recording.items[:3]} == {"writing"}
    first, second, third, _ = recording.items
    rendered = [100, 5, 7, 101]
    for item, more in ((first, []), (second, [100, 9, 101]), (third, [100, 11, 12, 101])):
        if more:
            rendered += more
        tokens = tokens_of(recording, item.id)
        assert tokens[: item.prompt_len] == rendered
        # The answer as text again, without the end of text; w0 and w1 are read back as unknown words.
        answer = [t if t > 1 else 0 for t in tokens[item.prompt_len :] if t != 2]
        rendered += [100, *answer, 101]
    again = recorded(folder, prompts, request)
    assert again.digest == recording.digest


def test_turns_that_cannot_follow_are_listed(tiny_target: TinyTarget) -> None:
    folder = tiny_target("targetA")
    refuses = "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}w100 w5"
    tokenizer_in(folder, chat_template=refuses)
    recording = recorded(
        folder, only(messages=WORDS, follow_ups=("w9",)), Request(taps=(1,), max_new_tokens=4)
    )
    assert [item.id for item in recording.items] == ["p/1"]
    assert recording.failed == {"p/2": "the chat template refuses the conversation: one turn only"}
