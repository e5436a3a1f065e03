"""Remote procedure calls with deadlines: the server gives up a call when its caller has.

    python examples/rpc.py serve [HOST [PORT]]
    python examples/rpc.py call HOST PORT

A call carries the seconds that it may still take. Calls of one connection run at the same time, and
are answered in the order in which they end. Without HOST the server listens on all addresses,
without PORT on 7473. It ends with Ctrl-C.
"""

import asyncio
import inspect
import json
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from itertools import count
from typing import Any

import aiordma


async def square(number: int) -> int:
    return number * number


async def wait() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        print("the server has given up waiting", flush=True)


METHODS: dict[str, Callable[..., Awaitable[object]]] = {"square": square, "wait": wait}


async def answer(conn: aiordma.Connection, request: bytes) -> None:
    number, seconds, method, arguments = json.loads(request)
    try:
        async with asyncio.timeout(seconds):
            reply = {"result": await METHODS[method](*arguments)}
    except TimeoutError:
        return  # the caller waits no more
    except Exception as error:
        reply = {"error": repr(error)}
    await conn.send(json.dumps([number, reply]).encode())


async def handle(conn: aiordma.Connection) -> None:
    async with asyncio.TaskGroup() as calls:
        async for message in conn:
            with message:
                calls.create_task(answer(conn, bytes(message)))


async def serve(host: str = "", port: str = "7473") -> None:
    async with await aiordma.start_server(handle, host, int(port)) as server:
        print(f"calls on {server.device}, port {server.port}", flush=True)
        await server.serve_forever()


class Client:
    """Calls over one connection, any number at a time."""

    def __init__(self, conn: aiordma.Connection) -> None:
        self._conn = conn
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def run(self) -> None:
        """Takes the answers, until the end of the connection, which ends the calls under way."""
        end: Exception = aiordma.ConnectionClosedError("the server has closed the connection")
        try:
            async for message in self._conn:
                with message:
                    number, reply = json.loads(bytes(message))
                if "error" in reply:
                    self._answer(number, RuntimeError(reply["error"]))
                else:
                    self._answer(number, reply["result"])
        except aiordma.RDMAError as error:
            end = error
        for number in self._waiting:
            self._answer(number, end)

    def _answer(self, number: int, answer: Any) -> None:
        waiter = self._waiting.get(number)
        if waiter is not None and not waiter.done():  # else its time has passed
            waiter.set_result(answer)

    async def call(self, seconds: float, method: str, *arguments: Any) -> Any:
        """TimeoutError after so many seconds, RuntimeError with an exception of the server,
        RDMAError when the connection ends."""
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                request = [number, seconds, method, arguments]
                await self._conn.send(json.dumps(request).encode())
                answer = await self._waiting[number]
        finally:
            del self._waiting[number]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def call(host: str, port: str) -> None:
    async with await aiordma.connect(host, int(port)) as conn:
        client = Client(conn)
        answers = asyncio.create_task(client.run())
        print("square(12) =", await client.call(60, "square", 12))
        for seconds, method, argument in ((1, "wait", ()), (60, "square", ("x",))):
            try:
                await client.call(seconds, method, *argument)
            except TimeoutError:
                print(f"{method}: no answer in {seconds} seconds")
            except RuntimeError as error:
                print(f"{method}: {error}")
        answers.cancel()


def main(command: str = "", *arguments: str) -> None:
    commands: dict[str, Callable[..., Coroutine[None, None, None]]]
    commands = {"serve": serve, "call": call}
    try:
        inspect.signature(commands[command]).bind(*arguments)
    except (KeyError, TypeError):  # another command, too few arguments, or too many
        sys.exit(__doc__)
    try:
        asyncio.run(commands[command](*arguments))
    except (aiordma.RDMAError, OSError, ValueError) as error:
        sys.exit(f"rpc: {error}")


with suppress(KeyboardInterrupt):
    main(*sys.argv[1:])
