"""The first six bytes of all fixed layouts: magic (4), version (1), flags (1).

A reader checks these bytes first, so that the error message can distinguish an unknown layout from
an unsupported version.
"""

from __future__ import annotations

from aiordma.errors import ProtocolError

PREFIX_SIZE = 6
"""The number of bytes that all layouts have in common."""


def check_layout(
    data: bytes | bytearray | memoryview,
    *,
    what: str,
    magic: bytes,
    version: int,
    flags: int,
    size: int,
    padded: bool = False,
) -> None:
    """Raise ProtocolError unless ``data`` has the given layout and size.

    ``what`` names the layout in the error, and ``flags`` contains all bits that this version
    supports. ``padded`` allows trailing zeros, because the connection manager pads private data.
    """
    view = memoryview(data)
    if view.nbytes < PREFIX_SIZE or view[:4] != magic:
        raise ProtocolError(
            f"not an aiordma {what}: received {view.nbytes} bytes starting with "
            f"{bytes(view[:4])!r}; the sender uses a different protocol"
        )
    if view[4] != version:
        raise ProtocolError(
            f"{what}: the peer uses version {view[4]}, but this side uses version {version}; "
            "run the same release of aiordma on both sides"
        )
    if view[5] & ~flags:
        raise ProtocolError(
            f"{what}: this side does not support all features that the peer requires "
            f"(flags {view[5]:#04x}); run the same release of aiordma on both sides"
        )
    if view.nbytes < size:
        raise ProtocolError(f"truncated {what} from the peer: {view.nbytes} of {size} bytes")
    if view.nbytes > size and (not padded or any(view[size:])):
        raise ProtocolError(f"invalid {what} from the peer: {view.nbytes} bytes instead of {size}")
