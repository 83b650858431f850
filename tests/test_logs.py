"""Logs and results of others: each form as its writer makes it, and what it does not say."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftgauge.engines.logs import read_log
from draftgauge.errors import EngineError
from tests.engine_servers import Sglang, Vllm, completion, rounds_of
from tests.tiny import PROMPTS

# 40 rounds that drafted 3 tokens each: 34, 24 and 10 of them accepted the first, second and third.
LINE = (
    "(APIServer pid=1) INFO 12-01 10:00:08 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: 2.70, "
    "Accepted throughput: 6.80 tokens/s, Drafted throughput: 12.00 tokens/s, Accepted: 68 tokens, "
    "Drafted: 120 tokens, Per-position acceptance rate: 0.850, 0.600, 0.250, Avg Draft acceptance rate: 56.7%\n"
)
OLDER = (
    "INFO 07-01 10:00:18 [metrics.py:86] SpecDecoding metrics: Draft acceptance rate: 50.0%, Mean acceptance length: "
    "2.00, Accepted: 10 tokens, Drafted: 20 tokens, Per-position acceptance rate: 0.700, 0.300\n"
)


def saved(folder: Path, value: Any, *, as_lines: bool = False) -> Path:
    path = folder / "file"
    path.write_text("".join(json.dumps(row) + "\n" for row in value) if as_lines else json.dumps(value))
    return path


def test_vllm_log_lines(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(f"INFO something else\n{LINE}INFO: 127.0.0.1 - POST /v1/completions 200\n{OLDER}")
    read = read_log(path)
    assert (read.convention, read.source) == ("pooled", "vLLM log")
    assert (read.rounds, read.accepted_tokens, read.drafted_tokens) == (50, 78, 140)
    assert read.accepted_per_depth == (41, 27, 10)
    assert (read.requests, read.completion_tokens, read.histogram, read.rows) == (None, None, None, ())
    assert "last interval" in read.doubts[0]


def test_rounds_that_the_printed_numbers_do_not_tell_are_unknown(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    text = (
        LINE.replace("2.70", "1.00").replace("68", "0").replace("0.850, 0.600, 0.250", "0.000, 0.000, 0.000")
    )
    path.write_text(text)
    read = read_log(path)
    assert (read.rounds, read.accepted_per_depth) == (None, None)
    assert (read.accepted_tokens, read.drafted_tokens) == (0, 120)
    assert "if every round drafted in full there were 40" in read.doubts[1]
    # Numbers that no count of rounds gives are not forced into one.
    path.write_text(LINE.replace("2.70", "2.90"))
    assert read_log(path).rounds is None


def test_vllm_bench(tmp_path: Path) -> None:
    said = {
        "completed": 8,
        "total_output_tokens": 900,
        "spec_decode_acceptance_rate": 56.67,
        "spec_decode_acceptance_length": 2.7,
        "spec_decode_num_drafts": 40,
        "spec_decode_draft_tokens": 120,
        "spec_decode_accepted_tokens": 68,
        "spec_decode_per_position_acceptance_rates": [34 / 40, 24 / 40, 10 / 40],
    }
    read = read_log(saved(tmp_path, said))
    assert (read.rounds, read.accepted_tokens, read.drafted_tokens) == (40, 68, 120)
    assert read.accepted_per_depth == (34, 24, 10)
    assert (read.requests, read.completion_tokens, read.histogram) == (8, 900, None)
    assert read.doubts
    bare = read_log(saved(tmp_path, {"spec_decode_num_drafts": 40}))
    assert (bare.rounds, bare.accepted_tokens, bare.accepted_per_depth, bare.requests) == (
        40,
        None,
        None,
        None,
    )
    with pytest.raises(EngineError, match="holds 2 runs"):
        read_log(saved(tmp_path, [said, said]))


def vllm_answers() -> list[Any]:
    server = Vllm(faults={"per request"})
    return [server.complete({"prompt": list(ids), "max_tokens": 20}) for ids in PROMPTS.values()]


def sglang_answers() -> list[Any]:
    body: dict[str, Any] = {"sampling_params": {"max_new_tokens": 20}}
    return [Sglang().generate({**body, "input_ids": list(ids)}) for ids in PROMPTS.values()]


@pytest.mark.parametrize("as_lines", [True, False], ids=["lines", "list"])
@pytest.mark.parametrize(
    ("answers", "convention"), [(vllm_answers, "pooled"), (sglang_answers, "sglang_request")]
)
def test_answers_of_the_engines(answers: Any, convention: str, as_lines: bool, tmp_path: Path) -> None:
    read = read_log(saved(tmp_path, answers(), as_lines=as_lines))
    outs = [completion(ids, 20) for ids in PROMPTS.values()]
    rounds = [n for out in outs for n in rounds_of(len(out))]
    assert read.convention == convention
    assert (read.requests, read.rounds, read.accepted_tokens) == (6, len(rounds), sum(rounds))
    assert read.completion_tokens == sum(map(len, outs))
    assert read.doubts == ()
    if convention == "sglang_request":
        assert [row.completion_ids for row in read.rows] == outs


def test_vllm_objects_by_themselves(tmp_path: Path) -> None:
    rows = [Vllm().per_request(20), Vllm().per_request(9)]
    read = read_log(saved(tmp_path, rows, as_lines=True))
    assert read.rounds == len(rounds_of(20)) + len(rounds_of(9))
    assert read.completion_tokens is None
    assert [row.id for row in read.rows] == ["1", "2"]


def test_rows_without_counts_are_a_doubt(tmp_path: Path) -> None:
    rows = [*sglang_answers(), {"text": "", "meta_info": {"completion_tokens": 3}}]
    assert read_log(saved(tmp_path, rows)).doubts == ("1 of 7 rows have no counts and are left out",)


def test_spec_bench(tmp_path: Path) -> None:
    """The lengths count the bonus: of 3 + 1 + 4 tokens in three rounds, 2 + 0 + 3 were drafted."""
    row = {
        "question_id": 81,
        "category": "writing",
        "choices": [{"index": 0, "turns": ["a", "b"], "new_tokens": [5, 4], "accept_lengths": [3, 1, 4]}],
    }
    read = read_log(saved(tmp_path, [row], as_lines=True))
    assert (read.convention, read.source) == ("pooled", "Spec-Bench")
    assert (read.rounds, read.accepted_tokens, read.completion_tokens) == (3, 5, 9)
    assert read.histogram == (1, 0, 1, 1)
    assert read.rows[0].id == "81"
    assert read.drafted_tokens is None


def ddtree() -> dict[str, Any]:
    def response(*lengths: int) -> dict[str, Any]:
        return {
            "acceptance_lengths": list(lengths),
            "num_output_tokens": sum(lengths) + 1,
            "num_input_tokens": 4,
        }

    one = {"baseline": response(1, 1, 1), "dflash": response(2, 1), "ddtree_tb16": response(3)}
    two = {"baseline": response(1, 1), "dflash": response(1, 1), "ddtree_tb16": response(1, 1)}
    return {"responses": [one, two], "block_size": 16, "args": {"dataset": "gsm8k"}}


def test_ddtree_results_are_read_method_by_method(tmp_path: Path) -> None:
    path = saved(tmp_path, ddtree())
    with pytest.raises(EngineError, match="holds the methods baseline, ddtree_tb16, dflash; name one"):
        read_log(path)
    with pytest.raises(
        EngineError, match="holds no method 'ddtree_tb32'; it holds baseline, ddtree_tb16, dflash"
    ):
        read_log(path, method="ddtree_tb32")
    read = read_log(path, method="ddtree_tb16")
    assert (read.convention, read.source) == ("ddtree", "DDTree results, ddtree_tb16")
    assert (read.rounds, read.accepted_tokens, read.completion_tokens) == (3, 2, 7)
    assert read.histogram == (2, 0, 1)
    assert [row.accepted_in_order for row in read.rows] == [(2,), (0, 0)]


@pytest.mark.parametrize("key", ["acceptance_lengths", "acceptance_length"])
def test_lengths_in_each_row(key: str, tmp_path: Path) -> None:
    read = read_log(saved(tmp_path, [{"id": "a", key: [3, 1]}, {"id": "b", key: [2]}], as_lines=True))
    assert (read.rounds, read.accepted_tokens, read.completion_tokens) == (3, 3, None)
    assert [row.id for row in read.rows] == ["a", "b"]


@pytest.mark.parametrize("lengths", [[3, 0], [2.5], "31"], ids=str)
def test_lengths_that_are_not_rounds_with_their_bonus(lengths: Any, tmp_path: Path) -> None:
    row = {"choices": [{"accept_lengths": lengths}]}
    with pytest.raises(EngineError, match=r"committed 0 tokens|not whole numbers"):
        read_log(saved(tmp_path, row))


@pytest.mark.parametrize("text", ["", "hello\n", "[]", '{"a": 1}', '{"acceptance_length": 3.2}', "[[1], 2]"])
def test_files_of_no_known_form(text: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(EngineError, match="is of no known form: expected"):
        read_log(path)
    with pytest.raises(EngineError, match="cannot be read"):
        read_log(tmp_path / "none")
