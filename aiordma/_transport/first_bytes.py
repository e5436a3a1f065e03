"""Accepted sockets whose peer has to send something: its first bytes, or a ticket for a challenge.

Such a socket costs a descriptor and a timer: no task, no transport, no queue pair, and no place
among the handshakes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from .._loop.driver import Watch
from .._native import fork
from ..cm.address import Address
from ..config import Config
from .fair_share import FairShare, networks_of, places


def _speaks(accepted: socket.socket) -> bool:
    """Whether there is something to read: bytes, the end or an error."""
    try:
        accepted.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


class SilentSocket:
    """An accepted socket on which nothing has come yet."""

    def __init__(
        self,
        sockets: SilentSockets,
        accepted: socket.socket,
        address: Address,
        when_readable: Callable[[], None],
    ) -> None:
        self._sockets = sockets
        self._socket = accepted
        self._when_readable = when_readable
        self.networks = networks_of(address[0])
        self._inode = fork.add_socket(accepted.fileno())
        self._watch = Watch(accepted.fileno(), self._readable)
        self._timer = asyncio.get_running_loop().call_later(sockets.timeout, self._too_late)

    def _readable(self) -> None:
        self._sockets.forget(self)
        self.stop()
        self._when_readable()

    def _too_late(self) -> None:
        self._sockets.forget(self)
        self.close()

    def stop(self) -> None:
        self._timer.cancel()
        self._watch.close()
        fork.remove_socket(self._inode)

    def close(self) -> None:
        self.stop()
        self._socket.close()


class SilentSockets:
    """Passes sockets on when bytes are there; closes those that stay silent."""

    def __init__(self, config: Config) -> None:
        self.timeout = config.handshake_timeout / 5
        self._waiting: FairShare[SilentSocket] = FairShare(places(config.max_handshakes))

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self, accepted: socket.socket, address: Address, when_readable: Callable[[], None]
    ) -> None:
        """Takes over an accepted socket until `when_readable` is called.

        If there is no room, another one is closed for it.
        """
        if _speaks(accepted):
            when_readable()
            return
        silent = SilentSocket(self, accepted, address, when_readable)
        goes = self._waiting.make_room(silent.networks)
        if goes is not None:
            goes.close()
        self._waiting.add(silent, silent.networks)

    def drop_oldest(self) -> bool:
        """Closes the oldest one, for its descriptor; False if there is none."""
        oldest = next(iter(self._waiting), None)
        if oldest is None:
            return False
        self.forget(oldest)
        oldest.close()
        return True

    def forget(self, silent: SilentSocket) -> None:
        self._waiting.remove(silent)

    def close(self) -> None:
        while self.drop_oldest():
            pass
        self.on_first_bytes = lambda accepted, _: accepted.close()  # the other refers to this
