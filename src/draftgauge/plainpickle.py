"""A pickle read as data: plain values come out, nothing is imported and nothing in it is called.

Python's own reader runs what a pickle names; this one is a small stack machine over the instructions that
the standard library's `pickletools` decodes. A class or function in the stream is only a name (`Global`).
Calling one looks the name up in a literal table of harmless rebuild functions, given by the caller and
completed by a few containers; every other name becomes an `Opaque` value that keeps what it was made of.
This module knows nothing of torch or tensors.

Source: CPython, Lib/pickletools.py, the descriptions of the instructions.
"""

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, no_type_check

MAX_DEPTH = 200
_CONTAINS_ITSELF = "(a value that contains itself)"


class PickleError(ValueError):
    """The stream is damaged, hostile, or uses an instruction that plain values do not need."""


@dataclass(frozen=True, eq=False)
class Opaque:
    """A value of a class that is not known: its full name, and what it was filled with.

    `state` is its items if it was filled like a dict or list, else the state it was given, else the
    arguments it was made with, all as plain values.

    Example:
        `Opaque("argparse.Namespace", {"lr": 0.001})`, `Opaque("pathlib.PosixPath", ("runs", "a"))`
    """

    class_name: str
    state: object


@dataclass(frozen=True)
class Global:
    """The name of a class or function, such as `torch.float32`. It cannot be called."""

    name: str


@dataclass(eq=False)
class Unfinished:
    """An opaque value while it is being read."""

    class_name: str
    args: tuple[object, ...]
    state: object = None
    items: dict[Any, Any] | list[Any] | None = None

    def content(self) -> object:
        """What becomes the state of the `Opaque`."""
        if self.items is not None:
            return self.items
        return self.args if self.state is None else self.state


Rebuild = Callable[..., object]
"""Makes a value from the arguments in the stream; NotImplemented makes it opaque after all."""


def load_plain(
    data: bytes,
    *,
    rebuild: Mapping[str, Rebuild],
    persistent: Callable[[object], object],
    leaf: Callable[[object, str], object],
) -> tuple[object, tuple[str, ...]]:
    """Read one pickle; returns its value and the sorted names of the classes that stayed opaque.

    `rebuild` maps full names to functions of ours. `persistent` turns a persistent id into a value.
    `leaf` sees every value that is neither a container nor opaque, with its dotted path, and returns what
    stands there in the end.

    Example:
        `({"step": 7, "args": Opaque("argparse.Namespace", {"lr": 0.1})}, ("argparse.Namespace",))`

    Raises:
        PickleError: the stream cannot be read this way.
    """
    machine = _Machine(_CONTAINERS | dict(rebuild), persistent)
    try:
        for opcode, arg, _ in pickletools.genops(data):
            _step(machine, opcode.name, arg)
        (value,) = machine.stack
        finisher = _Finisher(leaf)
        return finisher.finish(value, "", 0), tuple(sorted(finisher.opaque))
    except (ValueError, TypeError, LookupError, OverflowError) as error:
        raise PickleError(f"its pickle cannot be read as plain values: {error}") from error


@dataclass
class _Machine:
    rebuild: Mapping[str, Rebuild]
    persistent: Callable[[object], object]
    stack: list[Any] = field(default_factory=list)
    outer: list[list[Any]] = field(default_factory=list)  # the stacks below each open mark
    memo: dict[int, Any] = field(default_factory=dict)

    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        above, self.stack = self.stack, self.outer.pop()
        return above

    def drop_to_mark(self) -> None:
        self.pop_to_mark()

    def mark(self) -> None:
        self.outer.append(self.stack)
        self.stack = []

    def discard(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.pop_to_mark()

    def remember(self, index: int | None = None) -> None:
        self.memo[len(self.memo) if index is None else index] = self.stack[-1]

    def call(self, function: object, args: object) -> None:
        """Push what calling gives: a value of ours, or an opaque one under its name."""
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise PickleError(f"it calls a {type(function).__name__} with a {type(args).__name__}")
        made = self.rebuild[function.name](*args) if function.name in self.rebuild else NotImplemented
        self.push(Unfinished(function.name, args) if made is NotImplemented else made)

    def build(self) -> None:
        state = self.pop()
        target = self.stack[-1]
        if isinstance(
            target, Unfinished
        ):  # attributes of a plain value (a state dict's _metadata) are dropped
            target.state = state

    def set_items(self, flat: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Unfinished):
            target.items = {} if target.items is None else target.items
            target = target.items
        if not isinstance(target, dict) or len(flat) % 2:
            raise PickleError(f"it sets items of a {type(target).__name__}")
        target.update(_dict(flat))

    def extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Unfinished):
            target.items = [] if target.items is None else target.items
            target = target.items
        if not isinstance(target, list):
            raise PickleError(f"it appends to a {type(target).__name__}")
        target.extend(values)

    def add(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], set):
            raise PickleError(f"it adds to a {type(self.stack[-1]).__name__}")
        self.stack[-1].update(_keys(values))


def _step(machine: _Machine, name: str, arg: Any) -> None:
    if name in _LITERALS:
        machine.push(arg)
    elif name in _CONSTANTS:
        machine.push(_CONSTANTS[name]())
    elif name in _ACTIONS:
        _ACTIONS[name](machine, arg)
    else:
        raise PickleError(f"it uses the instruction {name}")


def _global(module: object, name: object) -> Global:
    if not isinstance(module, str) or not isinstance(name, str):
        raise PickleError("it names a class by something else than text")
    return Global(f"{_PYTHON2_MODULES.get(module, module)}.{name}")


def _stack_global(m: _Machine, _: Any) -> None:
    name, module = m.pop(), m.pop()
    m.push(_global(module, name))


def _reduce(m: _Machine, _: Any) -> None:
    args, function = m.pop(), m.pop()
    m.call(function, args)


def _new_with_keywords(m: _Machine, _: Any) -> None:
    keywords, args, function = m.pop(), m.pop(), m.pop()
    m.call(function, (*args, keywords) if keywords else args)


def _obj(m: _Machine, _: Any) -> None:
    function, *args = m.pop_to_mark()
    m.call(function, tuple(args))


def _set_item(m: _Machine, _: Any) -> None:
    value, key = m.pop(), m.pop()
    m.set_items([key, value])


def _append(m: _Machine, _: Any) -> None:
    value = m.pop()
    m.extend([value])


def _take(m: _Machine, count: int) -> tuple[Any, ...]:
    if len(m.stack) < count:
        raise PickleError("it takes more values than there are")
    taken = tuple(m.stack[-count:])
    del m.stack[-count:]
    return taken


def _dict(flat: list[Any]) -> dict[Any, Any]:
    return dict(zip(_keys(flat[::2]), flat[1::2], strict=True))


def _keys(values: Any) -> list[Any]:
    return [_key(value) for value in values]


def _key(value: Any) -> Any:
    """The value, if hashing it is cheap: the hash of deeply nested tuples would exhaust the C stack."""
    items = value if isinstance(value, tuple) else (value,)
    for item in items:
        if isinstance(item, tuple | list | dict | set | frozenset | bytearray):
            raise PickleError(f"a {type(item).__name__} is used in a key")
    return value


def _set_of(values: Any = ()) -> set[Any]:
    return set(_keys(values))


def _reconstructor(cls: object, *_: object) -> object:
    return Unfinished(cls.name, ()) if isinstance(cls, Global) else NotImplemented


def _encoded(text: object, encoding: object = "latin1") -> object:
    """How protocol 2 spells bytes."""
    if isinstance(text, str) and encoding in ("latin1", "latin-1"):
        return text.encode("latin-1")
    return NotImplemented


def _bytes(value: object = b"", *_: object) -> object:
    return bytes(value) if isinstance(value, bytes | bytearray) else NotImplemented


def _complex(real: object = 0.0, imag: object = 0.0) -> object:
    if isinstance(real, int | float) and isinstance(imag, int | float):
        return complex(real, imag)
    return NotImplemented


def _mapping(items: object = (), *_: object) -> object:
    if isinstance(items, dict):
        return dict(items)
    return {} if isinstance(items, tuple) and not items else _dict_of_pairs(items)


def _dict_of_pairs(pairs: object) -> object:
    if isinstance(pairs, list) and all(isinstance(p, list | tuple) and len(p) == 2 for p in pairs):
        return _dict([item for pair in pairs for item in pair])
    return NotImplemented


_PYTHON2_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # protocol 2 spells them so
_CONTAINERS: dict[str, Rebuild] = {
    "collections.OrderedDict": _mapping,
    "collections.defaultdict": lambda _factory=None, *args: _mapping(*args),
    "collections.Counter": _mapping,
    "builtins.dict": _mapping,
    "builtins.list": lambda values=(): list(values),
    "builtins.tuple": lambda values=(): tuple(values),
    "builtins.set": _set_of,
    "builtins.frozenset": lambda values=(): frozenset(_set_of(values)),
    "builtins.complex": _complex,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "copyreg._reconstructor": _reconstructor,
    "_codecs.encode": _encoded,
}
_CONSTANTS: dict[str, Callable[[], object]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": set,
}
_LITERALS = frozenset(
    {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"}
    | {"STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
    | {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"}
)
_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda m, arg: None,
    "FRAME": lambda m, arg: None,
    "STOP": lambda m, arg: None,
    "MARK": lambda m, arg: m.mark(),
    "POP": lambda m, arg: m.discard(),
    "POP_MARK": lambda m, arg: m.drop_to_mark(),
    "DUP": lambda m, arg: m.push(m.stack[-1]),
    "PUT": lambda m, arg: m.remember(arg),
    "BINPUT": lambda m, arg: m.remember(arg),
    "LONG_BINPUT": lambda m, arg: m.remember(arg),
    "MEMOIZE": lambda m, arg: m.remember(),
    "GET": lambda m, arg: m.push(m.memo[arg]),
    "BINGET": lambda m, arg: m.push(m.memo[arg]),
    "LONG_BINGET": lambda m, arg: m.push(m.memo[arg]),
    "TUPLE": lambda m, arg: m.push(tuple(m.pop_to_mark())),
    "TUPLE1": lambda m, arg: m.push(_take(m, 1)),
    "TUPLE2": lambda m, arg: m.push(_take(m, 2)),
    "TUPLE3": lambda m, arg: m.push(_take(m, 3)),
    "LIST": lambda m, arg: m.push(m.pop_to_mark()),
    "DICT": lambda m, arg: m.push(_dict(m.pop_to_mark())),
    "FROZENSET": lambda m, arg: m.push(frozenset(_keys(m.pop_to_mark()))),
    "SETITEM": _set_item,
    "SETITEMS": lambda m, arg: m.set_items(m.pop_to_mark()),
    "APPEND": _append,
    "APPENDS": lambda m, arg: m.extend(m.pop_to_mark()),
    "ADDITEMS": lambda m, arg: m.add(m.pop_to_mark()),
    "GLOBAL": lambda m, arg: m.push(_global(*arg.split(" ", 1))),
    "STACK_GLOBAL": _stack_global,
    "INST": lambda m, arg: m.call(_global(*arg.split(" ", 1)), tuple(m.pop_to_mark())),
    "OBJ": _obj,
    "REDUCE": _reduce,
    "NEWOBJ": _reduce,
    "NEWOBJ_EX": _new_with_keywords,
    "BUILD": lambda m, arg: m.build(),
    "PERSID": lambda m, arg: m.push(m.persistent(arg)),
    "BINPERSID": lambda m, arg: m.push(m.persistent(m.pop())),
}


@no_type_check  # at run time: a checker's wrapper around each call would multiply the depth of the stack
@dataclass
class _Finisher:
    """Turns the values of the machine into final ones; a value that occurs twice stays one value."""

    leaf: Callable[[object, str], object]
    opaque: set[str] = field(default_factory=set)
    # id of a container -> the container (kept alive, so that its id stays its own) and its final form
    done: dict[int, tuple[object, object]] = field(default_factory=dict)

    def finish(self, value: Any, path: str, depth: int) -> object:
        if not isinstance(value, dict | list | tuple | Unfinished):
            return self._finish_leaf(value, path, depth)
        if id(value) in self.done:
            return self.done[id(value)][1]
        if depth == MAX_DEPTH:
            raise PickleError(f"its values are nested deeper than {MAX_DEPTH} levels at {path[:80]}")
        self.done[id(value)] = value, Opaque(_CONTAINS_ITSELF, None)
        finished = self._finish_container(value, path, depth + 1)
        self.done[id(value)] = value, finished
        return finished

    def _finish_container(self, value: Any, path: str, depth: int) -> object:
        if isinstance(value, Unfinished):
            self.opaque.add(value.class_name)
            return Opaque(value.class_name, self.finish(value.content(), path, depth))
        if isinstance(value, dict):
            finished = {}
            for key, item in value.items():  # a loop: a comprehension would double the depth of the stack
                finished[self._finish_key(key, depth)] = self.finish(item, joined(path, key), depth)
            return finished
        items = []
        for index, item in enumerate(value):
            items.append(self.finish(item, joined(path, index), depth))
        return tuple(items) if isinstance(value, tuple) else items

    def _finish_leaf(self, value: Any, path: str, depth: int) -> object:
        if isinstance(value, set | frozenset):
            return type(value)(self._finish_key(item, depth) for item in value)
        found = self.leaf(value, path)
        if isinstance(found, Global):
            self.opaque.add(found.name)
            return Opaque(found.name, None)
        return found

    def _finish_key(self, key: Any, depth: int) -> object:
        """A key or an item of a set: what is known stays, what is not becomes opaque."""
        if isinstance(key, tuple):
            return tuple(self._finish_key(item, depth) for item in key)
        if isinstance(key, Unfinished):
            return self.finish(key, "(a key)", depth)
        return self._finish_leaf(key, "(a key)", depth)


def joined(path: str, key: object) -> str:
    """The dotted path of an item: `joined("state.0", "exp_avg")` is `state.0.exp_avg`."""
    name = str(key) if isinstance(key, str | int | float | bool | None) else f"<{type(key).__name__}>"
    return f"{path}.{name}" if path else name
