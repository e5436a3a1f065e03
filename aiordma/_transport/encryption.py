"""The part of `cryptography` that encrypted connections use (the extra `aiordma[encrypt]`).

A `Sealing` (_datapath) encrypts frames and long messages with the ciphers from this module. The
handshake (handshake.py) derives the keys as specified in _core/authentication.py. This module is
only imported if a connection uses encryption.
"""

from __future__ import annotations

import sys
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import GCM

from .._core.authentication import next_key, resume_key, traffic_secrets
from .._datapath.sealing import Sealing
from ..errors import AuthenticationError

__all__ = ["InvalidTag", "KeyExchange", "new_sealing", "payload_opener", "payload_sealer"]

if not hasattr(AESGCM, "encrypt_into"):
    raise ImportError("encrypt= needs cryptography 47 or newer: pip install 'aiordma[encrypt]'")

# A constant nonce is safe, because each key encrypts only one message.
_NONCE = bytes(12)


def payload_sealer(key: bytes) -> Any:
    return Cipher(AES256(key), GCM(_NONCE)).encryptor()


def payload_opener(key: bytes, tag: bytes) -> Any:
    return Cipher(AES256(key), GCM(_NONCE, tag)).decryptor()


def new_sealing(*, memory_in_clear: bool) -> Sealing:
    return Sealing(sys.modules[__name__], memory_in_clear)


class TrafficKeys:
    """The chain of traffic keys for one direction."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def resume_cipher(self) -> AESGCM:
        """Return the cipher for Resume frames. Must be called before `next_cipher`."""
        return AESGCM(resume_key(self._secret))

    def next_cipher(self) -> AESGCM:
        key, self._secret = next_key(self._secret)
        return AESGCM(key)


class KeyExchange:
    """An ephemeral X25519 key pair. `agree` derives the traffic keys and starts the encryption."""

    def __init__(self, sealing: Sealing) -> None:
        self._sealing = sealing
        self._private = X25519PrivateKey.generate()
        self.public: bytes = self._private.public_key().public_bytes_raw()

    def agree(self, key: bytes, peer_public: bytes, transcript: bytes, *, client: bool) -> None:
        """Derive the traffic keys from both public keys, and start the encryption.

        Raises:
            AuthenticationError: If the peer's public key is invalid, for example a low-order point,
                for which the shared secret is zero (RFC 7748, section 6.1).
        """
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(peer_public))
        except ValueError:
            raise AuthenticationError("the peer sent an invalid public key") from None
        client_public, server_public = (
            (self.public, peer_public) if client else (peer_public, self.public)
        )
        client_secret, server_secret = traffic_secrets(
            key, shared, client_public, server_public, transcript
        )
        sending, receiving = (
            (client_secret, server_secret) if client else (server_secret, client_secret)
        )
        self._sealing.start(TrafficKeys(sending), TrafficKeys(receiving))
