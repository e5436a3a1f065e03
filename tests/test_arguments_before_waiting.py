"""Tests that invalid arguments are refused in a call's first step, before it waits.

Each call gets one step on a running loop. A call that would have to wait for its peer, for memory,
for room in a queue or for the resolver therefore fails the test instead of hanging.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any, NamedTuple, cast

import pytest

import aiordma
from aiordma import Config, Rights, arrays, cm, rpc, streams, testing, verbs
from aiordma.async_connection_id import AsyncConnectionId
from aiordma.async_queue_pair import AsyncQueuePair
from aiordma.errors import QuotaError

from .transport.marks import one_loop

pytestmark = one_loop

REFUSED = (TypeError, ValueError, aiordma.RDMAError)
Call = Callable[[Any], Any]


def refused(call: Awaitable[object]) -> Exception:
    """Return the error that a call raises before it waits for anything."""
    coroutine = call.__await__()
    try:
        waited_for = coroutine.send(None)
    except REFUSED as error:
        return error
    except StopIteration as done:
        raise AssertionError(f"it returned {done.value!r}") from None
    coroutine.close()
    raise AssertionError(f"it waits for {waited_for!r}")


class Ends(NamedTuple):
    """A connection with an exhausted memory pool and an unresponsive peer."""

    conn: Any
    remote: Any
    """64 readable bytes of the peer."""
    writable: Any
    share: Any
    local: Any


@asynccontextmanager
async def two_ends(device_name: str) -> AsyncIterator[Ends]:
    config = Config(pool_limit=8 << 20)
    async with testing.connected_pair(device=device_name, config=config) as (conn, peer):
        with ExitStack() as held:
            shares = [
                held.enter_context(
                    peer.share(held.enter_context(peer.register(bytearray(64))), access=access)
                )
                for access in (Rights.READ, Rights.WRITE | Rights.ATOMIC)
            ]
            for share in shares:
                await share.ready()
            remote, writable = (conn.open_region(share.token.pack()) for share in shares)
            local = held.enter_context(conn.register(bytearray(64)))
            for size in (1 << 20, 1 << 12, 1):
                with suppress(QuotaError):
                    while True:
                        held.enter_context(conn.alloc(size))
            yield Ends(conn, remote, writable, shares[0], local)


SIDES = "local memory has 32 bytes, but the peer's memory has 64; slice the longer one"
PROGRESS = "progress must be a function of the number of bytes transferred, not int 5"
IMM = "imm must be an int from 0 to 4294967295, not "
LEASE = "a lease must be a number of seconds, or None for no end, not str "
KIND = 'kind must be "numpy" or "torch", not \'tensorflow\''
CONN = "conn must be an aiordma.Connection, not "
RIGHTS = "access must be a member of Rights ("
REMOTE = "the peer's memory must be a RemoteRegion"

ON_CONNECTION: dict[str, tuple[Call, str]] = {
    "send text": (lambda e: e.conn.send("text"), "a str cannot be used as memory"),
    "send imm": (lambda e: e.conn.send(b"", imm=-1), f"{IMM}-1"),
    "recv_into read-only": (lambda e: e.conn.recv_into(b"x"), "cannot receive into bytes"),
    "recv_into number": (lambda e: e.conn.recv_into(5), "an int cannot be used as memory"),
    "write length": (lambda e: e.conn.write(bytes(32), e.writable), SIDES),
    "write right": (lambda e: e.conn.write(bytes(64), e.remote), "missing the right to write"),
    "write imm": (lambda e: e.conn.write(bytes(64), e.writable, imm="7"), f"{IMM}str '7'"),
    "write progress": (lambda e: e.conn.write(bytes(64), e.writable, progress=5), PROGRESS),
    "write progress arity": (
        lambda e: e.conn.write(bytes(64), e.writable, progress=lambda: None),
        "progress must accept one argument, the number of bytes transferred: too many",
    ),
    "write target": (lambda e: e.conn.write(bytes(64), e.local), REMOTE),
    "read length": (lambda e: e.conn.read(e.remote, bytearray(32)), SIDES),
    "read right": (lambda e: e.conn.read(e.writable, bytearray(64)), "missing the right to read"),
    "read progress": (lambda e: e.conn.read(e.remote, bytearray(64), progress=5), PROGRESS),
    "read target": (lambda e: e.conn.read(e.remote, bytes(64)), "cannot read into bytes"),
    "swap number": (
        lambda e: e.conn.compare_and_swap(e.writable[:8], "1", 0),
        "expected must be an int from 0 to 2^64 - 1, not str '1'",
    ),
    "swap length": (
        lambda e: e.conn.compare_and_swap(e.writable[:16], 1, 0),
        "an atomic operation needs 8 bytes at an address that is a multiple of 8, not 16",
    ),
    "add right": (lambda e: e.conn.fetch_and_add(e.remote[:8], 1), "missing the right to atomic"),
    "lease size": (lambda e: e.conn.lease(-1), "size must be an int from 0 to 2^64 - 1, not -1"),
    "send_region memory": (
        lambda e: e.conn.send_region(b"x"),
        "b'x' is not registered local memory",
    ),
    "send_region access": (lambda e: e.conn.send_region(e.local, access="ALL"), RIGHTS),
    "send_region lease": (lambda e: e.conn.send_region(e.local, lease="x"), f"{LEASE}'x'"),
    "request_region size": (
        lambda e: e.conn.request_region(0),
        "size must be an int from 1 to 2^64 - 1, not 0",
    ),
    "request_region access": (lambda e: e.conn.request_region(8, access="ALL"), RIGHTS),
    "request_region lease": (lambda e: e.conn.request_region(8, lease="x"), f"{LEASE}'x'"),
    "hand_over": (lambda e: e.conn.hand_over(e.local), REMOTE),
    "renew remote": (lambda e: e.remote.renew("default"), f"{LEASE}'default'"),
    "renew share": (lambda e: e.share.renew("default"), f"{LEASE}'default'"),
    "arrays.send": (
        lambda e: arrays.send(e.conn, cast(Any, [1])),
        "arrays must be a dict of arrays by name",
    ),
    "arrays.recv": (lambda e: arrays.recv(e.conn, cast(Any, "tensorflow")), KIND),
    "arrays.open_file": (
        lambda e: arrays.open_file(e.conn, e.remote, cast(Any, "tensorflow")),
        KIND,
    ),
    "arrays.send connection": (lambda e: arrays.send(cast(Any, None), {}), f"{CONN}None"),
    "arrays.recv connection": (lambda e: arrays.recv(cast(Any, None)), f"{CONN}None"),
    "arrays.open_file connection": (
        lambda e: arrays.open_file(cast(Any, "x"), e.remote),
        f"{CONN}str 'x'",
    ),
    "arrays.open_file region": (
        lambda e: arrays.open_file(e.conn, cast(Any, "x")),
        "region must be a RemoteRegion or a slice of one, not str 'x'",
    ),
    "rpc.serve arity": (
        lambda e: rpc.serve(e.conn, {"add": cast(Any, lambda: None)}),
        "function 'add' must accept one argument: too many positional arguments",
    ),
    "rpc.serve dumps arity": (
        lambda e: rpc.serve(e.conn, {}, dumps=cast(Any, lambda: b"")),
        "dumps must accept one argument, the value to encode, such as pickle.dumps: too many "
        "positional arguments",
    ),
    "rpc.serve coroutine loads": (
        lambda e: rpc.serve(e.conn, {}, loads=cast(Any, handler)),
        "loads must be a function of the bytes to decode, such as pickle.loads, not function",
    ),
    "rpc.serve surrogate": (
        lambda e: rpc.serve(e.conn, {"\udc80": handler}),
        "the function name must be valid Unicode, not '\\udc80'",
    ),
    "rpc.serve null": (
        lambda e: rpc.serve(e.conn, {"a\0b": handler}),
        "the function name 'a\\x00b' contains a null character",
    ),
    "rpc.serve functions": (
        lambda e: rpc.serve(e.conn, cast(Any, [])),
        "functions must be a mapping",
    ),
    "rpc.serve dumps": (
        lambda e: rpc.serve(e.conn, {}, dumps=cast(Any, 5)),
        "dumps must be a function",
    ),
    "rpc.serve max_calls": (
        lambda e: rpc.serve(e.conn, {}, max_calls=0),
        "max_calls must be an int",
    ),
}


@pytest.mark.parametrize("call", ON_CONNECTION)
async def test_connection_methods_validate_arguments_before_waiting(
    call: str, device_name: str
) -> None:
    make, text = ON_CONNECTION[call]
    async with two_ends(device_name) as ends:
        assert text in str(refused(make(ends)))


def test_array_functions_raise_type_error_without_a_connection() -> None:
    for call in (
        lambda: arrays.share(cast(Any, 5), bytearray(8)),
        lambda: arrays.open_array(cast(Any, 5), b""),
    ):
        with pytest.raises(TypeError, match=f"^{re.escape(CONN)}int 5$"):
            call()


def test_open_array_rejects_an_invalid_kind_before_opening_the_region() -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(KIND)}$"):
        arrays.open_array(cast(Any, None), b"", cast(Any, "tensorflow"))


def server_context() -> ssl.SSLContext:
    return ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)


NAME = "server.example"  # never looked up
PORT = "port must be an int from 0 to 65535, not "
PEER_PORT = "port must be an int from 1 to 65535, not "
NO_HOST = "host must be the name or address of the peer, not ''"
FACTORY = "protocol_factory must be a function that returns a protocol"
OF_SERVER = (
    "ssl is a server context, but this side is a client; create a client context with "
    "ssl.create_default_context()"
)
OF_CLIENT = (
    "ssl is a client context, but this side is a server; create a server context with "
    "ssl.create_default_context(ssl.Purpose.CLIENT_AUTH) and load a certificate"
)
HANDSHAKE = "ssl_handshake_timeout must be a number of seconds"


async def handler(_: object) -> None:
    """Do nothing, because the server never starts."""


def context(where: dict[str, Any]) -> dict[str, Any]:
    return {**where, "via": "tcp", "ssl": ssl.create_default_context()}


OF_ADDRESS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "connect port": (lambda d: aiordma.connect(NAME, cast(Any, "1"), **d), f"{PEER_PORT}str '1'"),
    "connect port 0": (lambda d: aiordma.connect(NAME, 0, **d), f"{PEER_PORT}0"),
    "connect host": (lambda d: aiordma.connect("", 1, **d), NO_HOST),
    "connect source": (
        lambda d: aiordma.connect(NAME, 1, source=("127.0.0.1", 70000), **d),
        "the port of source must be an int from 0 to 65535, not 70000",
    ),
    "connect config": (
        lambda d: aiordma.connect(NAME, 1, config=cast(Any, {}), **d),
        "config must be an aiordma.Config",
    ),
    "connect data": (
        lambda d: aiordma.connect(NAME, 1, data=bytes(65), **d),
        "data must be at most 64 bytes long, not 65",
    ),
    "connect auth": (
        lambda d: aiordma.connect(NAME, 1, auth=cast(Any, "x"), **d),
        "auth must be bytes, not str",
    ),
    "connect ssl": (
        lambda d: aiordma.connect(NAME, 1, via="tcp", ssl=server_context(), **d),
        OF_SERVER,
    ),
    "listen ssl": (lambda d: aiordma.listen(NAME, 1, **context(d)), OF_CLIENT),
    "listen backlog": (lambda d: aiordma.listen(NAME, 1, backlog=cast(Any, "x"), **d), "backlog"),
    "listen on_request": (
        lambda d: aiordma.listen(NAME, 1, on_request=cast(Any, 5), **d),
        "on_request must be a function of a ConnectionRequest, not int 5",
    ),
    "listen on_request arity": (
        lambda d: aiordma.listen(NAME, 1, on_request=cast(Any, lambda: None), **d),
        "on_request must accept one argument, a ConnectionRequest: too many positional arguments",
    ),
    "start_server handler": (
        lambda d: aiordma.start_server(cast(Any, 5), NAME, **d),
        "the handler 5 is not a coroutine function",
    ),
    "start_server ssl": (lambda d: aiordma.start_server(handler, NAME, **context(d)), OF_CLIENT),
    "prepare_connection": (
        lambda d: aiordma.prepare_connection(address=cast(Any, 5), **d),
        "address must be a str",
    ),
    "reconnect port": (
        lambda d: anext(aiordma.reconnect(NAME, cast(Any, "1"), **d)),
        f"{PEER_PORT}str '1'",
    ),
    "reconnect port 0": (lambda d: anext(aiordma.reconnect(NAME, 0, **d)), f"{PEER_PORT}0"),
    "reconnect host": (lambda d: anext(aiordma.reconnect("", 1, **d)), NO_HOST),
    "reconnect attempts": (
        lambda d: anext(aiordma.reconnect(NAME, 1, attempts=0, **d)),
        "attempts must be an int from 1 to 2^64 - 1, not 0",
    ),
    "reconnect delay": (
        lambda d: anext(aiordma.reconnect(NAME, 1, first_delay=cast(Any, "x"), **d)),
        "first_delay must be a number of seconds",
    ),
    "rpc.connect": (lambda d: rpc.connect(NAME, 1, max_calls=0, **d), "max_calls must be an int"),
    "rpc.start_server": (
        lambda d: rpc.start_server({}, NAME, loads=cast(Any, 5), **d),
        "loads must be a function",
    ),
    "create_connection factory": (
        lambda d: aiordma.create_connection(cast(Any, 5), NAME, 1, **d),
        FACTORY,
    ),
    "create_connection factory arity": (
        lambda d: aiordma.create_connection(cast(Any, lambda _: None), NAME, 1, **d),
        "must not require arguments: missing a required argument: '_'",
    ),
    "create_server factory arity": (
        lambda d: aiordma.create_server(cast(Any, lambda _: None), NAME, 1, **d),
        "must not require arguments: missing a required argument: '_'",
    ),
    "server_hostname surrogate": (
        lambda d: aiordma.open_connection(NAME, 1, ssl=True, server_hostname="\udc80", **d),
        "invalid host name '\\udc80'",
    ),
    "server_hostname null": (
        lambda d: aiordma.open_connection(NAME, 1, ssl=True, server_hostname="a\0b", **d),
        "server_hostname 'a\\x00b' contains a null character",
    ),
    "open_connection limit": (
        lambda d: aiordma.open_connection(NAME, 1, limit=0, **d),
        "limit must be an int from 1 to 2^64 - 1, not 0",
    ),
    "open_connection ssl": (
        lambda d: aiordma.open_connection(NAME, 1, ssl=server_context(), **d),
        OF_SERVER,
    ),
    "open_connection server_hostname": (
        lambda d: aiordma.open_connection(NAME, 1, server_hostname="x", **d),
        "server_hostname 'x' requires TLS; pass ssl=",
    ),
    "create_server ssl": (
        lambda d: aiordma.create_server(
            asyncio.Protocol, NAME, ssl=ssl.create_default_context(), **d
        ),
        OF_CLIENT,
    ),
    "create_server hosts": (
        lambda d: aiordma.create_server(asyncio.Protocol, [NAME, cast(Any, 5)], **d),
        "host must be a str",
    ),
    "start_stream_server": (
        lambda d: aiordma.start_stream_server(cast(Any, 5), NAME, **d),
        "the handler must be a function of a reader and a writer",
    ),
    "connected_pair": (
        lambda d: testing.connected_pair(config=cast(Any, 5), **d).__aenter__(),
        "config must be an aiordma.Config",
    ),
}


@pytest.mark.parametrize("call", OF_ADDRESS)
async def test_functions_with_an_address_validate_arguments_before_waiting(
    call: str, device_name: str
) -> None:
    make, text = OF_ADDRESS[call]
    assert text in str(refused(make({"device": device_name})))


@pytest.mark.any_device
@pytest.mark.parametrize(
    ("factory", "options", "text"),
    [
        (5, {}, FACTORY),
        (
            asyncio.Protocol,
            {"ssl_handshake_timeout": -1},
            "must be a non-negative number of seconds, not -1.0",
        ),
        (asyncio.Protocol, {"ssl_handshake_timeout": "5"}, f"{HANDSHAKE}, not str '5'"),
        (
            asyncio.Protocol,
            {"ssl_shutdown_timeout": 0},
            "ssl_shutdown_timeout must be a positive number of seconds, not 0",
        ),
        (asyncio.Protocol, {"local_addr": 5}, "source must be a local (host, port)"),
    ],
)
def test_event_loop_methods_validate_arguments_before_waiting(
    factory: Any, options: dict[str, Any], text: str
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        tls = ssl.create_default_context()
        calls: list[Awaitable[object]] = [
            loop.create_connection(factory, NAME, 1, ssl=tls, **options)
        ]
        if "local_addr" not in options:
            calls.append(loop.create_server(factory, NAME, 1, ssl=server_context(), **options))
        for call in calls:
            assert text in str(refused(call))

    with asyncio.Runner(loop_factory=streams.EventLoop) as runner:
        runner.run(main())


@contextmanager
def full_queue(device: str) -> Iterator[tuple[AsyncQueuePair, verbs.ScatterGatherElement]]:
    """Provide a queue pair with a full send queue. Its peer posts no receive for the one send."""
    with verbs.open_device(device) as context, context.alloc_pd() as pd:
        sizes = verbs.QPCapabilities(max_send_wr=1, max_recv_wr=1)
        queue, peer = (AsyncQueuePair(pd, sizes) for _ in range(2))
        try:
            ends = [each.qp.endpoint() for each in (queue, peer)]
            queue.qp.connect(*ends)
            peer.qp.connect(*ends[::-1])
            region = pd.reg_mr(64)
            piece = verbs.ScatterGatherElement(region.addr, 8, region.lkey)
            sent = queue.send_nowait([piece])
            yield queue, piece
            queue.close()
            sent.exception()
        finally:
            queue.close()
            peer.close()


PIECES = "memory must be a list of ScatterGatherElement (from MemoryRegion.sge), not "
SEND = verbs.WROpcode.SEND
ON_FULL_QUEUE: dict[str, tuple[Callable[[AsyncQueuePair, Any], Awaitable[object]], str]] = {
    "send a piece": (lambda queue, piece: queue.send(piece), f"{PIECES}a single one"),
    "send text": (lambda queue, _: queue.send(cast(Any, ["x"])), f"{PIECES}of str"),
    "send imm": (
        lambda queue, piece: queue.send([piece], imm=-1),
        "imm_data must be an int from 0",
    ),
    "send imm text": (lambda queue, piece: queue.send([piece], imm=cast(Any, "x")), "not str 'x'"),
    "send pieces": (lambda queue, piece: queue.send([piece] * 1000), "elements: 1000 (max_"),
    "write address": (
        lambda queue, piece: queue.write([piece], cast(Any, "x"), 1),
        "remote_addr must be an int from 0 to 2^64 - 1, not str 'x'",
    ),
    "read address": (
        lambda queue, _: queue.read([], -1, 0),
        "remote_addr must be an int from 0 to 2^64 - 1, not -1",
    ),
    "read rkey": (
        lambda queue, piece: queue.read([piece], 0, -1),
        "rkey must be an int from 0 to 4294967295, not -1",
    ),
    "piece": (
        lambda queue, piece: queue.send([piece._replace(lkey=1 << 32)]),
        "lkey of a ScatterGatherElement must be an int from 0 to 4294967295, not 4294967296",
    ),
    "add length": (
        lambda queue, piece: queue.fetch_and_add(piece._replace(length=4), 0, 1, 1),
        "ATOMIC_FETCH_AND_ADD requires exactly 8 bytes of local memory, not 4",
    ),
    "add list": (
        lambda queue, piece: queue.fetch_and_add(cast(Any, [piece]), 0, 1, 1),
        f"{PIECES}of list",
    ),
    "submit numbers": (
        lambda queue, _: queue.submit(cast(Any, [5])),
        "requests must be SendWorkRequest or ReceiveWorkRequest objects, not 5",
    ),
    "submit one": (
        lambda queue, _: queue.submit(cast(Any, verbs.SendWorkRequest(0, SEND))),
        "requests must be a list; write [request]",
    ),
    "submit operation": (
        lambda queue, _: queue.submit([verbs.SendWorkRequest(0, 99)]),
        "unknown opcode 99",
    ),
    "submit wr_id": (
        lambda queue, _: queue.submit([verbs.SendWorkRequest(cast(Any, "x"), SEND)]),
        "wr_id must be an int from 0 to 2^64 - 1, not str 'x'",
    ),
    "recv": (lambda queue, _: queue.recv(cast(Any, "x")), f"{PIECES}str"),
}


@pytest.mark.parametrize("call", ON_FULL_QUEUE)
async def test_queue_pair_validates_requests_before_waiting(call: str, device_name: str) -> None:
    make, text = ON_FULL_QUEUE[call]
    with full_queue(device_name) as (queue, piece):
        assert text in str(refused(make(queue, piece)))


ADDRESS = "address must be a tuple (host, port), such as ('192.0.2.1', 7471), not "
ON_ID: dict[str, tuple[Callable[[AsyncConnectionId], Awaitable[object]], str]] = {
    "address": (lambda id: id.resolve_addr(cast(Any, "x")), f"{ADDRESS}str 'x'"),
    "port": (lambda id: id.resolve_addr(("127.0.0.1", -1)), f"{PORT}-1"),
    "name": (lambda id: id.resolve_addr((NAME, 1)), "is not a numeric IP address"),
    "source": (lambda id: id.resolve_addr(("127.0.0.1", 1), cast(Any, 5)), f"{ADDRESS}int 5"),
    "connect": (lambda id: id.connect(cast(Any, 5)), "parameters must be a ConnectionParameters"),
    "accept": (lambda id: id.accept(cast(Any, b"")), "write ConnectionParameters(private_data)"),
    "data": (lambda id: id.connect(cm.ConnectionParameters(cast(Any, 5))), "private_data"),
}


@pytest.mark.parametrize("call", ON_ID)
async def test_connection_id_validates_arguments_before_waiting(
    call: str, device_name: str
) -> None:
    make, text = ON_ID[call]
    async with AsyncConnectionId(device_name) as id:
        assert text in str(refused(make(id)))


async def test_connection_id_listen_rejects_a_non_integer_backlog(device_name: str) -> None:
    async with AsyncConnectionId(device_name) as id:
        with pytest.raises(TypeError, match=r"^backlog must be an int, not str 'x'$"):
            id.listen(cast(Any, "x"))
