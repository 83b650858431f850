"""The wirings near a given one: each possible, each once, each with the fields that state it."""

import dataclasses
from collections import Counter

import pytest

from draftgauge.neighbours import Candidate, Surroundings, neighbours
from draftgauge.wiring import LayerAttention, Wiring, validate
from tests.planted import WIRING

AROUND = Surroundings(num_target_layers=6, vocab_size=300, longest_context=200, trained_block_size=6)


def found(wiring: Wiring = WIRING, **around) -> list[Candidate]:
    return neighbours(wiring, dataclasses.replace(AROUND, **around))


def values(field: str, wiring: Wiring = WIRING, **around) -> list:
    return [c.settings.get(field) for c in found(wiring, **around) if field in c.settings]


def test_every_neighbour_is_possible_another_function_and_made_by_its_settings() -> None:
    candidates = found()
    assert len(candidates) > 30
    for candidate in candidates:
        assert validate(candidate.wiring) == dataclasses.replace(WIRING, **candidate.settings)
    digests = Counter(candidate.wiring.digest for candidate in candidates)
    assert set(digests.values()) == {1}
    assert WIRING.digest not in digests


def test_taps_move_one_by_one_and_together_and_change_places() -> None:
    taps = values("taps")
    assert (2, 4, 5) in taps
    assert (0, 2, 3) in taps
    assert {(0, 3, 4), (2, 3, 4), (1, 2, 4), (1, 3, 5)} <= set(taps)  # 1, 4, 4 would name a layer twice
    assert {(4, 3, 1), (3, 1, 4), (4, 3, 1), (1, 4, 3)} <= set(taps)


def test_taps_stay_within_the_target() -> None:
    edge = dataclasses.replace(WIRING, taps=(-1, 2, 5))
    assert all(-1 <= tap <= 5 for taps in values("taps", edge) for tap in taps)


@pytest.mark.parametrize(
    ("field", "around", "expected"),
    [
        ("rope_theta", {"target_rope_theta": 777.0}, {777.0, 1e4, 1e5, 1e6, 1e7}),
        ("rope_dims", {}, {8, 4}),
        ("rope_layout", {}, {"interleaved"}),
        ("predicts_from_anchor", {}, {True}),
        ("mask_token_id", {"special_tokens": {"<pad>": 9}}, {288, 289, 291, 292, 9, 0, 299, 298}),
        ("embedding_scale", {}, {32**0.5}),
        ("block_size", {}, {5, 7, 3, 12, 8, 16}),
    ],
)
def test_a_field_is_tried_with_the_values_that_are_usual(field: str, around: dict, expected: set) -> None:
    assert expected <= set(values(field, **around))


def test_layers_are_changed_by_kind() -> None:
    attention = {c.label: c.wiring.attention for c in found() if c.field == "attention"}
    full, sliding = WIRING.attention
    assert attention["the full layers causal in the block"] == (
        dataclasses.replace(full, block_causal=True),
        sliding,
    )
    assert attention["no window in the sliding layers"][1].window is None
    assert attention["the window's bound inclusive in the sliding layers"][1].window_inclusive
    assert attention["a window of 12 in the full layers"][0].window == 12
    assert attention["the convention speculators in the sliding layers"][1] == LayerAttention(
        window=12, window_from="anchor", window_inclusive=True, block_causal=True
    )


def test_windows_longer_than_every_context_are_not_tried() -> None:
    windows = {c.wiring.attention[0].window for c in found(longest_context=100) if c.field == "attention"}
    assert 64 in windows
    assert not {128, 256} & windows


def test_what_the_file_does_not_hold_is_not_tried() -> None:
    assert not [c for c in found() if c.field in ("ends", "vocabulary_map", "tap_after_final_norm")]
    own = dataclasses.replace(WIRING, head="own", vocabulary_map="offset")
    held = frozenset({"lm_head.weight", "d2t", "embed_tokens.weight"})
    fields = {c.field: c.label for c in found(own, stored=held)}
    assert {"ends", "vocabulary_map"} <= fields.keys()
    last = dataclasses.replace(WIRING, taps=(1, 3, 5))
    assert True in [
        c.settings["tap_after_final_norm"] for c in found(last) if c.field == "tap_after_final_norm"
    ]


def test_a_mask_embedding_is_tried_where_the_file_holds_one() -> None:
    labels = [c.label for c in found(stored=frozenset({"mask_embedding"})) if c.field == "mask_token_id"]
    assert "the drafter's own mask embedding" in labels
    with_own = dataclasses.replace(WIRING, mask_embedding=True)
    assert {False} == set(values("mask_embedding", with_own))
