"""The error for an object without memory, including what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from numbers import Number
from os import PathLike

from .buffers import name


def _has(method: str) -> Callable[[object], bool]:
    return lambda memory: hasattr(memory, method)


def _is(*types: type) -> Callable[[object], bool]:
    return lambda memory: isinstance(memory, types)


# What it is, and what was meant, most likely: the first that fits.  A class of the transport's
# says so itself (`_no_memory_hint`).
_MEANT: tuple[tuple[Callable[[object], bool], str], ...] = (
    (_is(str), "encode it: text.encode()"),
    (_is(PathLike), "read the file: path.read_bytes()"),
    (_is(bool, Number), "pack it: number.to_bytes(8, 'little'), or struct.pack('<d', number)"),
    (lambda memory: memory is None, "an empty message is b''"),
    (_has("to_numpy"), "take its memory: .to_numpy()"),
    (_has("SerializeToString"), "serialize it: .SerializeToString()"),
    (_has("getbuffer"), "take its memory: .getbuffer()"),
    (_has("tobytes"), "copy it: .tobytes()"),
    (_is(type), "give an object, not its class"),
    (callable, "call it: what it returns may have memory"),
    (
        _is(Mapping, Iterable),
        "make bytes of it: json.dumps(value).encode(), or pickle.dumps(value)",
    ),
    (is_dataclass, "make bytes of it: json.dumps(dataclasses.asdict(value)).encode()"),
)


def no_memory(memory: object) -> TypeError:
    """Return the error to raise."""
    hint = getattr(type(memory), "_no_memory_hint", "") or next(
        (hint for fits, hint in _MEANT if fits(memory)), "make bytes of it"
    )
    return TypeError(
        f"{name(memory)} has no memory to use: neither the buffer protocol nor DLPack; {hint}"
    )
