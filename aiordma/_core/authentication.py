"""The proof of both sides that they have the same key, without telling it.

    client -> server   a nonce
    server -> client   a nonce, and HMAC-SHA256(key, "server", both nonces, the connection)
    client -> server   HMAC-SHA256(key, "client", both nonces, the connection)

"The connection" is what both know of it: both hellos and both queue-pair numbers.  So an answer is
good for one connection and one direction: replayed, sent back or passed on to another connection it
is wrong.  An eavesdropper learns nothing of a key that cannot be guessed (RFC 2104; RFC 5869, 3.3).
"""

from __future__ import annotations

import hashlib
import hmac

from aiordma._core.handshake import Hello

NONCE_SIZE = 32
PROOF_SIZE = 32
MIN_KEY_SIZE = 16
"""Bytes of the shortest key that is taken: less could be tried out."""

_LABEL = b"aiordma pre-shared key 1 "


def check_key(key: bytes) -> bytes:
    """The key; ValueError or TypeError for what cannot be one."""
    if not isinstance(key, bytes):
        raise TypeError(f"auth is a key of type bytes, not {type(key).__name__}")
    if len(key) < MIN_KEY_SIZE:
        raise ValueError(
            f"auth has {len(key)} bytes; a key has at least {MIN_KEY_SIZE} random ones"
        )
    return key


def transcript(client: Hello, server: Hello, client_qp: int, server_qp: int) -> bytes:
    """What both sides know of the connection, as 32 bytes."""
    numbers = client_qp.to_bytes(4, "little") + server_qp.to_bytes(4, "little")
    return hashlib.sha256(client.pack() + server.pack() + numbers).digest()


def proof(key: bytes, role: str, client: bytes, server: bytes, connection: bytes) -> bytes:
    """What `role` ("client" or "server") answers to the two nonces."""
    return hmac.digest(key, _LABEL + role.encode() + client + server + connection, "sha256")


def proves(expected: bytes, given: bytes) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(expected, given)
