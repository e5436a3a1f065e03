"""The error for objects that cannot be used as memory, with advice on alternatives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from numbers import Number
from os import PathLike

from .buffers import type_name

_USE_WRITABLE = "use writable memory such as a bytearray or a numpy array"
_RECEIVE_INTO = "receive into a bytearray and"


def _has(method: str) -> Callable[[object], bool]:
    return lambda memory: hasattr(memory, method)


def _is(*types: type) -> Callable[[object], bool]:
    return lambda memory: isinstance(memory, types)


# A predicate for each kind of object, with the advice for sending and for receiving. The first
# match applies. For sending, a class can provide its own advice in `_no_memory_hint`.
_ADVICE: tuple[tuple[Callable[[object], bool], str, str], ...] = (
    (_is(str), "encode it with text.encode()", f"{_RECEIVE_INTO} decode it with data.decode()"),
    (
        _is(PathLike),
        "read the file with path.read_bytes()",
        f"{_RECEIVE_INTO} write the file with path.write_bytes(data)",
    ),
    (
        _is(bool, Number),
        "pack it with number.to_bytes(8, 'little') or struct.pack('<d', number)",
        f"{_RECEIVE_INTO} unpack it with int.from_bytes(data, 'little') or"
        " struct.unpack('<d', data)",
    ),
    (lambda memory: memory is None, "use b'' for an empty message", _USE_WRITABLE),
    (_has("to_numpy"), "pass the result of to_numpy()", _USE_WRITABLE),
    (
        _has("SerializeToString"),
        "pass the result of SerializeToString()",
        f"{_RECEIVE_INTO} parse it with ParseFromString(data)",
    ),
    (_has("getbuffer"), *("pass the result of getbuffer()",) * 2),
    (_has("tobytes"), "pass the result of tobytes()", _USE_WRITABLE),
    (_is(type), *("pass an object instead of its class",) * 2),
    (callable, *("call it and pass the result",) * 2),
    (
        _is(Mapping, Iterable),
        "serialize it with json.dumps(value).encode() or pickle.dumps(value)",
        f"{_RECEIVE_INTO} deserialize it with json.loads(data) or pickle.loads(data)",
    ),
    (
        is_dataclass,
        "serialize it with json.dumps(dataclasses.asdict(value)).encode()",
        f"{_RECEIVE_INTO} deserialize it with json.loads(data)",
    ),
)


def unsupported_memory_error(memory: object, will_receive: bool) -> TypeError:
    """Return the exception for an object that cannot be used as memory.

    If ``will_receive`` is true, its message explains how to receive into the object, otherwise how
    to send the object.
    """
    class_hint = "" if will_receive else getattr(type(memory), "_no_memory_hint", "")
    hints = (
        (for_source, for_target) for matches, for_source, for_target in _ADVICE if matches(memory)
    )
    hint = class_hint or next(hints, ("convert it to bytes", _USE_WRITABLE))[will_receive]
    return TypeError(
        f"{type_name(memory)} cannot be used as memory, because it supports neither the buffer "
        f"protocol nor DLPack; {hint}"
    )
