"""Tickets, which prove that a client has the key before a listener allocates resources for it.

::

    client -> listener   an offer: its hello, and its endpoint in the TCP bootstrap
    listener -> client   a challenge: a nonce
    client -> listener   the offer again (but not in the TCP bootstrap), and a ticket for it

A ticket is HMAC-SHA256(key, nonce, salt, offer), truncated to 16 bytes, after the tag and the salt.
The tag is the first bytes of the nonce and identifies the challenge. A challenge may come from an
earlier listener that has ended.

A ticket admits its client to one handshake, which continues with the proof of both sides
(authentication.py). The ticket and the proof do not replace each other. The 24 bytes of a ticket
are the space that a hello leaves in the private data of a connection request (56 bytes for
RDMA_PS_TCP).

A listener keeps no state for a client that it has challenged. All clients get the same nonce until
TICKETS clients have been admitted. Then the listener creates a new nonce, and the previous one
remains valid. Admitted tickets are remembered for as long as their nonce is valid, so each ticket
is valid once. The listener therefore stores data only for clients that have the key. Tickets do not
depend on a clock.

::

    challenge: offset  0  4s   b"AIOC"           ticket: offset  0  4s   tag
               offset  4  u8   version, 1                offset  4  4s   salt
               offset  5  u8   flags, 0                  offset  8  16s  HMAC
               offset  6  u16  reserved, 0
               offset  8  32s  nonce
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from aiordma._core.authentication import NONCE_SIZE, is_valid_proof, ticket_key, ticket_mac
from aiordma._core.handshake_layout import CHALLENGE_MAGIC, CHALLENGE_SIZE, TICKET_SIZE
from aiordma._core.layout import check_layout
from aiordma.errors import AuthenticationError, ProtocolError

_CHALLENGE = struct.Struct("<4sBBH32s")
_TICKET = struct.Struct("<4s4s16s")
assert (_CHALLENGE.size, _TICKET.size) == (CHALLENGE_SIZE, TICKET_SIZE)
_VERSION = 1
_TAG_SIZE = 4

SALT_SIZE = 4

TICKETS = 1024
"""The number of tickets admitted per challenge. At most twice as many are remembered."""


class Challenge(NamedTuple):
    """A server's challenge, with the nonce that the client's ticket must cover."""

    nonce: bytes

    @property
    def tag(self) -> bytes:
        """The first bytes of the nonce. A ticket repeats them to identify its challenge."""
        return self.nonce[:_TAG_SIZE]

    def pack(self) -> bytes:
        """Return the challenge as CHALLENGE_SIZE bytes."""
        return _CHALLENGE.pack(CHALLENGE_MAGIC, _VERSION, 0, 0, self.nonce)

    @classmethod
    def unpack(cls, data: bytes) -> Challenge:
        """Decode a challenge. Raises ProtocolError if the data is invalid."""
        check_layout(
            data,
            what="challenge",
            magic=CHALLENGE_MAGIC,
            version=_VERSION,
            flags=0,
            size=CHALLENGE_SIZE,
        )
        _, _, _, reserved, nonce = _CHALLENGE.unpack(data)
        if reserved:
            raise ProtocolError("invalid challenge from the peer: a reserved field is not zero")
        return cls(nonce)


def ticket(key: bytes, challenge: Challenge, offer: bytes, salt: bytes) -> bytes:
    """Return the ticket for an offer (TICKET_SIZE bytes). `salt` is SALT_SIZE random bytes."""
    mac = ticket_mac(ticket_key(key), challenge.nonce, salt, offer)
    return _TICKET.pack(challenge.tag, salt, mac)


class TicketValidator:
    """A listener's valid challenges, with the tickets admitted for each challenge."""

    def __init__(self, key: bytes, random: Callable[[int], bytes]) -> None:
        """Create the first challenge. `random(n)` must return n random bytes."""
        self._key = ticket_key(key)
        self._random = random
        self.challenge: Challenge = Challenge(random(NONCE_SIZE))
        """The challenge to send to new peers."""
        # The tickets admitted for each valid challenge. A ticket is admitted only once.
        self._admitted: dict[Challenge, set[bytes]] = {self.challenge: set()}
        self._remaining = TICKETS  # number of tickets to admit before the next challenge

    def validate(self, ticket: bytes, offer: bytes) -> bool:
        """Return whether the ticket admits the offer.

        If the result is False, the caller must challenge the sender again. A ticket is not admitted
        if its challenge has expired or if it was used before. A sender without a challenge sends
        zeros, which are not admitted either.

        Raises:
            AuthenticationError: The ticket was made with another key or for another offer.
        """
        tag, salt, mac = _TICKET.unpack(ticket)
        challenge = next((each for each in self._admitted if each.tag == tag), None)
        if challenge is None:
            return False
        if not is_valid_proof(ticket_mac(self._key, challenge.nonce, salt, offer), mac):
            raise AuthenticationError("the peer does not have the key given as auth=")
        admitted = self._admitted[challenge]
        if ticket in admitted:
            return False
        admitted.add(ticket)
        self._remaining -= 1
        if not self._remaining:
            self._renew()
        return True

    def _renew(self) -> None:
        """Replace the current challenge. The previous one stays valid until the next renewal."""
        previous = self.challenge
        self.challenge = Challenge(self._random(NONCE_SIZE))
        self._admitted = {self.challenge: set(), previous: self._admitted[previous]}
        self._remaining = TICKETS
