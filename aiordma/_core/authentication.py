"""Mutual authentication with a pre-shared key, which is not disclosed.

::

    client -> server   a nonce
    server -> client   a nonce, and HMAC-SHA256(key, "server", both nonces, the connection)
    client -> server   HMAC-SHA256(key, "client", both nonces, the connection)

"The connection" stands for a hash of both hellos and both queue pair numbers (`transcript`). A
proof is therefore valid for only one connection and one direction. It is rejected if it is
replayed, reflected or forwarded to another connection. An eavesdropper learns nothing about a key
that cannot be guessed (RFC 2104; RFC 5869, 3.3).

The pre-shared key itself is never the key of an HMAC. HMAC pads short keys with zeros and replaces
long keys by their hash, so two different keys could be equivalent. The keys for each purpose are
derived from it with HKDF-SHA256 (RFC 5869), whose input is the whole key.

On a connection that encrypts, the nonces are X25519 public keys that were created for this
connection. The proofs therefore authenticate the public keys, and the traffic secrets are derived
from the shared secret and the pre-shared key. Recorded traffic cannot be decrypted by learning the
pre-shared key later.
"""

from __future__ import annotations

import hashlib
import hmac
from functools import lru_cache

from aiordma._core.handshake_layout import Hello

NONCE_SIZE = 32
TICKET_MAC_SIZE = 16
MIN_KEY_SIZE = 16
"""The minimum key size in bytes. Shorter keys could be found by brute force."""

_SALT = b"aiordma pre-shared key 2"


def _extract(salt: bytes, secret: bytes) -> bytes:
    """Compute HKDF-Extract."""
    return hmac.digest(salt, secret, "sha256")


def _expand(key: bytes, info: bytes) -> bytes:
    """Compute the first block (32 bytes) of HKDF-Expand."""
    return hmac.digest(key, info + b"\x01", "sha256")


def _key_for(purpose: bytes, key: bytes) -> bytes:
    return _expand(_extract(_SALT, key), purpose)


def check_key(key: bytes) -> bytes:
    """Return `key` if it is a valid key, and raise TypeError or ValueError otherwise."""
    if not isinstance(key, bytes):
        raise TypeError(f"auth must be bytes, not {type(key).__name__}")
    if len(key) < MIN_KEY_SIZE:
        raise ValueError(f"auth must be at least {MIN_KEY_SIZE} bytes long, not {len(key)}")
    return key


def transcript(client: Hello, server: Hello, client_qp: int, server_qp: int) -> bytes:
    """Return the SHA-256 hash of both hellos and both queue pair numbers."""
    numbers = client_qp.to_bytes(4, "little") + server_qp.to_bytes(4, "little")
    return hashlib.sha256(client.pack() + server.pack() + numbers).digest()


def proof(
    key: bytes, role: str, client_nonce: bytes, server_nonce: bytes, transcript_hash: bytes
) -> bytes:
    """Return the proof that `role` ("client" or "server") has the key."""
    message = role.encode() + client_nonce + server_nonce + transcript_hash
    return hmac.digest(_key_for(b"proof", key), message, "sha256")


def is_valid_proof(expected: bytes, given: bytes) -> bool:
    """Return whether two proofs are equal, comparing them in constant time."""
    return hmac.compare_digest(expected, given)


@lru_cache(maxsize=4)  # a listener needs it for every unknown peer
def ticket_key(key: bytes) -> bytes:
    """Derive the ticket key from the pre-shared key (see admission.py)."""
    return _key_for(b"ticket", key)


def ticket_mac(key: bytes, nonce: bytes, salt: bytes, offer: bytes) -> bytes:
    """Return the MAC that authenticates a client's offer. `key` is the ticket key."""
    return hmac.digest(key, nonce + salt + offer, "sha256")[:TICKET_MAC_SIZE]


def traffic_secrets(
    key: bytes, shared: bytes, client: bytes, server: bytes, transcript_hash: bytes
) -> tuple[bytes, bytes]:
    """Derive the secrets for the client's and for the server's outgoing traffic, in this order.

    `shared` is the X25519 shared secret of the public keys `client` and `server`.
    """
    secret = _extract(_key_for(b"encryption", key), shared)
    info = client + server + transcript_hash
    return _expand(secret, b"client" + info), _expand(secret, b"server" + info)


def resume_key(secret: bytes) -> bytes:
    """Derive the key for Resume frames from the initial traffic secret of their direction."""
    return _expand(secret, b"resume")


def next_key(secret: bytes) -> tuple[bytes, bytes]:
    """Derive a 32-byte key and the secret from which the next key will be derived."""
    return _expand(secret, b"key"), _expand(secret, b"next")
