"""Remote procedure calls that the server cancels when the client's timeout expires.

    python examples/rpc.py serve [HOST [PORT]]
    python examples/rpc.py call HOST PORT

The server listens on HOST (default: all addresses) and PORT (default: 7473) until Ctrl-C is
pressed.
"""

import asyncio
import inspect
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress

import aiordma
from aiordma import rpc


async def square(number: int) -> int:
    return number * number


async def wait(_: None) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        print("the server cancelled the call", flush=True)


async def serve(host: str = "", port: str = "7473") -> None:
    functions: dict[str, rpc.Function] = {"square": square, "wait": wait}
    async with await rpc.start_server(functions, host, int(port)) as server:
        print(f"calls on {server.device}, port {server.port}", flush=True)
        await server.serve_forever()


async def call(host: str, port: str) -> None:
    async with await rpc.connect(host, int(port)) as client:
        print("squares:", await asyncio.gather(*(client.call("square", n) for n in range(5))))
        try:
            await client.call("wait", timeout=1)
        except TimeoutError:
            print("wait: no response within 1 second")
        try:
            await client.call("square", "x")
        except rpc.CallError as error:
            print(error)


def main(command: str = "", *arguments: str) -> None:
    commands: dict[str, Callable[..., Coroutine[None, None, None]]]
    commands = {"serve": serve, "call": call}
    try:
        inspect.signature(commands[command]).bind(*arguments)
    except (KeyError, TypeError):  # unknown command, or the wrong number of arguments
        sys.exit(__doc__)
    try:
        asyncio.run(commands[command](*arguments))
    except (aiordma.RDMAError, OSError, ValueError) as error:
        sys.exit(f"rpc: {error}")


with suppress(KeyboardInterrupt):
    main(*sys.argv[1:])
