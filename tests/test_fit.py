"""Whether a drafter was made for the target that was recorded."""

import dataclasses

import pytest

from draftgauge.errors import RecordingError
from draftgauge.fit import require_fit
from tests import tiny
from tests.golden import wiring_of

WIRING = wiring_of("draftA8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, r"hidden size is 32, the recorded target's \(Qwen3ForCausalLM\) 64; record"),
        (
            {"num_target_layers": 5},
            r"target of 5 layers, the recorded one \(Qwen3ForCausalLM\) has 6; record",
        ),
        ({"taps": (1, 2)}, r"\[2\] missing; record again with --taps 1,2"),
    ],
    ids=["hidden size", "layers", "taps"],
)
def test_a_drafter_for_another_target_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RecordingError, match=message):
        require_fit(dataclasses.replace(WIRING, **changes), tiny.recording())  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [None, 6])
def test_a_drafter_for_the_recorded_target_fits(layers: int | None) -> None:
    require_fit(dataclasses.replace(WIRING, num_target_layers=layers), tiny.recording())
