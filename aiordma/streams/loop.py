"""An event loop whose connections go over RDMA, for software that connects by its loop.

    with asyncio.Runner(loop_factory=aiordma.streams.EventLoop) as runner:
        runner.run(main())

Every connection and server by host and port goes over RDMA; sockets that the program made itself,
Unix sockets, datagrams and pipes are unchanged.
"""

from __future__ import annotations

import asyncio
import io
import os
import stat
from collections.abc import Callable
from typing import IO, Any

from ..config import DEFAULT, Config
from ..transport import Via
from . import client, server
from .transport import StreamTransport

# Options of asyncio's that choose among addresses or are those of a socket: without a meaning here.
# The time limits of TLS are those of `config`.
OF_TLS = {"ssl_handshake_timeout", "ssl_shutdown_timeout"}
CONNECT_OPTIONS = {
    *("family", "proto", "flags", "happy_eyeballs_delay", "interleave", "all_errors"),
    *OF_TLS,
}
SERVER_OPTIONS = {"family", "flags", "reuse_address", "reuse_port", "keep_alive", *OF_TLS}


PART = 256 << 10
"""Bytes of a file that are read at a time where it cannot be mapped."""


def check_options(function: str, given: dict[str, Any], known: set[str], ssl: Any) -> None:
    """Refuse what asyncio's function of this name refuses."""
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        if name in OF_TLS and value is not None and not ssl:
            raise ValueError(f"{name} is a time limit of TLS: {function}() needs ssl= with it")


class OverRDMA:
    """A mixin for a loop's class: `class Loop(OverRDMA, uvloop.Loop): ...`.

    The attributes, set on the class or on the loop, are the options of `aiordma.connect` and
    `aiordma.listen`; `applies` selects the addresses, by default all.
    """

    device: str | None = None
    via: Via = "cm"
    config: Config = DEFAULT

    def applies(self, host: str | None, port: int) -> bool:
        """Whether connections to, or a server at, this address go over RDMA."""
        return True

    async def create_connection(
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str | None = None,
        port: int | None = None,
        *,
        ssl: Any = None,
        sock: Any = None,
        local_addr: tuple[str, int] | None = None,
        server_hostname: str | None = None,
        **others: Any,
    ) -> Any:
        """As `AbstractEventLoop.create_connection`."""
        if sock is not None or host is None or port is None or not self.applies(host, port):
            return await super().create_connection(  # type: ignore[misc]
                protocol_factory,
                host,
                port,
                ssl=ssl,
                sock=sock,
                local_addr=local_addr,
                server_hostname=server_hostname,
                **others,
            )
        check_options("create_connection", others, CONNECT_OPTIONS, ssl)
        return await client.create_connection(
            protocol_factory,
            host,
            port,
            device=self.device,
            via=self.via,
            source=local_addr,
            config=self.config,
            ssl=ssl,
            server_hostname=server_hostname,
        )

    async def create_server(
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: Any = None,
        port: int | None = None,
        *,
        ssl: Any = None,
        sock: Any = None,
        backlog: int = 128,
        start_serving: bool = True,
        **others: Any,
    ) -> Any:
        """As `AbstractEventLoop.create_server`, for one host."""
        nowhere = host is None and port is None
        if sock is not None or nowhere or not self.applies(host, port or 0):
            return await super().create_server(  # type: ignore[misc]
                protocol_factory,
                host,
                port,
                ssl=ssl,
                sock=sock,
                backlog=backlog,
                start_serving=start_serving,
                **others,
            )
        check_options("create_server", others, SERVER_OPTIONS, ssl)
        return await server.create_server(
            protocol_factory,
            host,
            port or 0,
            device=self.device,
            via=self.via,
            backlog=backlog,
            config=self.config,
            start_serving=start_serving,
            ssl=ssl,
        )

    async def sendfile(
        self,
        transport: asyncio.WriteTransport,
        file: IO[bytes],
        offset: int = 0,
        count: int | None = None,
        *,
        fallback: bool = True,
    ) -> int:
        """As `AbstractEventLoop.sendfile`; over RDMA as `aiordma.streams.sendfile`.

        What is no regular file, such as a BytesIO or a pipe, is read and copied in parts, unless
        `fallback` is False: then asyncio.SendfileNotAvailableError.
        """
        if not isinstance(transport, StreamTransport):
            sent: int = await super().sendfile(  # type: ignore[misc]
                transport, file, offset, count, fallback=fallback
            )
            return sent
        if transport.is_closing():
            raise RuntimeError(f"{transport!r} is closing: it sends no file")
        if is_regular(file):
            return await client.sendfile(transport, file, offset, count)
        if not fallback:
            raise asyncio.SendfileNotAvailableError(f"{file!r} is no regular file")
        return await copy_file(transport, file, offset, count)


def is_regular(file: IO[bytes]) -> bool:
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except (AttributeError, io.UnsupportedOperation):
        return False


async def copy_file(
    transport: StreamTransport, file: IO[bytes], offset: int, count: int | None
) -> int:
    """Read the file in a thread, and send what it had; return the length of that."""
    if offset:
        file.seek(offset)
    sent = 0
    while count is None or sent < count:
        size = PART if count is None else min(PART, count - sent)
        data = await asyncio.to_thread(file.read, size)
        if not data:
            break
        await transport.write_from(memoryview(data))
        sent += len(data)
    return sent


class EventLoop(OverRDMA, asyncio.SelectorEventLoop):
    """asyncio's event loop with connections over RDMA."""
