"""Connections that share the socket of one exchange over TCP: the first one, and those that were
asked for over it or over one another (kin.py).

The socket's end is how the death of the peer is noticed at once, so it stays for as long as any of
them lives, and all hear of it.  A connection that ends while others go on cannot say so by its end:
then the peer is told its number.  The asking side gives the numbers; the first one's is 0.

It also knows which of its members rest between two connections (rest.py), and for how long.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Protocol

from ..config import Config
from .connection import Connection
from .life import Address
from .tcp_link import TCPLink

# Seconds for which a pair rests, at least; at most twice as long.
RESTS = 1.0

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
        self.lay_down = 0  # after how many sweeps of the family

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

    @property
    def gone(self) -> bool:
        """Whether the other side of it is no more."""
        return self._over is not None

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
            # Who says that it rests does not know of an end.
            parted = connection._last_word is not None and not connection._peer_rests
            said = connection._said_goodbye
        self.family.leave(self, told=parted or self._over is not None, soon=said)


class Resting(Protocol):
    """A member that is no connection now, but may be one again (rest.py)."""

    member: Member
    config: Config

    def gone(self, reason: object) -> None:
        """The queue pair, or the other side of it, is no more."""

    def finish(self) -> None:
        """It is not to be one again, once the peer has heard what it was told.  Never raises."""

    def give_up(self) -> None:
        """It is not to be one again.  Never raises."""

    async def told(self) -> None:
        """Until the peer's device has what it was told."""


class Family:
    """Those who share one socket, which goes with the last of them."""

    def __init__(self, link: TCPLink) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._members: dict[int, Member] = {}
        self._numbers = count(1)
        self._resting: dict[int, Resting] = {}
        self._ready: deque[int] = deque()  # of these, those that can be opened
        self._sweeping: asyncio.TimerHandle | None = None
        self._sweeps = 0
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
        """Those that are connections, or on the way to be some."""
        return (self._members[number] for number in self._members if number not in self._resting)

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

    # ---- pairs that rest -----------------------------------------------------------------

    @property
    def may_rest(self) -> bool:
        """Whether one of its connections may: not the last one."""
        return self._ended is None and len(self._members) - len(self._resting) > 1

    @property
    def resting(self) -> int:
        """How many do."""
        return len(self._resting)

    def lie_down(self, resting: Resting) -> None:
        """It is no connection from now on."""
        member = resting.member
        self._resting[member.number] = resting
        member.watched(resting.gone)
        member.lay_down = self._sweeps
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(RESTS, self._sweep)

    async def told(self) -> None:
        """Who is the last connection waits for what the others have said at their end."""
        if len(self._members) - len(self._resting) == 1:
            for resting in list(self._resting.values()):
                await resting.told()

    def ready(self, member: Member) -> None:
        """It can be opened."""
        self._ready.append(member.number)

    def wake(self, config: Config) -> Resting | None:
        """One that rests and was made in this way, for somebody to open."""
        for number in self._ready:
            resting = self._resting[number]
            if resting.config is config or resting.config == config:
                self._ready.remove(number)
                return resting
        return None

    def not_ready(self, member: Member) -> None:
        """It cannot any more, if it could."""
        if member.number in self._ready:
            self._ready.remove(member.number)

    def get_up(self, member: Member) -> None:
        """It is a connection again."""
        self._resting.pop(member.number, None)

    def settle(self) -> None:
        """None rests without a connection beside it."""
        if len(self._members) == len(self._resting):
            for resting in list(self._resting.values()):
                resting.finish()

    def _sweep(self) -> None:
        """Ends those that have rested for a whole turn, and comes again as long as any rest."""
        self._sweeping = None
        self._sweeps += 1
        for resting in list(self._resting.values()):
            if resting.member.lay_down + 1 < self._sweeps:
                resting.give_up()
        if self._resting:
            self._sweeping = self._loop.call_later(RESTS, self._sweep)

    def _over(self, number: int) -> None:
        # An unknown number is of one that has ended on this side at the same time.
        member = self._members.get(number)
        if member is not None:
            member.over("the peer has ended it without a goodbye")

    def _end(self, reason: str) -> None:
        self._ended = reason
        for member in list(self._members.values()):
            member.over(reason)

    def leave(self, member: Member, *, told: bool, soon: bool) -> None:
        """The socket goes, or the peer is told: `soon`, or else now; not if it knows."""
        if self._members.get(member.number) is not member:
            return
        del self._members[member.number]
        self._resting.pop(member.number, None)
        self.not_ready(member)
        if not self._members:
            self._close()
        elif len(self._members) == len(self._resting):
            self.settle()
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
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._link.close()
        self._link.release()
