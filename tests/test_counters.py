"""vLLM's counters: with and without the ending, of several engines, before there are any, and after a restart."""

import pytest

from draftgauge.engines.counters import Counters, read_counters
from draftgauge.errors import EngineError

TEXT = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m, x"} 40.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m, x"} 2.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m, x"} 1.76e+09
vllm:spec_decode_num_draft_tokens_total{engine="0"} 2.8e+02
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 57.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 35.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="2",engine="0"} 0.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="1"} 2.0
vllm:generation_tokens_total{engine="0"} 99.0
vllm:num_requests_running{engine="0"} 1.0
python_info{version="3.12"} 1.0
"""
READ = Counters(
    rounds=42, drafted_tokens=280, accepted_tokens=57, generated_tokens=99, accepted_per_depth=(35, 22, 0)
)


@pytest.mark.parametrize("text", [TEXT, TEXT.replace("_total", "")], ids=["_total", "without"])
def test_counters_are_read_and_added(text: str) -> None:
    assert read_counters(text) == READ


def test_what_is_not_shown_is_unknown() -> None:
    assert read_counters("python_info 1.0\n") == Counters()
    assert read_counters("vllm:generation_tokens_total 3\n") == Counters(generated_tokens=3)


def test_differences() -> None:
    before = Counters(
        rounds=40, drafted_tokens=270, accepted_tokens=50, generated_tokens=90, accepted_per_depth=(30, 20)
    )
    assert READ.since(before) == Counters(2, 10, 7, 9, (5, 2, 0))
    assert READ.since(Counters()) == READ  # a counter appears with its first count
    assert Counters().since(before) == Counters()


def test_a_counter_that_went_back_is_a_restart() -> None:
    with pytest.raises(EngineError, match="counter of rounds went from 43 to 42: it was restarted"):
        READ.since(Counters(rounds=43))
    with pytest.raises(EngineError, match="per position went from 36 to 35"):
        READ.since(Counters(accepted_per_depth=(36,)))
    with pytest.raises(EngineError, match="per position"):
        READ.since(Counters(accepted_per_depth=(1, 2, 0, 4)))
