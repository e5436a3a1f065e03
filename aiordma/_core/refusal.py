"""The reason for which a listener turns a peer away, as the peer's user will read it.

The private data of a rejection (148 bytes for RDMA_PS_TCP; rdma_reject(3)), which arrives padded
with zeros, and the same bytes in the TCP bootstrap::

    offset  0  4s    b"AIOX", or b"AIOK" where the peer has not the key
    offset  4  144s  text, UTF-8, ended by zeros
"""

from __future__ import annotations

_MAGIC = b"AIOX"
_KEY_MAGIC = b"AIOK"

REFUSAL_SIZE = 148
"""Bytes of a packed refusal."""

REJECTED_BY_APPLICATION = 28
"""The reason of a RejectedError that the connection manager has not made: IBTA clause 12.6.7.2."""

MAX_PRINTABLE = 256
"""Characters of the peer's text that stand in an error or a log, unless a caller says another."""


def pack_refusal(text: str, *, of_key: bool = False) -> bytes:
    """REFUSAL_SIZE bytes; what does not fit of the text is left out."""
    said = text.encode(errors="replace")[: REFUSAL_SIZE - len(_MAGIC)]
    return ((_KEY_MAGIC if of_key else _MAGIC) + said).ljust(REFUSAL_SIZE, b"\0")


def unpack_refusal(data: bytes) -> str | None:
    """The text, with nothing in it that a terminal would obey; None for what is no refusal."""
    if not data.startswith((_MAGIC, _KEY_MAGIC)):
        return None
    text = data[len(_MAGIC) : REFUSAL_SIZE].rstrip(b"\0").decode(errors="replace")
    return printable(text, REFUSAL_SIZE)


def is_of_key(data: bytes) -> bool:
    """True if `data` refuses a peer that does not have the key."""
    return data.startswith(_KEY_MAGIC)


def printable(text: str, longest: int = MAX_PRINTABLE) -> str:
    """The peer's text for errors and logs: one line, at most `longest` characters.

    What a terminal or a log file would obey (control characters, line ends, the directions of
    Unicode) is escaped as in Python's literals.
    """
    shown = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text[: longest + 1]
    )
    return shown if len(shown) <= longest else shown[: longest - 3] + "..."
