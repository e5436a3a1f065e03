"""Tests of proofs, which are valid only for one key, role, pair of nonces and connection."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from aiordma._core import authentication as auth
from aiordma._core.handshake_layout import Hello

HELLO = Hello(
    eager_size=8192,
    data_receives=24,
    control_receives=8,
    max_message=1 << 30,
    lend_quota=1 << 20,
    authenticates=True,
)
KEY = bytes(range(32))
NONCES = bytes(32), bytes([1]) * 32
TRANSCRIPT_HASH = auth.transcript(HELLO, HELLO, 1, 2)


def hkdf(salt: bytes, secret: bytes, info: bytes) -> bytes:
    """Compute HKDF (RFC 5869) with the cryptography package."""
    return HKDF(SHA256(), 32, salt, info).derive(secret)


def test_proof_matches_an_independent_hmac() -> None:
    """Client and server of any release must agree on the proof that the module describes."""
    derived = hkdf(b"aiordma pre-shared key 2", KEY, b"proof")
    text = b"server" + NONCES[0] + NONCES[1] + TRANSCRIPT_HASH
    expected = hmac.new(derived, text, hashlib.sha256).digest()
    assert auth.proof(KEY, "server", *NONCES, TRANSCRIPT_HASH) == expected
    assert auth.is_valid_proof(expected, expected)


def test_proof_depends_on_every_input() -> None:
    first, second = NONCES
    base = (KEY, "server", first, second, TRANSCRIPT_HASH)
    changed = [
        (bytes(32), "server", first, second, TRANSCRIPT_HASH),
        (KEY, "client", first, second, TRANSCRIPT_HASH),
        (KEY, "server", second, first, TRANSCRIPT_HASH),
        (KEY, "server", first, first, TRANSCRIPT_HASH),
        *(
            (KEY, "server", first, second, other)
            for other in (
                auth.transcript(HELLO, HELLO, 2, 1),
                auth.transcript(HELLO, HELLO, 1, 3),
                auth.transcript(replace(HELLO, lend_quota=0), HELLO, 1, 2),
                auth.transcript(HELLO, replace(HELLO, authenticates=False), 1, 2),
            )
        ),
    ]
    expected = auth.proof(*base)
    proofs = [auth.proof(*arguments) for arguments in changed]
    assert len({expected, *proofs}) == len(changed) + 1
    assert not any(auth.is_valid_proof(expected, proof) for proof in proofs)


LONG = bytes(range(100))


@pytest.mark.parametrize(
    ("key", "other"),
    [(KEY, KEY + b"\0"), (KEY, KEY.ljust(64, b"\0")), (LONG, hashlib.sha256(LONG).digest())],
    ids=["a zero", "zeros to a block", "its hash"],
)
def test_keys_with_equal_hmac_produce_different_proofs(key: bytes, other: bytes) -> None:
    """HMAC pads short keys with zeros and hashes long ones (RFC 2104)."""
    assert hmac.digest(key, b"", "sha256") == hmac.digest(other, b"", "sha256")
    shown = [auth.proof(one, "client", *NONCES, TRANSCRIPT_HASH) for one in (key, other)]
    assert not auth.is_valid_proof(*shown)
    assert not {*traffic(key=key)} & {*traffic(key=other)}


def traffic(**changed: bytes) -> tuple[bytes, bytes]:
    base = {"key": KEY, "shared": bytes(32), "client": NONCES[0], "server": NONCES[1]}
    return auth.traffic_secrets(**{**base, "transcript_hash": TRANSCRIPT_HASH, **changed})


def test_traffic_secrets_match_an_independent_derivation() -> None:
    """The secrets are those that the module describes. They depend on every input."""
    secret = hmac.digest(hkdf(b"aiordma pre-shared key 2", KEY, b"encryption"), bytes(32), "sha256")
    said = b"".join(NONCES) + TRANSCRIPT_HASH
    of = [HKDFExpand(SHA256(), 32, role + said).derive(secret) for role in (b"client", b"server")]
    assert [*traffic()] == of
    changed = [
        traffic(**{name: b"another"}) for name in ("key", "shared", "client", "transcript_hash")
    ]
    assert len({secret for pair in changed for secret in pair} | {*of}) == 2 * len(changed) + 2


def test_next_key_never_returns_the_same_key() -> None:
    seen = set()
    secret = KEY
    for _ in range(10):
        key, secret = auth.next_key(secret)
        seen |= {key, secret}
    assert len(seen) == 20


def test_check_key_rejects_short_keys_and_strings() -> None:
    assert auth.check_key(KEY) == KEY
    with pytest.raises(ValueError, match="at least 16"):
        auth.check_key(b"short")
    with pytest.raises(TypeError, match="bytes"):
        auth.check_key("a key of text, long enough")  # type: ignore[arg-type]
