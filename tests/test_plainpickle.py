import argparse
import collections
import pickle
from pathlib import Path

import pytest

from draftgauge.plainpickle import Global, Opaque, PickleError, load_plain


def load(data: bytes) -> tuple[object, tuple[str, ...]]:
    return load_plain(data, rebuild={}, persistent=lambda pid: pid, leaf=lambda value, path: value)


PLAIN = {
    "none": None,
    "flags": [True, False],
    "numbers": (0, -1, 255, 65536, -(1 << 31), 1 << 40, -(1 << 5000), 0.1, 2j),
    "text": "grüß\nGott",
    "bytes": b"\x00\xff",
    "empty": ({}, [], (), set(), frozenset(), b""),
    "sets": ({1, 2}, frozenset({"a"})),
    ("a", 1): {1.5: {2: [[["deep"]]]}},
    "long": list(range(1500)),
}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_of_every_protocol_come_back(protocol: int) -> None:
    assert load(pickle.dumps(PLAIN, protocol)) == (PLAIN, ())


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_standard_containers_become_plain_ones(protocol: int) -> None:
    value = [
        collections.OrderedDict(a=1),
        collections.defaultdict(list, {"b": [2]}),
        collections.Counter("aab"),
        bytearray(b"xy"),
    ]
    found, opaque = load(pickle.dumps(value, protocol))
    assert found == [{"a": 1}, {"b": [2]}, {"a": 2, "b": 1}, b"xy"]
    assert set(opaque) <= {"builtins.list"}  # the factory of the defaultdict is dropped with its argument


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_other_classes_become_opaque_with_what_they_were_filled_with(protocol: int) -> None:
    (space, folder), opaque = load(pickle.dumps([argparse.Namespace(lr=0.1), Path("a/b")], protocol))
    assert (space.class_name, space.state) == ("argparse.Namespace", {"lr": 0.1})
    assert (folder.class_name, folder.state) == (f"pathlib.{type(Path()).__name__}", ("a", "b"))
    assert opaque == ("argparse.Namespace", folder.class_name)


def test_a_value_that_occurs_twice_stays_one_value() -> None:
    shared = [1]
    found, _ = load(pickle.dumps({"a": shared, "b": (shared,)}))
    assert found["a"] is found["b"][0]


def test_doubling_references_cost_nothing() -> None:
    value: object = ()
    for _ in range(150):
        value = (value, value)
    found, _ = load(pickle.dumps(value))
    for _ in range(150):
        assert found[0] is found[1]
        found = found[0]


def test_a_value_that_contains_itself_is_marked() -> None:
    loop: list[object] = [1]
    loop.append(loop)
    found, _ = load(pickle.dumps(loop))
    assert found[0] == 1
    assert isinstance(found[1], Opaque)
    assert "contains itself" in found[1].class_name


@pytest.mark.parametrize(
    "stream",
    [
        b"cos\nsystem\n(Vtouch ran\ntR.",
        b"(Vtouch ran\nios\nsystem\n.",
        b"(cos\nsystem\nVtouch ran\no.",
        b"cbuiltins\neval\n(V__import__('os').system('touch ran')\ntR.",
        b"\x80\x04\x8c\x08builtins\x8c\x04exec\x93\x8c\x10open('ran','w').\x85R.",
        b"cbuiltins\ngetattr\n(cos\nsystem\nV__call__\ntR.",
        b"ccollections\nOrderedDict\n(tR(dV__reduce__\ncos\nsystem\nsb.",
        b"\x80\x02cos\nsystem\n(Vtouch ran\nt\x81.",
        b"\x80\x04cos\nsystem\n(Vtouch ran\nt}\x92.",
        b"cbuiltins\nset\n(V__class__.__base__\ntR.",
    ],
)
def test_an_attack_runs_nothing_and_is_read(
    stream: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    load(stream)
    assert list(tmp_path.iterdir()) == []


def test_a_function_in_a_pickle_is_a_name_only() -> None:
    found, opaque = load(b"cos\nsystem\n.")
    assert (found.class_name, found.state, opaque) == ("os.system", None, ("os.system",))


def test_an_opaque_key_keeps_its_content() -> None:
    found, opaque = load(pickle.dumps({Path("a", "b"): 1}))
    ((key, value),) = found.items()
    assert (key.state, value, opaque) == (("a", "b"), 1, (key.class_name,))


def nested(levels: int) -> bytes:
    return b"(" * levels + b"t" * levels + b"."


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (b"", "pickle"),
        (b".", "pickle"),
        (b"N", "exhausted before seeing STOP"),
        (b"NN.", "unpack"),
        (b"R.", "pop from empty"),
        (b"NNR.", "calls a NoneType"),
        (b"cos\nsystem\nNR.", "calls a Global with a NoneType"),
        (b"t.", "pop from empty"),
        (b"\x86.", "more values than there are"),
        (b"g7\n.", "7"),
        (b"q\x01.", "out of range"),
        (b"N(NNu.", "sets items of a NoneType"),
        (b"}(Nu.", "sets items"),
        (b"}]s.", "index out of range"),
        (b"}(]Nu.", "a list is used in a key"),
        (b"}((((tttNu.", "a tuple is used in a key"),
        (b"N(Ne.", "appends to a NoneType"),
        (b"\x80\x04N(N\x90.", "adds to a NoneType"),
        (b"\x82\x01.", "instruction EXT1"),
        (b"\x80\x05\x97.", "instruction NEXT_BUFFER"),
        (b"\x80\x04NN\x93.", "names a class by something else"),
        (b"I" + b"9" * 5000 + b"\n.", "pickle"),
        (nested(100_000), "nested deeper than 200"),
        (b"cbuiltins\ncomplex\n(NNNtR.", "positional"),
        (b"cbuiltins\nset\n(I7\ntR.", "not iterable"),
    ],
)
def test_a_malformed_stream_is_refused_with_one_kind_of_error(stream: bytes, message: str) -> None:
    with pytest.raises(PickleError, match=message):
        load(stream)


def test_every_cut_and_every_changed_byte_is_read_or_refused() -> None:
    whole = pickle.dumps({"a": [1, (2.5, b"x")], "n": argparse.Namespace(x={1, 2})}, 2)
    for at in range(len(whole)):
        with pytest.raises(PickleError):
            load(whole[:at])
        for changed in (0, ord("."), ord("("), ord("R"), whole[at] ^ 1, whole[at] ^ 0x80):
            try:
                load(whole[:at] + bytes([changed]) + whole[at + 1 :])
            except PickleError:
                continue


def test_rebuild_and_leaf_decide_what_stands_in_the_end() -> None:
    found, opaque = load_plain(
        b"(lp0\ncm\npoint\n(I1\nI2\ntRacm\nother\n(I3\ntRa.",
        rebuild={"m.point": lambda x, y: Global(f"p{x}{y}"), "m.other": lambda x: NotImplemented},
        persistent=lambda pid: pid,
        leaf=lambda value, path: f"{value.name}@{path}" if isinstance(value, Global) else value,
    )
    assert found[0] == "p12@0"
    assert (found[1].class_name, found[1].state) == ("m.other", (3,))
    assert opaque == ("m.other",)
