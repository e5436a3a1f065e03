"""The error for an object without memory, including what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from numbers import Number
from os import PathLike

from .buffers import name

_TARGET = "use writable memory, such as a bytearray or a numpy array"
_INTO = "receive into a bytearray, and"


def _has(method: str) -> Callable[[object], bool]:
    return lambda memory: hasattr(memory, method)


def _is(*types: type) -> Callable[[object], bool]:
    return lambda memory: isinstance(memory, types)


# Kinds of objects, with advice for a source of data and for a target. The first row that matches
# applies. A class of the transport has its own advice for sources (`_no_memory_hint`).
_ADVICE: tuple[tuple[Callable[[object], bool], str, str], ...] = (
    (_is(str), "encode it: text.encode()", f"{_INTO} decode that: data.decode()"),
    (_is(PathLike), "read the file: path.read_bytes()", f"{_INTO} write that: path.write_bytes()"),
    (
        _is(bool, Number),
        "pack it: number.to_bytes(8, 'little'), or struct.pack('<d', number)",
        f"{_INTO} unpack that: int.from_bytes(data, 'little'), or struct.unpack('<d', data)",
    ),
    (lambda memory: memory is None, "an empty message is b''", _TARGET),
    (_has("to_numpy"), "take its memory: .to_numpy()", _TARGET),
    (_has("SerializeToString"), "serialize it: .SerializeToString()", f"{_INTO} parse that"),
    (_has("getbuffer"), *("take its memory: .getbuffer()",) * 2),
    (_has("tobytes"), "copy it: .tobytes()", _TARGET),
    (_is(type), *("give an object, not its class",) * 2),
    (callable, *("call it: what it returns may have memory",) * 2),
    (
        _is(Mapping, Iterable),
        "make bytes of it: json.dumps(value).encode(), or pickle.dumps(value)",
        f"{_INTO} load that: json.loads(data), or pickle.loads(data)",
    ),
    (
        is_dataclass,
        "make bytes of it: json.dumps(dataclasses.asdict(value)).encode()",
        f"{_INTO} load that: json.loads(data)",
    ),
)


def no_memory(memory: object, target: bool) -> TypeError:
    """Return the error to raise, with advice for a source or a target of data."""
    own = "" if target else getattr(type(memory), "_no_memory_hint", "")
    hints = ((for_source, for_target) for fits, for_source, for_target in _ADVICE if fits(memory))
    hint = own or next(hints, ("make bytes of it", _TARGET))[target]
    return TypeError(
        f"{name(memory)} has no memory to use: neither the buffer protocol nor DLPack; {hint}"
    )
