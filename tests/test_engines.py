"""The command `references`, on servers that answer like vLLM and SGLang."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from draftgauge.cli import cli
from draftgauge.engines.states import file_of
from draftgauge.errors import EngineError, IncompleteError, PromptError
from draftgauge.evaluate import evaluate_checkpoint
from tests.engine_servers import KEY, Sglang, Vllm, serving
from tests.test_record import TEMPLATE
from tests.test_target import tokenizer_in
from tests.tiny import NEW_TOKENS, PROMPTS, draftgauge, prompts_file, recording, workshop


def asked(*arguments: object, **variables: str) -> Result:
    return CliRunner().invoke(cli, ["references", *map(str, arguments)], env=variables)


def test_references_and_states_in_one_command(tmp_path: Path) -> None:
    prompts, out = prompts_file(tmp_path / "p.jsonl"), tmp_path / "refs.jsonl"
    command = ["--prompts", prompts, "--out", out, "--max-new-tokens", 10, "--states", tmp_path / "states"]
    server = Sglang()
    with serving(server):
        first = asked("--engine", server.url, *command, "--json", DRAFTGAUGE_API_KEY=KEY)
        again = asked("--engine", server.url, *command)
    assert first.exit_code == again.exit_code == 0, (first.output, again.output)
    told = json.loads(first.stdout)
    assert told["references"]["asked"] == told["states"]["asked"] == len(PROMPTS)
    assert told["references"]["engine"] == f"{out}.engine.json"
    assert again.stdout.splitlines() == [
        f"{out}: 0 asked for now, 6 there before",
        f"{tmp_path / 'states'}: 0 asked for now, 6 there before",
    ]
    assert (tmp_path / "states" / file_of(5)).is_file()
    assert {request.headers.get("Authorization") for request in server.requests} == {f"Bearer {KEY}", None}
    written = "".join(path.read_text() for path in tmp_path.glob("refs*")) + first.output
    assert KEY not in written


def test_words_are_rendered_by_the_targets_own_template(tmp_path: Path) -> None:
    target = tmp_path / "target"
    tokenizer_in(target, chat_template=TEMPLATE)
    prompts, out = tmp_path / "p.jsonl", tmp_path / "refs.jsonl"
    prompts.write_text('{"turns": ["w5", "w7"]}\n{"prompt": "w9"}\n')
    options = ["--prompts", prompts, "--out", out, "--template", "chat-no-thinking", "--num-prompts", 1]
    with serving(Vllm()) as server:
        done = asked("--engine", f"{server.url}/v1", "--tokenizer", target, *options)
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in rows] == ["1/1", "1/2"]
    assert rows[0]["prompt_ids"] == [100, 5, 101, 103]


@pytest.mark.parametrize(
    ("server", "error", "said"),
    [
        (Vllm(faults={"too many"}), IncompleteError, "some answers cannot be used: pair: the server"),
        (Vllm(faults={"no ids"}), EngineError, "no token ids"),
        (Sglang(said={"simulate_acc_len": 3.0}), EngineError, "simulates acceptance"),
    ],
    ids=["one answer", "no ids", "simulated"],
)
def test_what_cannot_be_used_has_its_exit_code(
    server: Any, error: type[Exception], said: str, tmp_path: Path
) -> None:
    prompts = prompts_file(tmp_path / "p.jsonl")
    with serving(server):
        done = asked("--engine", server.url, "--prompts", prompts, "--out", tmp_path / "refs.jsonl")
    assert type(done.exception) is error
    assert said in str(done.exception)


def test_words_without_a_tokenizer(tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "w9"}\n')
    with serving(Vllm()) as server:
        done = asked("--engine", server.url, "--prompts", prompts, "--out", tmp_path / "refs.jsonl")
    assert isinstance(done.exception, PromptError)


def test_an_engines_references_are_recorded_by_the_command_line(tmp_path: Path) -> None:
    prompts_file(tmp_path / "p.jsonl", ["one", "five"])
    with serving(Vllm()) as server:
        done = draftgauge(
            *("references", "--engine", server.url, "--prompts", "p.jsonl", "--out", "refs.jsonl"),
            cwd=tmp_path,
            DRAFTGAUGE_API_KEY=KEY,
        )
        assert done.returncode == 0, done.stderr
    command = [
        "record",
        "--target",
        workshop() / "target",
        "--prompts",
        "refs.jsonl",
        "--taps",
        "1,3",
        "--json",
    ]
    recorded = draftgauge(*command, cwd=tmp_path)
    assert recorded.returncode == 0, recorded.stderr
    assert {item["id"] for item in json.loads(recorded.stdout)["items"]} == {"one", "five"}
    assert KEY not in done.stdout + done.stderr


def test_a_drafter_is_measured_on_what_a_server_computed_as_on_what_was_recorded(tmp_path: Path) -> None:
    """References and states of a server, imported: every count is that of a recording of the target itself."""
    prompts_file(tmp_path / "p.jsonl")
    (tmp_path / "served").mkdir()
    fetched = (
        "--prompts",
        "p.jsonl",
        "--out",
        "refs.jsonl",
        "--max-new-tokens",
        NEW_TOKENS,
        "--states",
        "states",
    )
    with serving(Vllm(folder=tmp_path / "served")) as server:
        done = draftgauge(
            "references", "--engine", server.url, *fetched, cwd=tmp_path, DRAFTGAUGE_API_KEY=KEY
        )
    assert done.returncode == 0, done.stderr
    shop = workshop()
    command = (
        "recordings",
        "import",
        "states",
        "--target",
        shop / "target",
        "--checkpoint",
        shop / "drafter",
    )
    made = draftgauge(
        *command, "--prompts", "refs.jsonl", "--layers", "hidden_states=1,3,5", "--json", cwd=tmp_path
    )
    assert made.returncode == 0, made.stderr
    ours = evaluate_checkpoint(
        shop / "drafter", tmp_path / json.loads(made.stdout)["path"], root=tmp_path / "a"
    )
    theirs = evaluate_checkpoint(shop / "drafter", recording().path, root=tmp_path / "b")
    for slug, policy in theirs.summary["policies"].items():
        assert ours.summary["policies"][slug]["counts"] == policy["counts"]
    assert ours.summary["reference"] == theirs.summary["reference"]
