"""Arrays and tensors over a connection: sent together by name, or read and written where they are.

An array is a numpy array or a torch tensor in the memory of the CPU; `kind` says which of both a
call makes, "numpy" or "torch".  Several arrays in one message have the layout of a safetensors
file, so that the contents of a file can be sent, and what was sent can be written to one.  Types
that numpy lacks (bfloat16, float8) need `kind="torch"` or the package ml_dtypes.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import operator
import struct
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack
from itertools import accumulate
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from ._core.region import TOKEN_SIZE, Rights
from .transport import Connection, Message, RemoteRegion, Share
from .verbs import bytes_of

Kind = Literal["numpy", "torch"]

# The types of the safetensors format: the bytes of an element, and the name in numpy, ml_dtypes and
# torch.
_TYPES = {
    "BOOL": (1, "bool"),
    "U8": (1, "uint8"),
    "I8": (1, "int8"),
    "F8_E5M2": (1, "float8_e5m2"),
    "F8_E4M3": (1, "float8_e4m3fn"),
    "U16": (2, "uint16"),
    "I16": (2, "int16"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "U32": (4, "uint32"),
    "I32": (4, "int32"),
    "F32": (4, "float32"),
    "U64": (8, "uint64"),
    "I64": (8, "int64"),
    "F64": (8, "float64"),
    "C64": (8, "complex64"),
}
_CODES = {name: code for code, (_, name) in _TYPES.items()}

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64
"""Of the first element in a message; each has the alignment of its type then."""
_MAX_HEADER = 100_000_000
"""Bytes; as of the safetensors library."""
_MAX_DIMENSIONS = 64
_BATCH = 512
"""Pieces of a remote array that are read or written with one doorbell."""
_GAP = 4096
"""Bytes: an operation takes longer than to read so many more."""
_MOST_PIECES = 4096
_MOST_WITH_GAPS = _MOST_PIECES * _GAP
"""Bytes that are read with their gaps at once."""


class Arrays(dict[str, Any]):
    """Arrays by name, and the `metadata` that came with them: texts by name."""

    def __init__(self, arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
        super().__init__(arrays)
        self.metadata: dict[str, str] = dict(metadata)


def _is_tensor(array: object) -> bool:
    return type(array).__module__.partition(".")[0] == "torch" or hasattr(array, "untyped_storage")


def _described(array: Any) -> tuple[Any, str, tuple[int, ...], tuple[int, ...]]:
    """It, or the numpy array of another object; its type, shape and strides in bytes."""
    if _is_tensor(array):
        name = str(array.dtype).removeprefix("torch.")
        strides = tuple(step * array.element_size() for step in array.stride())
    else:
        array = np.asarray(array)
        name, strides = array.dtype.name, array.strides
        if not array.dtype.isnative:
            raise TypeError(f"{name} in the other byte order; use array.astype({name!r})")
    if name not in _CODES:
        raise TypeError(
            f"arrays of {name} have no place in a message; there are {', '.join(_CODES)}"
        )
    return array, _CODES[name], tuple(array.shape), strides


def _type(code: str, kind: Kind) -> Any:
    name = _TYPES[code][1]
    if kind == "torch":
        return getattr(importlib.import_module("torch"), name)
    if kind != "numpy":
        raise ValueError(f'kind is "numpy" or "torch", not {kind!r}')
    try:
        return np.dtype(name)
    except TypeError:
        try:
            return np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
        except ImportError:
            raise TypeError(
                f'numpy has no {name}; install ml_dtypes, or write kind="torch"'
            ) from None


def _empty(code: str, shape: tuple[int, ...], kind: Kind) -> Any:
    if kind == "torch":
        return importlib.import_module("torch").empty(shape, dtype=_type(code, kind))
    return np.empty(shape, _type(code, kind))


def _view(memory: memoryview, code: str, shape: tuple[int, ...], kind: Kind) -> Any:
    if kind == "torch" and memory:  # torch refuses a buffer of no bytes
        torch = importlib.import_module("torch")
        return torch.frombuffer(memory, dtype=_type(code, kind)).reshape(shape)
    return (
        np.frombuffer(memory, _type(code, kind)).reshape(shape)
        if memory
        else _empty(code, shape, kind)
    )


def _bytes_of(memory: Any) -> memoryview:
    return memory.data if isinstance(memory, Message) else bytes_of(memory)


def _buffer(array: Any) -> Any:
    """It, or its memory as numbers: numpy exports no buffer of the types of ml_dtypes."""
    dtype = getattr(array, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype.isbuiltin != 1:
        return array.view(f"u{dtype.itemsize}")
    return array


def _contiguous(array: Any) -> Any:
    return array.contiguous() if _is_tensor(array) else np.ascontiguousarray(array)


def pack(arrays: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> list[Any]:
    """The buffers of a message with these arrays, for `Connection.send`: a header, and theirs.

    An array that does not lie in C order is copied, the others are sent from where they lie, and
    must not change until the `send` has ended.  TypeError for a type that the format lacks.
    """
    metadata = metadata or {}
    if not all(isinstance(it, str) for it in (*arrays, *metadata, *metadata.values())):
        raise TypeError("the names of arrays are strings, and so is all of the metadata")
    if "__metadata__" in arrays:
        raise ValueError("no array has the name '__metadata__': it is that of the metadata")
    found = {name: _described(array) for name, array in arrays.items()}
    # The largest elements first: so each begins at a multiple of its size.
    names = sorted(found, key=lambda name: -_TYPES[found[name][1]][0])
    sizes = [_TYPES[found[name][1]][0] * math.prod(found[name][2]) for name in names]
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, size, end in zip(names, sizes, accumulate(sizes), strict=True):
        _, code, shape, _ = found[name]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [end - size, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + _LENGTH.size) % _ALIGNMENT)
    filled = [found[name][0] for name, size in zip(names, sizes, strict=True) if size]
    buffers = [_buffer(_contiguous(array)) for array in filled]
    return [_LENGTH.pack(len(text)) + text, *buffers]


def _size(code: str, shape: tuple[int, ...]) -> int:
    """The bytes of such an array; ValueError where numpy and torch can have none."""
    element = _TYPES[code][0]
    if len(shape) > _MAX_DIMENSIONS or element * math.prod(it or 1 for it in shape) >> 63:
        raise ValueError
    return element * math.prod(shape)


Entry = tuple[str, tuple[int, ...], int, int]
"""The type of an array, its shape, and where its bytes begin and end."""


def _no_file(what: str) -> ValueError:
    return ValueError(f"no message or file of safetensors: {what}")


def _parse(text: bytes, size: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """The header of a message, which has `size` bytes behind it; ValueError if it is none."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _no_file(f"its header is no JSON ({error})") from None
    metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _no_file("its header has another form")
    entries: dict[str, Entry] = {}
    for name, entry in header.items():
        try:
            code, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            numbers = [*shape, start, end]
            if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
                raise TypeError
            if end - start != _size(code, shape):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise _no_file(f"the entry {str(name)[:50]!r} is {str(entry)[:200]!r}") from None
        entries[name] = code, shape, start, end
    place = 0
    for _, _, start, end in sorted(entries.values(), key=lambda entry: entry[2:]):
        if start != place:
            raise _no_file(f"bytes from {place} to {start} belong to no array, or to two")
        place = end
    if place != size:
        raise _no_file(f"its arrays have {place} bytes, and it has {size}")
    return entries, metadata


def unpack(memory: Any, kind: Kind = "numpy") -> Arrays:
    """The arrays of a `Message`, or of a file that was read or mapped: views of its memory.

    ValueError for what has not the layout of safetensors.
    """
    view = _bytes_of(memory)
    length = _LENGTH.unpack_from(view)[0] if len(view) >= _LENGTH.size else _MAX_HEADER
    data = view[_LENGTH.size + length :]
    if _LENGTH.size + length > len(view):
        raise _no_file("it is too short")
    entries, metadata = _parse(bytes(view[_LENGTH.size : _LENGTH.size + length]), len(data))
    return Arrays(
        {
            name: _view(data[start:end], code, shape, kind)
            for name, (code, shape, start, end) in entries.items()
        },
        metadata,
    )


async def send(
    conn: Connection, arrays: Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> None:
    """Sends arrays as one message, which `recv` takes; see `pack` and `Connection.send`."""
    await conn.send(pack(arrays, metadata))


async def recv(conn: Connection, kind: Kind = "numpy") -> Arrays:
    """The arrays of the next message, in new memory that they share; see `Connection.recv_with`.

    ValueError for a message of another kind, which is lost.
    """
    received = await conn.recv_with(lambda length: np.empty(length, np.uint8))
    return unpack(received.memory, kind)


class SharedArray:
    """An array of this side that the peer may use: its `token` is what the peer opens.

    Made by `share`.  Until `close`, or the end of the `with`, the array's memory stays registered.
    """

    def __init__(self, stack: ExitStack, share: Share, token: bytes) -> None:
        self._stack = stack
        self.share: Share = share
        self.token: bytes = token

    def close(self) -> None:
        """Takes the memory back from the peer."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _reach(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> tuple[int, int]:
    """Where its memory begins and ends, seen from element 0, for elements of `size` bytes."""
    if not all(shape):
        return 0, 0
    steps = [step * (count - 1) for step, count in zip(strides, shape, strict=True)]
    return sum(step for step in steps if step < 0), sum(step for step in steps if step > 0) + size


def _memory(array: Any, strides: tuple[int, ...]) -> tuple[Any, int]:
    """The memory from the first byte of an array to its last, and where in it element 0 begins."""
    if _is_tensor(array) or array.flags.c_contiguous:
        return _buffer(array), 0
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    low, high = _reach(array.shape, strides, array.itemsize)
    at = array.ctypes.data - root.ctypes.data + low
    flat = root if root.flags.c_contiguous else root.T
    return np.ndarray(high - low, np.uint8, flat, at), -low


def share(
    conn: Connection,
    array: Any,
    *,
    access: Rights = Rights.READ,
    lease: float | Literal["default"] | None = "default",
) -> SharedArray:
    """Lets the peer use an array where it is; send it `SharedArray.token`, for `open_array` there.

    Rights and lease are those of `Connection.share`.  A view of numpy's that leaves gaps shares
    what lies in the gaps too.  A tensor must lie in C order (`Tensor.contiguous`).
    """
    array, code, shape, strides = _described(array)
    memory, origin = _memory(array, strides) if all(shape) else (bytearray(1), 0)
    with ExitStack() as stack:
        region = stack.enter_context(conn.register(memory))
        shared = stack.enter_context(conn.share(region, access=access, lease=lease))
        description = json.dumps([code, shape, strides, origin]).encode()
        return SharedArray(stack.pop_all(), shared, shared.token.pack() + description)


def open_array(conn: Connection, token: Any, kind: Kind = "numpy") -> RemoteArray:
    """The peer's array of a `SharedArray.token`.  ValueError or ProtocolError for what is none."""
    data = bytes(_bytes_of(token))
    region = conn.open_region(data[:TOKEN_SIZE])
    try:
        code, shape, strides, origin = json.loads(data[TOKEN_SIZE:])
        numbers = [*shape, *strides, origin]
        if not all(type(number) is int and abs(number) < 1 << 63 for number in numbers):
            raise TypeError
        if len(shape) != len(strides) or min([*shape, 0]) < 0:
            raise ValueError
        size = _size(code, shape)
        low, high = _reach(shape, strides, _TYPES[code][0])
        if origin + low < 0 or max(origin + high, size) > len(region):
            raise ValueError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"no token of an array: {data[TOKEN_SIZE:][:200]!r}") from None
    return RemoteArray(conn, region, code, tuple(shape), tuple(strides), origin, kind)


async def open_file(conn: Connection, region: RemoteRegion, kind: Kind = "numpy") -> Arrays:
    """The remote arrays of a safetensors file, or message, in memory that the peer shares.

    Only the header is read.  ValueError if it has another layout.
    """
    if len(region) < _LENGTH.size:
        raise _no_file("it is too short")
    length = bytearray(_LENGTH.size)
    await conn.read(region[: _LENGTH.size], length)
    (size,) = _LENGTH.unpack(length)
    start = _LENGTH.size + size
    if size > min(_MAX_HEADER, len(region) - _LENGTH.size):
        raise _no_file(f"a header of {size} bytes")
    header = bytearray(size)
    await conn.read(region[_LENGTH.size : start], header)
    entries, metadata = _parse(bytes(header), len(region) - start)
    remote = {
        name: RemoteArray(conn, region, code, shape, _c_order(code, shape), start + place, kind)
        for name, (code, shape, place, _) in entries.items()
    }
    return Arrays(remote, metadata)


def _c_order(code: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    steps = accumulate(shape[:0:-1], lambda step, count: step * count, initial=_TYPES[code][0])
    return tuple(steps)[::-1] if shape else ()


class RemoteArray:
    """An array in the peer's memory: index it, then `await` the part to read it, or `write` it::

        row = await remote[7]
        await remote[:, 3].write(column)

    Made by `open_array` and `open_file`.  Indices are integers, slices and `...`; what they give is
    a RemoteArray, and moves nothing.  A part that lies in pieces, such as a column, is written by
    batches with an operation for each piece, and read likewise, or, if the gaps between the pieces
    are short, with the gaps.
    """

    def __init__(
        self,
        conn: Connection,
        region: RemoteRegion,
        code: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        origin: int,
        kind: Kind,
    ) -> None:
        self._conn, self._code, self._origin, self._kind = conn, code, origin, kind
        self.region: RemoteRegion = region
        self.shape: tuple[int, ...] = shape
        self.strides: tuple[int, ...] = strides

    def __repr__(self) -> str:
        return f"<RemoteArray of {_TYPES[self._code][1]}, shape {self.shape}, in {self.region!r}>"

    @property
    def dtype(self) -> Any:
        """The type of its elements: numpy's or torch's."""
        return _type(self._code, self._kind)

    @property
    def ndim(self) -> int:
        """The number of its dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of its elements, without what lies between them."""
        return self.size * _TYPES[self._code][0]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a remote array without dimensions has no length")
        return self.shape[0]

    def __getitem__(self, key: Any) -> RemoteArray:
        """A part of it, as of a numpy array; IndexError outside of it."""
        keys = list(key) if isinstance(key, tuple) else [key]
        dots = [at for at, index in enumerate(keys) if index is ...]
        missing = self.ndim - len(keys) + len(dots)
        if missing < 0 or len(dots) > 1:
            raise IndexError(f"too many indices for {self.ndim} dimensions: {key}")
        at = dots[0] if dots else len(keys)
        keys[at : at + 1] = [slice(None)] * missing
        shape, strides, origin = [], [], self._origin
        for index, count, step in zip(keys, self.shape, self.strides, strict=True):
            if isinstance(index, slice):
                places = range(count)[index]
                origin += places.start * step if places else 0
                shape.append(len(places))
                strides.append(places.step * step)
            else:
                origin += range(count)[operator.index(index)] * step
        conn, region, code = self._conn, self.region, self._code
        return RemoteArray(conn, region, code, tuple(shape), tuple(strides), origin, self._kind)

    def _pieces(self) -> tuple[int, list[tuple[int, int]]]:
        """The bytes of the runs that lie behind one another; counts and strides of the others."""
        run = _TYPES[self._code][0]
        outer = list(zip(self.shape, self.strides, strict=True))
        while outer and (outer[-1][0] == 1 or outer[-1][1] == run):
            run *= outer.pop()[0]
        return run, outer

    def _parts(self, array: Any, most_bytes: int) -> Iterator[tuple[RemoteArray, Any]]:
        """It and `array`, which has its shape, in parts with few pieces or at most so many bytes,
        gaps included: so memory and time until the next `await` are bounded."""
        _, outer = self._pieces()
        low, high = _reach(self.shape, self.strides, 0)
        if math.prod(count for count, _ in outer) <= _MOST_PIECES or high - low <= most_bytes:
            yield self, array
        elif (half := self.shape[0] // 2) > 0:
            yield from self[:half]._parts(array[:half], most_bytes)
            yield from self[half:]._parts(array[half:], most_bytes)
        else:
            yield from self[0]._parts(array[0], most_bytes)

    async def read(self, target: Any = None) -> Any:
        """Its elements: a new array, or `target`, of the same type and shape and in C order."""
        found = _empty(self._code, self.shape, self._kind) if target is None else target
        self._check("target", found)
        if self.size:
            for part, memory in self._parts(found, _MOST_WITH_GAPS):
                await part._read_part(memory)
        return found

    async def _read_part(self, found: Any) -> None:
        pieces = math.prod(count for count, _ in self._pieces()[1])
        size = _TYPES[self._code][0]
        low, high = _reach(self.shape, self.strides, size)
        if pieces < 2 or high - low > pieces * _GAP:
            await self._move(found, reading=True)
        else:
            memory = np.empty(high - low, np.uint8)
            await self._conn.read(self.region[self._origin + low : self._origin + high], memory)
            elements = np.ndarray(self.shape, f"u{size}", memory, -low, self.strides)
            target = np.frombuffer(bytes_of(_buffer(found)), f"u{size}")
            target.reshape(self.shape)[...] = elements

    def __await__(self) -> Generator[Any, None, Any]:
        return self.read().__await__()

    async def write(self, values: Any) -> None:
        """Writes its elements: an array, a list or a number, which is spread over it as by numpy.

        Needs `Rights.WRITE`.  A tensor must have its type and shape.
        """
        if not _is_tensor(values) and self._kind == "torch":
            torch = importlib.import_module("torch")
            values = torch.as_tensor(values, dtype=self.dtype).broadcast_to(self.shape)
        elif not _is_tensor(values):
            values = np.broadcast_to(np.asarray(values, self.dtype), self.shape)
        self._check("values", values)
        if self.size:
            for part, memory in self._parts(values, 0):
                await part._move(_contiguous(memory), reading=False)

    def _check(self, what: str, array: Any) -> None:
        _, code, shape, _ = _described(array)
        if (code, shape) != (self._code, self.shape):
            raise ValueError(f"{what}: {code} {shape}, but the part is {self._code} {self.shape}")

    async def _move(self, array: Any, *, reading: bool) -> None:
        run, outer = self._pieces()
        steps = [np.arange(count) * step for count, step in outer]
        places = functools.reduce(np.add.outer, steps, np.array(self._origin)).ravel().tolist()
        with self._conn.register(_buffer(array)) as memory:
            for first in range(0, len(places), _BATCH):
                async with self._conn.batch() as batch:
                    for index, place in enumerate(places[first : first + _BATCH], first):
                        here = memory[index * run : (index + 1) * run]
                        there = self.region[place : place + run]
                        if reading:
                            batch.read(there, here)
                        else:
                            batch.write(here, there)
