"""`aiordma.rpc`: calls, their errors, timeouts and cancellation, and peers that break the rules."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from aiordma import rpc
from aiordma.errors import (
    ConnectionBrokenError,
    ConnectionClosedError,
    MessageTooLongError,
    ProtocolError,
)
from aiordma.transport import Connection, Message

from .connection_factory import NEVER, SMALL, ConnectionFactory, ends, leases, pattern, yield_loop
from .test_peer_texts import HOSTILE, SHOWN


class NoTextError(Exception):
    def __str__(self) -> str:
        raise ValueError


class Functions(dict[str, rpc.Function]):
    """Of the server; `running` counts those that wait."""

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
    """A client whose server has no call under way in the end, and ends without an error."""
    coders = {name: coder for name, coder in client_options.items() if name != "max_calls"}
    async with factory.pair() as (client, server):
        serving = asyncio.create_task(rpc.serve(server, functions, max_calls=max_calls, **coders))
        async with rpc.Client(client, **client_options) as caller:
            yield caller
        await serving


async def until(functions: Functions, **counts: int) -> None:
    while any(getattr(functions, name) != count for name, count in counts.items()):
        await yield_loop(1)


async def test_calls(factory: ConnectionFactory) -> None:
    """Many at a time, each answered with its own result, also while another takes longer."""
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


async def test_a_task_that_is_cancelled_at_the_end_still_calls(factory: ConnectionFactory) -> None:
    """`asyncio.run` cancels the program's tasks at its end, and what reads answers is none."""
    async with factory.pair() as (conn, server):
        serving = asyncio.create_task(rpc.serve(server, Functions()))
        before = asyncio.all_tasks()
        async with rpc.Client(conn) as client:
            for task in asyncio.all_tasks() - before:
                task.cancel()
            assert await client.call("add", [1, 2]) == 3
        await serving


async def test_servers(factory: ConnectionFactory) -> None:
    """`start_server` and `connect` take the options of a connection and those of calls."""
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


async def test_buffers_are_not_copied(factory: ConnectionFactory) -> None:
    """A long value is a view of the memory that it was received in, for as long as it is used."""
    options: Any = {"dumps": memoryview, "loads": memoryview}
    async with calls(factory, Functions(), **options) as client:
        data = pattern(1 << 20)
        found = await client.call("same", data)
        assert isinstance(found, memoryview)
        assert found == data


async def test_memory_of_values_is_not_kept(factory: ConnectionFactory) -> None:
    """Neither by a call under way, nor by an idle connection."""
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


async def failing(error: Exception) -> None:
    raise error


async def test_errors(factory: ConnectionFactory, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "aiordma.rpc")
    functions = Functions()
    functions["object"] = lambda _: asyncio.sleep(0, object())
    functions["no text"] = lambda _: failing(NoTextError())
    functions["long"] = lambda _: asyncio.sleep(0, bytes(SMALL.max_message))
    async with calls(factory, functions) as client:
        for name, value, kind, text in (
            ("fail", "no", "ValueError", "no"),
            ("fail", HOSTILE, "ValueError", SHOWN),
            ("fail", "x" * 10_000, "ValueError", "xxx"),
            ("add", 5, "TypeError", "not iterable"),
            ("object", None, "TypeError", "serialize"),
            ("no text", None, "NoTextError", "cannot be had"),
            ("__len__", None, "LookupError", "no such function"),
        ):
            error = await ends(client.call(name, value), rpc.CallError)
            assert isinstance(error, rpc.CallError)
            assert (error.function, error.kind) == (name, kind)
            assert text in str(error)
            assert str(error).isprintable()
            assert len(str(error)) < 5000
        assert "the call of fail failed" in caplog.text
        await ends(client.call("x" * 300), ValueError)
        await ends(client.call("same", object()), TypeError)
        assert await client.call("add", [1]) == 1


async def test_too_long(factory: ConnectionFactory) -> None:
    """A result or an argument that is longer than a message may be is that call's error alone."""
    short = replace(SMALL, max_message=10_000)
    async with factory.pair(short) as (client, server):
        functions: dict[str, rpc.Function] = {"bytes": lambda size: asyncio.sleep(0, bytes(size))}
        serving = asyncio.create_task(rpc.serve(server, functions))
        async with rpc.Client(client, max_calls=1) as caller:
            error = await ends(caller.call("bytes", 20_000), rpc.CallError)
            assert "MessageTooLongError" in str(error)
            await ends(caller.call("bytes", bytes(20_000)), MessageTooLongError)
            assert await caller.call("bytes", 5) == bytes(5)
        await serving


async def test_timeout_and_cancellation(factory: ConnectionFactory) -> None:
    """The server gives up what its client has given up; then there is room for the next call."""
    functions = Functions()
    async with calls(factory, functions, max_calls=1) as client:
        with pytest.raises(TimeoutError):
            await client.call("wait", timeout=0.01)
        await until(functions, running=0, given_up=1)
        for turns in factory.cancel_points:
            task = asyncio.create_task(client.call("wait"))
            await yield_loop(turns)
            task.cancel()
            await ends(task, asyncio.CancelledError)
            while client._waiting:
                await yield_loop(1)
            await until(functions, running=0)
            assert await client.call("add", [turns]) == turns


async def test_limits(factory: ConnectionFactory) -> None:
    """The server refuses more calls than it takes; a client does not send more than it may."""
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
        client._room = asyncio.Semaphore(2)
        assert await asyncio.gather(*(client.call("wait", 3) for _ in range(9))) == [None] * 9


class LateCompletions:
    """A connection whose sends complete long after the peer has got what was sent."""

    def __init__(self, conn: Connection) -> None:
        self.conn = conn

    def __getattr__(self, name: str) -> Any:
        return getattr(self.conn, name)

    def __aiter__(self) -> AsyncIterator[Message]:
        return self.conn.__aiter__()

    async def send(self, data: Any) -> None:
        await self.conn.send(data)
        await yield_loop(200)

    def send_nowait(self, data: Any) -> asyncio.Future[None]:
        return asyncio.ensure_future(self.send(data))


async def test_a_call_that_follows_an_answer_at_once(factory: ConnectionFactory) -> None:
    """A client within the server's limit is not refused: its answer ends a call, no completion."""
    functions = Functions()
    async with factory.pair() as (client, server):
        late: Any = LateCompletions(server)
        serving = asyncio.create_task(rpc.serve(late, functions, max_calls=1))
        async with rpc.Client(client, max_calls=1) as caller:
            for _ in range(3):
                assert await caller.call("add", [1]) == 1
                await ends(caller.call("fail", "no"), rpc.CallError)
                with pytest.raises(TimeoutError):
                    await caller.call("wait", timeout=0.01)
        await serving


@pytest.mark.parametrize("how", ["client closes", "server closes", "server aborts"])
async def test_the_end_of_the_connection(factory: ConnectionFactory, how: str) -> None:
    """It ends the calls on both sides; a call whose connection ended has no result."""
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
        assert "before wait was answered" in str(error)
        await ends(caller.call("add", [1]), ConnectionClosedError, ConnectionBrokenError)
        await caller.close()
        await asyncio.wait([serving])
        assert (functions.running, functions.given_up) == (0, 1)


@pytest.mark.parametrize("grace", [0, NEVER])
async def test_the_end_of_the_server(factory: ConnectionFactory, grace: float) -> None:
    """It gives calls under way its grace, and cancels them then."""
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


async def test_a_client_that_does_not_read(factory: ConnectionFactory) -> None:
    """Each of its calls has an answer nevertheless, and it does not hold up the server's end."""
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
                answered.add(rpc._unpack(answer.data).number)
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


async def test_a_call_that_is_cancelled_while_its_connection_closes(
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


async def test_a_cancellation_that_comes_with_its_call(factory: ConnectionFactory) -> None:
    """The server answers a call that is cancelled before its task has begun, as any other."""
    async with factory.pair() as (client, server):
        await client.send(rpc._pack(rpc._CALL, 7, "wait") + b"\xc0")
        await client.send(rpc._pack(rpc._CANCEL, 7))
        await client.send(rpc._pack(rpc._CANCEL, 8))
        await yield_loop(20)  # all three are there when the server begins to read
        serving = asyncio.create_task(rpc.serve(server, Functions()))
        for number in 7, 8:
            with await client.recv() as answer:
                frame = rpc._unpack(answer.data)
            assert (frame.kind, frame.number, frame.name) == (rpc._ERROR, number, "CancelledError")
        await client.close()
        await serving


NONSENSE = {
    "nothing": b"",
    "short": rpc._HEADER.pack(0, 0, 1)[:-1],
    "kind": rpc._HEADER.pack(4, 0, 1),
    "name": rpc._HEADER.pack(0, 5, 1) + b"four",
    "text": rpc._HEADER.pack(0, 1, 1) + b"\xff",
    "number": rpc._pack(rpc._CALL, 7, "wait") + b"\xc0",  # twice
}


@pytest.mark.parametrize("what", NONSENSE)
async def test_a_client_that_breaks_the_rules(factory: ConnectionFactory, what: str) -> None:
    functions = Functions()
    async with factory.pair() as (client, server):
        serving = asyncio.create_task(rpc.serve(server, functions))
        await client.send(rpc._pack(rpc._CALL, 7, "wait") + b"\xc0")
        await client.send(NONSENSE[what])
        await ends(serving, ProtocolError)
        assert functions.running == 0


@pytest.mark.parametrize("what", ["nothing", "short", "text", "call"])
async def test_a_server_that_breaks_the_rules(factory: ConnectionFactory, what: str) -> None:
    """Its answers to calls that were not made are ignored, and nonsense ends the connection."""
    async with factory.pair() as (client, server):
        caller = rpc.Client(client)
        call = asyncio.create_task(caller.call("add", [1]))
        with await server.recv() as request:
            number = rpc._unpack(request.data).number
        await server.send(rpc._pack(rpc._RESULT, number + 1) + b"\xc0")
        await server.send({"call": rpc._pack(rpc._CALL, number), **NONSENSE}[what])
        error = await ends(call, ConnectionBrokenError)
        assert isinstance(error.__cause__, ProtocolError)
        assert client.closed
        await caller.close()


NO_VALUES = [b"", b"\xc1", b"\xa1\xff", b"\xc0\xc0", b"\xdd" + b"\xff" * 4, b"\x91" * 100_000]


async def test_values_that_are_none(factory: ConnectionFactory) -> None:
    """They are the error of their call alone, on the side that gets them."""
    async with factory.pair() as (client, server):
        serving = asyncio.create_task(rpc.serve(server, Functions()))
        for number, value in enumerate(NO_VALUES):
            await client.send([rpc._pack(rpc._CALL, number, "same"), value])
            with await client.recv() as answer:
                frame = rpc._unpack(answer.data)
            assert (frame.kind, frame.number) == (rpc._ERROR, number)
        async with rpc.Client(client) as caller:
            assert await caller.call("same", 1) == 1
        await serving
    async with factory.pair() as (client, server), rpc.Client(client) as caller:
        for value in (*NO_VALUES, b"\x01"):
            call = asyncio.create_task(caller.call("same", 1))
            with await server.recv() as request:
                number = rpc._unpack(request.data).number
            await server.send([rpc._pack(rpc._RESULT, number), value])
            if value == b"\x01":
                assert await call == 1
            else:
                await ends(call, ValueError)


async def test_random_calls(factory: ConnectionFactory) -> None:
    """Results, errors and cancellations in any order: each call has its own end, none is left."""
    chance = random.Random(7)
    functions = Functions()

    async def one(client: rpc.Client, index: int) -> None:
        name = chance.choice(["add", "wait", "fail", "same"])
        value = [index] if name == "add" else chance.randrange(9) if name == "wait" else str(index)
        task = asyncio.create_task(client.call(name, value))
        await yield_loop(chance.randrange(30))
        if chance.random() < 0.4:
            task.cancel()
        wanted = {"add": index, "wait": None, "same": value}
        await asyncio.wait([task])
        if task.cancelled():
            return
        if name == "fail":
            assert str(task.exception()) == f"fail: ValueError: {value}"
        else:
            assert task.result() == wanted[name]

    async with calls(factory, functions, max_calls=7) as client:
        client._room = asyncio.Semaphore(7)
        await asyncio.gather(*(one(client, index) for index in range(300)))
        while client._waiting:
            await yield_loop(1)
        assert functions.running == 0
        assert client._room._value == 7
