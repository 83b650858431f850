"""Other projects' feature files: which form each has, and damage that is named. Their numbers: test_importing."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from draftgauge.errors import CheckpointError, DraftgaugeError, RecordingError
from draftgauge.featurefiles import feature_sources, ids_of, open_features, source_name, states_of
from tests import foreign, tiny


def forms(folder: Path, room: Path) -> list[tuple[str, str]]:
    found = []
    for path in feature_sources(folder):
        with open_features(path, root=folder, room=room) as sequences:
            found += [(features.form.name, features.name) for features in sequences]
    return found


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("specforge", ("specforge", "rows_0/one")),
        ("specforge_gz", ("specforge", "one")),
        ("vllm", ("vllm", "hs_one")),
        ("modelopt", ("modelopt", "one")),
        ("loose", ("loose", "one")),
    ],
)
def test_a_form_is_recognised_by_what_is_in_it(form: str, expected: tuple[str, str], tmp_path: Path) -> None:
    folder = foreign.stored(form, tmp_path / "f", tiny.recording(), names=["one"])
    assert forms(folder, tmp_path) == [expected]
    for path in feature_sources(folder):
        other = path.with_name(f"renamed{''.join(path.suffixes)}")
        path.rename(other)
    assert forms(folder, tmp_path) == [(expected[0], source_name(other, root=folder))]


def test_states_are_views_of_the_file(tmp_path: Path) -> None:
    recording = tiny.recording()
    folder = foreign.stored("vllm", tmp_path / "f", recording, names=["long"])
    (path,) = feature_sources(folder)
    _, tokens, _, taps, last = foreign.parts(recording, recording.item("long"), (1, 3))
    with open_features(path, root=folder, room=tmp_path) as (features,):
        assert features.tokens is not None
        assert ids_of(features.tokens) == tokens.tolist()
        for part, expected in enumerate((*taps, last)):
            view = states_of(features, "hidden_states", part=part, length=len(tokens), hidden_size=64)
            assert isinstance(view.base, np.memmap) or isinstance(view.base.base, np.memmap)
            assert torch.equal(torch.from_numpy(view.copy()), expected)


def deepspec(tmp_path: Path) -> Path:
    _, tokens, mask, taps, last = foreign.parts(tiny.recording(), tiny.recording().item("one"), (1, 3))
    folder = tmp_path / "cache"
    folder.mkdir()
    foreign.deepspec(folder, [("one", tokens, mask, taps.bfloat16(), last.bfloat16())] * 2, layers=(1, 3))
    return folder


def test_a_cache_of_deepspec_says_its_layers(tmp_path: Path) -> None:
    folder = deepspec(tmp_path)
    assert feature_sources(folder) == [folder]
    with open_features(folder, root=folder, room=tmp_path) as found:
        assert [f.name for f in found] == ["cache/0", "cache/1"]
        assert {f.layers for f in found} == {(1, 3)}


def without(key: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        del manifest[key]
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "samples.idx").write_bytes(b"\0" * 57), "has 57 bytes; expected entries of 56"),
        (
            lambda f: (f / "shard-1.bin").unlink(),
            "places sample 1 in shard 1, which is not there; the manifest names",
        ),
        (lambda f: (f / "manifest.json").write_text("{"), "is not the manifest of a DeepSpec cache"),
        (
            without("target_layer_ids"),
            "is not the manifest of a DeepSpec cache: 'target_layer_ids'. Copy the cache",
        ),
    ],
)
def test_a_damaged_cache_is_named(change: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    folder = deepspec(tmp_path)
    change(folder)
    with pytest.raises(CheckpointError, match=message), open_features(folder, root=folder, room=tmp_path):
        pass


def test_a_shard_that_ends_too_early_is_named(tmp_path: Path) -> None:
    folder = deepspec(tmp_path)
    whole = (folder / "shard-1.bin").read_bytes()
    (folder / "shard-1.bin").write_bytes(whole[:-4])
    with open_features(folder, root=folder, room=tmp_path) as found:
        assert found[1].tokens is not None
        length = found[1].tokens.numel
        with pytest.raises(CheckpointError, match=r"shard-1.bin has .* bytes; expected"):
            states_of(found[1], "target_last_hidden_states", part=0, length=length, hidden_size=64)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.ckpt.gz", b"not gzip", "cannot be unpacked"),
        ("a.pt", b"PK\x03\x04 and no more", "a.pt"),
        ("a.safetensors", b"\x10", "truncated or still being written"),
    ],
)
def test_a_damaged_file_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with (
        pytest.raises(DraftgaugeError, match=message),
        open_features(tmp_path / name, root=tmp_path, room=tmp_path),
    ):
        pass
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_file_without_states_says_what_it_holds(tmp_path: Path) -> None:
    torch.save({"input_ids": torch.arange(4), "note": "hello"}, tmp_path / "a.pt")
    with (
        pytest.raises(RecordingError, match=r"holds no hidden states, .*; it holds input_ids"),
        open_features(tmp_path / "a.pt", root=tmp_path, room=tmp_path),
    ):
        pass
    torch.save({"aux": torch.zeros(2, 3, 4, 5)}, tmp_path / "b.pt")
    with (
        pytest.raises(RecordingError, match=r"aux \[2, 3, 4, 5\]; expected \[T, width\]"),
        open_features(tmp_path / "b.pt", root=tmp_path, room=tmp_path),
    ):
        pass
