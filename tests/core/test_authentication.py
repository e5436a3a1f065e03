"""Proofs: right for one key, one role, one pair of nonces and one connection, and for no other."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma._core import authentication as auth
from aiordma._core.handshake import Hello

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
CONNECTION = auth.transcript(HELLO, HELLO, 1, 2)


def test_a_proof_is_an_hmac() -> None:
    """As the module says it, computed apart: both sides of every release must agree on it."""
    text = b"aiordma pre-shared key 1 server" + NONCES[0] + NONCES[1] + CONNECTION
    expected = hmac.new(KEY, text, hashlib.sha256).digest()
    assert auth.proof(KEY, "server", *NONCES, CONNECTION) == expected
    assert len(expected) == auth.PROOF_SIZE
    assert auth.proves(expected, expected)


def test_everything_that_goes_in_matters() -> None:
    first, second = NONCES
    base = (KEY, "server", first, second, CONNECTION)
    changed = [
        (bytes(32), "server", first, second, CONNECTION),
        (KEY, "client", first, second, CONNECTION),
        (KEY, "server", second, first, CONNECTION),
        (KEY, "server", first, first, CONNECTION),
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
    assert not any(auth.proves(expected, proof) for proof in proofs)


@given(st.binary(min_size=16, max_size=64), st.binary(min_size=16, max_size=64))
def test_another_key_proves_nothing(key: bytes, other: bytes) -> None:
    proofs = [auth.proof(one, "client", *NONCES, CONNECTION) for one in (key, other)]
    # HMAC pads its key with zeros (RFC 2104): such keys are the same one.
    assert auth.proves(*proofs) == (key.rstrip(b"\0") == other.rstrip(b"\0"))


def test_keys_that_are_none() -> None:
    assert auth.check_key(KEY) == KEY
    with pytest.raises(ValueError, match="at least 16"):
        auth.check_key(b"short")
    with pytest.raises(TypeError, match="bytes"):
        auth.check_key("a key of text, long enough")  # type: ignore[arg-type]
