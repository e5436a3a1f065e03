"""The first six bytes that all fixed layouts share: magic (4), version (1), flags (1).

A reader checks here first, so that a foreign layout, or one of another version, is refused
with a text that says which of the two it is.
"""

from __future__ import annotations

from aiordma.errors import ProtocolError

PREFIX_SIZE = 6
"""Bytes that all layouts share."""


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
    """Raise ProtocolError unless ``data`` is ``size`` bytes of this layout.

    ``what`` names it in the text, ``flags`` are all the bits that this version knows. ``padded``
    allows zeros after the end: the connection manager pads private data with them.
    """
    view = memoryview(data)
    if view.nbytes < PREFIX_SIZE or view[:4] != magic:
        raise ProtocolError(
            f"not an aiordma {what} ({view.nbytes} bytes that start with "
            f"{bytes(view[:4])!r}): the sender uses another protocol"
        )
    if view[4] != version:
        raise ProtocolError(
            f"{what}: the peer uses version {view[4]}, this side version {version}; "
            "run the same release of aiordma on both"
        )
    if view[5] & ~flags:
        raise ProtocolError(
            f"{what}: the peer requires features unknown to this side (flags {view[5]:#04x}); "
            "run the same release of aiordma on both"
        )
    if view.nbytes < size:
        raise ProtocolError(f"truncated {what} from the peer: {view.nbytes} of {size} bytes")
    if view.nbytes > size and (not padded or any(view[size:])):
        raise ProtocolError(f"invalid {what} from the peer: {view.nbytes} bytes instead of {size}")
