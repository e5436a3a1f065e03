"""Connections that share the socket of one exchange over TCP: the first one, and those that were
asked for over it or over one another (kin.py).

The socket's end is how the death of the peer is noticed at once, so it stays for as long as any of
them lives, and all hear of it.  A connection that ends while others go on cannot say so by its end:
then the peer is told its number.  The asking side gives the numbers; the first one's is 0.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator
from itertools import count

from .._core.connection_states import ConnectionState
from .connection import Connection
from .lifecycle import Address
from .tcp_link import TCPLink

# Seconds until the peer is told of the end of connections that ended in order, together: it has had
# a goodbye, and waits for this only with what it still had under way.
TOLD_TOGETHER = 0.002


class Member:
    """One connection's share of the socket: its link."""

    def __init__(self, family: Family, number: int) -> None:
        self.family = family
        self.number = number
        self._connection: weakref.ref[Connection] | None = None
        self._on_end: Callable[[str], None] | None = None
        self._over: str | None = None

    @property
    def local_address(self) -> Address | None:
        return self.family.local_address

    @property
    def peer_address(self) -> Address | None:
        return self.family.peer_address

    @property
    def connection(self) -> Connection | None:
        return self._connection() if self._connection is not None else None

    @property
    def used(self) -> bool:
        """Whether there has been a connection."""
        return self._connection is not None

    def belongs_to(self, connection: Connection) -> None:
        self._connection = weakref.ref(connection)

    def watched(self, on_end: Callable[[str], None]) -> None:
        """From now on `on_end` hears of the end, once or never, and at once if it has been."""
        self._on_end = on_end
        if self._over is not None:
            on_end(self._over)

    def over(self, reason: str) -> None:
        """The other side of it is no more."""
        self._over = reason
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(reason)

    def close(self) -> None:
        self._on_end = None

    def release(self) -> None:
        connection = self.connection
        parted = said = False
        if connection is not None:
            parted = connection._peer_close_error is not None
            said = connection._ended_in is ConnectionState.GOODBYE_SENT
        self.family.leave(self, told=parted or self._over is not None, soon=said)


class Family:
    """Those who share one socket, which goes with the last of them."""

    def __init__(self, link: TCPLink) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._members: dict[int, Member] = {}
        self._numbers = count(1)
        self._unsaid: list[int] = []
        self._saying: asyncio.TimerHandle | None = None
        self._ended: str | None = None
        self.local_address = link.local_address
        self.peer_address = link.peer_address
        self.asks = True
        """Whether the peer takes asks; it has not said otherwise."""
        self.overdue = 0
        """Asks that nobody waits for any more, and are not answered yet."""
        link.established(self._end, self._over)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __contains__(self, number: int) -> bool:
        return number in self._members

    @property
    def alive(self) -> bool:
        """Whether further connections may be asked for, if not now."""
        return self.asks and self._ended is None and bool(self._members)

    @property
    def usable(self) -> bool:
        """Whether they should be asked for now."""
        return self.alive and not self.overdue

    def new(self) -> Member:
        """For a connection that is asked for."""
        return self.join(next(self._numbers))

    def join(self, number: int) -> Member:
        """For one that the peer has given this number."""
        member = self._members[number] = Member(self, number)
        if self._ended is not None:
            member.over(self._ended)
        return member

    def _over(self, number: int) -> None:
        # An unknown number is of one that has ended on this side at the same time.
        member = self._members.get(number)
        if member is not None:
            member.over("the peer has ended it without a goodbye")

    def _end(self, reason: str) -> None:
        self._ended = reason
        for member in list(self):
            member.over(reason)

    def leave(self, member: Member, *, told: bool, soon: bool) -> None:
        """The socket goes, or the peer is told: `soon`, or else now; not if it knows."""
        if self._members.get(member.number) is not member:
            return
        del self._members[member.number]
        if not self._members:
            self._close()
        elif told or self._ended is not None or self._loop.is_closed():
            return
        elif soon:
            self._unsaid.append(member.number)
            if self._saying is None:
                self._saying = self._loop.call_later(TOLD_TOGETHER, self._say)
        else:
            self._unsaid.append(member.number)
            self._say()

    def _say(self) -> None:
        if self._saying is not None:
            self._saying.cancel()
            self._saying = None
        unsaid, self._unsaid = self._unsaid, []
        self._link.say_over(unsaid)

    def _close(self) -> None:
        if self._saying is not None:
            self._saying.cancel()
            self._saying = None
        self._link.close()
        self._link.release()
