"""What a server counts: the same rounds by vLLM's counters and by SGLang's answers, and who else asked."""

from typing import Any

import pytest

from draftgauge.engines.served import COUNTED, fetch_served
from draftgauge.errors import EngineError, PromptError
from tests.engine_servers import DEPTH, Sglang, StandIn, Vllm, completion, engine, rounds_of
from tests.tiny import PROMPTS

COUNT = 20


def expected() -> dict[str, list[int]]:
    """The rounds of every prompt, accepted tokens each."""
    return {name: rounds_of(len(completion(ids, COUNT))) for name, ids in PROMPTS.items()}


def served(server: StandIn, **how: Any) -> Any:
    with engine(server) as found:
        return fetch_served(found, PROMPTS, max_new_tokens=COUNT, pause_s=0.0, **how)


def test_every_kind_of_engine_has_its_way_of_counting() -> None:
    from draftgauge.engines.kinds import KINDS

    assert KINDS.keys() == COUNTED.keys()


@pytest.mark.parametrize(
    ("server", "convention"),
    [
        (Vllm(), "pooled"),
        (Vllm(faults={"old names"}), "pooled"),
        (Vllm(faults={"per request"}), "pooled"),
        (Sglang(), "sglang_request"),
        (Sglang(faults={"old"}), "sglang_request"),
    ],
    ids=["vllm", "older names", "vllm per request", "sglang", "older sglang"],
)
@pytest.mark.parametrize("concurrency", [1, 3])
def test_the_rounds_of_our_prompts_are_counted(server: StandIn, convention: str, concurrency: int) -> None:
    whole = served(server, concurrency=concurrency)
    rounds = [n for accepted in expected().values() for n in accepted]
    assert whole.convention == convention
    assert whole.requests == len(PROMPTS)
    assert whole.rounds == len(rounds)
    assert whole.accepted_tokens == sum(rounds)
    assert whole.drafted_tokens == DEPTH * len(rounds)
    assert whole.completion_tokens == sum(len(completion(ids, COUNT)) for ids in PROMPTS.values())
    assert whole.histogram == tuple(rounds.count(n) for n in range(DEPTH + 1))
    assert whole.accepted_per_depth == tuple(sum(n > d for n in rounds) for d in range(DEPTH))
    assert [row.id for row in whole.rows] == list(PROMPTS)
    assert [row.completion_ids for row in whole.rows] == [completion(ids, COUNT) for ids in PROMPTS.values()]


def test_requests_are_told_apart_where_the_server_does() -> None:
    told = [len(accepted) for accepted in expected().values()]
    assert [row.rounds for row in served(Sglang()).rows] == told
    detailed = served(Vllm(faults={"per request"}))
    assert [list(row.accepted_in_order) for row in detailed.rows] == list(expected().values())
    assert {row.rounds for row in served(Vllm()).rows} == {None}


def test_doubts_are_kept_with_the_counts() -> None:
    (doubt,) = served(Vllm()).doubts
    assert doubt == "the server does not show its configuration, so simulated acceptance cannot be ruled out"
    assert served(Vllm(said={"speculative_config": {"method": "dflash"}})).doubts == ()
    assert served(Sglang()).doubts == ()


def test_one_more_request_goes_before_and_is_not_counted() -> None:
    server = Sglang()
    served(server)
    sizes = [request.body["sampling_params"]["max_new_tokens"] for request in server.asked("/generate")]
    assert sizes == [8] + [COUNT] * len(PROMPTS)


def test_traffic_of_others_voids_the_counters() -> None:
    with pytest.raises(EngineError, match=r"generated \d+ tokens while our requests got \d+: others use it"):
        served(Vllm(faults={"traffic"}))


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (Vllm(faults={"no drafter"}), "drafted nothing on 6 prompts; start vLLM with --speculative-config"),
        (Vllm(faults={"no metrics"}), "has no /metrics; start vLLM without --disable-log-stats"),
        (Sglang(faults={"no drafter"}), "does not speculate; start SGLang with --speculative-algorithm"),
    ],
    ids=["vllm", "no metrics", "sglang"],
)
def test_a_server_that_does_not_speculate(server: StandIn, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        served(server)


def test_counters_that_never_hold_our_tokens_are_not_used() -> None:
    class Stuck(Vllm):
        def count(self, tokens: int) -> None:
            pass

    with pytest.raises(EngineError, match="kept moving, or stayed below our own tokens"):
        served(Stuck())


def test_metrics_of_another_server_are_not_taken() -> None:
    class Strange(Vllm):
        def metrics(self) -> str:
            return "python_info 1.0\n"

    with pytest.raises(EngineError, match="no counters of vLLM in /metrics"):
        served(Strange())


def test_no_prompts_are_an_error() -> None:
    with engine(Sglang()) as found, pytest.raises(PromptError, match="no prompts to ask"):
        fetch_served(found, {}, max_new_tokens=COUNT)
