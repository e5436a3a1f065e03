"""Read tensors of a safetensors file by name from a server's memory.

    python examples/tensors.py serve FILE [HOST [PORT]]
    python examples/tensors.py list HOST PORT
    python examples/tensors.py fetch HOST PORT NAME...

The server maps the file into memory and shares the mapping with its clients. Reads do not involve
the server's program. The server listens on HOST (default: all addresses) and PORT (default: 7472)
until Ctrl-C is pressed. To fetch tensors of the types bfloat16 and float8, install the package
ml_dtypes.
"""

import asyncio
import inspect
import mmap
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress

import aiordma
from aiordma import arrays


async def serve(path: str, host: str = "", port: str = "7472") -> None:
    with open(path, "rb") as file:  # noqa: ASYNC230
        # Map the file copy-on-write, because Linux before 6.2 cannot register read-only mappings.
        contents = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    async def share(conn: aiordma.Connection) -> None:
        with conn.register(contents) as region:
            await conn.send_region(region, access=aiordma.Rights.READ, lease=None)
            await conn.wait_closed()  # the client reads until it closes

    async with await aiordma.start_server(share, host, int(port)) as server:
        print(f"tensors on {server.device}, port {server.port}", flush=True)
        await server.serve_forever()


async def tensors(conn: aiordma.Connection) -> arrays.Arrays:
    return await arrays.open_file(conn, await conn.recv_region())


async def names(host: str, port: str) -> None:
    async with await aiordma.connect(host, int(port)) as conn:
        for name, remote in (await tensors(conn)).items():
            print(f"{name}: {remote.code} {list(remote.shape)}")


async def fetch(host: str, port: str, name: str, *more: str) -> None:
    async with await aiordma.connect(host, int(port)) as conn:
        remote = await tensors(conn)
        for wanted in (name, *more):
            if wanted not in remote:
                raise ValueError(f"no tensor {wanted} in the file")
            values = await remote[wanted]
            print(f"{wanted}: {values.size} values, mean {values.mean():g}")


def main(command: str = "", *arguments: str) -> None:
    commands: dict[str, Callable[..., Coroutine[None, None, None]]]
    commands = {"serve": serve, "list": names, "fetch": fetch}
    try:
        inspect.signature(commands[command]).bind(*arguments)
    except (KeyError, TypeError):  # unknown command, or the wrong number of arguments
        sys.exit(__doc__)
    try:
        asyncio.run(commands[command](*arguments))
    except (aiordma.RDMAError, OSError, TypeError, ValueError) as error:
        sys.exit(f"tensors: {error}")


with suppress(KeyboardInterrupt):
    main(*sys.argv[1:])
