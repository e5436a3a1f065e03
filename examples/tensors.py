"""Rows of a tensor by one-sided reads: the server's program takes no part in them.

    python examples/tensors.py serve [HOST [PORT]]
    python examples/tensors.py fetch HOST PORT ROW...

The tensor is a numpy array; one of torch in the memory of the CPU works the same. Without HOST the
server listens on all addresses, without PORT on 7472. It ends with Ctrl-C.
"""

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress

import numpy as np

import aiordma

TENSOR = np.repeat(np.arange(1000, dtype="f4"), 256).reshape(1000, 256)  # row 7 has sevens


async def publish(conn: aiordma.Connection) -> None:
    with conn.register(TENSOR) as region:
        await conn.send(json.dumps([TENSOR.dtype.str, TENSOR.shape]).encode())
        await conn.send_region(region, access=aiordma.Rights.READ, lease=None)
        await conn.wait_closed()  # until then the client reads what it wants


async def serve(host: str = "", port: str = "7472") -> None:
    async with await aiordma.start_server(publish, host, int(port)) as server:
        print(f"tensor on {server.device}, port {server.port}", flush=True)
        await server.serve_forever()


async def fetch(host: str, port: str, row: str, *more: str) -> None:
    rows = row, *more
    async with await aiordma.connect(host, int(port)) as conn:
        with await conn.recv() as description:
            dtype, shape = json.loads(bytes(description))
        remote = await conn.recv_region()
        found = np.empty((len(rows), *shape[1:]), dtype)
        size = found.itemsize * found[0].size
        async with conn.batch() as batch:  # one doorbell, one await for all rows
            for index, target in zip(map(int, rows), found, strict=True):
                batch.read(remote[index * size : (index + 1) * size], target)
    for name, values in zip(rows, found, strict=True):
        print(f"row {name}: {values.size} values, mean {values.mean():g}")


def main(command: str = "", *arguments: str) -> None:
    commands: dict[str, Callable[..., Coroutine[None, None, None]]]
    commands = {"serve": serve, "fetch": fetch}
    try:
        inspect.signature(commands[command]).bind(*arguments)
    except (KeyError, TypeError):  # another command, too few arguments, or too many
        sys.exit(__doc__)
    try:
        asyncio.run(commands[command](*arguments))
    except (aiordma.RDMAError, OSError, ValueError) as error:
        sys.exit(f"tensors: {error}")


with suppress(KeyboardInterrupt):
    main(*sys.argv[1:])
