"""Send arrays and tensors over a connection, or access them in the peer's memory.

In this module, an array is a numpy array or a torch tensor in CPU memory. The argument `kind`,
"numpy" or "torch", selects the type of the arrays that a function creates. A message that contains
arrays has the same layout as a safetensors file. You can therefore send the contents of a
safetensors file as a message, or write a received message to a file.

Some element types, such as bfloat16 and float8, do not exist in numpy. To receive them, pass
`kind="torch"` or install the ml_dtypes package.
"""

from __future__ import annotations

import importlib
import json
import math
import operator
import reprlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate, product
from typing import Any, Literal, NamedTuple, NoReturn, Self

import numpy as np

from ._core.arguments import instance
from ._core.region import TOKEN_SIZE, Rights
from ._core.strict_json import parse_json
from ._transport.remote_memory import RemoteMemory
from .transport import Connection, Message, RemoteRegion, Share
from .verbs import bytes_of

Kind = Literal["numpy", "torch"]


class _ElementType(NamedTuple):
    """The size of an element type in bytes, and its name in numpy, ml_dtypes and torch."""

    size: int
    name: str


# The safetensors types whose elements are whole bytes.
_TYPES = {
    "BOOL": _ElementType(1, "bool"),
    "U8": _ElementType(1, "uint8"),
    "I8": _ElementType(1, "int8"),
    "F8_E5M2": _ElementType(1, "float8_e5m2"),
    "F8_E4M3": _ElementType(1, "float8_e4m3fn"),
    "F8_E8M0": _ElementType(1, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": _ElementType(1, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": _ElementType(1, "float8_e5m2fnuz"),
    "U16": _ElementType(2, "uint16"),
    "I16": _ElementType(2, "int16"),
    "F16": _ElementType(2, "float16"),
    "BF16": _ElementType(2, "bfloat16"),
    "U32": _ElementType(4, "uint32"),
    "I32": _ElementType(4, "int32"),
    "F32": _ElementType(4, "float32"),
    "U64": _ElementType(8, "uint64"),
    "I64": _ElementType(8, "int64"),
    "F64": _ElementType(8, "float64"),
    "C64": _ElementType(8, "complex64"),
}
_CODES = {it.name: code for code, it in _TYPES.items()}

_PREFIX = 8
"""The size of the prefix, which contains the header's length as a little-endian integer."""
_ALIGNMENT = 64
"""The alignment of the first element in a message, so that every element is aligned."""
_MAX_HEADER = 2 << 20
"""The maximum size of a header, enough for about 20,000 arrays.

Parsing a peer's header blocks the event loop.
"""
_MAX_TOKEN = 4096
"""The maximum size of an encoded layout in a token. A layout has at most 64 dimensions."""
_MAX_RUNS = 1024
"""The maximum number of contiguous runs that one batch reads or writes."""
_MAX_GAP = 4096
"""The largest gap, in bytes, that is faster to read than to skip with a separate operation."""
_MAX_READ_WITH_GAPS = _MAX_RUNS * _MAX_GAP
"""The maximum number of bytes, gaps included, of one read."""


class Arrays(dict[str, Any]):
    """A dictionary that maps names to arrays. Its `metadata` attribute maps strings to strings."""

    def __init__(self, arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
        super().__init__(arrays)
        self.metadata: dict[str, str] = dict(metadata)


class _Layout(NamedTuple):
    """The element type and memory layout of an array, as encoded in a shared array's token."""

    code: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    origin: int  # offset of element 0 in bytes

    @classmethod
    def in_c_order(cls, code: str, shape: tuple[int, ...], origin: int) -> Self:
        steps = [*accumulate(shape[:0:-1], operator.mul, initial=_TYPES[code].size)]
        return cls(code, shape, tuple(steps[::-1] if shape else ()), origin)

    @property
    def nbytes(self) -> int:
        return _TYPES[self.code].size * math.prod(self.shape)

    def span(self) -> tuple[int, int]:
        """Return the offset of the first byte and the offset just past the last byte."""
        if not all(self.shape):
            return self.origin, self.origin
        steps = [(count - 1) * step for count, step in zip(self.shape, self.strides, strict=True)]
        low = self.origin + sum(step for step in steps if step < 0)
        high = self.origin + sum(step for step in steps if step > 0)
        return low, high + _TYPES[self.code].size

    def runs(self) -> tuple[int, list[tuple[int, int]]]:
        """Return the size of a contiguous run in bytes, and the arrangement of the runs.

        The list contains a (count, stride) pair for each dimension that is not part of a run.
        """
        length = _TYPES[self.code].size
        outer = list(zip(self.shape, self.strides, strict=True))
        while outer and (outer[-1][0] == 1 or outer[-1][1] == length):
            length *= outer.pop()[0]
        return length, outer

    def part(self, key: Any) -> _Layout:
        """Return the layout of `array[key]`, or raise IndexError for an invalid index."""
        keys = list(key) if isinstance(key, tuple) else [key]
        ellipses = [ellipsis_index for ellipsis_index, index in enumerate(keys) if index is ...]
        missing = len(self.shape) - len(keys) + len(ellipses)
        if missing < 0 or len(ellipses) > 1:
            raise IndexError(f"too many indices: the array is {len(self.shape)}-dimensional")
        ellipsis_index = ellipses[0] if ellipses else len(keys)
        keys[ellipsis_index : ellipsis_index + 1] = [slice(None)] * missing
        shape, strides, origin = [], [], self.origin
        for index, count, step in zip(keys, self.shape, self.strides, strict=True):
            try:
                if isinstance(index, slice):
                    indices = range(count)[index]
                    origin += indices.start * step if indices else 0
                    shape.append(len(indices))
                    strides.append(indices.step * step if len(indices) > 1 else step)
                elif isinstance(index, bool):
                    raise TypeError
                else:
                    origin += range(count)[operator.index(index)] * step
            except TypeError:
                raise IndexError(
                    f"invalid index {reprlib.repr(index)}: a remote array supports integers, "
                    "slices and `...`; for other indices, await the array and index the result"
                ) from None
            except IndexError:
                raise IndexError(
                    f"index {index} is out of bounds for a dimension of size {count}"
                ) from None
        return _Layout(self.code, tuple(shape), tuple(strides), origin)


# ---- arrays of numpy and torch -------------------------------------------------------------------


def _module(kind: Kind) -> Any:
    if kind not in ("numpy", "torch"):
        raise ValueError(f'kind must be "numpy" or "torch", not {kind!r}')
    return importlib.import_module(kind)


def _dtype(code: str, kind: Kind) -> Any:
    name = _TYPES[code].name
    if kind == "torch":
        return getattr(_module(kind), name)
    if not name.startswith(("bfloat", "float8")):
        return np.dtype(name)
    try:
        return np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    except (ImportError, AttributeError):
        raise TypeError(
            f'numpy does not support {name}; install or update ml_dtypes, or pass kind="torch"'
        ) from None


def _empty(code: str, shape: tuple[int, ...], kind: Kind) -> Any:
    return _module(kind).empty(shape, dtype=_dtype(code, kind))


def _view(memory: memoryview, code: str, shape: tuple[int, ...], kind: Kind) -> Any:
    if not memory:  # torch rejects an empty buffer
        return _empty(code, shape, kind)
    if kind == "torch" and memory.readonly:  # torch would return a writable tensor
        memory = memoryview(bytearray(memory))
    return _module(kind).frombuffer(memory, dtype=_dtype(code, kind)).reshape(shape)


def _is_tensor(array: object) -> bool:
    return hasattr(array, "untyped_storage")


def _describe(what: str, array: Any, *, in_place: bool = False) -> tuple[Any, _Layout]:
    """Return a view of an array's memory, and the array's layout.

    The view is a numpy array of unsigned integers, because numpy does not support the buffer
    protocol for ml_dtypes types. A tensor is returned unchanged.
    With `in_place`, objects without their own memory, such as lists, are rejected.
    """
    if in_place and not hasattr(array, "dtype"):
        raise TypeError(
            f"{what} must be an array, not {type(array)}; convert it with numpy.asarray"
        )
    if _is_tensor(array):
        if array.is_nested or str(array.layout) != "torch.strided":
            bytes_of(array)  # raises a BufferError that says what to use instead
        name = str(array.dtype).removeprefix("torch.")
        strides = tuple(step * array.element_size() for step in array.stride())
    else:
        if np.ma.isMaskedArray(array):
            raise TypeError(
                f"{what} must not be a masked array; use its `data` and `mask`, or `filled()`"
            )
        array = _asarray(what, array)
        name, strides = array.dtype.name, array.strides
        if array.dtype.hasobject:
            raise TypeError(
                f"{what} contains Python objects (dtype {array.dtype}), which cannot be sent; give "
                f"each nested array its own name, such as 'layer.weight', and send other values as "
                f"metadata or in a separate message"
            )
        if name in _CODES and not array.dtype.isnative:
            raise TypeError(f"{what} has a non-native byte order; convert it with astype({name!r})")
    if name not in _CODES:
        raise TypeError(
            f"{what} has type {name}, which safetensors does not support; convert it to one of "
            f"{', '.join(_CODES)}, or send its bytes: x.reshape(-1).view('u1') in numpy, "
            f"x.reshape(-1).view(torch.uint8) in torch"
        )
    memory = array if _is_tensor(array) else array.view(f"u{array.itemsize}")
    return memory, _Layout(_CODES[name], tuple(array.shape), strides, 0)


def _asarray(what: str, values: Any, dtype: Any = None) -> Any:
    try:
        return np.asarray(values, dtype)
    except (TypeError, ValueError, OverflowError) as error:  # such as lists of different lengths
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{what}: {error}") from None


def _contiguous(array: Any) -> Any:
    return array.contiguous() if _is_tensor(array) else np.ascontiguousarray(array)


# ---- several in one message ----------------------------------------------------------------------


def pack(arrays: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> list[Any]:
    """Pack arrays into a list of buffers that `Connection.send` can send as one message.

    The first buffer is the header. Arrays that are not in C order are copied. All other arrays are
    sent directly from their own memory, so do not modify them until `send` returns.

    Raises:
        TypeError: If safetensors does not support an array's type.
        ValueError: If a name is reserved or invalid, or if the header is too large.
    """
    metadata = metadata or {}
    try:
        texts = (*arrays.keys(), *metadata.keys(), *metadata.values())
        "".join(texts).encode()
    except (AttributeError, TypeError):
        wanted = "arrays must be a dict of arrays by name; names and metadata must be strings"
        raise TypeError(wanted) from None
    except UnicodeEncodeError as error:
        raise ValueError(f"array names and metadata must be valid Unicode: {error}") from None
    if "__metadata__" in arrays:
        raise ValueError("the array name '__metadata__' is reserved; choose another name")
    described = [(name, *_describe(f"array {name!r}", array)) for name, array in arrays.items()]
    # Put large elements first, so that every array is aligned for its element type.
    described.sort(key=lambda it: -_TYPES[it[2].code].size)
    ends = accumulate(layout.nbytes for _, _, layout in described)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for (name, _, layout), end in zip(described, ends, strict=True):
        offsets = [end - layout.nbytes, end]
        header[name] = {"dtype": layout.code, "shape": layout.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + _PREFIX) % _ALIGNMENT)
    if len(text) > _MAX_HEADER:
        what = f"the header of {len(described)} arrays and their metadata has {len(text)} bytes"
        raise ValueError(f"{what} (maximum {_MAX_HEADER}); send several messages instead")
    buffers = [_contiguous(array) for _, array, layout in described if layout.nbytes]
    return [len(text).to_bytes(_PREFIX, "little") + text, *buffers]


def _bytes_of(memory: Any) -> memoryview:
    return memory.data if isinstance(memory, Message) else bytes_of(memory)


def _format_error(what: str) -> ValueError:
    return ValueError(f"invalid safetensors data: {what}")


def _parse_integers(value: object) -> tuple[int, ...]:
    """Return a JSON list of integers as a tuple, or raise TypeError for any other value."""
    if type(value) is not list or not all(type(it) is int for it in value):
        raise TypeError
    return tuple(value)


def _check_layout_limits(layout: _Layout, *more: int) -> None:
    """Raise ValueError or TypeError if a peer's layout exceeds the limits of numpy or torch.

    `more` are further numbers from the peer that must fit into 64 bits.
    """
    code, shape, strides, origin = layout
    numbers = (*shape, *strides, origin, *more)
    if len(shape) > 64:
        raise ValueError
    bytes_at_least = _TYPES[code].size * math.prod(it or 1 for it in shape)
    if min((*shape, 0)) < 0 or max(bytes_at_least, *map(abs, numbers)) >> 63:
        raise ValueError


def _header_size(prefix: bytes, size: int) -> int:
    """Return the header size of a message that has `size` bytes and begins with `prefix`."""
    length = int.from_bytes(prefix, "little")
    if length > min(_MAX_HEADER, size - _PREFIX):
        what = f"{size} bytes cannot contain a header of {length} bytes (maximum {_MAX_HEADER})"
        raise _format_error(what)
    return length


def _parse(text: bytes, size: int) -> tuple[dict[str, _Layout], dict[str, str]]:
    """Return the array layouts and metadata from the header of a message of `size` bytes."""
    try:
        header: Any = parse_json(text) if text.startswith(b"{") else None
    except ValueError as error:
        raise _format_error(f"the header is not valid JSON ({error})") from None
    metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _format_error("the header is not an object, or a metadata value is not a string")
    data = _PREFIX + len(text)
    entries: dict[str, _Layout] = {}
    for name, entry in header.items():
        try:
            code, shape = entry["dtype"], _parse_integers(entry["shape"])
            start, end = _parse_integers(entry["data_offsets"])
            _check_layout_limits(_Layout(code, shape, (), start), end)
            entries[name] = _Layout.in_c_order(code, shape, data + start)
            if end - start != entries[name].nbytes:
                raise ValueError
        except (KeyError, TypeError, ValueError):
            what = f"invalid header entry {reprlib.repr(name)}: {reprlib.repr(entry)}"
            raise _format_error(f"{what}; supported types are {', '.join(_TYPES)}") from None
    position = data
    for start, length in sorted((entry.origin, entry.nbytes) for entry in entries.values()):
        if start != position:
            raise _format_error(
                f"there is a gap or an overlap between bytes {position} and {start}"
            )
        position += length
    if position != size:
        raise _format_error(f"the arrays need {position} bytes, but the data has {size} bytes")
    return entries, metadata


def unpack(memory: Any, kind: Kind = "numpy") -> Arrays:
    """Return the arrays in a `Message` or in the contents of a safetensors file.

    The arrays are views of `memory`. Tensors in read-only `memory` are copies instead, because
    torch does not support read-only tensors.

    Raises:
        TypeError: If numpy does not support an array's element type.
        ValueError: If `memory` does not have the layout of a safetensors file.
    """
    _module(kind)
    view = _bytes_of(memory)
    length = _header_size(bytes(view[:_PREFIX]), len(view))
    entries, metadata = _parse(bytes(view[_PREFIX:][:length]), len(view))
    arrays = {
        name: _view(view[it.origin :][: it.nbytes], it.code, it.shape, kind)
        for name, it in entries.items()
    }
    return Arrays(arrays, metadata)


def _check_connection(conn: object) -> None:
    instance("conn", conn, Connection, "an aiordma.Connection")


async def send(
    conn: Connection, arrays: Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> None:
    """Send arrays to the peer in one message. The peer receives the arrays with `recv`.

    Arrays that are not in C order are copied first. Raises the same exceptions as `pack` and
    `Connection.send`.
    """
    _check_connection(conn)
    await conn.send(pack(arrays, metadata))


async def recv(conn: Connection, kind: Kind = "numpy") -> Arrays:
    """Receive the next message and return the arrays in it.

    The arrays share one newly allocated block of memory. Raises the same exceptions as
    `Connection.recv_with` and `unpack`.

    Raises:
        ValueError: If the message does not contain arrays. The message is then discarded.
    """
    _module(kind)
    _check_connection(conn)
    received = await conn.recv_with(lambda length: np.empty(length, np.uint8))
    try:
        return unpack(received.memory, kind)
    except ValueError as error:
        raise ValueError(
            f"the message does not contain arrays: {error}; send arrays with aiordma.arrays.send, "
            "and receive other messages with Connection.recv"
        ) from None


# ---- an array that the peer uses -----------------------------------------------------------------


class SharedArray:
    """A local array that the peer may access, created by `share`.

    Send the `token` to the peer, which passes the token to `open_array`. The array's memory stays
    registered until you call `close`, the `with` block ends, or the lease expires. To renew the
    lease, use the `share` attribute.
    """

    _no_memory_hint = "send its token"

    def __init__(self, share: Share, layout: bytes) -> None:
        self.share: Share = share
        self._layout = layout

    @property
    def token(self) -> bytes:
        """The token to send to the peer. The token changes if the connection switches devices."""
        return self.share.token.pack() + self._layout

    def close(self) -> None:
        """Revoke the peer's access to the array."""
        self.share.revoke()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _memory(array: Any, layout: _Layout) -> tuple[Any, int]:
    """Return the memory that an array spans, and the offset of element 0 in this memory."""
    if _is_tensor(array) or array.flags.c_contiguous:
        return array, 0
    # The memory belongs to the last base. With its axes sorted by stride, the base can be used as a
    # flat buffer even if it is in Fortran order.
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    flat = root.transpose(sorted(range(root.ndim), key=lambda axis: -root.strides[axis]))
    low, high = layout.span()
    if high - low < layout.nbytes or not flat.flags.c_contiguous:
        raise ValueError(
            "cannot share an array with overlapping elements; share the array it is a view of"
        )
    at = array.ctypes.data - root.ctypes.data + low
    return np.ndarray(high - low, np.uint8, flat, at), -low


def share(
    conn: Connection,
    array: Any,
    *,
    access: Rights = Rights.READ,
    lease: float | Literal["default"] | None = "default",
) -> SharedArray:
    """Share an array with the peer without copying it.

    Send the returned object's `token` to the peer, which passes the token to `open_array`.
    `access` and `lease` have the same meaning as for `Connection.share`. If a numpy view has gaps
    between its elements, the peer can also access the memory in the gaps. A tensor must be in C
    order (see `Tensor.contiguous`).

    Raises:
        TypeError: If `array` is not an array, or if safetensors does not support its type.
        ValueError: If array elements overlap in memory, as after `numpy.broadcast_to`.
    """
    _check_connection(conn)
    found, layout = _describe("the array", array, in_place=True)
    # An empty array has no memory to share, so share a byte that nobody accesses.
    memory, origin = _memory(found, layout) if layout.nbytes else (bytearray(1), 0)
    with conn.register(memory) as region:  # the share keeps the region registered
        shared = conn.share(region, access=access, lease=lease)
    return SharedArray(shared, json.dumps(layout._replace(origin=origin)).encode())


def open_array(conn: Connection, token: Any, kind: Kind = "numpy") -> RemoteArray:
    """Open an array that the peer has shared. `token` is the peer's `SharedArray.token`.

    Raises the same exceptions as `Connection.open_region`.

    Raises:
        ValueError: If `token` belongs to another connection, or to a region that is not an array.
        ProtocolError: If `token` does not begin with a region token.
    """
    _module(kind)
    _check_connection(conn)
    data = bytes(_bytes_of(token))
    region = conn.open_region(data[:TOKEN_SIZE])
    try:
        description: Any = parse_json(data[TOKEN_SIZE:][:_MAX_TOKEN])
        code, shape, strides, origin = description
        layout = _Layout(
            code, _parse_integers(shape), _parse_integers(strides), *_parse_integers([origin])
        )
        _check_layout_limits(layout)
        low, high = layout.span()
        if low < 0 or high > len(region) or high - low < layout.nbytes:
            raise ValueError
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"invalid array token: {data[TOKEN_SIZE:][:200]!r}") from None
    return RemoteArray(conn, region, layout, kind)


async def open_file(conn: Connection, region: RemoteRegion, kind: Kind = "numpy") -> Arrays:
    """Open the arrays of a safetensors file that the peer has shared.

    `region` contains the file. It can also contain a message with arrays, because such messages
    have the same layout as a file. Only the header is read. The result contains a RemoteArray for
    each array. Raises the same exceptions as `Connection.read`.

    Raises:
        ValueError: If the region does not have the layout of a safetensors file.
    """
    _module(kind)
    _check_connection(conn)
    instance("region", region, RemoteMemory, "a RemoteRegion or a slice of one")
    first = bytearray(min(len(region), _PREFIX))
    await conn.read(region[: len(first)], first)
    header = bytearray(_header_size(bytes(first), len(region)))
    await conn.read(region[_PREFIX : _PREFIX + len(header)], header)
    entries, metadata = _parse(bytes(header), len(region))
    remote = {name: RemoteArray(conn, region, it, kind) for name, it in entries.items()}
    return Arrays(remote, metadata)


def _split_layout(layout: _Layout, array: Any, max_bytes: int) -> Iterator[tuple[_Layout, Any]]:
    """Split a layout and the local `array` of the same shape into parts to transfer one by one.

    Each part either consists of at most _MAX_RUNS contiguous runs of bytes, or spans at most
    `max_bytes`, including the gaps between its runs. This limits memory use and the time for which
    a transfer blocks the event loop.
    """
    low, high = layout.span()
    half = layout.shape[0] // 2 if layout.shape else 0
    if layout.nbytes <= _MAX_RUNS * layout.runs()[0] or high - low <= max_bytes:
        yield layout, array
    else:
        # A first dimension of length 1 is removed, so that the next dimension can be halved.
        for key in (slice(half), slice(half, None)) if half else (0,):
            yield from _split_layout(layout.part(key), array[key], max_bytes)


class RemoteArray:
    """An array in the peer's memory, created by `open_array` or `open_file`.

    Index the array to select a part. Await the part to read it, or call its `write` method::

        row = await remote[7]
        await remote[:, 3].write(column)

    An index can contain integers, slices and `...`. Indexing returns another RemoteArray without
    transferring any elements.

    The selected elements are not always contiguous. A column, for example, consists of many short
    runs of bytes. Writing a column takes one operation per run, and the operations are sent in
    batches. Reading works the same way, unless the gaps between the runs are short. Short gaps are
    read along with the runs.

    `shape`, `strides` (in bytes), `ndim`, `size` and `nbytes` have the same meaning as in numpy.
    `code` is the safetensors name for the element type, such as "BF16". The peer determines the
    shape, so check `nbytes` before reading an array from an untrusted peer.
    """

    _no_memory_hint = "it is in the peer's memory: `await` it"

    def __init__(self, conn: Connection, region: RemoteRegion, layout: _Layout, kind: Kind) -> None:
        self._conn, self._layout, self._kind = conn, layout, kind
        self.region: RemoteRegion = region
        self.code: str = layout.code
        self.shape: tuple[int, ...] = layout.shape
        self.strides: tuple[int, ...] = layout.strides
        self.ndim: int = len(layout.shape)
        self.size: int = math.prod(layout.shape)
        self.nbytes: int = layout.nbytes

    def __repr__(self) -> str:
        name = _TYPES[self._layout.code].name
        return f"<RemoteArray of {name}, shape {self.shape}, in {self.region!r}>"

    @property
    def dtype(self) -> Any:
        """The element type, as a numpy or torch dtype."""
        return _dtype(self._layout.code, self._kind)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a zero-dimensional remote array has no length")
        return self.shape[0]

    def __getitem__(self, key: Any) -> RemoteArray:
        """Return a part of the array as a RemoteArray, or raise IndexError for an invalid index."""
        return RemoteArray(self._conn, self.region, self._layout.part(key), self._kind)

    def _raise_not_local(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            f"{self!r} is in the peer's memory; await it, or a part of it, to get a local array, "
            f"and use write() to change it"
        )

    def __getattr__(self, name: str) -> NoReturn:
        hint = "" if name.startswith("_") else f"; write (await array).{name}"
        raise AttributeError(
            f"a RemoteArray has no attribute {name!r}: its elements are in the peer's memory{hint}",
            name=name,
            obj=self,
        )

    def __await__(self) -> Generator[Any, None, Any]:
        return self.read().__await__()

    async def read(self, target: Any = None) -> Any:
        """Read the elements into `target` or, by default, into a new array, and return the array.

        `target` must be in C order, with the same element type and shape as this array. If the read
        is cancelled, some elements of `target` may already have been overwritten. Raises the same
        exceptions as `Connection.read`.

        Raises:
            TypeError: If `target` is not an array.
            ValueError: If `target` has a different element type or shape.
        """
        result = _empty(self._layout.code, self.shape, self._kind) if target is None else target
        memory = self._memory_of("target", result, in_place=True)
        for part, local_part in (
            _split_layout(self._layout, memory, _MAX_READ_WITH_GAPS) if self.size else ()
        ):
            await self._transfer(part, local_part, reading=True)
        return result

    async def write(self, values: Any) -> None:
        """Write an array, a list or a number to the peer's memory.

        The values are broadcast to this array's shape, as in numpy. A tensor must already have this
        shape. The peer must have shared the array with `Rights.WRITE`. If the write is cancelled,
        some elements may already have been written. Raises the same exceptions as
        `Connection.write`.

        Raises:
            ValueError: If the values cannot be broadcast to this array's shape, or if a tensor has
                a different element type or shape.
        """
        if not _is_tensor(values) and self._kind == "torch":
            torch = _module("torch")
            values = torch.as_tensor(values, dtype=self.dtype).broadcast_to(self.shape)
        elif not _is_tensor(values):
            values = _asarray("values", values, self.dtype)
            with suppress(ValueError):  # `_memory_of` rejects values that cannot be broadcast
                values = np.broadcast_to(values, self.shape)
        memory = self._memory_of("values", values)
        for part, local_part in _split_layout(self._layout, memory, 0) if self.size else ():
            await self._transfer(part, _contiguous(local_part), reading=False)

    def _memory_of(self, what: str, array: Any, *, in_place: bool = False) -> Any:
        """Return the memory of an array, which must have this array's element type and shape."""
        memory, layout = _describe(what, array, in_place=in_place)
        # Compare only the element type and the shape, because the strides may differ.
        if layout[:2] != self._layout[:2]:
            found, wanted = (f"{_TYPES[it.code].name} {it.shape}" for it in (layout, self._layout))
            raise ValueError(f"invalid {what}: got {found}, expected {wanted}")
        return memory

    async def _transfer(self, part: _Layout, array: Any, *, reading: bool) -> None:
        """Read a part into `array`, or write `array` to the part. `array` must be in C order."""
        low, high = part.span()
        length, outer = part.runs()
        runs = part.nbytes // length
        if runs == 1 and reading:
            await self._conn.read(self.region[low:high], array)
        elif runs == 1:
            await self._conn.write(array, self.region[low:high])
        elif reading and high - low <= runs * _MAX_GAP:
            # If the gaps between the runs are small, it is faster to read them too.
            bytes_with_gaps = np.empty(high - low, np.uint8)
            await self._conn.read(self.region[low:high], bytes_with_gaps)
            dtype = f"u{_TYPES[part.code].size}"
            elements = np.ndarray(
                part.shape, dtype, bytes_with_gaps, part.origin - low, part.strides
            )
            np.frombuffer(bytes_of(array), dtype).reshape(part.shape)[...] = elements
        else:
            # The offset of a run is the sum of one offset in each outer dimension.
            run_offsets = product(*([at * step for at in range(count)] for count, step in outer))
            with self._conn.register(array) as memory:
                async with self._conn.batch() as batch:
                    for index, offsets in enumerate(run_offsets):
                        local = memory[index * length : (index + 1) * length]
                        start = part.origin + sum(offsets)
                        remote = self.region[start : start + length]
                        batch.read(remote, local) if reading else batch.write(local, remote)


# Special methods that raise an error, because they would need the elements in local memory. If they
# were not defined, Python and numpy would fall back to indexing the array row by row, or raise an
# error that does not mention `await`.
_OF_ARRAYS = "array bytes iter reversed contains setitem delitem bool int float complex index"
_OF_NUMBERS = "lt le eq ne gt ge neg pos abs invert round trunc floor ceil"
_OF_TWO = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor"
for _name in (
    *_OF_ARRAYS.split(),
    *_OF_NUMBERS.split(),
    *(prefix + name for prefix in ("", "r", "i") for name in _OF_TWO.split()),
):
    setattr(RemoteArray, f"__{_name}__", RemoteArray._raise_not_local)
