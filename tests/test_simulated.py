"""Switches of simulated acceptance, in every form in which a server may say them."""

from typing import Any

import pytest

from draftgauge.engines.simulated import require_real
from draftgauge.errors import EngineError

REPR = "SpeculativeConfig(method='mtp', synthetic_acceptance_length={}, rejection_sample_method='{}')"


@pytest.mark.parametrize(
    "said",
    [
        {"simulate_acc_len": 3},
        {"env": [{"SGLANG_SIMULATE_ACC_LEN": "4.5"}]},
        {"speculative_config": {"synthetic_acceptance_rates": [0.9, 0.5]}},
        {"speculative_config": '{"synthetic_acceptance_length": 3.51}'},
        {"rejection_sample_method": "synthetic"},
        REPR.format("2.5", "standard"),
        REPR.format("None", "synthetic"),
        "SGLANG_SIMULATE_ACC_LEN=3 python -m sglang.launch_server",
    ],
    ids=str,
)
def test_what_simulates(said: Any) -> None:
    with pytest.raises(EngineError, match=r"http://x simulates acceptance .*start it without"):
        require_real(said, url="http://x")


@pytest.mark.parametrize(
    "said",
    [
        None,
        {},
        {"simulate_acc_len": -1},
        {"SIMULATE_ACC_LEN": "-1.0", "SGLANG_SIMULATE_ACC_METHOD": "multinomial"},
        {"synthetic_acceptance_length": None, "synthetic_acceptance_rates": []},
        {"rejection_sample_method": "standard"},
        REPR.format("None", "standard"),
        REPR.format("null", "block"),
        {"speculative_algorithm": "DFLASH", "rows": [1, 2.5, True]},
    ],
    ids=str,
)
def test_what_does_not(said: Any) -> None:
    require_real(said, url="http://x")
