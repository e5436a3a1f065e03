"""Seal frames in Python, with other functions of the package than the library uses.

aiordma/_core/frames.py defines the layout, and aiordma/_core/authentication.py the keys.
"""

from __future__ import annotations

from cryptography.hazmat.primitives import hmac
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from aiordma._core.frames import REKEY_FRAMES, TAG_SIZE

SALT = b"aiordma pre-shared key 2"


def expand(secret: bytes, info: bytes) -> bytes:
    return HKDFExpand(SHA256(), 32, info).derive(secret)


class SealedDirection:
    """The sealed frames of one direction, for the sender or the receiver."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.max_frames = REKEY_FRAMES
        self._next_key()

    def _next_key(self) -> None:
        self._cipher = AESGCM(expand(self._secret, b"key"))
        self._secret = expand(self._secret, b"next")
        self.frames = 0

    def _nonce(self) -> bytes:
        if self.frames == self.max_frames:
            self._next_key()
        self.frames += 1
        return (self.frames - 1).to_bytes(12, "little")

    def seal(self, frame: bytes) -> bytes:
        nonce = self._nonce()
        return self._cipher.encrypt(nonce, frame, None)

    def open(self, data: bytes) -> bytes:
        nonce = self._nonce()
        return self._cipher.decrypt(nonce, data, None)


def seal_payload(payload: bytes, key: bytes) -> tuple[bytes, bytes]:
    """Encrypt a payload. Return the ciphertext to offer, and the key and tag for the request."""
    sealed = AESGCM(key).encrypt(bytes(12), payload, None)
    return sealed[:-TAG_SIZE], key + sealed[-TAG_SIZE:]


def open_payload(offered: bytes, seal: bytes) -> bytes:
    return AESGCM(seal[:32]).decrypt(bytes(12), offered + seal[32:], None)


class ModelExchange:
    """The client's side of the key exchange."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def agree(
        self, key: bytes, server: bytes, connection: bytes
    ) -> tuple[SealedDirection, SealedDirection]:
        """Derive the keys. Return the direction from client to server, then the opposite one."""
        shared = self._private.exchange(X25519PublicKey.from_public_bytes(server))
        mac = hmac.HMAC(HKDF(SHA256(), 32, SALT, b"encryption").derive(key), SHA256())
        mac.update(shared)
        secret = mac.finalize()
        said = self.public + server + connection
        return (
            SealedDirection(expand(secret, b"client" + said)),
            SealedDirection(expand(secret, b"server" + said)),
        )
