"""The field types of control messages, with their msgpack encoding and validation.

Each type is an ``Annotated`` alias. Type checkers see the plain type, and
:mod:`aiordma._core.protocol` finds the codec in the annotation.
"""

from __future__ import annotations

from typing import Annotated, Protocol

from aiordma._core.refusal import printable
from aiordma._core.region import ALL_RIGHTS, RegionToken, Rights

MAX_TEXT = 256
"""The maximum length of a text in a message in UTF-8 bytes. Longer texts are truncated."""
MAX_DATA = 64
"""The maximum length of the application's data in a message, in bytes."""
MAX_RAILS = 8
"""The maximum number of rails of a connection, including the lead."""


class Codec(Protocol):
    """A converter for one type of field. Both methods raise ValueError for an invalid value."""

    def encode(self, value: object) -> object:
        """Validate a local value, and convert it for msgpack."""

    def decode(self, value: object) -> object:
        """Validate a value of any type from the peer, and convert it to the type of the field."""


def _unsigned(value: object, bits: int) -> int:
    # Bools are rejected, because msgpack distinguishes them from integers.
    if type(value) is int and not value >> bits:  # shifting a negative number never gives 0
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"expected an int, not {type(value).__name__}")
    if value < 0 or value >> bits:
        raise ValueError(f"{value} does not fit in {bits} bits")
    return int(value)


class _Unsigned:
    def __init__(self, bits: int) -> None:
        self._bits = bits

    def encode(self, value: object) -> object:
        return _unsigned(value, self._bits)

    decode = encode


class _Text:
    def encode(self, value: object) -> object:
        if not isinstance(value, str):
            raise ValueError(f"expected a str, not {type(value).__name__}")
        # Drop lone surrogates, and the partial character that truncation may leave at the end.
        return value.encode("utf-8", "ignore")[:MAX_TEXT].decode("utf-8", "ignore")

    def decode(self, value: object) -> object:
        if not isinstance(value, str):
            raise ValueError(f"expected a str, not {type(value).__name__}")
        if len(value.encode()) > MAX_TEXT:
            raise ValueError(f"longer than {MAX_TEXT} bytes")
        return printable(value)  # so that the raw text cannot reach an error or a log


class _Access:
    def encode(self, value: object) -> object:
        number = _unsigned(value, 32)
        unknown = number & ~ALL_RIGHTS
        if unknown:
            raise ValueError(f"unknown rights {unknown:#x}")
        return number

    def decode(self, value: object) -> object:
        return Rights(_unsigned(self.encode(value), 32))


class _Bytes:
    """The codec for byte strings of a fixed or maximum size."""

    def __init__(self, size: int, *, at_most: bool = False) -> None:
        self._size = size
        self._at_most = at_most

    def encode(self, value: object) -> object:
        if not isinstance(value, bytes):
            raise ValueError(f"expected bytes, not {type(value).__name__}")
        if self._at_most and len(value) > self._size:
            raise ValueError(f"longer than {self._size} bytes")
        if not self._at_most and len(value) != self._size:
            raise ValueError(f"expected {self._size} bytes, not {len(value)}")
        return value

    decode = encode


class _Token:
    def encode(self, value: object) -> object:
        if not isinstance(value, RegionToken):
            raise ValueError(f"expected a region token, not {type(value).__name__}")
        return value.pack()

    def decode(self, value: object) -> object:
        if not isinstance(value, bytes):
            raise ValueError(f"expected bytes, not {type(value).__name__}")
        return RegionToken.unpack(value)


class _Keys:
    """The codec for (rail number, rkey) pairs."""

    def encode(self, value: object) -> object:
        if not isinstance(value, list | tuple) or len(value) > MAX_RAILS:
            raise ValueError(f"expected at most {MAX_RAILS} pairs")
        for pair in value:
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise ValueError("expected (rail, key) pairs")
        return tuple(tuple(_unsigned(number, 32) for number in pair) for pair in value)

    decode = encode


U16 = Annotated[int, _Unsigned(16)]
U32 = Annotated[int, _Unsigned(32)]
U64 = Annotated[int, _Unsigned(64)]
Text = Annotated[str, _Text()]
Bytes32 = Annotated[bytes, _Bytes(32)]
Bytes40 = Annotated[bytes, _Bytes(40)]
Data = Annotated[bytes, _Bytes(MAX_DATA, at_most=True)]
Access = Annotated[Rights, _Access()]
Token = Annotated[RegionToken, _Token()]
Keys = Annotated[tuple[tuple[int, int], ...], _Keys()]
