"""Connections that share the socket of one TCP bootstrap (connect_inband.py).

These are the first connection, and those that were opened over it or over one another. The end of
the socket shows immediately that the peer has died. It therefore stays open while any of the
connections is open, and its end ends all of them. A connection that ends before the others cannot
use the end of the socket to tell its peer. Its number is sent on the socket instead. The connecting
side assigns the numbers, and the first connection is number 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import count

from ..cm.address import Address
from .lifecycle import ControlChannel
from .tcp_link import TCPLink


class GroupMember:
    """One connection's share of the socket, which is its link."""

    def __init__(self, group: ConnectionGroup, number: int) -> None:
        self.group = group
        self.number = number
        self.channel: ControlChannel | None = None
        """The control channel of the connection, once it has been created."""
        self._on_end: Callable[[str], object] | None = None
        self._end_reason: str | None = None

    @property
    def local_address(self) -> Address | None:
        return self.group.local_address

    @property
    def peer_address(self) -> Address | None:
        return self.group.peer_address

    def attach(self, channel: ControlChannel) -> None:
        self.channel = channel

    def established(self, on_end: Callable[[str], object]) -> None:
        """Call `on_end` once when the peer's side has ended, or soon if it has ended already.

        It is not called immediately, because the connection will first process earlier frames.
        """
        self._on_end = on_end
        if self._end_reason is not None:
            asyncio.get_running_loop().call_soon(self.end, self._end_reason)

    def end(self, reason: str) -> None:
        """Report that the peer's side has ended."""
        self._end_reason = reason
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(reason)

    def close(self) -> None:
        self._on_end = None

    def release(self) -> None:
        peer_closed = self.channel is not None and self.channel.peer_closed
        self.group.leave(self, peer_knows=peer_closed or self._end_reason is not None)


class ConnectionGroup:
    """The connections that share one socket, which is closed with the last of them."""

    def __init__(self, link: TCPLink) -> None:
        self._link = link
        self._members: dict[int, GroupMember] = {}
        self._numbers = count(1)
        self._end_reason: str | None = None
        self.local_address = link.local_address
        self.peer_address = link.peer_address
        self.peer_accepts = True
        """Whether the peer accepts further connections, unless it has reported otherwise."""
        self.overdue = 0
        """The number of requests that this side gave up and that have no response yet."""
        link.established(self._on_link_end, self._on_peer_ended)

    def __iter__(self) -> Iterator[GroupMember]:
        return iter(self._members.values())

    def __contains__(self, number: int) -> bool:
        return number in self._members

    @property
    def alive(self) -> bool:
        """Whether further connections can be opened over the group, now or later."""
        return self.peer_accepts and self._end_reason is None and bool(self._members)

    @property
    def usable(self) -> bool:
        """Whether further connections should be opened over the group now."""
        return self.alive and not self.overdue

    def new(self) -> GroupMember:
        """Return a new member for a connection that this side opens."""
        return self.join(next(self._numbers))

    def join(self, number: int) -> GroupMember:
        """Return a new member for a connection with a number assigned by the peer."""
        member = self._members[number] = GroupMember(self, number)
        if self._end_reason is not None:
            member.end(self._end_reason)
        return member

    def _on_peer_ended(self, number: int) -> None:
        # A connection with an unknown number has ended on this side at the same time.
        member = self._members.get(number)
        if member is not None:
            member.end("the peer aborted the connection")

    def _on_link_end(self, reason: str) -> None:
        self._end_reason = reason
        for member in list(self):
            member.end(reason)

    def leave(self, member: GroupMember, *, peer_knows: bool) -> None:
        """Remove a member. The last one closes the socket.

        For others, the number is sent to the peer unless `peer_knows`.
        """
        if self._members.get(member.number) is not member:
            return
        del self._members[member.number]
        if not self._members:
            self._link.close()
            self._link.release()
        elif not peer_knows and self._end_reason is None:
            self._link.send_ended([member.number])
