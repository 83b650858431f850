"""Counts of speculation: what the engines' objects say, sums over requests, and what stays unknown."""

from draftgauge.engines.counts import (
    RequestCounts,
    histogram_of,
    of_rounds,
    of_sglang,
    of_vllm,
    per_depth,
    summed,
)


def test_rounds_by_accepted_tokens_and_by_depth() -> None:
    assert histogram_of([2, 0, 2, 3]) == (1, 0, 2, 1)
    assert histogram_of([]) == ()
    assert per_depth((1, 0, 2, 1)) == (3, 3, 1)
    assert per_depth((4,)) == per_depth(()) == ()


def test_a_request_told_round_by_round() -> None:
    counts = of_rounds([2, 0, 3], name="a", completion_tokens=9)
    assert counts == RequestCounts(
        "a",
        rounds=3,
        accepted_tokens=5,
        completion_tokens=9,
        histogram=(1, 0, 1, 1),
        accepted_in_order=(2, 0, 3),
    )


def test_sums_add_histograms_of_any_width() -> None:
    whole = summed([of_rounds([2, 0]), of_rounds([1])], convention="pooled", source="x", doubts=["so"])
    assert (whole.requests, whole.rounds, whole.accepted_tokens) == (2, 3, 3)
    assert whole.histogram == (1, 1, 1)
    assert whole.accepted_per_depth == (2, 1)
    assert (whole.completion_tokens, whole.drafted_tokens) == (None, None)
    assert whole.doubts == ("so",)
    assert whole.as_dict()["rows"][1]["accepted_in_order"] == (1,)


def test_what_one_request_does_not_say_is_unknown_in_all() -> None:
    whole = summed([of_rounds([2]), RequestCounts(rounds=1)], convention="pooled", source="x")
    assert (whole.rounds, whole.accepted_tokens, whole.histogram, whole.accepted_per_depth) == (
        2,
        None,
        None,
        None,
    )
    assert summed([], convention="pooled", source="x").rounds is None


def test_the_names_of_every_sglang() -> None:
    new = {
        "completion_tokens": 8,
        "spec_verify_ct": 3,
        "spec_num_correct_drafts": 4,
        "spec_num_proposed_drafts": 9,
        "spec_correct_drafts_histogram": [1, 0, 2],
    }
    old = {
        "completion_tokens": 8,
        "spec_verify_ct": 3,
        "spec_accept_token_num": 4,
        "spec_draft_token_num": 9,
        "spec_accept_histogram": [1, 0, 2],
    }
    assert of_sglang(new) == of_sglang(old)
    assert of_sglang(new).histogram == (1, 0, 2)
    assert of_sglang({"spec_accept_histogram": [1, 0, 2]}).accepted_tokens == 4
    oldest = of_sglang({"completion_tokens": 8, "spec_verify_ct": 3, "spec_accept_length": 2.67})
    assert (oldest.rounds, oldest.completion_tokens) == (3, 8)
    assert (oldest.accepted_tokens, oldest.drafted_tokens, oldest.histogram) == (None, None, None)


def test_what_is_no_count_is_unknown() -> None:
    odd = of_sglang(
        {"spec_verify_ct": 2.5, "completion_tokens": True, "spec_correct_drafts_histogram": [1, None]}
    )
    assert odd == RequestCounts()
    assert of_sglang({"spec_correct_drafts_histogram": []}).histogram is None
    assert of_vllm({}) == RequestCounts()
