"""Prompt files: every form that is understood, every line that is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftgauge.errors import PromptError
from draftgauge.prompts import Prompt, PromptSet, read_prompts


def written(path: Path, *rows: Any) -> str:
    """A JSON-lines file of the rows; text goes in as it is."""
    file = path / "prompts.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(file)


def one(path: Path, row: Any) -> Prompt:
    return read_prompts(written(path, row)).prompts[0]


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": "Hello"}, (("user", "Hello"),)),
        ({"turns": ["Hello"]}, (("user", "Hello"),)),
        ({"question_id": 81, "category": "writing", "turns": ["Hello"]}, (("user", "Hello"),)),
        (
            {"messages": [turn("system", "Be brief"), turn("user", "Hello")]},
            (("system", "Be brief"), ("user", "Hello")),
        ),
        ({"conversations": [{"from": "human", "value": "Hello"}]}, (("user", "Hello"),)),
        # What the file's assistant answers in the end is left out, what it said before is the prompt's.
        (
            {
                "messages": [
                    turn("user", "1"),
                    turn("assistant", "2"),
                    turn("user", "3"),
                    turn("assistant", "4"),
                ]
            },
            (("user", "1"), ("assistant", "2"), ("user", "3")),
        ),
        (
            {"conversations": [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}]},
            (("user", "1"),),
        ),
        # A first message told again as `prompt`, as some sets have it.
        ({"prompt": "Hello", "messages": [turn("user", "Hello")]}, (("user", "Hello"),)),
    ],
)
def test_conversations(row: dict[str, Any], messages: tuple[tuple[str, str], ...], tmp_path: Path) -> None:
    prompt = one(tmp_path, row)
    assert prompt.messages == messages
    assert (prompt.prompt_ids, prompt.completion_ids) == (None, None)
    assert prompt.category == row.get("category")


@pytest.mark.parametrize(
    ("row", "prompt_ids", "completion_ids"),
    [
        ({"prompt_ids": [5, 6]}, (5, 6), None),
        ({"prompt_ids": [5, 6], "completion_ids": None}, (5, 6), None),
        ({"prompt_ids": [5, 6], "completion_ids": [7]}, (5, 6), (7,)),
        ({"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}, (5, 6), (7, 8)),
        ({"input_ids": [5, 6], "loss_mask": [False, True]}, (5,), (6,)),
    ],
)
def test_token_ids(
    row: dict[str, Any], prompt_ids: tuple[int, ...], completion_ids: tuple[int, ...] | None, tmp_path: Path
) -> None:
    prompt = one(tmp_path, row)
    assert (prompt.prompt_ids, prompt.completion_ids) == (prompt_ids, completion_ids)
    assert prompt.messages is None


def test_ids_are_the_files_own_or_the_lines_number(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "question_id": 7, "prompt": "1"},
        "",
        {"question_id": 7, "prompt": "2"},
        {"task_id": "HumanEval/0", "prompt": "3"},
        {"id": None, "prompt": "4"},
    ]
    assert [p.id for p in read_prompts(written(tmp_path, *rows)).prompts] == ["a", "7", "HumanEval/0", "5"]


def test_line_separators_within_a_string_do_not_end_the_line(tmp_path: Path) -> None:
    text = "one\u2028two\x0bthree\x85four"
    row = json.dumps({"prompt": text}, ensure_ascii=False)
    assert "\u2028" in row
    assert one(tmp_path, row).messages == (("user", text),)


@pytest.mark.parametrize("content", [b'\xef\xbb\xbf{"prompt": "Hello"}\n', b'{"prompt": "Hello"}\r\n\r\n'])
def test_byte_order_marks_and_windows_line_ends_are_no_content(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(content)
    assert [p.messages for p in read_prompts(str(tmp_path / "p.jsonl")).prompts] == [(("user", "Hello"),)]


def test_what_the_user_says_next_is_kept_in_order(tmp_path: Path) -> None:
    prompt = one(tmp_path, {"question_id": 81, "turns": ["Write.", "Shorter.", "In verse."]})
    assert prompt.messages == (("user", "Write."),)
    assert prompt.follow_ups == ("Shorter.", "In verse.")


def test_a_pretokenised_conversation_is_one_prompt_for_each_answer(tmp_path: Path) -> None:
    row = {"id": "c", "input_ids": [1, 2, 3, 4, 5, 6, 7], "loss_mask": [0, 0, 1, 1, 0, 1, 0]}
    first, second = read_prompts(written(tmp_path, row)).prompts
    assert (first.id, first.prompt_ids, first.completion_ids) == ("c/1", (1, 2), (3, 4))
    assert (second.id, second.prompt_ids, second.completion_ids) == ("c/2", (1, 2, 3, 4, 5), (6,))
    assert first.conversation == second.conversation == "c"


def test_turns_belong_to_the_identity_of_a_set(tmp_path: Path) -> None:
    rows = [
        {"turns": ["a"]},
        {"turns": ["a", "b"]},
        {"turns": ["a", "c"]},
        {"turns": ["a"], "conversation": 1},
    ]
    assert len({read_prompts(written(tmp_path, row)).digest for row in rows}) == len(rows)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 1 is not JSON: "),
        ("[1]", "line 1 is not a JSON object; expected "),
        ({"text": "Hello"}, 'line 1 has none of the known forms; expected {"prompt": "..."}, '),
        ({"prompt": ["Hello"]}, "has none of the known forms"),
        ({"turns": []}, "has none of the known forms"),
        ({"messages": []}, "has none of the known forms"),
        ({"messages": [turn("assistant", "Hello")]}, "has none of the known forms"),
        ({"input_ids": [5, 6]}, "has none of the known forms"),
        ({"turns": ["1", 2]}, "turns holds '2'; expected plain text"),
        (
            {"turns": [turn("user", "1")]},
            "turns holds \"{'role': 'user', 'content': '1'}\"; expected plain text",
        ),
        (
            {"messages": [turn("user", [{"type": "text"}])]},
            "content holds \"[{'type': 'text'}]\"; expected plain",
        ),
        ({"messages": [turn("user", None)]}, "content holds 'None'; expected plain text"),
        ({"messages": ["Hello"]}, "messages must hold objects with 'role' and 'content'"),
        ({"messages": [{"role": "user"}]}, "messages must hold objects with 'role' and 'content'"),
        ({"conversations": [turn("user", "1")]}, "conversations must hold objects with 'from' and 'value'"),
        (
            {"messages": [turn("user", "1"), turn("system", "2")]},
            "the last message is by 'system', expected the",
        ),
        ({"prompt_ids": []}, "prompt_ids must be a list of token ids, at least one"),
        ({"prompt_ids": "5 6"}, "prompt_ids must be a list of token ids"),
        ({"prompt_ids": [5, -1]}, "prompt_ids must be a list of token ids"),
        ({"prompt_ids": [5, True]}, "prompt_ids must be a list of token ids"),
        ({"prompt_ids": [[5, 6]]}, "prompt_ids must be a list of token ids"),
        ({"prompt_ids": [5], "completion_ids": []}, "completion_ids must be a list of token ids"),
        (
            {"input_ids": [5, 6], "loss_mask": [0, 0]},
            "loss_mask must be 0 on the prompt and 1 on the answers",
        ),
        ({"input_ids": [5, 6], "loss_mask": [1, 1]}, "loss_mask must be 0 on the prompt"),
        (
            {"input_ids": [5, 6, 7], "loss_mask": [0, 1]},
            "loss_mask must hold 0 or 1 for each of the 3 input_ids",
        ),
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 2]}, "loss_mask must hold 0 or 1 for each"),
        ({"input_ids": [5, 6, 7], "loss_mask": None}, "loss_mask must hold 0 or 1 for each"),
    ],
)
def test_lines_that_are_refused(row: Any, message: str, tmp_path: Path) -> None:
    source = written(tmp_path, row)
    with pytest.raises(PromptError) as caught:
        read_prompts(source)
    assert str(caught.value).startswith(f"{source}, line 1")
    assert message in str(caught.value)


def test_the_line_of_a_refusal_is_the_files(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="line 3 is not JSON"):
        read_prompts(written(tmp_path, {"prompt": "1"}, "", "nonsense"))


def test_files_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"nowhere.jsonl does not exist; give a path or builtin:coding10"):
        read_prompts("nowhere.jsonl")
    with pytest.raises(PromptError, match="holds no prompts; expected one JSON object a line: "):
        read_prompts(written(tmp_path, "", "  "))
    with pytest.raises(PromptError, match="two prompts have the id '2'; ids must differ"):
        read_prompts(written(tmp_path, {"id": 2, "prompt": "1"}, {"prompt": "2"}))
    with pytest.raises(PromptError, match="there is no built-in prompt set 'mtbench'; built in: coding10"):
        read_prompts("builtin:mtbench")
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(PromptError, match=r"cannot be read as UTF-8 text: .+; convert it"):
        read_prompts(str(tmp_path / "latin.jsonl"))


@pytest.mark.parametrize(("name", "count"), [("coding10", 10)])
def test_the_sets_that_ship_with_the_package(name: str, count: int) -> None:
    prompts = read_prompts(f"builtin:{name}")
    assert (prompts.name, len(prompts.prompts)) == (name, count)
    assert all(prompt.messages is not None and prompt.category for prompt in prompts.prompts)


def prompt_set(**changes: Any) -> PromptSet:
    plain = Prompt("a", category="x", messages=(("user", "Hello"),), prompt_ids=(1, 2), completion_ids=(3,))
    return PromptSet("name", (Prompt(**(vars(plain) | changes)),))


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "b"},
        {"category": None},
        {"messages": (("user", "Hallo"),)},
        {"messages": (("system", "Hello"),)},
        {"prompt_ids": (1, 3)},
        {"completion_ids": None},
    ],
)
def test_the_digest_sees_all_that_a_prompt_says(changes: dict[str, Any]) -> None:
    assert prompt_set(**changes).digest != prompt_set().digest


def test_the_digest_sees_the_order_and_not_the_name() -> None:
    two = (*prompt_set().prompts, *prompt_set(id="b").prompts)
    assert PromptSet("name", two).digest != PromptSet("name", two[::-1]).digest
    assert PromptSet("other", two).digest == PromptSet("name", two).digest


def test_the_first_prompts() -> None:
    prompts = PromptSet("name", tuple(Prompt(str(i)) for i in range(3)))
    assert [p.id for p in prompts.first(2).prompts] == ["0", "1"]
    assert len(prompts.first(9).prompts) == 3
    assert prompts.first(None) is prompts
    for count in (0, -1):
        with pytest.raises(PromptError, match=f"{count} prompts of name were asked for; expected 1 or more"):
            prompts.first(count)
