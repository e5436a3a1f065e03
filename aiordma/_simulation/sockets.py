"""Streams between simulated hosts, for the TCP bootstrap and for asyncio's own connections.

Each end is a socket of the kernel, of a pair whose other end the simulation has: what arrives is
written there.  What an end sends arrives by a timer of the receiving host's loop, so it waits for
a host that is paused.  Behind a cut it is tried again.  What is sent to a host that was killed
resets the connection when that has booted.  An end takes no more bytes while `WINDOW` of them have
not arrived: then the kernel's buffer of its socket is full, and the loop waits until it can be
written again.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from ..cm.address import Address

if TYPE_CHECKING:
    from .loop import HostLoop
    from .machine import Machine

RETRY = 0.2  # seconds, as TCP's
LONGEST_RETRY = 120.0
CONNECT_TIMEOUT = 127.0  # seconds, of six retries: tcp(7), tcp_syn_retries
ROUNDED = 1e-8  # seconds that a timer may be early
WINDOW = 256 << 10  # bytes
FULL = bytes(4096)  # fills the smallest buffer of a socket
FIRST_PORT, PORTS = 32768, 28232


def _loop() -> HostLoop:
    return cast("HostLoop", asyncio.get_running_loop())


class Stream(socket.socket):
    """One end of a connection."""

    def __init__(self, machine: Machine, local: Address, peer: Address) -> None:
        own, self._inner = socket.socketpair()
        super().__init__(fileno=own.detach())
        self.setblocking(False)
        self._inner.setblocking(False)
        super().setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, len(FULL))
        self._machine = machine
        self._names = local, peer
        self._last = 0.0
        self._coming: deque[tuple[float, bytes]] = deque()  # with the time of each
        self._room = WINDOW
        self.other: Stream

    def getsockname(self) -> Address:
        return self._names[0]

    def getpeername(self) -> Address:
        return self._names[1]

    def setsockopt(self, *_: Any) -> None:
        """Nothing of it changes anything here."""

    def send(self, data: Any, flags: int = 0) -> int:
        taken = bytes(data[: self._room])
        self._room -= len(taken)
        if len(taken) < len(data):
            with suppress(BlockingIOError):
                super().send(FULL)
        if taken:
            self.other._transmit(taken)
        elif data:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return len(taken)

    def _arrived(self, count: int) -> None:
        """So many bytes that this end has sent."""
        was_full, self._room = not self._room, self._room + count
        if was_full and self._inner.fileno() >= 0:
            with suppress(BlockingIOError):
                while self._inner.recv(len(FULL)):
                    pass

    def sendmsg(self, buffers: Any, *_: Any) -> int:
        return self.send(b"".join(buffers))

    def shutdown(self, how: int) -> None:
        if how != socket.SHUT_RD:
            self.other._transmit(b"")

    def close(self) -> None:
        if self.fileno() >= 0:
            self._end()
            self.other._transmit(b"")
        super().close()

    def _end(self) -> None:
        """Nothing comes from the network any more."""
        if self._inner.fileno() >= 0:
            self._machine.loop.remove_writer(self._inner)
            self._inner.close()

    def _transmit(self, data: bytes) -> None:
        """To this end; nothing is the end."""
        machine = self._machine
        if not machine.alive:
            self.other._retry(RETRY)
            return
        delay = machine.world._latency(self.other._machine.host, machine.host)
        self._last = max(machine.now + delay, self._last)
        self._coming.append((self._last, data))
        machine.loop.call_at(self._last, self._take)

    def _retry(self, after: float) -> None:
        """Until the dead host has booted, and does not know the connection, or for minutes."""
        if self._inner.fileno() < 0:  # it has been closed here
            return
        if after < LONGEST_RETRY and not self.other._machine.host.alive:
            self._machine.loop.call_later(after, self._retry, 2 * after)
            return
        with suppress(BlockingIOError):
            super().send(FULL)  # that, unread by the other end, has the kernel reset this one
        self._end()

    def _take(self) -> None:
        machine = self._machine
        if self._inner.fileno() < 0:  # it has been closed here
            return
        machine.loop.remove_writer(self._inner)
        while self._coming and self._coming[0][0] <= machine.now + ROUNDED:
            if machine.world._is_cut(self.other._machine.host, machine.host):
                machine.loop.call_later(RETRY, self._take)
                return
            due, data = self._coming.popleft()
            if not data:
                self._inner.shutdown(socket.SHUT_WR)
                continue
            taken = 0
            with suppress(BlockingIOError):
                taken = self._inner.send(data)
                delay = machine.world._latency(machine.host, self.other._machine.host)
                self.other._machine.loop.call_at(machine.now + delay, self.other._arrived, taken)
            if taken < len(data):  # the rest when the program has read
                self._coming.appendleft((due, data[taken:]))
                machine.loop.add_writer(self._inner, self._take)
                return


class ListeningStream:
    """A listening socket, as far as asyncio and the bootstrap use it."""

    family, type, proto = socket.AF_INET, socket.SOCK_STREAM, 0

    def __init__(self, machine: Machine, address: Address) -> None:
        host, port = address
        if not port:
            free = set(range(FIRST_PORT, FIRST_PORT + PORTS)) - machine.listening.keys()
            port = machine.random.choice(sorted(free))
        elif port in machine.listening:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        self._machine = machine
        self._address = host, port
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        self._waiting: deque[Stream] = deque()
        machine.listening[port] = self

    def fileno(self) -> int:
        return self._fd

    def getsockname(self) -> Address:
        return self._address

    def setblocking(self, _: bool) -> None:
        """It never blocks."""

    def listen(self, _: int = 0) -> None:
        """It does already."""

    def offer(self, stream: Stream) -> None:
        self._waiting.append(stream)
        os.eventfd_write(self._fd, 1)

    def accept(self) -> tuple[Stream, Address]:
        os.eventfd_read(self._fd)
        stream = self._waiting.popleft()
        return stream, stream.getpeername()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            del self._machine.listening[self._address[1]]
            for stream in self._waiting:
                stream.close()


def listening_socket(address: Address) -> ListeningStream:
    """Takes the place of connect_tcp's."""
    return ListeningStream(_loop().machine, address)


async def connected_socket(address: Address, source: Address | None) -> Stream:
    """Takes the place of tcp_link's.  As with Linux, a silent host is asked for some time."""
    loop = _loop()
    here = loop.machine
    host = here.world._host_at(address[0], here.host)
    if host is None:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))
    port = source[1] if source and source[1] else here.random.randrange(FIRST_PORT, 1 << 16)
    local = (source or (here.host.address,))[0], port
    answer: asyncio.Future[Stream] = loop.create_future()
    patience = loop.time() + CONNECT_TIMEOUT

    def ask() -> None:
        """Again and again, as TCP does."""
        if answer.done():
            return
        if loop.time() >= patience:
            answer.set_exception(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))
            return
        there = host._machine
        if not here.world._is_cut(here.host, host):
            delay = here.world._latency(here.host, host)
            there.loop.call_at(here.now + delay, arrive, there)
        loop.call_later(1, ask)

    def arrive(there: Machine) -> None:
        listening = there.listening.get(address[1])
        made = None
        if not answer.done() and listening is not None:
            made, accepted = Stream(here, local, address), Stream(there, address, local)
            made.other, accepted.other = accepted, made
            listening.offer(accepted)
        delay = here.world._latency(host, here.host)
        loop.call_at(there.now + delay, finish, made)

    def finish(made: Stream | None) -> None:
        if answer.done():
            if made is not None:
                made.close()
        elif made is None:
            answer.set_exception(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"))
        else:
            answer.set_result(made)

    ask()
    return await answer
