"""Connections that share the socket of one TCP bootstrap (connect_inband.py).

A group consists of the connection from the bootstrap and all connections opened in-band over its
members. If the peer dies, its end of the socket closes, and all members end. The socket therefore
stays open until the last member has ended. If a member ends earlier, this side sends its number
over the socket to notify the peer. The connecting side assigns the numbers, and the first
connection is number 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import count

from ..cm.address import Address
from .lifecycle import ControlChannel
from .tcp_link import TCPLink


class GroupMember:
    """The link of one connection in a group, which shares the group's socket."""

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
        """Register `on_end`, which is called once when the peer's side ends.

        If the peer's side has already ended, the call is scheduled with `call_soon`, so that the
        connection can first process the frames that arrived earlier.
        """
        self._on_end = on_end
        if self._end_reason is not None:
            asyncio.get_running_loop().call_soon(self.mark_ended, self._end_reason)

    def mark_ended(self, reason: str) -> None:
        """Report that the peer's side of the connection has ended."""
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
    """Connections that share one socket. The last one to end closes the socket."""

    def __init__(self, link: TCPLink) -> None:
        self._link = link
        self._members: dict[int, GroupMember] = {}
        self._numbers = count(1)
        self._end_reason: str | None = None
        self.local_address = link.local_address
        self.peer_address = link.peer_address
        self.peer_accepts = True
        """Whether the peer accepts further connections. True until the peer reports otherwise."""
        self.abandoned_requests = 0
        """The number of abandoned requests to which the peer has not responded yet."""
        link.established(self._on_link_end, self._on_peer_ended)

    def __iter__(self) -> Iterator[GroupMember]:
        return iter(self._members.values())

    def __contains__(self, number: int) -> bool:
        return number in self._members

    @property
    def alive(self) -> bool:
        """Whether the group is open and the peer accepts further connections over it."""
        return self.peer_accepts and self._end_reason is None and bool(self._members)

    @property
    def usable(self) -> bool:
        """Whether to connect over the group. False while an abandoned request awaits its reply."""
        return self.alive and not self.abandoned_requests

    def new_member(self) -> GroupMember:
        """Add a member with a new number, for a connection that this side opens."""
        return self.add_member(next(self._numbers))

    def add_member(self, number: int) -> GroupMember:
        """Add a member for a connection whose number has already been assigned."""
        member = self._members[number] = GroupMember(self, number)
        if self._end_reason is not None:
            member.mark_ended(self._end_reason)
        return member

    def _on_peer_ended(self, number: int) -> None:
        # The number is unknown if this side ended the connection at the same time.
        member = self._members.get(number)
        if member is not None:
            member.mark_ended("the peer aborted the connection")

    def _on_link_end(self, reason: str) -> None:
        self._end_reason = reason
        for member in list(self):
            member.mark_ended(reason)

    def leave(self, member: GroupMember, *, peer_knows: bool) -> None:
        """Remove a member, and close the socket if no members remain.

        If others remain, notify the peer of the member's end, unless `peer_knows` is true.
        """
        if self._members.get(member.number) is not member:
            return  # it has left before
        del self._members[member.number]
        if not self._members:
            self._link.close()
            self._link.release()
        elif not peer_knows and self._end_reason is None:
            self._link.send_ended([member.number])
