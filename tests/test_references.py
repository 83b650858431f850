"""References of an engine: what `record` makes of them, turns, resuming, and what one bad answer costs."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftgauge.engines.references import Wanted, engine_file, fetch_references, read_references
from draftgauge.errors import ConnectionLostError, EngineError, PromptError, StoreError
from draftgauge.prompts import Prompt, PromptSet, read_prompts
from draftgauge.record import Request, record_target
from draftgauge.recording import open_recording
from draftgauge.target import load_tokenizer
from draftgauge.tensorfile import read_safetensors
from tests.engine_servers import DROP, KEY, Sglang, StandIn, Vllm, completion, engine
from tests.test_record import TEMPLATE
from tests.test_target import tokenizer_in
from tests.tiny import NEW_TOKENS, PROMPTS, prompt_set, recording, workshop

WANTED = Wanted(max_new_tokens=NEW_TOKENS, concurrency=3)
SERVERS = {"vllm": Vllm, "sglang": Sglang}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_id(path: Path) -> Mapping[str, Any]:
    return {row["id"]: row for row in lines(path)}


@pytest.mark.parametrize("name", SERVERS)
def test_references_are_recorded_as_the_targets_own(name: str, tmp_path: Path) -> None:
    """The recording of an engine's references has the same tokens as one for which the target generated itself."""
    out = tmp_path / "refs.jsonl"
    with engine(SERVERS[name]()) as found:
        asked = fetch_references(found, prompt_set(), out=out, wanted=WANTED)
    assert (asked.asked, asked.there, asked.failed) == (len(PROMPTS), 0, {})
    assert set(by_id(out)) == set(PROMPTS)
    for prompt in prompt_set().prompts:
        row = by_id(out)[prompt.id]
        assert list(row) == [
            "id",
            "category",
            "conversation",
            "prompt_ids",
            "completion_ids",
            "finish_reason",
        ]
        assert row["category"] == prompt.category
        assert row["conversation"] is None
        assert row["finish_reason"] in ("stop", "length")
    request = Request(taps=(1,), max_new_tokens=NEW_TOKENS)
    root = tmp_path / "recordings"
    again = record_target(workshop() / "target", read_prompts(str(out)), request=request, root=root)
    own = {item.id: item for item in recording().items}
    for item in again.items:
        tokens = [
            read_safetensors(r.path / i.file)[0]["tokens"].sha256()
            for r, i in ((again, item), (recording(), own[item.id]))
        ]
        assert tokens[0] == tokens[1]
    assert open_recording(again.path).failed == {}


def test_who_answered_is_kept_beside_them(tmp_path: Path) -> None:
    out = tmp_path / "refs.jsonl"
    server = Vllm()
    with engine(server, key=KEY) as found:
        fetch_references(found, prompt_set(["one"]), out=out, wanted=WANTED)
        url = found.url
    kept = json.loads(engine_file(out).read_text())
    assert engine_file(out).name == "refs.jsonl.engine.json"
    assert (kept["url"], kept["engine"]) == (url, "openai")
    assert kept["facts"]["version"] == "0.11.2"
    assert kept["sampling"]["temperature"] == 0.0
    assert kept["echoed"] == {"model": "tiny"}
    assert kept["request"] == {"max_new_tokens": NEW_TOKENS, "template": "chat"}
    assert kept["prompts"] == {"name": "tiny.jsonl", "digest": prompt_set(["one"]).digest}
    assert len(kept["rendered"]) == 64
    assert KEY not in engine_file(out).read_text() + out.read_text()
    assert server.asked("/v1/completions")[0].headers["Authorization"] == f"Bearer {KEY}"


def test_a_repeated_command_asks_for_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "refs.jsonl"
    server = Vllm()
    with engine(server) as found:
        fetch_references(found, prompt_set(), out=out, wanted=WANTED)
        whole = by_id(out)
        text = out.read_bytes()
        ends = [i for i, byte in enumerate(text) if byte == ord("\n")]
        out.write_bytes(text[: ends[2] + 1 + 20])  # three rows, and a part of a fourth
        server.requests.clear()
        again = fetch_references(found, prompt_set(), out=out, wanted=WANTED)
        assert (again.asked, again.there) == (3, 3)
        assert len(server.asked("/v1/completions")) == 3
        assert by_id(out) == whole
        server.requests.clear()
        assert fetch_references(found, prompt_set(), out=out, wanted=WANTED).asked == 0
    assert not server.requests


def test_other_settings_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "refs.jsonl"
    longer = replace(WANTED, max_new_tokens=NEW_TOKENS + 1)
    with engine(Vllm()) as found:
        fetch_references(found, prompt_set(), out=out, wanted=WANTED)
        before = out.read_bytes()
        with pytest.raises(
            StoreError, match=r"request differ \(request was .*max_new_tokens.*choose another --out"
        ):
            fetch_references(found, prompt_set(), out=out, wanted=longer)
        with pytest.raises(StoreError, match="rendered differ"):
            fetch_references(found, prompt_set(["one"]), out=out, wanted=WANTED)
    with engine(Sglang()) as other, pytest.raises(StoreError, match="url, engine, facts, sampling differ"):
        fetch_references(other, prompt_set(), out=out, wanted=WANTED)
    assert out.read_bytes() == before


def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "refs.jsonl"
    out.write_text("mine\n")
    with engine(Vllm()) as found:
        with pytest.raises(StoreError, match=r"exists without refs\.jsonl\.engine\.json"):
            fetch_references(found, prompt_set(), out=out, wanted=WANTED)
        engine_file(out).write_text("[]")
        with pytest.raises(StoreError, match="was asked for in another way"):
            fetch_references(found, prompt_set(), out=out, wanted=WANTED)
        engine_file(out).write_text("{")
        with pytest.raises(StoreError, match="cannot be read"):
            fetch_references(found, prompt_set(), out=out, wanted=WANTED)
        blocked = tmp_path / "blocked"
        blocked.touch()
        with pytest.raises(StoreError, match="cannot be written"):
            fetch_references(found, prompt_set(), out=blocked / "refs.jsonl", wanted=WANTED)
    assert out.read_text() == "mine\n"


@pytest.mark.parametrize("name", SERVERS)
def test_a_wrong_count_costs_one_prompt(name: str, tmp_path: Path) -> None:
    out = tmp_path / "refs.jsonl"
    with engine(SERVERS[name](faults={"too many"})) as found:
        asked = fetch_references(found, prompt_set(["one", "pair", "three"]), out=out, wanted=WANTED)
    assert set(by_id(out)) == {"one", "three"}
    assert list(asked.failed) == ["pair"]
    assert "counted" in asked.failed["pair"] or "at most" in asked.failed["pair"]
    assert asked.as_dict()["failed"] == asked.failed


def test_what_passes_costs_nothing(tmp_path: Path) -> None:
    out = tmp_path / "refs.jsonl"
    with engine(Vllm(refusals=[(429, {"Retry-After": "0"}), DROP, (503, {})])) as found:
        asked = fetch_references(found, prompt_set(), out=out, wanted=WANTED)
    assert (asked.asked, asked.failed) == (len(PROMPTS), {})


def test_a_server_that_goes_away_leaves_what_came(tmp_path: Path) -> None:
    out = tmp_path / "refs.jsonl"
    server = Vllm()
    one_by_one = replace(WANTED, concurrency=1)
    with engine(server) as found:
        fetch_references(found, prompt_set(), out=tmp_path / "all.jsonl", wanted=one_by_one)
        server.answer, answer = refuse_after(server, 2), server.answer
        with pytest.raises(ConnectionLostError, match="same command"):
            fetch_references(found, prompt_set(), out=out, wanted=one_by_one)
        assert [row["id"] for row in lines(out)] == list(PROMPTS)[:2]
        server.answer = answer
        assert fetch_references(found, prompt_set(), out=out, wanted=one_by_one).asked == len(PROMPTS) - 2
    assert by_id(out) == by_id(tmp_path / "all.jsonl")


def refuse_after(server: StandIn, count: int) -> Any:
    """How the server answers so many completions, and then that it is not there."""
    answer, already = server.answer, len(server.asked("/v1/completions"))

    def some(request: Any) -> Any:
        late = len(server.asked("/v1/completions")) > already + count
        return (503, {"error": "going down"}) if late else answer(request)

    return some


def test_a_server_without_ids_ends_it_all(tmp_path: Path) -> None:
    out = tmp_path / "refs.jsonl"
    with engine(Vllm(faults={"no ids"})) as found, pytest.raises(EngineError, match="no token ids"):
        fetch_references(found, prompt_set(), out=out, wanted=WANTED)
    assert out.read_bytes() == b""
    assert not engine_file(out).exists()


CONVERSATION = Prompt("81", category="math", messages=(("user", "w5 w7"),), follow_ups=("w9", "w11 w12"))
PLAIN = Prompt("82", messages=(("user", "w30"),))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    tokenizer_in(tmp_path / "target", chat_template=TEMPLATE)
    return load_tokenizer(tmp_path / "target")


@pytest.mark.parametrize("name", SERVERS)
def test_turns_are_asked_one_after_another_with_the_servers_answers(
    name: str, tokenizer: Any, tmp_path: Path
) -> None:
    out = tmp_path / "refs.jsonl"
    prompts = PromptSet("talk", (CONVERSATION, PLAIN))
    wanted = Wanted(max_new_tokens=6)
    with engine(SERVERS[name]()) as found:
        asked = fetch_references(found, prompts, out=out, tokenizer=tokenizer, wanted=wanted)
        rows = by_id(out)
        assert (asked.asked, set(rows)) == (4, {"81/1", "81/2", "81/3", "82"})
        assert rows["82"]["conversation"] is None
        heard: list[int] = []
        for turn, said in enumerate(([5, 7], [9], [11, 12]), start=1):
            row = rows[f"81/{turn}"]
            ids = [*heard, 100, *said, 101]
            assert row["prompt_ids"] == ids
            assert row["completion_ids"] == list(completion(tuple(ids), 6))
            assert (row["conversation"], row["category"]) == ("81", "math")
            answer = tokenizer.decode(row["completion_ids"], skip_special_tokens=True)
            heard = [*ids, 100, *tokenizer(answer)["input_ids"], 101]
        # A conversation that stopped in its middle goes on with the answers that are there.
        text = [line for line in out.read_text().splitlines() if '"81/3"' not in line]
        out.write_text("\n".join(text) + "\n")
        assert fetch_references(found, prompts, out=out, tokenizer=tokenizer, wanted=wanted).asked == 1
    assert by_id(out) == rows


def test_turns_after_one_that_failed_are_listed(tokenizer: Any, tmp_path: Path) -> None:
    with engine(Vllm(faults={"too many"})) as found:
        asked = fetch_references(
            found, PromptSet("talk", (PLAIN, CONVERSATION)), out=tmp_path / "r.jsonl", tokenizer=tokenizer
        )
    assert list(asked.failed) == ["81/1", "81/2", "81/3"]
    assert asked.failed["81/3"] == "the turn before it failed (81/1)"


def test_prompts_that_cannot_be_rendered_are_refused_before_anything_is_asked(tmp_path: Path) -> None:
    server = Vllm()
    out = tmp_path / "refs.jsonl"
    with engine(server) as found:
        with pytest.raises(PromptError, match="the target has no tokenizer"):
            fetch_references(found, PromptSet("talk", (PLAIN,)), out=out)
        with pytest.raises(PromptError, match="template 'odd' is unknown"):
            fetch_references(found, prompt_set(), out=out, wanted=Wanted(template="odd"))
    assert not server.asked("/v1/completions")
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1 is not JSON"),
        ("[]\n", "line 1 is no reference"),
        ('{"id": "a", "prompt_ids": [1], "completion_ids": []}\n', "line 1 is no reference"),
        ('{"id": 3, "prompt_ids": [1], "completion_ids": [2]}\n', "line 1 is no reference"),
    ],
)
def test_rows_that_are_not_ours(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "refs.jsonl"
    path.write_text(text)
    with pytest.raises(PromptError, match=said):
        read_references(path)


def test_references_are_read_whatever_their_ids_hold(tmp_path: Path) -> None:
    odd = "a\u2028b\x85c"
    out = tmp_path / "refs.jsonl"
    with engine(Vllm()) as found:
        fetch_references(found, PromptSet("odd", (Prompt(odd, prompt_ids=(5,)),)), out=out, wanted=WANTED)
    assert [row["id"] for row in read_references(out)] == [odd]
    with pytest.raises(PromptError, match="cannot be read"):
        read_references(tmp_path / "none.jsonl")
