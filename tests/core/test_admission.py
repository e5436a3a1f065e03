"""Tests of tickets, each of which is valid once, for one challenge, offer and key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from aiordma._core.admission import SALT_SIZE, TICKETS, Challenge, TicketValidator, ticket
from aiordma._core.handshake_layout import CHALLENGE_SIZE, ENDPOINT_SIZE, HELLO_SIZE, TICKET_SIZE
from aiordma.errors import AuthenticationError

KEY = b"sixteen or more random bytes"
OFFER = b"an offer"


def counted() -> Callable[[int], bytes]:
    """Return a predictable replacement for a random generator, which counts up from 1."""
    numbers = iter(range(1, 1 << 30))
    return lambda size: next(numbers).to_bytes(size, "little")


salt = counted()


def is_admitted(validator: TicketValidator, challenge: Challenge | None = None) -> bool:
    """Return whether a valid ticket is admitted. The challenge defaults to the current one."""
    return validator.validate(
        ticket(KEY, challenge or validator.challenge, OFFER, salt(SALT_SIZE)), OFFER
    )


def test_ticket_matches_an_independent_hmac() -> None:
    """Client and server of any release must agree on the ticket that the module describes."""
    derived = HKDF(SHA256(), 32, b"aiordma pre-shared key 2", b"ticket").derive(KEY)
    challenge = Challenge(bytes(range(32)))
    mac = hmac.new(derived, challenge.nonce + b"salt" + OFFER, hashlib.sha256).digest()
    assert ticket(KEY, challenge, OFFER, b"salt") == b"\0\1\2\3salt" + mac[:16]


def test_ticket_and_challenge_have_their_wire_sizes() -> None:
    """A ticket follows the hello in a connection request. A challenge replaces an endpoint."""
    assert HELLO_SIZE + TICKET_SIZE == 56
    assert len(Challenge(bytes(32)).pack()) == CHALLENGE_SIZE == ENDPOINT_SIZE


def test_ticket_is_admitted_once() -> None:
    validator = TicketValidator(KEY, counted())
    shown = ticket(KEY, validator.challenge, OFFER, b"salt")
    assert [validator.validate(shown, OFFER) for _ in range(3)] == [True, False, False]
    assert is_admitted(validator)


@pytest.mark.parametrize(
    ("key", "offer"), [(KEY + b"!", OFFER), (KEY, OFFER + b"!")], ids=["key", "offer"]
)
def test_ticket_with_wrong_key_or_offer_raises_authentication_error(
    key: bytes, offer: bytes
) -> None:
    validator = TicketValidator(KEY, counted())
    with pytest.raises(AuthenticationError):
        validator.validate(ticket(key, validator.challenge, offer, b"salt"), OFFER)


def test_ticket_for_another_challenge_is_not_admitted() -> None:
    """A client whose challenge is from before a restart is asked again."""
    validator = TicketValidator(KEY, counted())
    assert not is_admitted(validator, Challenge(b"\1" * 32))
    with pytest.raises(AuthenticationError):  # a ticket is valid for one listener only
        is_admitted(validator, Challenge(validator.challenge.tag.ljust(32, b"\1")))


def test_challenge_expires_after_a_fixed_number_of_tickets() -> None:
    """The previous challenge is valid for as many more, so that slow clients need not retry."""
    validator = TicketValidator(KEY, counted())
    first = validator.challenge
    early = ticket(KEY, first, OFFER, b"salt")
    assert validator.validate(early, OFFER)
    for _ in range(TICKETS - 1):
        assert is_admitted(validator)
    second = validator.challenge
    assert second.nonce != first.nonce
    assert is_admitted(validator, first)
    assert not validator.validate(early, OFFER)
    for _ in range(TICKETS):
        assert is_admitted(validator)
    assert not is_admitted(validator, first)
    assert not validator.validate(early, OFFER)
    assert is_admitted(validator, second)


def test_validator_remembers_a_bounded_number_of_tickets() -> None:
    """The bound also holds if all tickets are for the previous challenge."""
    validator = TicketValidator(KEY, counted())
    for _ in range(TICKETS - 1):
        assert is_admitted(validator)
    before = validator.challenge
    for _ in range(3 * TICKETS):
        is_admitted(validator, before)
        assert sum(map(len, validator._admitted.values())) <= 3 * TICKETS
        assert len(validator._admitted) <= 2


def test_forged_tickets_do_not_change_the_validator_state() -> None:
    validator = TicketValidator(KEY, counted())
    first = validator.challenge
    for number in range(3 * TICKETS):
        forged = ticket(bytes(16), first, OFFER, number.to_bytes(SALT_SIZE, "little"))
        with pytest.raises(AuthenticationError):
            validator.validate(forged, OFFER)
        assert not validator.validate(bytes(TICKET_SIZE), OFFER)
    assert validator.challenge == first
    assert not validator._admitted[first]
