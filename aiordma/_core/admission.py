"""The ticket of a client that has the key. A listener creates nothing for a peer without one.

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
is valid once. Only clients that have the key make the listener remember anything. No time is
involved.

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

from aiordma._core.authentication import NONCE_SIZE, proves, ticket_key, ticket_mac
from aiordma._core.handshake import CHALLENGE_MAGIC, CHALLENGE_SIZE, TICKET_SIZE
from aiordma._core.layout import check_layout
from aiordma.errors import AuthenticationError, ProtocolError

_CHALLENGE = struct.Struct("<4sBBH32s")
_TICKET = struct.Struct("<4s4s16s")
assert (_CHALLENGE.size, _TICKET.size) == (CHALLENGE_SIZE, TICKET_SIZE)
_VERSION = 1
_TAG_SIZE = 4

SALT_SIZE = 4

TICKETS = 1024
"""The number of tickets admitted per challenge. At most three times as many are remembered."""


class Challenge(NamedTuple):
    """A server's challenge: the nonce for which a client computes its ticket."""

    nonce: bytes

    @property
    def tag(self) -> bytes:
        """The first bytes of the nonce, with which a ticket identifies its challenge."""
        return self.nonce[:_TAG_SIZE]

    def pack(self) -> bytes:
        """Return the challenge as CHALLENGE_SIZE bytes."""
        return _CHALLENGE.pack(CHALLENGE_MAGIC, _VERSION, 0, 0, self.nonce)

    @classmethod
    def unpack(cls, data: bytes) -> Challenge:
        """Decode a challenge. Raises ProtocolError for data that :meth:`pack` does not create."""
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
    """Return the ticket for an offer: TICKET_SIZE bytes. `salt` is SALT_SIZE random bytes."""
    mac = ticket_mac(ticket_key(key), challenge.nonce, salt, offer)
    return _TICKET.pack(challenge.tag, salt, mac)


class TicketOffice:
    """A listener's challenges, and the tickets for them that it has admitted."""

    def __init__(self, key: bytes, random: Callable[[int], bytes]) -> None:
        """Create an office. `random(n)` returns n random bytes."""
        self._key = ticket_key(key)
        self._random = random
        self.challenge: Challenge = Challenge(random(NONCE_SIZE))
        """The challenge to send to new peers."""
        self._admitted: dict[Challenge, set[bytes]] = {self.challenge: set()}
        self._left = TICKETS

    def admits(self, ticket: bytes, offer: bytes) -> bool:
        """Return whether the ticket admits the offer. If not, challenge the sender again.

        A ticket of zeros means that the sender does not have a ticket. Tickets of zeros, tickets
        for expired challenges and tickets that were admitted before do not admit an offer.

        Raises:
            AuthenticationError: The ticket was made with another key or for another offer.
        """
        tag, salt, mac = _TICKET.unpack(ticket)
        challenge = next((each for each in self._admitted if each.tag == tag), None)
        if challenge is None:
            return False
        if not proves(ticket_mac(self._key, challenge.nonce, salt, offer), mac):
            raise AuthenticationError("the peer does not have the key given as auth=")
        admitted = self._admitted[challenge]
        if ticket in admitted:
            return False
        admitted.add(ticket)
        self._left -= 1
        if not self._left:
            self._renew()
        return True

    def _renew(self) -> None:
        """Replace the current challenge. The previous one stays valid for now."""
        before = self.challenge
        self.challenge = Challenge(self._random(NONCE_SIZE))
        self._admitted = {self.challenge: set(), before: self._admitted[before]}
        self._left = TICKETS
