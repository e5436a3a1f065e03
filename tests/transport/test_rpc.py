"""Test `aiordma.rpc`: calls, errors, timeouts, cancellation, and peers that break the protocol."""

from __future__ import annotations

import asyncio
import pickle
import re
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import aiordma
from aiordma import arrays, rpc
from aiordma.errors import (
    BusyError,
    ConnectionBrokenError,
    ConnectionClosedError,
    MessageTooLongError,
    ProtocolError,
    QuotaError,
    host_port,
)
from aiordma.streams import StreamTransport
from aiordma.transport import Connection, Message

from .connection_factory import NEVER, SMALL, ConnectionFactory, ends, leases, pattern, yield_loop
from .test_dropped import drop, pair_of
from .test_peer_texts import HOSTILE, SHOWN


class Outcome(BaseException):
    """A BaseException that is not an Exception, like pytest's `Failed`."""


class NoTextError(Exception):
    def __str__(self) -> str:
        raise Outcome


class Functions(dict[str, rpc.Function]):
    """The functions that the server offers. `running` counts pending calls of `wait`."""

    def __init__(self) -> None:
        super().__init__(add=self.add, wait=self.wait, fail=self.fail, same=self.same)
        self.running = self.given_up = 0

    async def add(self, numbers: list[int]) -> int:
        return sum(numbers)

    async def same(self, value: object) -> object:
        return value

    async def fail(self, text: str) -> None:
        raise ValueError(text)

    async def wait(self, turns: int | None) -> None:
        self.running += 1
        try:
            await (asyncio.Event().wait() if turns is None else yield_loop(turns))
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        finally:
            self.running -= 1


@asynccontextmanager
async def calls(
    factory: ConnectionFactory,
    functions: Mapping[str, rpc.Function],
    *,
    max_calls: int = 256,
    **client_options: Any,
) -> AsyncIterator[rpc.Client]:
    """Yield a client, and check that its server finishes all calls and ends without an error."""
    coders = {name: coder for name, coder in client_options.items() if name != "max_calls"}
    async with factory.pair() as (client, server):
        serving = asyncio.create_task(rpc.serve(server, functions, max_calls=max_calls, **coders))
        async with rpc.Client(client, **client_options) as caller:
            yield caller
        await serving


async def until(functions: Functions, **counts: int) -> None:
    while any(getattr(functions, name) != count for name, count in counts.items()):
        await yield_loop(1)


async def test_concurrent_calls_return_their_own_results(factory: ConnectionFactory) -> None:
    """One call stays outstanding during all the others."""
    functions = Functions()
    async with calls(factory, functions) as client:
        waiting = asyncio.create_task(client.call("wait"))
        results = await asyncio.gather(*(client.call("add", [i, 1]) for i in range(600)))
        assert results == list(range(1, 601))
        assert await client.call("same", {"a": [1.5, None, b"x", "\u00fc"]}) == {
            "a": [1.5, None, b"x", "\u00fc"]
        }
        waiting.cancel()
        await ends(waiting, asyncio.CancelledError)


async def test_rpc_client_can_call_after_all_tasks_are_cancelled(
    factory: ConnectionFactory,
) -> None:
    """`asyncio.run` cancels the program's tasks at its end, so the client must not read its answers
    in a task.
    """
    async with factory.pair() as (conn, server):
        serving = asyncio.create_task(rpc.serve(server, Functions()))
        before = asyncio.all_tasks()
        async with rpc.Client(conn) as client:
            for task in asyncio.all_tasks() - before:
                task.cancel()
            assert await client.call("add", [1, 2]) == 3
        await serving


async def test_rpc_start_server_and_connect_accept_serializers(factory: ConnectionFactory) -> None:
    coders: Any = {"dumps": pickle.dumps, "loads": pickle.loads}
    options: Any = {"config": SMALL, **factory.where, **coders}
    async with await rpc.start_server(Functions(), factory.host, **options) as server:
        async with await rpc.connect(factory.host, server.port, **options) as client:
            assert await client.call("same", {1, 2}) == {1, 2}
            await ends(rpc.connect(factory.host, server.port, max_calls=0, **options), ValueError)
            assert server.connections == 1
        await ends(client.call("same"), ConnectionClosedError)
    for bad in ({"config": None}, {"max_calls": 0}, {"handler": print}):
        with pytest.raises((TypeError, ValueError), match=next(iter(bad))):
            await rpc.start_server(Functions(), factory.host, **bad)
    with pytest.raises(TypeError, match=r"coroutine function .* \(async def\)"):
        await rpc.start_server({"print": print}, factory.host)  # type: ignore[dict-item]


async def test_rpc_passes_a_memoryview_to_the_loads_function(factory: ConnectionFactory) -> None:
    """The memory stays valid as long as the view is used."""
    options: Any = {"dumps": memoryview, "loads": memoryview}
    async with calls(factory, Functions(), **options) as client:
        data = pattern(1 << 20)
        found = await client.call("same", data)
        assert isinstance(found, memoryview)
        assert found == data


async def test_call_releases_received_memory_before_it_completes(
    factory: ConnectionFactory,
) -> None:
    """Neither a call in progress nor an idle connection may hold the memory."""
    functions = Functions()
    functions["late"] = lambda _: functions.wait(None)
    async with calls(factory, functions) as client:
        conn = client.connection
        before = await leases(conn)
        await client.call("same", pattern(1 << 20))
        waiting = asyncio.create_task(client.call("late", pattern(1 << 20)))
        await until(functions, running=1)
        while await leases(conn) > before:
            await yield_loop(1)
        waiting.cancel()
        await ends(waiting, asyncio.CancelledError)


async def failing(error: BaseException) -> None:
    raise error


async def test_exceptions_in_functions_raise_call_error_in_the_client(
    factory: ConnectionFactory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "aiordma.rpc")
    functions = Functions()
    functions["object"] = lambda _: asyncio.sleep(0, object())
    functions["no text"] = lambda _: failing(NoTextError())
    for error in (Outcome("own"), GeneratorExit("of it"), BaseExceptionGroup("all", [Outcome()])):
        functions[type(error).__name__] = partial(lambda error, _: failing(error), error)
    functions["gives up"] = lambda _: failing(asyncio.CancelledError())
    functions["long"] = lambda _: asyncio.sleep(0, bytes(SMALL.max_message))
    async with calls(factory, functions) as client:
        for name, value, kind, text in (
            ("fail", "no", "ValueError", "no"),
            ("fail", HOSTILE, "ValueError", SHOWN),
            ("fail", "x" * 10_000, "ValueError", "xxx"),
            ("add", 5, "TypeError", "not iterable"),
            (
                "object",
                None,
                "TypeError",
                "cannot serialize object; pass dumps= and loads= on both",
            ),
            ("no text", None, "NoTextError", "the message is not available"),
            ("__len__", None, "LookupError", "no such function"),
            ("Outcome", None, "Outcome", "own"),
            ("GeneratorExit", None, "GeneratorExit", "of it"),
            ("BaseExceptionGroup", None, "BaseExceptionGroup", "all (1 sub-exception)"),
            ("gives up", None, "CancelledError", "was cancelled"),
        ):
            told = await ends(client.call(name, value), rpc.CallError)
            assert (told.function, told.kind) == (name, kind)
            assert text in str(told)
            assert str(told).isprintable()
            assert len(str(told)) < 5000
        assert "the call of fail failed" in caplog.text
        assert await client.call("add", [1]) == 1


def test_keyboard_interrupt_in_a_handler_stops_the_event_loop(factory: ConnectionFactory) -> None:
    async def main() -> None:
        functions: dict[str, rpc.Function] = {"exit": lambda _: failing(KeyboardInterrupt())}
        async with factory.pair() as (client, server):
            serving = asyncio.create_task(rpc.serve(server, functions))
            async with rpc.Client(client) as caller:
                await caller.call("exit")
            await serving

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())


@pytest.mark.parametrize("of", ["dumps", "loads"])
async def test_failing_serializer_raises_call_error(factory: ConnectionFactory, of: str) -> None:
    async with factory.pair() as (client, server):
        coders: Any = {of: lambda _: failing(Outcome()).send(None)}
        serving = asyncio.create_task(rpc.serve(server, Functions(), **coders))
        async with rpc.Client(client) as caller:
            error = await ends(caller.call("same"), rpc.CallError)
            assert error.kind == "Outcome"
        await serving


MISTAKES: dict[str, tuple[Callable[[Connection, rpc.Client], object], str]] = {
    "a list of functions": (
        lambda conn, _: rpc.serve(conn, [failing]),  # type: ignore[arg-type]
        "functions must be a mapping of names to coroutine functions, such as {'add': add}, not li",
    ),
    "a name that is none": (
        lambda conn, _: rpc.serve(conn, {5: failing}),  # type: ignore[dict-item]
        "the function name must be a str, not int 5",
    ),
    "a name that is too long": (
        lambda conn, _: rpc.serve(conn, {"x" * 256: failing}),
        "function name 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx'... is too long: 256 bytes (maximum 255)",
    ),
    "no function": (
        lambda conn, _: rpc.serve(conn, {"add": 5}),  # type: ignore[dict-item]
        "add must be a coroutine function of one argument, not int 5",
    ),
    "no dumps": (
        lambda conn, _: rpc.serve(conn, {}, dumps=5),  # type: ignore[arg-type]
        "dumps must be a function of the value to encode, such as pickle.dumps, not int 5",
    ),
    "no calls": (
        lambda conn, _: rpc.Client(conn, max_calls=0),
        "max_calls must be an int from 1 to 2^64 - 1, not 0",
    ),
    "no connection": (
        lambda _, client: rpc.Client(client),  # type: ignore[arg-type]
        "conn must be an aiordma.Connection, such as the result of connect() or accept(), not C",
    ),
    "a name of another type": (
        lambda _, client: client.call(b"add"),  # type: ignore[arg-type]
        "the function name must be a str, not bytes b'add'",
    ),
    "two arguments": (
        lambda _, client: client.call("add", 1, 2),  # type: ignore[arg-type]
        "add() must be called with one argument, not 2; pass a list",
    ),
    "a time as text": (
        lambda _, client: client.call("add", timeout="5"),  # type: ignore[arg-type]
        "timeout must be a number of seconds, not str '5'",
    ),
    "a number as a key": (
        lambda _, client: client.call("add", [{"a": {1: 2}}]),
        "msgpack cannot serialize the value: dict keys must be str or bytes; pass ",
    ),
    "an array": (
        lambda _, client: client.call("add", [np.zeros(3)]),
        "msgpack cannot serialize numpy.ndarray; pass dumps= and loads= on both sides, or send arr",
    ),
    "a large number": (
        lambda _, client: client.call("add", 1 << 70),
        "msgpack cannot serialize an int of 71 bits; pass ",
    ),
}


async def made(make: Callable[[], object]) -> object:
    found = make()
    return await found if isinstance(found, Awaitable) else found


@pytest.mark.parametrize("what", MISTAKES)
async def test_invalid_rpc_argument_raises_an_error_with_advice(
    factory: ConnectionFactory, what: str
) -> None:
    """The mistake is reported before anything is sent."""
    make, text = MISTAKES[what]
    async with calls(factory, Functions()) as client, factory.pair() as (other, _):
        with pytest.raises((TypeError, ValueError), match=re.escape(text)):
            await made(lambda: make(other, client))
        assert await client.call("add", [1]) == 1


async def read_by_iteration(conn: Connection) -> object:
    return await anext(aiter(conn))


READERS: dict[str, Callable[[Connection], object]] = {
    "recv": Connection.recv,
    "recv_into": lambda conn: conn.recv_into(bytearray(9)),
    "recv_with": lambda conn: conn.recv_with(bytearray),
    "async for": read_by_iteration,
    "arrays": arrays.recv,
    "Client": rpc.Client,
    "serve": lambda conn: rpc.serve(conn, {}),
}


@pytest.mark.parametrize("reader", READERS)
async def test_reading_from_an_rpc_connection_raises_busy_error(
    factory: ConnectionFactory, reader: str
) -> None:
    """The error names the first reader, which continues.

    Once that reader has ended, reading is possible again.
    """
    async with factory.pair() as (client, server):
        begun = aiter(client), client.recv()  # before the client existed
        serving = asyncio.create_task(rpc.serve(server, Functions()))
        caller = rpc.Client(client)
        await yield_loop(1)
        for conn, name in (client, "an rpc.Client"), (server, "rpc.serve"):
            error = await ends(made(partial(READERS[reader], conn)), BusyError)
            assert f": it is in use by {name}; use another connection" in str(error)
            assert f"with {error_peer(conn)}" in str(error)
        await ends(anext(begun[0]), BusyError)
        await ends(begun[1], BusyError)
        assert await caller.call("add", [1, 2]) == 3
        serving.cancel()
        await ends(serving, asyncio.CancelledError)
        await caller._messages.send(b"for anyone")
        assert bytes(await server.recv()) == b"for anyone"
        await caller.close()


async def _write_with_imm(conn: Connection, shared: aiordma.RemoteRegion) -> None:
    await conn.write(b"12345678", shared, imm=1)


ALL = aiordma.Rights.READ | aiordma.Rights.WRITE

SENDERS: dict[str, Callable[[Connection, aiordma.RemoteRegion], Awaitable[object]]] = {
    "send": lambda conn, _: conn.send(b"x"),
    "send of an array": lambda conn, _: arrays.send(conn, {"a": np.zeros(3)}),
    "send_nowait": lambda conn, _: conn.send_nowait(b"x"),
    "write with immediate data": _write_with_imm,
}


@pytest.mark.parametrize("owner", ["an rpc.Client", "rpc.serve", "a stream"])
async def test_sending_on_a_connection_in_use_raises_busy_error(
    owner: str, factory: ConnectionFactory
) -> None:
    """Reads and writes without immediate data do not disturb the owner."""
    async with factory.pair() as (client, server), AsyncExitStack() as stack:
        memory = stack.enter_context(await server.lease(8))
        shared = client.open_region(server.share(memory, access=ALL).token)
        serving = asyncio.create_task(rpc.serve(server, Functions()))
        if owner == "a stream":
            serving.cancel()
            await ends(serving, asyncio.CancelledError)
            kept: object = StreamTransport(client, asyncio.Protocol())
        else:
            kept = rpc.Client(client)
        await yield_loop(1)
        conn = server if owner == "rpc.serve" else client
        for send in SENDERS.values():
            with pytest.raises(BusyError) as caught:
                await send(conn, shared)
            assert str(caught.value) == (
                f"cannot send a message on the connection with {error_peer(conn)}: it is in use "
                f"by {owner}; use another connection"
            )
        await client.write(b"12345678", shared)
        target = bytearray(8)
        await client.read(shared, target)
        assert target == b"12345678"
        if isinstance(kept, rpc.Client):
            assert await kept.call("add", [1, 2]) == 3
        serving.cancel()
        await ends(serving, asyncio.CancelledError)


async def test_awaiting_an_earlier_send_raises_busy_error_after_client_creation(
    factory: ConnectionFactory,
) -> None:
    async with factory.pair() as (client, server):
        memory = await server.lease(8)
        with memory:
            shared = client.open_region(server.share(memory, access=ALL).token)
            with client.alloc(8) as local:
                operations = client.send(b"x"), client.write(local, shared, imm=1)
                async with rpc.Client(client):
                    for operation in operations:
                        with pytest.raises(BusyError, match=r"in use by an rpc\.Client"):
                            await operation


def error_peer(conn: Connection) -> str:
    assert conn.peer_address is not None
    return host_port(conn.peer_address)


async def test_rpc_client_raises_busy_error_while_tasks_wait_in_recv(
    factory: ConnectionFactory,
) -> None:
    """A client takes all messages, so it cannot share the connection with tasks in `recv`.

    Any number of these tasks may wait.
    """
    async with factory.pair() as (client, server):
        waiting = [asyncio.create_task(client.recv()) for _ in range(3)]
        await yield_loop(1)
        with pytest.raises(
            BusyError, match=r"an rpc\.Client cannot .* a task that waits in recv\(\)"
        ):
            rpc.Client(client)
        for number in range(3):
            await server.send(bytes([number]))
        assert [bytes(await task) for task in waiting] == [b"\0", b"\1", b"\2"]
        async with rpc.Client(client):
            pass


async def test_dropped_client_warns_and_ends_its_connection(factory: ConnectionFactory) -> None:
    """The warning is the same as for a plain connection."""
    async with factory.pair() as (_, end):
        conn, server = await pair_of(factory)
        serving = asyncio.create_task(rpc.serve(server, Functions()))
        kept = [rpc.Client(conn)]
        del conn
        assert await kept[0].call("add", [1, 2]) == 3
        with pytest.warns(ResourceWarning, match="was not closed"):
            drop(kept)
        await ends(serving, ConnectionBrokenError)
        await server.close()
        await end.close()


@pytest.mark.parametrize("plain", ["client", "server"])
async def test_non_rpc_message_breaks_the_connection_on_both_sides(
    factory: ConnectionFactory, plain: str
) -> None:
    """Both sides must be told what is wrong."""
    async with factory.pair() as (client, server):
        if plain == "server":
            async with rpc.Client(client) as caller:
                call = asyncio.create_task(caller.call("add", [1]))
                with await server.recv() as message:
                    await server.send(message)
                errors = [await ends(call, ConnectionBrokenError)]
                errors.append(await ends(server.recv(), ConnectionBrokenError))
        else:
            serving = asyncio.create_task(rpc.serve(server, Functions()))
            await client.send(b"hello")
            errors = [await ends(client.recv(), ConnectionBrokenError)]
            await ends(serving, ProtocolError)
        for error in errors:
            assert "that are not a valid aiordma.rpc message; use rpc.connect with" in str(error)


async def test_oversized_value_fails_only_its_own_call(factory: ConnectionFactory) -> None:
    """The value may be the result or the argument."""
    short = replace(SMALL, max_message=10_000)
    async with factory.pair(short) as (client, server):
        functions: dict[str, rpc.Function] = {"bytes": lambda size: asyncio.sleep(0, bytes(size))}
        serving = asyncio.create_task(rpc.serve(server, functions))
        async with rpc.Client(client, max_calls=1) as caller:
            error = await ends(caller.call("bytes", 20_000), rpc.CallError)
            assert "MessageTooLongError" in str(error)
            assert "10000 (Config.max_message of the receiver)" in str(error)  # this side's limit
            await ends(caller.call("bytes", bytes(20_000)), MessageTooLongError)
            assert await caller.call("bytes", 5) == bytes(5)
        await serving


async def test_connection_closes_when_reading_responses_runs_out_of_memory(
    factory: ConnectionFactory,
) -> None:
    """No later answer would be read either."""

    async def refused() -> AsyncIterator[Message]:
        raise QuotaError("too long", amount=2, limit=1)
        yield

    async with factory.pair() as (client, _):
        await rpc._Calls(1).read(refused(), weakref.ref(client))
        assert client.closed


async def test_timed_out_and_cancelled_calls_are_cancelled_on_the_server(
    factory: ConnectionFactory,
) -> None:
    """The server cancels calls that its client has given up, which makes room for the next call."""
    functions = Functions()
    async with calls(factory, functions, max_calls=1) as client:
        with pytest.raises(TimeoutError, match=r"^the call of wait timed out after 0\.01 seconds$"):
            await client.call("wait", timeout=0.01)
        await until(functions, running=0, given_up=1)
        for turns in factory.cancel_points:
            task = asyncio.create_task(client.call("wait"))
            await yield_loop(turns)
            task.cancel()
            await ends(task, asyncio.CancelledError)
            while client._calls.waiting:
                await yield_loop(1)
            await until(functions, running=0)
            assert await client.call("add", [turns]) == turns


async def test_server_refuses_calls_beyond_max_calls(factory: ConnectionFactory) -> None:
    """The server refuses calls beyond its limit. A client that has the same limit waits instead."""
    functions = Functions()
    async with calls(factory, functions, max_calls=2) as client:
        assert await asyncio.gather(*(client.call("add", [it]) for it in (1, 2))) == [1, 2]
        waiting = [asyncio.create_task(client.call("wait")) for _ in range(2)]
        await until(functions, running=2)
        error = await ends(client.call("add", [1]), rpc.CallError)
        assert "TooManyCalls: 2 calls" in str(error)
        for task in waiting:
            task.cancel()
        await until(functions, running=0)
    async with calls(factory, functions, max_calls=2) as client:
        client._calls.slots = asyncio.Semaphore(2)
        assert await asyncio.gather(*(client.call("wait", 3) for _ in range(9))) == [None] * 9


def complete_late(conn: Connection, patch: pytest.MonkeyPatch) -> None:
    """Delay the completion of sends until long after the peer has received the data."""
    now = conn.send

    async def late(data: Any) -> None:
        await now(data)
        await yield_loop(200)

    patch.setattr(conn, "send", late)
    patch.setattr(conn, "send_nowait", lambda data: asyncio.ensure_future(late(data)))


async def test_call_sent_immediately_after_a_response_is_accepted(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the client a call ends with its answer, so the server must not count it until the send of
    the answer completes.
    """
    functions = Functions()
    async with factory.pair() as (client, server):
        complete_late(server, monkeypatch)
        serving = asyncio.create_task(rpc.serve(server, functions, max_calls=1))
        async with rpc.Client(client, max_calls=1) as caller:
            for _ in range(3):
                assert await caller.call("add", [1]) == 1
                await ends(caller.call("fail", "no"), rpc.CallError)
                with pytest.raises(TimeoutError):
                    await caller.call("wait", timeout=0.01)
        await serving


@pytest.mark.parametrize("how", ["client closes", "server closes", "server aborts"])
async def test_closing_the_connection_ends_calls_on_both_sides(
    factory: ConnectionFactory, how: str
) -> None:
    functions = Functions()
    async with factory.pair() as (client, server):
        serving = asyncio.create_task(rpc.serve(server, functions))
        caller = rpc.Client(client)
        call = asyncio.create_task(caller.call("wait"))
        await until(functions, running=1)
        if how == "client closes":
            await caller.close()
        elif how == "server closes":
            await server.close()
        else:
            server.abort()
        kind = ConnectionBrokenError if how == "server aborts" else ConnectionClosedError
        error = await ends(call, kind)
        assert "before the function wait returned" in str(error)
        await ends(caller.call("add", [1]), ConnectionClosedError, ConnectionBrokenError)
        await caller.close()
        await asyncio.wait([serving])
        assert (functions.running, functions.given_up) == (0, 1)


@pytest.mark.parametrize("grace", [0, NEVER])
async def test_rpc_server_close_cancels_calls_after_the_grace_period(
    factory: ConnectionFactory, grace: float
) -> None:
    functions = Functions()
    options: Any = {"config": SMALL, **factory.where}
    async with (
        await rpc.start_server(functions, factory.host, **options) as server,
        await rpc.connect(factory.host, server.port, **options) as client,
    ):
        call = asyncio.create_task(client.call("wait", 30 if grace else None))
        await until(functions, running=1)
        await server.close(grace)
        if grace:
            assert await call is None
        else:
            error = await ends(call, rpc.CallError)
            assert "CancelledError" in str(error)


async def test_slow_client_receives_every_response(factory: ConnectionFactory) -> None:
    """This client must not hold up the end of the server either."""
    functions = Functions()
    numbers = range(30)
    async with factory.pair() as (client, server):
        serving = asyncio.create_task(rpc.serve(server, functions))
        for number in numbers:
            await client.send(rpc._pack(rpc._CALL, number, "fail") + b"\xa2no")
        await yield_loop(50)
        cancels = [client.send_nowait(rpc._pack(rpc._CANCEL, it)) for it in reversed(numbers)]
        await yield_loop(50)
        answered = set[int]()
        while len(answered) < len(numbers):
            with await client.recv() as answer:
                answered.add(rpc._unpack(answer.data, rpc._ERROR).number)
        await client.close()
        await serving
        await asyncio.gather(*cancels, return_exceptions=True)
    async with factory.pair() as (client, server):
        serving = asyncio.create_task(rpc.serve(server, functions))
        for number in range(200):
            await client.send(rpc._pack(rpc._CALL, number, "wait") + b"\xc0")
        await until(functions, running=200)
        serving.cancel()
        await ends(serving, asyncio.CancelledError)
        assert functions.running == 0
        client.abort()


async def test_call_cancelled_while_its_connection_closes_raises_cancelled_error(
    factory: ConnectionFactory,
) -> None:
    async with calls(factory, Functions()) as client:
        call = asyncio.create_task(client.call("wait"))
        await yield_loop(20)
        closing = asyncio.create_task(client.connection.close())
        await asyncio.sleep(0)
        call.cancel()
        await ends(call, asyncio.CancelledError)
        await closing


async def test_call_cancelled_before_it_starts_receives_a_response(
    factory: ConnectionFactory,
) -> None:
    """The call is cancelled before its task on the server has started."""
    async with factory.pair() as (client, server):
        await client.send(rpc._pack(rpc._CALL, 7, "wait") + b"\xc0")
        await client.send(rpc._pack(rpc._CANCEL, 7))
        await client.send(rpc._pack(rpc._CANCEL, 8))
        await yield_loop(20)  # all three arrive before the server reads
        serving = asyncio.create_task(rpc.serve(server, Functions()))
        for number in 7, 8:
            with await client.recv() as answer:
                frame = rpc._unpack(answer.data, rpc._ERROR)
            assert (frame.number, frame.name) == (number, "CancelledError")
        await client.close()
        await serving


MALFORMED_MESSAGES = {
    "nothing": b"",
    "short": rpc._HEADER.pack(0, 0, 1)[:-1],
    "kind": rpc._HEADER.pack(4, 0, 1),
    "name": rpc._HEADER.pack(0, 5, 1) + b"four",
    "text": rpc._HEADER.pack(0, 1, 1) + b"\xff",
    "number": rpc._pack(rpc._CALL, 7, "wait") + b"\xc0",  # call 7 is already pending
}


@pytest.mark.parametrize("what", MALFORMED_MESSAGES)
async def test_serve_raises_protocol_error_for_malformed_client_messages(
    factory: ConnectionFactory, what: str
) -> None:
    functions = Functions()
    async with factory.pair() as (client, server):
        serving = asyncio.create_task(rpc.serve(server, functions))
        await client.send(rpc._pack(rpc._CALL, 7, "wait") + b"\xc0")
        await client.send(MALFORMED_MESSAGES[what])
        await ends(serving, ProtocolError)
        assert functions.running == 0


@pytest.mark.parametrize("what", ["nothing", "short", "text", "call"])
async def test_calls_fail_when_the_server_sends_a_malformed_message(
    factory: ConnectionFactory, what: str
) -> None:
    """Answers to calls that were not made are ignored. Malformed messages end the connection."""
    async with factory.pair() as (client, server):
        caller = rpc.Client(client)
        call = asyncio.create_task(caller.call("add", [1]))
        with await server.recv() as request:
            number = rpc._unpack(request.data, rpc._CALL).number
        await server.send(rpc._pack(rpc._RESULT, number + 1) + b"\xc0")
        await server.send({"call": rpc._pack(rpc._CALL, number), **MALFORMED_MESSAGES}[what])
        error = await ends(call, ConnectionBrokenError)
        assert isinstance(error.__cause__, ProtocolError)
        assert client.closed
        await caller.close()


def packed_list(length: int, item: bytes) -> bytes:
    return b"\xdd" + length.to_bytes(4, "big") + item * length


COSTLY = {
    "numbers": packed_list((1 << 20) - 3, b"\x07"),
    "lists": packed_list((1 << 20) // 5, b"\x90"),
    "dicts": packed_list((1 << 20) // 5, b"\x80"),
    "lists of one": packed_list((1 << 20) // 5, b"\x91\xc0"),
    "extensions": packed_list((1 << 20) // 33, b"\xd4\x05\0"),
    "times": packed_list((1 << 20) // 33, b"\xd6\xff" + bytes(4)),
    "claims": b"".join(packed_list(100_000, b"")[:5] for _ in range(11)),
    "dict": b"\xdf" + (1 << 19).to_bytes(4, "big"),
}


@pytest.mark.parametrize("what", COSTLY)
def test_unpack_rejects_messages_with_too_many_values(what: str) -> None:
    """The values are rejected before any object is created from them.

    Slightly smaller ones are accepted.
    """
    with pytest.raises(ValueError, match="too many values"):
        rpc._unpackb(memoryview(COSTLY[what]))
    if what in ("numbers", "lists"):
        item = COSTLY[what][-1:]
        assert len(rpc._unpackb(memoryview(packed_list(200_000, item)))) == 200_000


MALFORMED_VALUES = [
    b"",
    b"\xc1",
    b"\xa1\xff",
    b"\xc0\xc0",
    b"\xdd" + b"\xff" * 4,
    b"\x91" * 100_000,
]


async def test_malformed_value_fails_only_its_own_call(factory: ConnectionFactory) -> None:
    """This holds for values sent to the server and to the client."""
    async with factory.pair() as (client, server):
        serving = asyncio.create_task(rpc.serve(server, Functions()))
        for number, value in enumerate(MALFORMED_VALUES):
            await client.send([rpc._pack(rpc._CALL, number, "same"), value])
            with await client.recv() as answer:
                assert rpc._unpack(answer.data, rpc._ERROR).number == number
        async with rpc.Client(client) as caller:
            assert await caller.call("same", 1) == 1
        await serving
    async with factory.pair() as (client, server), rpc.Client(client) as caller:
        for value in (*MALFORMED_VALUES, b"\x01"):
            call = asyncio.create_task(caller.call("same", 1))
            with await server.recv() as request:
                number = rpc._unpack(request.data, rpc._CALL).number
            await server.send([rpc._pack(rpc._RESULT, number), value])
            if value == b"\x01":
                assert await call == 1
            else:
                await ends(call, rpc.CallError)
