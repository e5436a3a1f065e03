"""The measurement server, which serves one client at a time and enforces limits."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from time import process_time
from typing import Any, Self

import aiordma
from aiordma import Config, LoopConfig
from aiordma.config import DEFAULT
from aiordma.errors import ProtocolError, RDMAError
from aiordma.transport import Via

from . import memory, wire
from .ends import End, Load, Tally
from .machine import garbage_collection_disabled, machine
from .messages import STREAM_LIMIT, Sends, Streams, receive_from
from .queue_pairs import QueuePair

logger: logging.Logger = logging.getLogger("aiordma.perf")

MIB = 1 << 20

# The time limit for attaching all connections of a measurement, in seconds. It also applies to the
# first message on each connection.
ATTACH_TIMEOUT = 60.0
# The maximum size of a control message, in bytes. It also applies to the first message on each
# measured connection.
MAX_CONTROL = 1 << 20

# The maximum number of responses in flight per connection if the client does not wait for each
# response. The value is an estimate.
MAX_PENDING_REPLIES = 256

# With UC and UD, missing operations count as lost if no operation arrives for this many seconds.
LOST_TIMEOUT = 0.1

ENDS: dict[str, Callable[[aiordma.Connection], End]] = {
    "send": Sends,
    "write": memory.Writes,
    "read": memory.Source,
    "atomic": memory.Sum,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits that the server imposes on a client's measurements."""

    size: int = 1024 * MIB
    """The maximum size of one operation, in bytes."""
    memory: int = 2048 * MIB
    """The maximum operation size multiplied by the number of connections, in bytes."""
    connections: int = 1024
    waiting: int = 16
    """The maximum number of clients waiting for their turn."""
    silence: float = 600.0
    """The maximum time between two client messages, in seconds.

    It limits the duration of a part, because the client sends no messages during a part.
    """


class Refusal(Exception):
    """Raised to refuse a request. Its message is sent to the client as the reason."""


class Session:
    """The state of the client being served, and its connections."""

    def __init__(self, opened: wire.Open) -> None:
        self.opened = opened
        self.key: bytes = os.urandom(wire.KEY_SIZE)
        self.ends: list[End | None] = [None] * opened.connections
        self.complete: asyncio.Event = asyncio.Event()
        self.ended: asyncio.Event = asyncio.Event()

    def attach(self, index: int, end: End) -> None:
        """Add a measured connection. The session is complete once all of them have been added."""
        if index >= len(self.ends) or self.ends[index] is not None:
            raise ProtocolError(
                f"the client attached connection {index} twice, or never announced it"
            )
        self.ends[index] = end
        if None not in self.ends:
            self.complete.set()


class PerfServer:
    """A measurement server, created by `start`. Use it as an async context manager.

    Its host and port are available from `listening`.
    """

    def __init__(self, limits: Limits, via: Via, config: Config, security: dict[str, Any]) -> None:
        self._limits = limits
        self._via = via
        self._config = config
        self._security = security
        self._server: aiordma.Server | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._session: Session | None = None

    @classmethod
    async def start(
        cls,
        host: str,
        port: int,
        *,
        device: str | None = None,
        via: Via = "cm",
        config: Config = DEFAULT,
        limits: Limits = Limits(),
        **security: Any,
    ) -> Self:
        """Start a server. Raises the same exceptions as `aiordma.listen`.

        Args:
            host: The address to listen on.
            port: The port to listen on. 0 selects a free port.
            device: The device, as for `aiordma.listen`.
            via: The connection method, as for `aiordma.listen`.
            config: The connection settings, as for `aiordma.listen`. `max_message` is derived from
                `limits`.
            limits: The limits to impose on clients' measurements.
            **security: Additional arguments for `aiordma.listen`, such as `auth`.
        """
        config = replace(config, max_message=max(limits.size, MAX_CONTROL))
        self = cls(limits, via, config, security)
        self._server = await aiordma.start_server(
            self._serve, host, port, device=device, via=via, config=config, **security
        )
        return self

    @property
    def listening(self) -> aiordma.Server:
        """The `aiordma.Server` that accepts connections."""
        assert self._server is not None
        return self._server

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.listening.close()

    async def forever(self) -> None:
        """Serve clients until this call is cancelled."""
        await self.listening.serve_forever()

    async def _serve(self, conn: aiordma.Connection) -> None:
        """Serve a connection. Errors are logged, because they concern only this client."""
        try:
            await self._serve_one(conn)
        except ConnectionError:
            raise  # `aiordma.Server` logs that the client has disconnected
        except (RDMAError, TimeoutError) as error:
            logger.warning("%r: %s", conn, error or "the client sent nothing in time")

    async def _serve_one(self, conn: aiordma.Connection) -> None:
        """Serve a client's control connection, or one of the connections that it measures.

        The first message tells which: `Open` or `Attach`.
        """
        async with asyncio.timeout(ATTACH_TIMEOUT):
            try:
                first = await receive(conn)
            except ProtocolError as error:
                await conn.send(wire.pack(wire.Refused(str(error))))
                raise
        match first:
            case wire.Open():
                await self._measure(conn, first)
            case _:
                index, session = self._checked_index(first), self._session
                assert session is not None  # checked by `_checked_index`
                make_end = ENDS.get(session.opened.operation)
                if make_end is None:
                    raise ProtocolError(
                        "the client sent a message on a connection that it announced as a stream"
                    )
                opened = session.opened
                end = QueuePair(conn.device, opened) if opened.qp else make_end(conn)
                session.attach(index, end)
                await session.ended.wait()

    def _checked_index(self, first: wire.Wire) -> int:
        """Check a connection's first message, and return the connection's index in the session."""
        if not isinstance(first, wire.Attach):
            raise ProtocolError(
                f"the client began a connection with {type(first).__name__} instead of Attach"
            )
        if self._session is None or self._session.key != first.key:
            raise ProtocolError("the client attached a connection to an unknown measurement")
        return first.index

    async def _measure(self, control: aiordma.Connection, opened: wire.Open) -> None:
        """Run a client's measurement when it is its turn, or send the reason for a refusal."""
        try:
            if opened.connections > self._limits.connections:
                raise Refusal(
                    f"{opened.connections} connections exceed the server's limit of "
                    f"{self._limits.connections} (--max-connections)"
                )
            async with self._wait_for_turn():
                await while_connected(control, self._run_session(control, opened))
        except Refusal as refusal:
            await control.send(wire.pack(wire.Refused(str(refusal))))

    @asynccontextmanager
    async def _wait_for_turn(self) -> AsyncIterator[None]:
        """Wait until no other client is served. Raises Refusal if too many clients are waiting."""
        if self._waiting > self._limits.waiting:
            raise Refusal(f"{self._limits.waiting} clients are already waiting; try again later")
        self._waiting += 1
        try:
            async with self._turn:
                yield
        finally:
            self._waiting -= 1

    async def _run_session(self, control: aiordma.Connection, opened: wire.Open) -> None:
        """Wait until the client has opened all measured connections, and serve the measurement."""
        session = self._session = Session(opened)
        try:
            async with self._streams(session) as port:
                polling = self._config.polling
                if polling is None:
                    polling = LoopConfig().polling
                reply = wire.Opened(session.key, port, machine(), round(polling * 1e6))
                await control.send(wire.pack(reply))
                async with asyncio.timeout(ATTACH_TIMEOUT):
                    await session.complete.wait()
                with garbage_collection_disabled():
                    await self._serve_parts(control, session)
        except TimeoutError:
            raise Refusal("the client was idle for too long") from None
        finally:
            session.ended.set()
            self._session = None

    @asynccontextmanager
    async def _streams(self, session: Session) -> AsyncIterator[int]:
        """Accept the session's streams on a new port.

        Yields:
            The port, or 0 if the session has no streams.
        """
        if session.opened.operation != "stream":
            yield 0
            return

        async def attach(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Add a stream to the session, and keep it open until the session ends."""
            try:
                async with asyncio.timeout(ATTACH_TIMEOUT):
                    first = await receive_from(reader)
                session.attach(self._checked_index(first), Streams(reader, writer))
                await session.ended.wait()
            except (RDMAError, OSError, EOFError) as error:
                logger.warning("a stream from %s: %s", writer.get_extra_info("peername"), error)
            finally:
                writer.close()

        listening = await aiordma.start_stream_server(
            attach,
            self.listening.host,
            0,
            limit=STREAM_LIMIT,
            device=self.listening.device,
            via=self._via,
            config=self._config,
            **self._security,
        )
        async with listening:
            try:
                yield listening.address[1]
            finally:
                session.ended.set()

    async def _serve_parts(self, control: aiordma.Connection, session: Session) -> None:
        """Serve the parts of a measurement, one message size each, until the client disconnects."""
        while True:
            async with asyncio.timeout(self._limits.silence):
                begin = await receive(control)
            if not isinstance(begin, wire.Begin):
                raise ProtocolError(
                    f"the client began a part with {type(begin).__name__} instead of Begin"
                )
            await self._serve_part(control, session, begin)

    def _check_part(self, session: Session, begin: wire.Begin) -> None:
        """Raise an exception if a part exceeds the limits or is invalid for the operation."""
        limits, count = self._limits, len(session.ends)
        if begin.size > limits.size:
            raise Refusal(
                f"a size of {begin.size} bytes exceeds the server's limit of {limits.size} bytes "
                "(--max-size)"
            )
        if begin.way != "flood" and session.opened.operation in ("read", "atomic"):
            raise ProtocolError(
                "the client requested responses, which only send, write and stream support"
            )
        if begin.size < 1 and session.opened.operation != "send":
            raise ProtocolError("the client began a part of size 0, which only send supports")
        if begin.size * count > limits.memory:
            raise Refusal(
                f"operations of {begin.size} bytes on {count} connections exceed the server's "
                f"limit of {limits.memory} bytes (--max-memory)"
            )
        if len(begin.tokens) != count:
            raise ProtocolError(
                f"the client sent {len(begin.tokens)} tokens for {count} connections"
            )

    async def _serve_part(
        self, control: aiordma.Connection, session: Session, begin: wire.Begin
    ) -> None:
        """Run one part of a measurement, and report the first mismatch to the client."""
        self._check_part(session, begin)
        ends = [end for end in session.ends if end is not None]
        with ExitStack() as stack:
            for end in ends:
                stack.callback(end.release)
            mismatch = await self._run_part(control, session.opened, ends, begin)
        await control.send(wire.pack(wire.Finished(mismatch[: wire.MAX_TEXT])))

    async def _run_part(
        self, control: aiordma.Connection, opened: wire.Open, ends: list[End], begin: wire.Begin
    ) -> str:
        """Run the server's side of a part. Returns the first error found, or an empty string."""
        load = Load.of(opened, begin.way, begin.seed, begin.size, serving=True)
        tokens = [end.prepare(load) for end in ends]
        for end, token in zip(ends, begin.tokens, strict=True):
            end.use(token)
        # Reads, atomics, and writes without immediate data do not notify the server.
        receives_operations = load.numbered or opened.operation in ("send", "stream")
        tallies = [Tally(begin.verify_all) for _ in ends]
        tasks = [
            asyncio.create_task(receive_operations(end, tally, begin.way))
            for end, tally in zip(ends, tallies, strict=True)
            if receives_operations
        ]
        cpu = process_time()
        try:
            await control.send(wire.pack(wire.Begun(tokens)))
            lost = 0
            async with asyncio.timeout(self._limits.silence):
                finish = await receive(control)
                if not isinstance(finish, wire.Finish) or len(finish.counts) != len(ends):
                    raise ProtocolError(f"the client ended a part with {finish} instead of Finish")
                counts = finish.counts
                for end, tally, count in zip(ends, tallies, counts, strict=True):
                    if receives_operations:
                        await tally.reach(count, LOST_TIMEOUT if end.lossy else None)
                        lost += max(0, count - tally.count) if end.lossy else 0
            used_us = round((process_time() - cpu) * 1e6)
            await control.send(wire.pack(wire.Reached(used_us, lost)))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        # In a flood, this side has performed no operations. Otherwise, it has responded to each of
        # the client's operations with one of its own.
        mismatches = (
            tally.mismatch or end.verify(0 if begin.way == "flood" else count, count)
            for end, tally, count in zip(ends, tallies, counts, strict=True)
        )
        return next(filter(None, mismatches), "")


async def receive_operations(end: End, tally: Tally, way: str) -> None:
    """Record the client's operations on one connection, and respond to them as `way` says.

    This runs until it is cancelled. An error ends the tally instead.
    """
    replies: deque[asyncio.Future[Any]] = deque()
    try:
        while True:
            tally.record_operation(end, await end.receive())
            number = tally.count - 1
            if way == "ping":
                await end.reply(number)
            elif way == "both":
                if len(replies) == MAX_PENDING_REPLIES:
                    await replies.popleft()
                replies.append(end.begin(number))
    except (RDMAError, OSError, EOFError) as error:
        tally.fail(str(error) or type(error).__name__)


async def while_connected(control: aiordma.Connection, work: Coroutine[Any, Any, None]) -> None:
    """Await `work`, but cancel it if the client disconnects."""
    working = asyncio.create_task(work)
    disconnected = asyncio.create_task(control.wait_closed())
    try:
        await asyncio.wait({working, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
    finally:
        for task in (working, disconnected):
            task.cancel()
        await asyncio.gather(working, disconnected, return_exceptions=True)


async def receive(conn: aiordma.Connection) -> wire.Wire:
    """Receive a control message, which must not be too long."""
    with await conn.recv() as message:
        if len(message) > MAX_CONTROL:
            raise ProtocolError(
                f"the client's control message is too long: {len(message)} bytes (maximum "
                f"{MAX_CONTROL})"
            )
        return wire.unpack(bytes(message))
