import argparse
import dataclasses
import datetime
import enum
import io
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from draftgauge.errors import CheckpointError
from draftgauge.plainpickle import Opaque
from draftgauge.tensorfile import StoredTensor
from draftgauge.torchfile import ChecksumCount, TorchFile, read_torch_file, verify_checksums


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Setting:
    rate: float


class Ran:
    """Its pickle calls os.mkdir where it is loaded."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, ("ran",)


WEIGHT = torch.arange(12, dtype=torch.float32).reshape(3, 4)
TENSORS = {
    "float32": WEIGHT,
    "bfloat16": WEIGHT.bfloat16(),
    "float16": WEIGHT.half(),
    "float64": WEIGHT.double(),
    "int64": torch.tensor([1 << 40, -1]),
    "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
    "float8": torch.zeros(5, dtype=torch.float8_e4m3fn),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(7),
    "empty": torch.zeros(0, 4),
    "parameter": torch.nn.Parameter(WEIGHT.clone()),
    "rows": WEIGHT[1:],  # shares the storage of float32
    "thin": WEIGHT[:, :1][:1],  # strides of a dimension of 1 do not matter
}


def saved(path: Path, value: object) -> Path:
    torch.save(value, path)
    return path


def rezipped(source: Path, target: Path, change: Callable[[dict[str, bytes]], None], **options: int) -> Path:
    """The records of a torch file after `change`, in a zip written by the standard library."""
    with zipfile.ZipFile(source) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    change(records)
    with zipfile.ZipFile(target, "w", **options) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    return target


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return saved(tmp_path / "plain.pt", {"w": WEIGHT, "b": torch.ones(3), "step": 5})


def test_every_tensor_has_the_type_shape_and_bytes_that_torch_loads(tmp_path: Path) -> None:
    read = read_torch_file(saved(tmp_path / "t.pt", {"in": TENSORS}))
    found = dict(read.tensors())
    assert list(found) == [f"in.{name}" for name in TENSORS]
    assert [name for name, tensor in found.items() if name != tensor.name] == []
    for name, tensor in TENSORS.items():
        stored = found[f"in.{name}"]
        assert stored.shape == tuple(tensor.shape)
        expected = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert stored.mapped().tobytes() == expected
    codes = ["F32", "BF16", "F16", "F64", "I64", "U16", "F8_E4M3", "BOOL", "I64", "F32", "F32", "F32", "F32"]
    assert [tensor.dtype for tensor in found.values()] == codes
    assert found["in.rows"].offset == found["in.float32"].offset + 16
    np.testing.assert_array_equal(found["in.bfloat16"].to_float32(), WEIGHT.numpy())


def test_everything_else_is_plain_or_opaque(tmp_path: Path) -> None:
    value = {
        "args": argparse.Namespace(lr=0.5, layers=[1, 2]),
        "loss": np.float32(1.5),
        "step": np.int64(7),
        "where": Path("runs/a"),
        "when": datetime.date(2026, 5, 1),
        "setting": Setting(0.25),
        "colour": Colour.RED,
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
        "shape": torch.Size([2, 3]),
        "array": np.arange(2),
        "evil": Ran(),
    }
    read = read_torch_file(saved(tmp_path / "t.pt", value))
    found = read.value
    assert isinstance(found, dict)
    assert {key: item for key, item in found.items() if not isinstance(item, Opaque)} == {
        "loss": 1.5,
        "step": 7,
        "dtype": "torch.bfloat16",
        "device": "cuda:1",
        "shape": (2, 3),
    }
    states = {key: item.state for key, item in found.items() if isinstance(item, Opaque)}
    assert states["args"] == {"lr": 0.5, "layers": [1, 2]}
    assert states["where"] == ("runs", "a")
    assert states["when"] == (b"\x07\xea\x05\x01",)
    assert states["setting"] == {"rate": 0.25}
    assert states["colour"] == ("red",)
    assert states["evil"] == ("ran",)
    assert not Path("ran").exists()
    assert f"{os.mkdir.__module__}.mkdir" in read.opaque_classes
    assert {"argparse.Namespace", f"{__name__}.Setting", "datetime.date"} <= set(read.opaque_classes)


def test_a_module_and_an_optimizer_are_listed(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    module.weight.tag = "attribute"
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    value = {"model": module, "weights": module.state_dict(), "optimizer": optimizer.state_dict()}
    found = dict(read_torch_file(saved(tmp_path / "t.pt", value)).tensors())
    assert {name: tensor.shape for name, tensor in found.items()} == {
        "model._parameters.weight": (2, 3),
        "model._parameters.bias": (2,),
        "weights.weight": (2, 3),
        "weights.bias": (2,),
        **{f"optimizer.state.0.{part}": (2, 3) for part in ("exp_avg", "exp_avg_sq")},
        **{f"optimizer.state.1.{part}": (2,) for part in ("exp_avg", "exp_avg_sq")},
        **{f"optimizer.state.{i}.step": () for i in (0, 1)},
    }


@pytest.mark.parametrize("view", [WEIGHT.t(), WEIGHT[:, ::2], WEIGHT[:, :1], torch.ones(1).expand(4)])
def test_a_view_that_is_not_contiguous_is_listed_and_refused_when_asked_for(
    tmp_path: Path, view: torch.Tensor
) -> None:
    ((name, tensor),) = read_torch_file(saved(tmp_path / "t.pt", {"turned": view})).tensors()
    assert tensor.shape == tuple(view.shape)
    with pytest.raises(CheckpointError, match=rf"{name} .*strides .*contiguous\(\)"):
        tensor.mapped()


def test_types_without_a_code_are_opaque(tmp_path: Path) -> None:
    read = read_torch_file(saved(tmp_path / "t.pt", {"c": torch.zeros(2, dtype=torch.complex128)}))
    assert isinstance(read.value["c"], Opaque)
    assert list(read.tensors()) == []


def test_a_container_that_occurs_twice_is_listed_once(tmp_path: Path) -> None:
    weights = {"w": WEIGHT}
    read = read_torch_file(saved(tmp_path / "t.pt", {"model": weights, "ema": weights, "also": WEIGHT}))
    assert [name for name, _ in read.tensors()] == ["model.w", "also"]
    assert read.value["ema"] is read.value["model"]


# --- damage ------------------------------------------------------------------------------------------


def test_a_file_cut_anywhere_is_refused(plain: Path, tmp_path: Path) -> None:
    whole = plain.read_bytes()
    cut = tmp_path / "cut.pt"
    for length in [*range(0, len(whole), 13), *range(len(whole) - 30, len(whole))]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut.pt .*truncated or still being written"):
            read_torch_file(cut)


def test_a_file_that_still_grows_is_refused_until_it_is_whole(plain: Path, tmp_path: Path) -> None:
    growing = tmp_path / "growing.pt"
    growing.write_bytes(b"\0" * 4096)  # space taken in advance
    with pytest.raises(CheckpointError, match="still being written"):
        read_torch_file(growing)
    growing.write_bytes(plain.read_bytes())
    assert len(list(read_torch_file(growing).tensors())) == 2
    with growing.open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match="still being written"):
        read_torch_file(growing)


def test_every_changed_byte_of_a_tensor_fails_its_checksum(plain: Path) -> None:
    opened = read_torch_file(plain)
    tensors = dict(opened.tensors())
    assert verify_checksums(opened) == ChecksumCount(checked=len(opened.records), absent=0)
    whole = plain.read_bytes()
    for name, tensor in tensors.items():
        for at in range(tensor.offset, tensor.offset + tensor.nbytes):
            plain.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(CheckpointError, match=rf"is damaged: record data/\d \({name}\) has CRC-32"):
                verify_checksums(opened, [name])


def test_only_the_chosen_tensors_are_compared(plain: Path) -> None:
    opened = read_torch_file(plain)
    weight = dict(opened.tensors())["w"]
    whole = bytearray(plain.read_bytes())
    whole[weight.offset] ^= 1
    plain.write_bytes(whole)
    steps: list[tuple[int, int]] = []
    count = verify_checksums(opened, ["b"], progress=lambda done, total: steps.append((done, total)))
    assert count == ChecksumCount(checked=2, absent=0)  # data.pkl and the storage of b
    total = opened.records["data.pkl"].size + 12
    assert steps == [(opened.records["data.pkl"].size, total), (total, total)]
    with pytest.raises(CheckpointError, match="record data/0"):
        verify_checksums(opened)


def test_a_changed_description_is_refused_on_opening(plain: Path) -> None:
    record = read_torch_file(plain).records["data.pkl"]
    whole = bytearray(plain.read_bytes())
    whole[record.offset + record.size // 2] ^= 1
    plain.write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"data.pkl fails its checksum"):
        read_torch_file(plain)


@pytest.fixture
def without_crc() -> Iterator[None]:
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


@pytest.mark.usefixtures("without_crc")
def test_a_file_without_checksums_opens_and_says_so(tmp_path: Path) -> None:
    opened = read_torch_file(saved(tmp_path / "t.pt", {"w": WEIGHT}))
    assert verify_checksums(opened, ["w"]) == ChecksumCount(checked=0, absent=2)


def test_every_changed_byte_of_the_file_is_read_or_refused(plain: Path, tmp_path: Path) -> None:
    whole = plain.read_bytes()
    changed = tmp_path / "changed.pt"
    for at in range(0, len(whole), 3):
        changed.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            verify_checksums(read_torch_file(changed))
        except CheckpointError:
            continue


# --- what is not such a file ---------------------------------------------------------------------------


def test_other_files_are_refused_with_what_helps(tmp_path: Path, plain: Path) -> None:
    old = tmp_path / "old.pt"
    torch.save({"w": WEIGHT}, old, _use_new_zipfile_serialization=False)
    text = tmp_path / "text.pt"
    text.write_text("version https://git-lfs.github.com/spec/v1")
    arrays = tmp_path / "arrays.pt"
    with arrays.open("wb") as file:
        np.savez(file, a=np.zeros(2))

    def rename(records: dict[str, bytes]) -> None:
        records["other/data.pkl"] = records["plain/data.pkl"]

    def script(records: dict[str, bytes]) -> None:
        records["plain/code/x.py"] = b""

    def big_endian(records: dict[str, bytes]) -> None:
        records["plain/byteorder"] = b"big"

    def lacking(records: dict[str, bytes]) -> None:
        del records["plain/data/0"]

    def short(records: dict[str, bytes]) -> None:
        records["plain/data/0"] = records["plain/data/0"][:-4]

    cases = {
        old: "before 1.6.*Save it again",
        text: "expected a .pt file of torch",
        arrays: "0 records named data.pkl",
        tmp_path / "none.pt": "No such file",
        tmp_path: "cannot be read: Is a directory",
        rezipped(plain, tmp_path / "two.pt", rename): "2 records named data.pkl",
        rezipped(plain, tmp_path / "script.pt", script): "TorchScript",
        rezipped(plain, tmp_path / "big.pt", big_endian): "big-endian",
        rezipped(plain, tmp_path / "lacking.pt", lacking): "no record data/0, which holds w",
        rezipped(plain, tmp_path / "short.pt", short): "w .* does not fit its record data/0 of 44 bytes",
        rezipped(
            plain, tmp_path / "packed.pt", lambda _: None, compression=zipfile.ZIP_DEFLATED
        ): "compressed",
    }
    for path, message in cases.items():
        with pytest.raises(CheckpointError, match=message):
            read_torch_file(path)


def with_pickle(path: Path, stream: bytes, storage: bytes = bytes(16)) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", stream)
        archive.writestr("a/data/0", storage)
    return path


def described(
    *, pid: object = None, offset: object = 0, shape: object = (4,), stride: object = (1,), numel: object = 4
) -> bytes:
    """A pickle of one tensor as torch spells it, with the given parts, in protocol 2."""

    class Storage(pickle.Pickler):
        def persistent_id(self, value: object) -> object:
            if value != "the storage":
                return None
            return ("storage", torch.FloatStorage, "0", "cpu", numel) if pid is None else pid

    class Tensor:
        def __reduce__(self) -> tuple[object, ...]:
            return torch._utils._rebuild_tensor_v2, ("the storage", offset, shape, stride, False, {})

    buffer = io.BytesIO()
    Storage(buffer, protocol=2).dump(Tensor())
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"pid": "a string"}, "persistent id"),
        ({"pid": ("storage", torch.FloatStorage, "0", "cpu")}, "persistent id"),
        ({"pid": ("storage", "FloatStorage", "0", "cpu", 4)}, "persistent id"),
        ({"pid": ("storage", torch.FloatStorage, "0", "cpu", -4)}, "persistent id"),
        ({"pid": ("storage", torch.FloatStorage, "../x", "cpu", 4)}, "no record"),
        ({"numel": 5}, "does not fit"),
        ({"shape": (5,)}, "does not fit"),
        ({"offset": 1}, "does not fit"),
        ({"offset": -1}, "not counts"),
        ({"shape": (-1,)}, "not counts"),
        ({"shape": (1 << 62,)}, "not counts"),
        ({"shape": (2, 2)}, "not counts"),
        ({"shape": [4]}, "not counts"),
        ({"stride": ("x",)}, "not counts"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(tmp_path: Path, parts: dict[str, object], message: str) -> None:
    assert dict(read_torch_file(with_pickle(tmp_path / "fine.pt", described())).tensors())[""].shape == (4,)
    with pytest.raises(CheckpointError, match=message):
        read_torch_file(with_pickle(tmp_path / "t.pt", described(**parts)))


def test_a_file_beyond_4_gb_is_read(tmp_path: Path) -> None:
    """A sparse file whose records stand where only the 64-bit fields of a zip can say."""
    path = tmp_path / "large.pt"
    far = (1 << 32) + 64
    with path.open("wb") as file:
        file.write(b"PK\x03\x04" + bytes(26))
        file.seek(far)
        records = {"a/data.pkl": described(), "a/data/0": b"0123" * 4}
        entries = [local_record(file, name, data) for name, data in records.items()]
        start = file.tell()
        file.write(b"".join(entries))
        end = file.tell()
        file.write(struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, 2, 2, end - start, start))
        file.write(struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1))
        file.write(struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 2, 2, end - start, 0xFFFFFFFF, 0))
    opened = read_torch_file(path)
    ((_, tensor),) = opened.tensors()
    assert tensor.offset > far
    assert tensor.mapped().tobytes() == b"0123" * 4
    assert verify_checksums(opened) == ChecksumCount(checked=2, absent=0)


def local_record(file: io.BufferedWriter, name: str, data: bytes) -> bytes:
    """Write one record with 64-bit local fields and padding, and return its entry for the directory."""
    at, crc, encoded = file.tell(), zlib.crc32(data), name.encode()
    extra = struct.pack("<HHQQ", 1, 16, len(data), len(data)) + struct.pack("<HH", 0x4246, 5) + b"Z" * 5
    common = struct.pack("<HHHHHI", 45, 0, 0, 0, 0, crc)
    sizes = struct.pack("<II", 0xFFFFFFFF, 0xFFFFFFFF)
    file.write(b"PK\x03\x04" + common + sizes + struct.pack("<HH", len(encoded), len(extra)))
    file.write(encoded + extra + data)
    wide = struct.pack("<HHQQQ", 1, 24, len(data), len(data), at)
    return (
        b"PK\x01\x02"
        + struct.pack("<H", 45)
        + common
        + sizes
        + struct.pack("<HHHHHII", len(encoded), len(wide), 0, 0, 0, 0, 0xFFFFFFFF)
        + encoded
        + wide
    )


def test_a_torch_file_holds_what_it_says(plain: Path) -> None:
    opened = read_torch_file(plain)
    assert isinstance(opened, TorchFile)
    assert opened.value["step"] == 5
    assert isinstance(opened.value["w"], StoredTensor)
    assert opened.fingerprint.size == plain.stat().st_size


def test_a_file_inside_another_is_read_where_it_is(tmp_path: Path) -> None:
    inner = saved(tmp_path / "inner.pt", {"fc": WEIGHT, "step": 3}).read_bytes()
    (tmp_path / "outer").write_bytes(bytes(13) + inner + bytes(50))
    read = read_torch_file(tmp_path / "outer", part=(13, len(inner)))
    ((name, fc),) = read.tensors()
    assert (name, b"".join(fc.blocks())) == ("fc", WEIGHT.numpy().tobytes())
    assert verify_checksums(read).absent == 0
    with pytest.raises(CheckpointError, match="truncated or still being written"):
        read_torch_file(tmp_path / "outer", part=(13, len(inner) - 5))
