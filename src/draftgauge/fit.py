"""Whether a drafter was made for the target that was recorded, and reads what was kept of it.

Knows neither files nor torch.
"""

from __future__ import annotations

from draftgauge.errors import RecordingError
from draftgauge.recording import Recording
from draftgauge.wiring import Wiring


def require_fit(wiring: Wiring, recording: Recording) -> None:
    """Makes sure that the drafter was made for the target that was recorded.

    Raises:
        RecordingError: Another target's size or number of layers, or a tap that was not recorded.
    """
    if wiring.hidden_size != recording.target.hidden_size:
        raise RecordingError(
            f"the drafter's hidden size is {wiring.hidden_size}, the recorded target's "
            f"({recording.target.architecture}) {recording.target.hidden_size}; record the target that the "
            "drafter was trained for, with `draftgauge record --checkpoint`"
        )
    if wiring.num_target_layers not in (None, recording.target.num_layers):
        raise RecordingError(
            f"the drafter was trained for a target of {wiring.num_target_layers} layers, the recorded one "
            f"({recording.target.architecture}) has {recording.target.num_layers}; record the target that the "
            "drafter was trained for, with `draftgauge record --checkpoint`"
        )
    recording.tap_rows(wiring.taps)
