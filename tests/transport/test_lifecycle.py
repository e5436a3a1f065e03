"""Test connections from connecting to their end, whether orderly or not."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import select
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from aiordma import (
    Connection,
    ConnectionBrokenError,
    ConnectionClosedError,
    ConnectionManagerError,
    ProtocolError,
    RemoteRegion,
    listen,
    verbs,
)
from aiordma._core import protocol
from aiordma._core.connection_states import ConnectionState, LifecycleEvent, transition
from aiordma._event_loop import per_loop_resource
from aiordma._transport.connect_cm import CMLink
from aiordma._transport.connect_tcp import READY
from aiordma._transport.keep_alive import Probe
from aiordma._transport.lifecycle import ConnectionOwner
from aiordma._transport.tcp_link import TCPLink
from aiordma.cm import EventType
from aiordma.errors import (
    AuthenticationError,
    DeviceEventError,
    InternalError,
    QuotaError,
    RDMAError,
    RejectedError,
    VerbsError,
    work_completion_error,
)
from aiordma.testing import check_leaks
from aiordma.verbs._device.resource import Node
from tests import combinations
from tests.session.pair import stop

from .connection_factory import (
    SMALL,
    ConnectionFactory,
    check_alive,
    ends,
    leases,
    pattern,
    told_once,
    yield_loop,
)
from .marks import by_cm, by_tcp, on_pair, one_loop
from .raw_peer import raw_pair

# ---- connecting ----------------------------------------------------------------------------------


@one_loop
@pytest.mark.parametrize("in_band", [True, False])
async def test_server_receives_messages_from_a_client_closed_before_accept(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch, in_band: bool
) -> None:
    """Sockets of the kernel do not lose this data either."""
    closed = asyncio.Event()
    clients = set()
    expect, read = CMLink.expect, TCPLink.read

    async def expect_late(link: CMLink, wanted: EventType) -> Any:
        event = await expect(link, wanted)
        if wanted is EventType.ADDR_RESOLVED:
            clients.add(link)
        elif wanted is EventType.ESTABLISHED and link not in clients:
            await closed.wait()
            while link._seen:  # until the disconnect arrives
                await yield_loop(1)
        return event

    async def read_late(link: TCPLink, size: int, magic: bytes) -> bytes:
        data = await read(link, size, magic)
        if magic == READY:
            await closed.wait()
            while not (link._received or link._is_lost):
                await yield_loop(1)
        return data

    monkeypatch.setattr(CMLink, "expect", expect_late)
    monkeypatch.setattr(TCPLink, "read", read_late)
    config = replace(SMALL, in_band=in_band)
    async with await factory.listen(config) as listener:
        client = await factory.connect(listener.port, config)
        await client.send(b"everything")
        await client.close()
        closed.set()
        async with await listener.accept() as server:
            assert bytes(await server.recv()) == b"everything"
            await ends(server.recv(), ConnectionClosedError)


@pytest.mark.parametrize("address", ["", "::", "0.0.0.0"])
@one_loop
async def test_listener_bound_to_wildcard_address_accepts_connections(
    factory: ConnectionFactory, address: str
) -> None:
    async with await factory.listen(host=address) as listener:
        await factory.works(listener)


@one_loop
async def test_connect_and_listen_resolve_host_names(factory: ConnectionFactory) -> None:
    """The embedded device can reach the loopback interface. A card has no route to it."""
    by_name = replace(factory, host="localhost")
    if factory.device != "embedded0":
        async with await factory.listen() as listener:
            await ends(by_name.connect(listener.port), ConnectionManagerError, OSError)
        return
    async with await by_name.listen() as listener:
        client, server = await by_name.both(listener)
        async with client, server:
            await check_alive(client, server)


@pytest.mark.parametrize(("lasts", "times"), [(3600.0, 1), (0.0, 3)])
@one_loop
async def test_device_choice_is_cached_for_a_limited_time(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch, lasts: float, times: int
) -> None:
    asked = []
    choose = verbs.choose_device

    def chosen(name: str | None) -> verbs.Choice:
        asked.append(name)
        return choose(name)

    monkeypatch.setattr(verbs, "choose_device", chosen)
    monkeypatch.setattr("aiordma.transport.CHOICE_LIFETIME", lasts)
    async with await factory.listen() as listener:
        for _ in range(2):
            await factory.works(listener)
    assert asked == [factory.device] * times


@one_loop
@by_cm
async def test_listen_uses_device_from_aiordma_device_variable(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIORDMA_DEVICE", factory.device)
    async with await listen(factory.host) as listener:
        assert listener.device == factory.device


@one_loop
async def test_pool_too_small_for_a_connection_raises_quota_error(
    factory: ConnectionFactory,
) -> None:
    """The fixtures check that nothing stays behind."""
    async with await factory.listen() as listener:
        # Both ends share the loop's pool. With "tcp", the listener's end runs out first and closes
        # the bootstrap socket.
        kind = QuotaError if factory.via == "cm" else ProtocolError
        with pytest.raises(
            kind, match="pool_limit" if kind is QuotaError else "closed the bootstrap"
        ):
            await factory.connect(listener.port, replace(SMALL, pool_limit=1 << 20))


# ---- close ---------------------------------------------------------------------------------------


CALLS: dict[str, Callable[[Connection, RemoteRegion], Coroutine[Any, Any, object]]] = {
    "send": lambda conn, _: conn.send(b"x"),
    "send large": lambda conn, _: conn.send(bytes(10_000)),
    "recv": lambda conn, _: conn.recv(),
    "recv_region": lambda conn, _: conn.recv_region(),
    "recv_buffer": lambda conn, _: conn.recv_buffer(),
    "request_region": lambda conn, _: conn.request_region(8),
    "write": lambda conn, remote: conn.write(bytes(8), remote),
    "read": lambda conn, remote: conn.read(remote, bytearray(8)),
    "read large": lambda conn, remote: conn.read(remote, bytearray(100_000)),
    "fetch_and_add": lambda conn, remote: conn.fetch_and_add(remote, 1),
    "compare_and_swap": lambda conn, remote: conn.compare_and_swap(remote, 0, 1),
    "hand over": lambda conn, remote: conn.hand_over(remote),
}


@pytest.mark.parametrize("end", ["close", "abort", "peer closes", "peer aborts"])
async def test_all_calls_raise_the_same_error_after_the_connection_ends(
    factory: ConnectionFactory, end: str
) -> None:
    async with factory.witness(), factory.pair() as (client, server):
        remote = await client.request_region(8)
        kind = ConnectionBrokenError if end == "peer aborts" else ConnectionClosedError
        match end:
            case "close":
                await asyncio.gather(client.close(), client.close())
            case "abort":
                client.abort()
            case "peer closes":
                await server.close()
            case _:
                server.abort()
        await client.wait_closed()
        for _ in range(2):
            for name, call in CALLS.items():
                error = await ends(call(client, remote), kind, ConnectionClosedError)
                assert type(error) is kind, f"{name}: {error!r}"
            for synchronous in (lambda: client.alloc(8), lambda: client.register(bytearray(8))):
                with pytest.raises(kind):
                    synchronous()
        client.abort()  # does nothing
        await client.close()  # does nothing
        await client.wait_closed()


@one_loop
async def test_calls_raise_connection_closed_error_after_the_pool_is_freed(
    factory: ConnectionFactory,
) -> None:
    """The loop's memory pool is gone by then as well, but must not be reported as the reason."""
    async with factory.pair() as (client, server):
        remote = await client.request_region(8)
        await client.close()
        await server.wait_closed()
        for name, call in CALLS.items():
            error = await ends(call(client, remote), Exception)
            assert type(error) is ConnectionClosedError, f"{name}: {error!r}"


@one_loop
async def test_send_during_close_raises_connection_closed_error(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):
        sending = asyncio.create_task(client.send(bytes(200_000)))
        await yield_loop(1)
        closing = asyncio.create_task(client.close())
        await yield_loop(1)
        with pytest.raises(ConnectionClosedError, match="being closed"):
            await client.send(b"too late")
        assert "closing" in repr(client)
        assert len(await server.recv()) == 200_000
        await sending
        await closing
        await ends(server.recv(), ConnectionClosedError)


@one_loop
async def test_recv_raises_connection_closed_error_on_disconnect_during_close(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that reacts quickly to the goodbye looks as if it had broken the connection."""
    async with factory.pair() as (client, server):
        tell = client._sharing.send

        async def tell_and_lose(message: protocol.Message) -> None:
            telling = tell(message)
            await yield_loop(1)
            client._on_disconnected("the peer is gone")
            await telling

        monkeypatch.setattr(client._sharing, "send", tell_and_lose)
        waiting = asyncio.create_task(client.recv())
        await yield_loop(1)
        await client.close()
        error = await ends(finish(waiting), ConnectionClosedError)
        assert not error.by_peer
        await ends(server.recv(), ConnectionClosedError, ConnectionBrokenError)


@one_loop
async def test_recv_raises_connection_closed_error_when_goodbye_is_still_queued(
    factory: ConnectionFactory,
) -> None:
    """The goodbye is still in the completion queue when the link reports its end."""
    async with raw_pair(factory) as (conn, peer):
        peer.send_control(GOODBYE)
        channel = conn._endpoint.driver.channel
        readable, _, _ = select.select([channel.fd], [], [], 5 * factory.slow)
        assert readable
        conn._on_disconnected("the peer is gone")
        error = await ends(conn.recv(), ConnectionClosedError)
        assert error.by_peer


@on_pair
async def test_closing_discards_messages_after_an_unread_long_message(
    factory: ConnectionFactory,
) -> None:
    """Messages are received in order, so those behind a message that can no longer be read are lost
    with it.
    """
    config = replace(SMALL, fetch_ahead=0)
    async with factory.pair(SMALL, server=config) as (client, server):
        await client.send(b"before")
        long = client.send_nowait(pattern(5000))
        await client.send(b"behind")
        await server.close()
        assert isinstance(await ends(long, ConnectionClosedError), ConnectionClosedError)
        with await server.recv() as message:
            assert message == b"before"
        await ends(server.recv(), ConnectionClosedError)


async def finish(task: asyncio.Task[Any]) -> object:
    return await task


# ---- abort ---------------------------------------------------------------------------------------


@one_loop
async def test_unreceived_messages_release_pool_memory_after_close(
    factory: ConnectionFactory,
) -> None:
    async with factory.pair() as (anchor, other):
        before = await leases(anchor, other)
        async with factory.pair() as (client, server):
            for n in range(SMALL.data_receives):
                await client.send(pattern(1000 if n else 5000, n))
            await client.close()
            await server.wait_closed()
        del client, server
        gc.collect()
        assert await leases(anchor, other) == before


@pytest.mark.any_device
def test_invalid_lifecycle_event_raises_internal_error() -> None:
    """Such an event is a bug of aiordma, and the error says so."""
    with pytest.raises(InternalError, match="invalid event DRAINED in connection state CONNECTING"):
        transition(ConnectionState.CONNECTING, LifecycleEvent.DRAINED)


@pytest.mark.any_device
@pytest.mark.parametrize(
    "root",
    [
        work_completion_error(12, operation="read", what="read of 8 bytes"),
        work_completion_error(10, operation="write", what="write of 8 bytes"),
        DeviceEventError("QP_FATAL", device="mlx5_0"),
        DeviceEventError("DEVICE_FATAL", device="mlx5_0"),
        VerbsError(errno.EINVAL, "ibv_post_send", "what the device allows"),
        ConnectionBrokenError("the peer left"),
        ProtocolError("the peer sent something else"),
        AuthenticationError("the peer has another key"),
        RejectedError("not today"),
    ],
    ids=lambda root: type(root).__name__,
)
def test_root_error_appears_once_in_the_message(root: RDMAError) -> None:
    error = ConnectionOwner(mock.Mock()).error_for(root, "send of 10 bytes to [::1]:7471")
    assert type(error) in (type(root), ConnectionBrokenError)
    told_once(error)


@one_loop
async def test_async_for_raises_when_the_connection_breaks(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):
        await client.send(b"one")
        client.abort()
        seen = []

        async def iterate() -> None:
            async for message in server:
                seen.append(bytes(message))

        await ends(iterate(), ConnectionBrokenError)
        assert seen in ([b"one"], [])


# ---- listeners -----------------------------------------------------------------------------------


async def test_closing_a_listener_keeps_its_accepted_connections(
    factory: ConnectionFactory,
) -> None:
    """Tasks that wait for a connection end as well."""
    listener = await factory.listen()
    client, server = await factory.both(listener)
    waiting = asyncio.create_task(listener.accept())

    async def iterate() -> int:
        return len([conn async for conn in listener])

    iterating = asyncio.create_task(iterate())
    await yield_loop(2)
    await listener.close()
    await listener.close()
    await ends(finish(waiting), ConnectionClosedError)
    assert await iterating == 0
    await ends(listener.accept(), ConnectionClosedError)
    await ends(factory.connect(listener.port), RejectedError)
    async with client, server:
        await check_alive(client, server)


# ---- nothing happens -----------------------------------------------------------------------------


@one_loop
@by_tcp
async def test_data_on_the_socket_after_bootstrap_breaks_the_connection(
    factory: ConnectionFactory,
) -> None:
    """After the bootstrap, the socket serves only to detect the end of the connection."""
    async with factory.witness(), factory.pair() as (client, server):
        client._link.group._link._transport.write(b"hello?")  # type: ignore[union-attr]
        error = await ends(server.recv(), ConnectionBrokenError)
        assert "sent data after the bootstrap" in str(error)


def wake_ups() -> int:
    """Return the number of voluntary context switches of this process's threads."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
            count += int(fields["voluntary_ctxt_switches"])
    return count


@one_loop
async def test_idle_connection_does_not_wake_the_process(factory: ConnectionFactory) -> None:
    """A process that waits for a message must neither use a timer nor poll.

    Wake-ups caused by earlier work stop after some time, while periodic checks never do.
    """
    async with factory.pair() as (client, server):
        await check_alive(client, server)
        waiting = asyncio.create_task(server.recv())
        while True:
            before = wake_ups()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await asyncio.shield(waiting)
            if wake_ups() - before <= 3:  # this timeout causes one
                break
        await client.send(b"x")
        assert bytes(await waiting) == b"x"


GOODBYE = protocol.Goodbye(0, protocol.GoodbyeCode.NORMAL, "")


@on_pair
async def test_goodbye_from_an_unresponsive_peer_ends_pending_calls(
    factory: ConnectionFactory,
) -> None:
    """The peer says goodbye but does not disconnect, so pending calls end after `close_timeout`."""
    config = replace(SMALL, close_timeout=0.1)
    async with factory.pair(config) as (client, server):
        stop(server)
        sending = client.send_nowait(b"the last one")
        client._process_control(GOODBYE)
        for waiting in (sending, client.recv()):
            error = await ends(waiting, ConnectionClosedError)
            assert error.by_peer
        await client.wait_closed()


@on_pair
async def test_goodbye_closes_the_connection_after_pending_requests(
    factory: ConnectionFactory,
) -> None:
    """The connection must not wait for `close_timeout`."""
    async with factory.pair(replace(SMALL, close_timeout=1000)) as (client, _):
        client._queue.post(Probe(lambda: None))
        client._process_control(GOODBYE)
        assert not client.closed
        await client.wait_closed()


@on_pair
async def test_both_sides_can_close_at_the_same_time(factory: ConnectionFactory) -> None:
    """A `close` that waits for the peer to read a message ends with the peer's goodbye."""
    async with factory.pair(replace(SMALL, fetch_ahead=0, close_timeout=1000)) as (client, server):
        client.send_nowait(bytes(100_000)).add_done_callback(lambda done: done.exception())
        closing = asyncio.create_task(client.close())
        await yield_loop(10)
        assert not closing.done()
        await server.close()
        await closing


async def live_and_die(factory: ConnectionFactory, number: int) -> Node[Any] | None:
    """Close a connection while the device refuses to destroy one object.

    The device destroys `number` other objects first. Return the refused object, or None if there
    were no more objects.
    """
    kept: dict[Node[Any], None] = {}
    refused: Node[Any] | None = None
    left, close = itertools.count(number, -1), Node.close

    def refuse(node: Node[Any]) -> None:
        def destroy_or_not(pointer: Any) -> object:
            nonlocal refused
            if node is refused or not next(left):
                refused = node
                raise VerbsError(errno.EBUSY, f"destroying a {node.kind}")
            return destroy(pointer)

        kept[node] = None
        destroy, node._destroy = node._destroy, destroy_or_not
        try:
            close(node)
        finally:
            node._destroy = destroy
        kept.pop(node, None)

    async with factory.pair() as (client, server):
        sending = client.send_nowait(bytes(100_000))  # leaves a memory window behind
        (await server.recv()).release()
        await sending
        with server.alloc(8) as memory:
            await server.send_region(memory)
        with mock.patch.object(Node, "close", refuse):
            for conn in (client, server):
                conn.abort()
                await conn.close()
    assert len(client._queue.table) == 0 or (refused and refused.kind == "QueuePair")
    # The parents of the refused object stay open too, and a bound window keeps its region open.
    assert {child for node in kept for child in node.children} <= set(kept)
    for node in kept:
        node.close()
    return refused


@pytest.mark.any_device
@pytest.mark.parametrize("via", ["cm", "tcp"])
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
async def test_close_completes_when_the_device_refuses_to_destroy_objects(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch, via: Any
) -> None:
    """In each round the device refuses to destroy a different object.

    The error is reported, and everything else is released.
    """
    monkeypatch.setattr(per_loop_resource, "IDLE_TIMEOUT", 0)
    factory = replace(factory, via=via)
    await live_and_die(factory, -1)  # the first run creates objects that stay
    kinds = set()
    for number in itertools.count():
        with check_leaks():
            refused = await live_and_die(factory, number)
        if refused is None:
            break
        kinds.add(refused.kind)
        told = [str(each["exception"]) for each in combinations.reported]
        assert any(f"destroying a {refused.kind}" in text for text in told)
        combinations.reported.clear()
    assert kinds >= {"QueuePair", "CompletionQueue", "MemoryRegion", "ProtectionDomain"}
