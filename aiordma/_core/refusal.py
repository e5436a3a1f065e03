"""The message that explains to a peer why a listener rejects it.

It is the private data of a rejection (148 bytes for RDMA_PS_TCP, see rdma_reject(3)), which arrives
padded with zeros. The TCP bootstrap carries the same bytes::

    offset  0  4s    b"AIOX", or b"AIOK" if the peer does not have the key
    offset  4  144s  text, UTF-8, ended by zeros
"""

from __future__ import annotations

_MAGIC = b"AIOX"
_KEY_MAGIC = b"AIOK"

REFUSAL_SIZE = 148
"""The size of a packed refusal in bytes."""

REJECTED_BY_APPLICATION = 28
"""The reason of a RejectedError that does not come from the connection manager (IBTA 12.6.7.2)."""

MAX_PRINTABLE = 256
"""The default limit on the characters of a peer's text in an error or a log."""


def pack_refusal(text: str, *, key_missing: bool = False) -> bytes:
    """Encode a refusal in REFUSAL_SIZE bytes. Text that does not fit is truncated.

    Set `key_missing` if the reason for the refusal is that the peer does not have the key.
    """
    encoded = text.encode(errors="replace")[: REFUSAL_SIZE - len(_MAGIC)]
    return ((_KEY_MAGIC if key_missing else _MAGIC) + encoded).ljust(REFUSAL_SIZE, b"\0")


def unpack_refusal(data: bytes) -> str | None:
    """Return the printable text of a refusal, or None if `data` is not a refusal."""
    if not data.startswith((_MAGIC, _KEY_MAGIC)):
        return None
    # Both magics have the same length.
    text = data[len(_MAGIC) : REFUSAL_SIZE].rstrip(b"\0").decode(errors="replace")
    return printable(text, REFUSAL_SIZE)


def is_missing_key_refusal(data: bytes) -> bool:
    """Return whether the refusal `data` says that the peer does not have the key."""
    return data.startswith(_KEY_MAGIC)


def printable(text: str, max_length: int = MAX_PRINTABLE) -> str:
    """Return a peer's text as one line of at most `max_length` characters, for errors and logs.

    Control characters, line breaks and Unicode direction marks are escaped as in Python literals,
    so that terminals and log viewers do not interpret them.
    """
    shown = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text[: max_length + 1]
    )
    return shown if len(shown) <= max_length else shown[: max_length - 3] + "..."
