"""Test byte streams over connections, as asyncio documents transports and protocols."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from aiordma import Config, Connection, ConnectionBrokenError, streams
from aiordma._core import protocol
from aiordma.errors import ProtocolError, RejectedError
from aiordma.streams import StreamServer, StreamTransport
from aiordma.streams.transport import MAX_MESSAGE_SIZE, WINDOW

from .connection_factory import SMALL, ConnectionFactory, ends, pattern, yield_loop
from .marks import by_tcp, one_loop

pytestmark = pytest.mark.any_device

# More bytes than both sides buffer for a paused reader, with the limits of SMALL.
TOO_MUCH = 8 << 20
HIGH_WATER = 64 << 10  # as in asyncio's own transports


Reported = list[dict[str, Any]]

# Errors that a protocol callback may raise. CancelledError is raised if the callback reads the
# result of a cancelled future.
FAULTS = [RuntimeError, ConnectionError, asyncio.CancelledError]


class Recorder(asyncio.Protocol):
    """A protocol that records its callbacks. `eof_received` returns `eof_result`."""

    def __init__(self, eof_result: bool = False) -> None:
        self.events: list[str] = []
        self.data = bytearray()
        self.eof_result = eof_result
        self.transport: StreamTransport | None = None
        self.error: BaseException | None = None
        self.made = asyncio.Event()
        self.eof = asyncio.Event()
        self.lost = asyncio.Event()
        self.grown = asyncio.Event()
        self.paused = asyncio.Event()
        self.resumed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(StreamTransport, transport)
        self.events.append("made")
        self.made.set()

    def data_received(self, data: bytes) -> None:
        assert isinstance(data, bytes)
        if self.events[-1] != "data":
            self.events.append("data")
        self.data += data
        self.grown.set()

    def eof_received(self) -> bool:
        self.events.append("eof")
        self.eof.set()
        return self.eof_result

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append("lost")
        self.error = exc
        self.lost.set()

    def pause_writing(self) -> None:
        self.events.append("pause")
        self.paused.set()

    def resume_writing(self) -> None:
        self.events.append("resume")
        self.resumed.set()

    async def until(self, size: int) -> None:
        while len(self.data) < size:
            self.grown.clear()
            await self.grown.wait()


class Buffered(asyncio.BufferedProtocol):
    """A protocol that receives through a buffer of `size` bytes."""

    def __init__(self, size: int = 1) -> None:
        self.buffer = bytearray(size)
        self.data = bytearray()
        self.error: BaseException | None = None
        self.eof = asyncio.Event()
        self.lost = asyncio.Event()

    def get_buffer(self, sizehint: int) -> bytearray | memoryview:
        assert sizehint > 0
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data += self.buffer[:nbytes]

    def eof_received(self) -> None:
        self.eof.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.error = exc
        self.lost.set()


class Pausing(Buffered):
    """A protocol that pauses reading when its buffer is full. `resume` empties it and resumes."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.free = size
        self.full = asyncio.Event()
        self.transport: StreamTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(StreamTransport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        assert not self.full.is_set(), "reading is paused"
        return memoryview(self.buffer)[: self.free]

    def buffer_updated(self, nbytes: int) -> None:
        super().buffer_updated(nbytes)
        self.free -= nbytes
        if not self.free:
            assert self.transport is not None
            self.transport.pause_reading()
            self.full.set()

    def resume(self) -> StreamTransport:
        assert self.transport is not None
        self.free = len(self.buffer)
        self.full.clear()
        self.transport.resume_reading()
        return self.transport


@asynccontextmanager
async def serving(
    factory: ConnectionFactory, make_protocol: Callable[[], asyncio.BaseProtocol]
) -> AsyncIterator[StreamServer]:
    server = await streams.create_server(make_protocol, factory.host, config=SMALL, **factory.there)
    try:
        yield server
    finally:
        server.close()
        server.abort_clients()
        await server.wait_closed()


async def dial(
    factory: ConnectionFactory, server: StreamServer, make_protocol: Callable[[], Any]
) -> tuple[StreamTransport, Any]:
    transport, protocol = await streams.create_connection(
        make_protocol, factory.host, server.address[1], config=SMALL, **factory.where
    )
    assert isinstance(transport, StreamTransport)
    return transport, protocol


@asynccontextmanager
async def pair(
    factory: ConnectionFactory,
    client: Callable[[], Any] = Recorder,
    server: Callable[[], Any] = Recorder,
) -> AsyncIterator[tuple[Any, Any]]:
    """Yield the protocols of the client and the server of one stream."""
    accepted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def make_protocol() -> Any:
        protocol = server()
        accepted.set_result(protocol)
        return protocol

    async with serving(factory, make_protocol) as listening:
        transport, protocol = await dial(factory, listening, client)
        await protocol.made.wait()
        try:
            yield protocol, await accepted
        finally:
            transport.abort()
            if isinstance(protocol, Recorder):
                await protocol.lost.wait()


async def wait_for_transport(protocol: Recorder) -> StreamTransport:
    await protocol.made.wait()
    assert protocol.transport is not None
    return protocol.transport


# ---- streams -------------------------------------------------------------------------------------


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(100_000):
        writer.write(data)
        await writer.drain()
    writer.close()
    await writer.wait_closed()


async def test_stream_server_echoes_written_data(factory: ConnectionFactory) -> None:
    server = await streams.start_stream_server(
        echo, factory.host, config=Config(max_connections=1), **factory.there
    )
    async with server:
        dialled = factory.host, server.address[1]
        reader, writer = await streams.open_connection(*dialled, **factory.where)
        assert writer.can_write_eof()
        await ends(streams.open_connection(*dialled, **factory.where), RejectedError)
        for size in (
            1,
            100,
            HIGH_WATER,
            MAX_MESSAGE_SIZE,
            MAX_MESSAGE_SIZE + 1,
            WINDOW + MAX_MESSAGE_SIZE + 1,
        ):
            data = pattern(size)
            writer.write(data)
            received, _ = await asyncio.gather(reader.readexactly(size), writer.drain())
            assert received == data
        writer.write(b"the end")
        writer.write_eof()
        assert await reader.read() == b"the end"
        writer.close()
        await writer.wait_closed()


# ---- transports: order, sizes, buffers -----------------------------------------------------------


async def test_small_writes_are_coalesced_into_few_messages(factory: ConnectionFactory) -> None:
    async with pair(factory) as (client, server):
        pieces = [pattern(size, seed=size) for size in range(1, 400)]
        transport = client.transport
        for piece in pieces:
            transport.write(piece)
        whole = b"".join(pieces)
        await server.until(len(whole))
        assert server.data == whole
        # Pieces written while others were in flight are joined into one message.
        messages = transport.get_extra_info("connection").statistics().messages_sent
        assert messages < len(pieces) // 10


@one_loop
async def test_buffer_can_be_modified_immediately_after_write(factory: ConnectionFactory) -> None:
    async with pair(factory) as (client, server):
        transport = client.transport
        memory = bytearray(pattern(MAX_MESSAGE_SIZE))
        transport.write(memory)
        transport.write(memoryview(memory)[:100])
        transport.writelines([b"ab", bytearray(b"c"), memoryview(b"d")])
        expected = bytes(memory) + bytes(memory[:100]) + b"abcd"
        memory[:] = bytes(MAX_MESSAGE_SIZE)
        await server.until(len(expected))
        assert server.data == expected


@one_loop
@pytest.mark.parametrize("kind", [Recorder, Buffered])
async def test_protocol_does_not_need_a_base_class(
    factory: ConnectionFactory, kind: type[Recorder | Buffered]
) -> None:
    methods = {
        name: method
        for cls in (asyncio.BaseProtocol, kind)
        for name, method in vars(cls).items()
        if callable(method) and (name == "__init__" or not name.startswith("__"))
    }
    duck = type("Duck", (), methods)
    async with pair(factory, server=lambda: duck(*[100] * (kind is Buffered))) as (client, server):
        client.transport.write(b"duck")
        client.transport.write_eof()
        await server.lost.wait()
        assert server.data == b"duck"
        assert server.eof.is_set()


@one_loop
async def test_write_rejects_invalid_data_and_calls_after_write_eof(
    factory: ConnectionFactory,
) -> None:
    async with pair(factory) as (client, server):
        transport = client.transport
        objects: Any = np.zeros(9, object)
        for wrong, why in (("text", "bytes"), (objects.data, "addresses in this process")):
            with pytest.raises(TypeError, match=why):
                transport.write(cast(bytes, wrong))
            with pytest.raises(TypeError):
                transport.writelines([b"x", cast(bytes, wrong)])
        transport.write(b"")
        transport.write(b"x")
        transport.write_eof()
        transport.write_eof()
        with pytest.raises(RuntimeError, match="write_eof"):
            transport.write(b"y")
        await server.eof.wait()
        assert server.data == b"x"


# ---- backpressure --------------------------------------------------------------------------------


async def test_paused_reader_pauses_its_writer(factory: ConnectionFactory) -> None:
    async with pair(factory) as (client, server):
        there, here = await wait_for_transport(server), client.transport
        for _ in range(2):
            there.pause_reading()
        assert not there.is_reading()
        data = pattern(TOO_MUCH)
        here.write(data)
        assert client.paused.is_set()
        await yield_loop(50)
        assert here.get_write_buffer_size() > TOO_MUCH // 2
        assert not server.data
        for _ in range(2):
            there.resume_reading()
        assert there.is_reading()
        await client.resumed.wait()
        await server.until(TOO_MUCH)
        assert server.data == data
        assert here.get_write_buffer_size() == 0


@one_loop
async def test_buffered_protocol_can_pause_within_a_message(factory: ConnectionFactory) -> None:
    data = pattern(5000)
    async with pair(factory, server=lambda: Pausing(2000)) as (client, server):
        client.transport.write(data)
        for taken in (2000, 4000):
            await server.full.wait()
            await yield_loop(20)
            assert server.data == data[:taken]
            server.resume()
        client.transport.write_eof()
        await server.eof.wait()
        assert server.data == data


@one_loop
@pytest.mark.parametrize("changes", [False, True])
async def test_buffered_protocol_can_close_or_be_replaced_mid_message(
    factory: ConnectionFactory, changes: bool
) -> None:
    """The protocol closes the transport, or sets another protocol, which then gets the rest."""
    second = Recorder()

    class Ending(Pausing):
        def buffer_updated(self, nbytes: int) -> None:
            self.data += self.buffer[:nbytes]
            assert self.transport is not None
            if changes:
                second.connection_made(self.transport)
                self.transport.set_protocol(second)
            else:
                self.transport.close()

    data = pattern(5000)
    async with pair(factory, server=lambda: Ending(2000)) as (client, server):
        client.transport.write(data)
        await (second.until(3000) if changes else server.lost.wait())
        assert server.data == data[:2000]
        assert second.data == (data[2000:] if changes else b"")


@one_loop
async def test_reading_does_not_use_the_task_factory(factory: ConnectionFactory) -> None:
    """An eager task factory would run the reading task before the stream knows about it."""

    def no_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        assert getattr(work, "__name__", "") != "_read"
        return asyncio.Task(work, loop=loop, **options)

    asyncio.get_running_loop().set_task_factory(no_task)
    async with pair(factory) as (client, server):
        client.transport.write(b"one")
        await server.until(3)


@one_loop
@pytest.mark.parametrize("end", [StreamTransport.close, StreamTransport.abort])
async def test_unread_message_is_released_when_the_transport_closes(
    factory: ConnectionFactory, end: Callable[[StreamTransport], None]
) -> None:
    """This must also happen when reading has been resumed, but the reader has not run yet."""
    for resumed in (False, True):
        async with pair(factory, server=lambda: Pausing(2000)) as (client, server):
            client.transport.write(pattern(5000))
            await server.full.wait()
            await yield_loop(5)
            there = server.transport
            assert there is not None
            message = there._inbox.message
            assert message is not None
            if resumed:
                there.resume_reading()
            end(there)
            await server.lost.wait()
            assert "released" in repr(message)


# ---- the end -------------------------------------------------------------------------------------


async def test_write_eof_leaves_the_other_direction_open(factory: ConnectionFactory) -> None:
    async with pair(factory, server=lambda: Recorder(eof_result=True)) as (client, server):
        here, there = client.transport, await wait_for_transport(server)
        here.write(b"question")
        here.write_eof()
        await server.eof.wait()
        assert server.data == b"question"
        there.write(pattern(MAX_MESSAGE_SIZE * 3))
        await client.until(MAX_MESSAGE_SIZE * 3)
        there.close()
        await client.lost.wait()
        await server.lost.wait()
        assert client.error is None
        assert server.error is None
        assert client.events == ["made", "data", "eof", "lost"]
        assert server.events == ["made", "data", "eof", "lost"]


async def test_peer_gets_connection_broken_error_when_abort_discards_data(
    factory: ConnectionFactory,
) -> None:
    async with pair(factory) as (client, server):
        (await wait_for_transport(server)).pause_reading()
        client.transport.write(bytes(TOO_MUCH))
        client.transport.abort()
        (await wait_for_transport(server)).resume_reading()
        await server.lost.wait()
        await client.lost.wait()
        assert client.error is None
        assert isinstance(server.error, ConnectionBrokenError)
        assert "eof" not in server.events


@one_loop
async def test_protocol_violation_closes_both_streams_with_an_error(
    factory: ConnectionFactory,
) -> None:
    async with pair(factory) as (client, server):
        here, there = client.transport, await wait_for_transport(server)
        # Respond to a request that the peer never made.
        here.get_extra_info("connection")._messages.controls.send(protocol.Pong(0))
        await server.lost.wait()
        assert isinstance(server.error, ProtocolError)
        assert there.is_closing()
        await client.lost.wait()
        assert isinstance(client.error, ConnectionBrokenError)


@one_loop
async def test_peer_that_closes_with_unread_data_resets_the_stream(
    factory: ConnectionFactory,
) -> None:
    async with pair(factory, client=lambda: Recorder(eof_result=True)) as (client, server):
        there, here = await wait_for_transport(server), client.transport
        there.pause_reading()
        here.write(bytes(TOO_MUCH))
        there.close()
        await client.lost.wait()
        assert isinstance(client.error, ConnectionResetError)


def poll_until_sends_complete(connection: Connection) -> None:
    """Poll until all sends have completed, without yielding to the event loop."""
    queue = connection._queue
    while queue.free != queue.capacity:
        connection._endpoint.driver.poll()


def deliver_goodbye(connection: Connection) -> None:
    connection._process_control(protocol.Goodbye(0, protocol.GoodbyeCode.NORMAL, ""))
    connection._on_disconnected("the peer is gone")


async def test_stream_closes_cleanly_when_final_events_arrive_together(
    factory: ConnectionFactory,
) -> None:
    """A message, the completion of a write and the goodbye are found together after the link has
    ended.
    """
    async with pair(factory, client=lambda: Recorder(eof_result=True)) as (client, server):
        there, here = await wait_for_transport(server), client.transport
        here.write(b"first")
        await server.until(5)
        there.write(b"last")
        poll_until_sends_complete(there.get_extra_info("connection"))
        here.write(b"read")
        poll_until_sends_complete(here.get_extra_info("connection"))
        deliver_goodbye(here.get_extra_info("connection"))
        await client.lost.wait()
        assert client.data == b"last"
        assert client.error is None


async def test_unacknowledged_write_causes_connection_reset_error(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(factory, client=lambda: Recorder(eof_result=True)) as (client, _):
        here = client.transport
        connection = here.get_extra_info("connection")
        monkeypatch.setattr(connection._endpoint.driver, "poll", lambda: None)
        here.write(b"not to be told any more")
        assert not here.get_write_buffer_size()
        deliver_goodbye(connection)
        await client.lost.wait()
        assert isinstance(client.error, ConnectionResetError)


@asynccontextmanager
async def paused_client_of_closed_peer(
    factory: ConnectionFactory,
    end: Callable[[StreamTransport], None] = lambda it: it.get_extra_info("connection").abort(),
) -> AsyncIterator[Any]:
    """Yield a paused client with an unread message. It has not noticed that its peer is gone."""
    async with pair(factory) as (client, server):
        here, there = client.transport, await wait_for_transport(server)
        connection = here.get_extra_info("connection")
        here.pause_reading()
        there.write(b"not wanted")
        while not connection.statistics().messages_received:
            await yield_loop(1)
        end(there)
        await connection.wait_closed()
        assert not here.is_closing()
        yield client
        assert not client.data


@one_loop
async def test_write_while_paused_reports_that_the_peer_aborted(
    factory: ConnectionFactory, tmp_path: Path
) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x")
    for sends_file in (False, True):
        async with paused_client_of_closed_peer(factory) as client:
            if sends_file:
                with path.open("rb") as file:
                    await ends(streams.sendfile(client.transport, file), ConnectionResetError)
                    assert file.tell() == 0
            else:
                client.transport.write(b"x")
            await client.lost.wait()
            assert isinstance(client.error, ConnectionBrokenError)


@one_loop
async def test_write_while_paused_resets_the_stream_when_peer_has_closed(
    factory: ConnectionFactory,
) -> None:
    async with paused_client_of_closed_peer(factory, StreamTransport.close) as client:
        client.transport.write(b"x")
        await client.lost.wait()
        assert type(client.error) is ConnectionResetError


@one_loop
async def test_write_is_buffered_until_connection_loss_is_noticed(
    factory: ConnectionFactory, tmp_path: Path
) -> None:
    """The data counts towards the high-water mark, but sendfile raises."""
    path = tmp_path / "data"
    path.write_bytes(b"x")
    async with pair(factory) as (client, _):
        here = client.transport
        here.get_extra_info("connection")._end(ConnectionBrokenError("the peer is gone"))
        with path.open("rb") as file:
            await ends(streams.sendfile(here, file), ConnectionResetError)
        assert not here.is_closing()
        for _ in range(2):
            here.write(bytes(HIGH_WATER))
        assert client.paused.is_set()
        await client.lost.wait()
        assert isinstance(client.error, ConnectionBrokenError)


@one_loop
async def test_write_while_paused_closes_the_stream_after_connection_loss(
    factory: ConnectionFactory,
) -> None:
    """The end comes behind data that stays unread as long as the writer waits for the end."""
    async with pair(factory, server=lambda: Pausing(2000)) as (client, server):
        client.transport.write(pattern(5000))
        await server.full.wait()
        there = server.resume()
        there.get_extra_info("connection")._end(ConnectionBrokenError("the peer is gone"))
        there.write(bytes(HIGH_WATER + 1))
        there.write(bytes(HIGH_WATER + 1))
        assert not there.is_closing()
        await server.lost.wait()
        assert len(server.data) == 4000


@one_loop
async def test_failed_send_closes_the_stream_and_calls_exception_handler(
    factory: ConnectionFactory, reported: Reported, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        def send_nowait(self, data: memoryview) -> None:
            raise MemoryError("no memory")

    async with pair(factory) as (client, _):
        here = client.transport
        monkeypatch.setattr(here._outbox, "_messages", Failing())
        here.write(b"x")
        assert here.is_closing()
        await client.lost.wait()
        assert isinstance(client.error, MemoryError)
    assert [type(context["exception"]) for context in reported] == [MemoryError]


@one_loop
async def test_close_completes_when_the_peer_has_aborted(factory: ConnectionFactory) -> None:
    async with pair(factory) as (client, server):
        there, here = await wait_for_transport(server), client.transport
        there.pause_reading()
        here.write(bytes(TOO_MUCH))
        here.close()
        there.abort()
        await client.lost.wait()
        assert isinstance(client.error, ConnectionResetError)


@one_loop
async def test_writes_after_close_are_dropped(
    factory: ConnectionFactory, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(factory) as (client, server):
        here = client.transport
        here.write(b"before")
        here.close()
        here.write(b"after")
        here.write_eof()
        await server.lost.wait()
        assert server.data == b"before"
        assert "after close()" in caplog.text


@one_loop
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize(
    ("protocol", "method", "end"),
    [
        (Recorder, "connection_made", None),
        (Recorder, "data_received", None),
        (Recorder, "eof_received", StreamTransport.write_eof),
        (Recorder, "eof_received", StreamTransport.close),
        (Buffered, "buffer_updated", None),
    ],
)
async def test_exception_in_a_protocol_method_closes_its_stream(
    factory: ConnectionFactory,
    reported: Reported,
    protocol: type[Recorder | Buffered],
    method: str,
    end: Callable[[StreamTransport], None] | None,
    kind: type[BaseException],
) -> None:
    def fail(self: Any, *arguments: object) -> None:
        raise kind("the protocol's own fault")

    Failing = type("Failing", (protocol,), {method: fail})
    async with pair(factory, server=Failing) as (client, server):
        transport = client.transport
        if end is None:
            transport.write(b"x")
        else:
            end(transport)
        await server.lost.wait()
        await client.lost.wait()
    assert isinstance(server.error, kind)
    assert [type(context["exception"]) for context in reported] == [kind]


@one_loop
@pytest.mark.parametrize(
    ("buffer", "text"),
    [(bytearray(), "empty buffer"), (np.zeros(9, object), "addresses in this process")],
)
async def test_invalid_protocol_buffer_closes_the_stream(
    factory: ConnectionFactory, reported: Reported, buffer: Any, text: str
) -> None:
    def with_buffer() -> Buffered:
        protocol = Buffered(0)
        protocol.buffer = buffer
        return protocol

    async with pair(factory, server=with_buffer) as (client, server):
        client.transport.write(b"x")
        await server.lost.wait()
    assert text in str(reported[0]["exception"])


# ---- files ---------------------------------------------------------------------------------------


@one_loop
async def test_sendfile_sends_the_requested_range(
    factory: ConnectionFactory, tmp_path: Path
) -> None:
    data = pattern(MAX_MESSAGE_SIZE * 5 + 123)
    path = tmp_path / "data"
    path.write_bytes(data)
    async with pair(factory) as (client, server):
        here = client.transport
        here.write(b"before")
        with path.open("rb") as file:
            assert await streams.sendfile(here, file) == len(data)
            assert file.tell() == len(data)
            assert await streams.sendfile(here, file, 5000, 100) == 100
            assert file.tell() == 5100
            assert await streams.sendfile(here, file, len(data)) == 0
            here.write(b"after")
            expected = b"before" + data + data[5000:5100] + b"after"
            await server.until(len(expected))
            assert server.data == expected
            for offset, count in ((-1, None), (0, 0)):
                error = await ends(streams.sendfile(here, file, offset, count), ValueError)
                assert str(offset) in str(error)
            here.close()
            await ends(streams.sendfile(here, file), ConnectionError)


# ---- servers -------------------------------------------------------------------------------------


@one_loop
async def test_sendfile_raises_connection_error_when_the_peer_aborts(
    factory: ConnectionFactory, tmp_path: Path
) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(16 << 20))
    async with pair(factory) as (client, server):
        (await wait_for_transport(server)).pause_reading()
        with path.open("rb") as file:
            sending = asyncio.create_task(streams.sendfile(client.transport, file))
            await yield_loop(20)
            (await wait_for_transport(server)).abort()
            await ends(sending, ConnectionError)


@one_loop
@by_tcp
async def test_stream_server_serves_until_closed(factory: ConnectionFactory) -> None:
    server = await streams.create_server(
        Recorder, factory.host, start_serving=False, **factory.there
    )
    assert not server.is_serving()
    assert server.get_loop() is asyncio.get_running_loop()
    (socket,) = server.sockets
    assert socket.getsockname()[:2] == server.address
    await server.start_serving()
    await server.start_serving()
    assert server.is_serving()
    transport, protocol = await dial(factory, server, Recorder)
    transport.write(b"x")
    while "1 connections" not in repr(server):
        await yield_loop(1)
    server.close()
    assert not server.is_serving()
    assert server.sockets == ()
    waiting = asyncio.create_task(server.wait_closed())
    await yield_loop(20)
    assert not waiting.done(), "a connection goes on"
    with pytest.raises(RuntimeError, match="closed"):
        await server.start_serving()
    server.close_clients()
    await waiting
    await protocol.lost.wait()
    assert protocol.error is None


@one_loop
@by_tcp
async def test_cancelled_serve_forever_closes_the_stream_server(factory: ConnectionFactory) -> None:
    server = await streams.create_server(Recorder, factory.host, **factory.there)
    serving_forever = asyncio.create_task(server.serve_forever())
    await yield_loop(2)
    with pytest.raises(RuntimeError, match="already"):
        await server.serve_forever()
    serving_forever.cancel()
    await ends(serving_forever, asyncio.CancelledError)
    assert not server.is_serving()


@one_loop
@by_tcp
@pytest.mark.parametrize("kind", [LookupError, asyncio.CancelledError])
async def test_failing_server_factory_closes_only_its_connection(
    factory: ConnectionFactory, reported: Reported, kind: type[BaseException]
) -> None:
    failing = True

    def make_protocol() -> Recorder:
        if failing:
            raise kind("no protocol today")
        return Recorder()

    async with serving(factory, make_protocol) as server:
        _, first = await dial(factory, server, Recorder)
        await first.lost.wait()
        failing = False
        transport, second = await dial(factory, server, Recorder)
        await yield_loop(20)
        assert not second.lost.is_set()
        transport.abort()
        await second.lost.wait()
    assert [type(context["exception"]) for context in reported] == [kind]


@one_loop
@by_tcp
async def test_exception_in_client_factory_is_raised_to_the_caller(
    factory: ConnectionFactory,
) -> None:
    def make_protocol() -> Recorder:
        raise LookupError("no protocol today")

    async with serving(factory, Recorder) as server:
        await ends(dial(factory, server, make_protocol), LookupError)


@one_loop
async def test_cancelled_connect_calls_connection_made_then_connection_lost(
    factory: ConnectionFactory,
) -> None:
    recorder = Recorder()

    def make_protocol() -> Recorder:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return recorder

    async with serving(factory, Recorder) as listening:
        dialling = asyncio.create_task(dial(factory, listening, make_protocol))
        await asyncio.wait([dialling])
        assert dialling.cancelled()
        await recorder.lost.wait()
        assert recorder.events == ["made", "lost"]
