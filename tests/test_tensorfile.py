import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from draftgauge.errors import CheckpointError
from draftgauge.tensorfile import Fingerprint, StoredTensor, read_safetensors, write_safetensors

ARRAYS = {
    "flag": np.array([True, False, True]),
    "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "half": np.array([[1.5, -2.0]], np.float16),
    "ids": np.array([-3, 1 << 40], np.int64),
    "empty": np.zeros((0, 4), np.float32),
    "scalar": np.array(7.25),
    "turned": np.arange(6, dtype=np.float32).reshape(2, 3).T,
}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, ARRAYS, metadata={"format": "pt"})
    return path


def test_what_is_written_is_read_by_the_reference_library(written: Path) -> None:
    loaded = load_file(written)
    assert loaded.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)


def test_what_the_reference_library_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({name: array.copy(order="C") for name, array in ARRAYS.items()}, path, {"by": "them"})
    tensors, metadata = read_safetensors(path)
    assert metadata == {"by": "them"}
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        name: array.shape for name, array in ARRAYS.items()
    }
    for name, array in ARRAYS.items():
        assert tensors[name].nbytes == array.nbytes
        assert tensors[name].mapped().tobytes() == array.tobytes()
        assert b"".join(tensors[name].blocks(5)) == array.tobytes()


def test_written_tensors_are_aligned_and_bytes_repeat(written: Path, tmp_path: Path) -> None:
    tensors, _ = read_safetensors(written)
    assert [t.name for t in tensors.values() if t.offset % (t.nbytes // max(1, t.numel) or 1)] == []
    again = tmp_path / "again"
    write_safetensors(again, ARRAYS, metadata={"format": "pt"})
    assert again.read_bytes() == written.read_bytes()


@pytest.mark.parametrize(
    ("code", "bits", "expected"),
    [
        ("BF16", np.array([0x3FC0, 0xC000, 0x0001, 0x7F80], np.uint16), [1.5, -2.0, 2.0**-133, np.inf]),
        ("F16", np.array([0x3E00, 0xC000, 0x0001, 0x7C00], np.uint16), [1.5, -2.0, 2.0**-24, np.inf]),
        ("F32", np.array([0x3FC00000, 0xC0000000], np.uint32), [1.5, -2.0]),
        ("F64", np.array([0x3FF8000000000000], np.uint64), [1.5]),
    ],
)
def test_floats_become_float32(tmp_path: Path, code: str, bits: np.ndarray, expected: list[float]) -> None:
    path = tmp_path / "t"
    write_safetensors(path, {"pad": np.zeros(3, np.uint8), "t": (code, bits.reshape(-1, 1))})
    values = read_safetensors(path)[0]["t"].to_float32()
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, np.array(expected, np.float32).reshape(-1, 1))


def test_integers_do_not_become_float32(written: Path) -> None:
    with pytest.raises(CheckpointError, match=r"ids .* type I64; expected F32, BF16"):
        read_safetensors(written)[0]["ids"].to_float32()


def test_mapped_bytes_cannot_be_written(written: Path) -> None:
    tensors, _ = read_safetensors(written)
    for name in ("weight", "empty"):
        assert not tensors[name].mapped().flags.writeable


def test_a_file_cut_anywhere_is_refused(written: Path, tmp_path: Path) -> None:
    whole = written.read_bytes()
    cut = tmp_path / "cut.safetensors"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut.safetensors .*truncated or still being written"):
            read_safetensors(cut)


def test_a_file_cut_after_it_was_opened_is_refused(written: Path) -> None:
    tensors, _ = read_safetensors(written)
    last = max(tensors.values(), key=lambda tensor: tensor.offset + tensor.nbytes)
    weight = tensors["weight"]
    written.write_bytes(written.read_bytes()[: weight.offset + 4])
    for read in (last.mapped, weight.to_float32, lambda: list(weight.blocks())):
        with pytest.raises(CheckpointError, match="truncated or still being written"):
            read()


def with_header(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: object = "U8", shape: object = (2,), span: object = (0, 2)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"not json", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a":1,"a":2}', "a name occurs twice"),
        ([1], "not a mapping"),
        ({"__metadata__": {"step": 3}}, "metadata"),
        ({"__metadata__": [1]}, "metadata"),
        ({"a": 3}, "type None"),
        ({"a": entry(dtype="F4")}, "type F4"),
        ({"a": entry(dtype=["F32"])}, "type"),
        ({"a": entry(shape=[-2])}, "entry of a"),
        ({"a": entry(shape=[True, 2])}, "entry of a"),
        ({"a": entry(shape="2")}, "entry of a"),
        ({"a": entry(shape=[1 << 60])}, "entry of a"),
        ({"a": entry(span=[0])}, "entry of a"),
        ({"a": entry(span=[1, 3])}, "a claims bytes 1 to 3; expected 0 to 2"),
        ({"a": entry(span=[0, 3])}, "a claims bytes 0 to 3; expected 0 to 2"),
        ({"a": entry(), "b": entry()}, "claims bytes 0 to 2; expected 2 to 4"),
        ({"a": entry(), "b": entry(span=[3, 5])}, "b claims bytes 3 to 5"),
        ({"a": entry(shape=[1], span=[0, 1])}, "header accounts for"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, header: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_safetensors(with_header(tmp_path / "t.safetensors", header, b"12"))


def test_a_header_of_absurd_length_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="this is not safetensors"):
        read_safetensors(with_header(tmp_path / "t", {}, length=1 << 60))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_safetensors(tmp_path / "none")


@pytest.mark.parametrize(
    "value", [np.zeros(2, np.complex128), ("BF16", np.zeros(2, np.float32)), ("X", np.zeros(2))]
)
def test_types_that_the_format_lacks_are_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(ValueError, match=r"t (has|is)"):
        write_safetensors(tmp_path / "t", {"t": value})


def test_big_endian_arrays_are_written_little(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "t", {"t": np.array([1, 2], ">i4")})
    assert read_safetensors(tmp_path / "t")[0]["t"].mapped().tolist() == [1, 0, 0, 0, 2, 0, 0, 0]


def test_a_rewritten_file_has_another_fingerprint(written: Path) -> None:
    before = Fingerprint.of(written)
    before.require_unchanged(written)
    same_bytes = written.read_bytes()
    written.unlink()
    written.with_name("keeps the old inode").write_bytes(b"")
    written.write_bytes(same_bytes)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        before.require_unchanged(written)


def test_a_tensor_that_cannot_be_taken_says_why(tmp_path: Path) -> None:
    tensor = StoredTensor("t", "F32", (2, 2), tmp_path / "f", 0, unreadable="is transposed")
    for read in (tensor.mapped, tensor.to_float32, lambda: list(tensor.blocks())):
        with pytest.raises(CheckpointError, match=r"t in .* is transposed"):
            read()
