"""SGLang's own protocol: ids from either of their places, the reason of the end, hidden states however nested."""

import numpy as np
import pytest

from draftgauge.engines.sglang import GREEDY
from draftgauge.errors import AnswerError, EngineError
from tests.engine_servers import Sglang, completion, engine, states

IDS = (25, 159, 99, 118, 120)


def test_a_completion_is_the_targets_own() -> None:
    server = Sglang()
    with engine(server) as found:
        answer = found.complete(IDS, max_new_tokens=8)
        assert found.sampling == GREEDY
    assert answer.token_ids == completion(IDS, 8)
    assert answer.finish_reason == "length"
    assert answer.echoed == {"weight_version": "default"}
    assert answer.counts.histogram == (1, 0, 2, 0)
    assert (answer.counts.rounds, answer.counts.accepted_tokens) == (3, 4)
    (request,) = server.asked("/generate")
    assert request.body == {"input_ids": list(IDS), "sampling_params": {**GREEDY, "max_new_tokens": 8}}


def test_ids_that_come_only_with_log_probabilities_are_asked_for_so() -> None:
    server = Sglang(faults={"old"})
    with engine(server) as found:
        answer = found.complete(IDS, max_new_tokens=8)
    assert answer.token_ids == completion(IDS, 8)
    assert [request.body.get("return_logprob") for request in server.asked("/generate")] == [None, True]
    assert (answer.counts.accepted_tokens, answer.counts.drafted_tokens) == (4, 9)


def test_no_ids_at_all_is_an_error_of_the_server() -> None:
    with (
        engine(Sglang(faults={"no ids"})) as found,
        pytest.raises(EngineError, match="no token ids") as caught,
    ):
        found.complete(IDS, max_new_tokens=8)
    assert type(caught.value) is EngineError


def test_a_request_that_the_server_ended_is_an_error() -> None:
    with engine(Sglang(faults={"abort"})) as found, pytest.raises(AnswerError, match="Out of memory"):
        found.complete(IDS, max_new_tokens=8)


@pytest.mark.parametrize("faults", [set(), {"whole"}], ids=["chunks and a step", "one chunk"])
def test_hidden_states_are_rows_however_they_are_nested(faults: set[str]) -> None:
    server = Sglang(faults=faults)
    with engine(server) as found:
        seen = found.observe(IDS)
    np.testing.assert_array_equal(seen.states[: len(IDS), 0], states(IDS)[:, -1])
    assert seen.states.shape[0] == len(IDS) + (not faults)
    assert (seen.dtype, seen.token_ids) == ("F32", None)
    (request,) = server.asked("/generate")
    assert request.body["return_hidden_states"] is True


def test_a_server_without_the_flag_says_how_to_start_it() -> None:
    server = Sglang(faults={"no states"})
    with engine(server) as found, pytest.raises(EngineError, match="--enable-return-hidden-states"):
        found.observe(IDS)
    assert not server.asked("/generate")
