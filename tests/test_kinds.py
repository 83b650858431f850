"""A server is recognised by what it answers, and one that simulates acceptance is refused."""

from typing import Any

import pytest

from draftgauge.engines.kinds import KINDS
from draftgauge.errors import EngineError
from tests.engine_servers import KEY, MODEL, Other, Sglang, StandIn, Vllm, engine


@pytest.mark.parametrize(
    ("server", "kind"),
    [
        (Sglang(), "sglang"),
        (Sglang(faults={"old"}), "sglang"),
        (Vllm(), "openai"),
        (Vllm(said={"speculative_config": {"method": "dflash"}}), "openai"),
    ],
    ids=["sglang", "an older sglang", "vllm", "vllm in development mode"],
)
def test_servers_are_recognised_by_asking(server: StandIn, kind: str) -> None:
    with engine(server) as found:
        assert found.kind == kind
        assert found.kind in KINDS
        assert found.url == server.url
    assert all(request.method == "GET" for request in server.requests)


def test_a_server_of_something_else_is_refused() -> None:
    refused = r"is no engine known here: .* nor /v1/models; give the address"
    with pytest.raises(EngineError, match=refused), engine(Other()):
        pass


def test_what_a_server_says_of_itself_is_kept_without_its_key() -> None:
    with engine(Sglang(), key=KEY) as found:
        assert found.facts["model_path"] == MODEL
        assert found.facts["version"] == "0.5.4"
        assert found.facts["speculative_algorithm"] == "DFLASH"
        assert "api_key" not in found.facts
        assert "internal_states" not in found.facts  # they change while it works
    with engine(Vllm()) as found:
        assert found.facts == {
            "model": MODEL,
            "root": MODEL,
            "max_model_len": 512,
            "owned_by": "vllm",
            "version": "0.11.2",
            "configuration_shown": False,
        }


@pytest.mark.parametrize(
    "server",
    [
        Sglang(said={"simulate_acc_len": 3.0}),
        Sglang(said={"environment": {"SGLANG_SIMULATE_ACC_LEN": "2.5"}}),
        Vllm(said={"speculative_config": {"synthetic_acceptance_length": 3.5}}),
        Vllm(said={"speculative_config": "SpeculativeConfig(rejection_sample_method='synthetic')"}),
    ],
    ids=["argument", "environment", "length", "method"],
)
def test_a_server_that_simulates_acceptance_is_refused(server: StandIn) -> None:
    with pytest.raises(EngineError, match="simulates acceptance"), engine(server):
        pass


@pytest.mark.parametrize(
    ("server", "model", "said"),
    [
        (Vllm(said={"models": [{"id": "lora"}]}), None, "serves tiny, lora; name one with --model"),
        (Vllm(), "big", "does not serve 'big'; it serves tiny"),
        (Sglang(), "big", "does not serve 'big'; it serves tiny"),
    ],
    ids=["several", "another", "another of sglang"],
)
def test_the_model_has_to_be_one_that_is_served(server: StandIn, model: Any, said: str) -> None:
    with pytest.raises(EngineError, match=said), engine(server, model=model):
        pass
    with engine(Vllm(said={"models": [{"id": "lora"}]}), model="lora") as found:
        assert found.facts["model"] == "lora"
