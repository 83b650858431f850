"""Where each layer's state lies: said by the user, or by the form of the file."""

from pathlib import Path

import pytest

from draftgauge.errors import RecordingError
from draftgauge.featurefiles import FORMS, Features
from draftgauge.layouts import Layout, layout_of
from draftgauge.tensorfile import StoredTensor

H = 4


def features(form: str, layers: tuple[int, ...] | None = None, **shapes: tuple[int, ...]) -> Features:
    states = {n: StoredTensor(n, "F32", shape, Path("f.pt"), 0) for n, shape in shapes.items()}
    tokens = StoredTensor("input_ids", "I64", (9,), Path("f.pt"), 0)
    return Features("f", FORMS[form], Path("f.pt"), tokens, None, states, {}, layers)


def layout(found: Features, taps: tuple[int, ...], **stated: tuple[int, ...]) -> Layout:
    return layout_of(found, taps, stated=stated, hidden_size=H, last_layer=7)


@pytest.mark.parametrize(
    ("found", "taps", "stated", "expected"),
    [
        (
            features("specforge", hidden_states=(1, 9, 8)),
            (1, 5),
            {},
            Layout((("hidden_states", 0), ("hidden_states", 1)), None),
        ),
        (
            features("specforge", hidden_states=(1, 9, 8), target_last_hidden_states=(1, 9, 4)),
            (5, 1),
            {},
            Layout((("hidden_states", 0), ("hidden_states", 1)), ("target_last_hidden_states", 0)),
        ),
        (
            features("vllm", hidden_states=(9, 3, 4)),
            (1, 5),
            {},
            Layout((("hidden_states", 0), ("hidden_states", 1)), ("hidden_states", 2)),
        ),
        # DeepSpec says its layers: fewer, and in another order, may be read.
        (
            features("deepspec", (1, 3, 5), target_hidden_states=(9, 12), target_last_hidden_states=(9, 4)),
            (5, 1),
            {},
            Layout(
                (("target_hidden_states", 2), ("target_hidden_states", 0)), ("target_last_hidden_states", 0)
            ),
        ),
        (
            features("loose", aux_hidden=(1, 9, 8), last_hidden=(1, 9, 4)),
            (5, 7, 1),
            {"aux_hidden": (1, 5), "last_hidden": (7,)},
            Layout((("aux_hidden", 1), ("last_hidden", 0), ("aux_hidden", 0)), ("last_hidden", 0)),
        ),
        # The user's word goes before the form's.
        (
            features("modelopt", aux_hidden_states=(9, 8), hidden_states=(9, 4)),
            (2,),
            {"aux_hidden_states": (2, 3)},
            Layout((("aux_hidden_states", 0),), None),
        ),
    ],
)
def test_where_the_states_are(
    found: Features, taps: tuple[int, ...], stated: dict[str, tuple[int, ...]], expected: Layout
) -> None:
    assert layout(found, taps, **stated) == expected


@pytest.mark.parametrize(
    ("found", "taps", "stated", "message"),
    [
        (
            features("specforge", hidden_states=(1, 9, 16)),
            (1, 2, 3, 4, 5),
            {},
            r"reads 5 taps, .* holds 4 tap\(s\)",
        ),
        (features("specforge", hidden_states=(12, 9)), (1, 5, 6), {}, "It looks transposed"),
        (features("deepspec", (1, 3), target_hidden_states=(9, 8)), (1, 5), {}, r"holds taps \[1, 3\]"),
        (features("loose", aux=(9, 8)), (1, 5), {}, r"Say it for each tensor, as in --layers aux=N,N"),
        (features("loose", aux=(9, 8)), (1, 5), {"aux": (1, 3)}, r"gives \[1, 3\]: \[5\] missing"),
        (
            features("loose", aux=(9, 8)),
            (1, 5),
            {"aux": (1,)},
            r"says 1 layer\(s\) of 4; in f.pt aux \[9, 8\] \(2 state",
        ),
        (features("loose", aux=(9, 8)), (1, 5), {"other": (1,)}, r"holds no states 'other'; it holds aux"),
    ],
)
def test_what_does_not_hold_the_taps_is_refused(
    found: Features, taps: tuple[int, ...], stated: dict[str, tuple[int, ...]], message: str
) -> None:
    with pytest.raises(RecordingError, match=message):
        layout(found, taps, **stated)
