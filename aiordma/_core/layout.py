"""The first six bytes of all fixed layouts: magic (4), version (1), flags (1).

A reader checks them first, so that another layout or another version is rejected with a text that
tells which of the two it is.
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
    """Raise ProtocolError unless ``data`` has this layout and ``size`` bytes.

    ``what`` is the name of the layout for the text, and ``flags`` are all the bits that this
    version knows. ``padded`` allows zeros after the end, because the connection manager pads
    private data.
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
