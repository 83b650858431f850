"""The OpenAI-compatible protocol as vLLM serves it: token ids in and out, greedy whatever the model's config says."""

from pathlib import Path

import numpy as np
import pytest

from draftgauge.errors import AnswerError, EngineError
from tests.engine_servers import MODEL, Vllm, completion, engine, states

IDS = (25, 159, 99, 118, 120)


def test_a_completion_is_the_targets_own() -> None:
    server = Vllm()
    with engine(server) as found:
        answer = found.complete(IDS, max_new_tokens=12)
    assert answer.token_ids == completion(IDS, 12)
    assert answer.finish_reason == "length"
    assert answer.echoed == {"model": MODEL}
    assert answer.counts.rounds is None
    (request,) = server.asked("/v1/completions")
    assert request.body == {
        "model": MODEL,
        "prompt": list(IDS),
        "max_tokens": 12,
        "return_token_ids": True,
        "stream": False,
        "temperature": 0.0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "n": 1,
    }


def test_a_completion_that_ends_says_so() -> None:
    with engine(Vllm()) as found:
        ends = [found.complete((token,), max_new_tokens=40) for token in range(20)]
    assert {answer.finish_reason for answer in ends} == {"stop", "length"}
    assert all(answer.token_ids[-1] == 23 for answer in ends if answer.finish_reason == "stop")


def test_counts_of_the_request_are_taken_where_the_server_gives_them() -> None:
    with engine(Vllm(faults={"per request"})) as found:
        counts = found.complete(IDS, max_new_tokens=8).counts
    # The prefill gives one token, the rounds 2 + 1, 0 + 1 and 2 + 1: a third accepted one would be one too many.
    assert counts.accepted_in_order == (2, 0, 2)
    assert counts.histogram == (1, 0, 2, 0)
    assert (counts.rounds, counts.accepted_tokens, counts.drafted_tokens) == (3, 4, 9)
    assert counts.completion_tokens == 8


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("no ids", EngineError, r"returned no token ids: it must know `return_token_ids`.*0\.10\.2"),
        ("wrong usage", AnswerError, "counted 9 completion tokens and returned the ids of 8"),
        ("other prompt", AnswerError, "read 6 prompt ids that are not the 5"),
    ],
)
def test_an_answer_that_cannot_be_used(fault: str, error: type[EngineError], said: str) -> None:
    with engine(Vllm(faults={fault})) as found, pytest.raises(error, match=said) as caught:
        found.complete(IDS, max_new_tokens=8)
    assert type(caught.value) is error


def test_a_prompt_that_is_too_long_is_refused_in_the_servers_words() -> None:
    with engine(Vllm()) as found, pytest.raises(AnswerError, match="maximum context length is 512 tokens"):
        found.complete((5,) * 510, max_new_tokens=8)


def test_hidden_states_come_from_the_connectors_file(tmp_path: Path) -> None:
    with engine(Vllm(folder=tmp_path)) as found:
        seen = found.observe(IDS)
    assert seen.dtype == "F32"
    np.testing.assert_array_equal(seen.states.view(np.float32), states(IDS))
    assert seen.token_ids is not None
    assert seen.token_ids.tolist() == list(IDS)


def test_a_server_without_the_connector_says_how_to_start_it() -> None:
    with engine(Vllm()) as found, pytest.raises(EngineError, match="ExampleHiddenStatesConnector"):
        found.observe(IDS)
