"""Set and get a value of 1 MiB in Valkey, then measure GETs of 64 bytes.

Run `valkey_get.py rdma|tcp PORT COUNT`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from importlib import import_module
from typing import Any

VALUE = 1 << 20
GET = b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n"


async def main() -> None:
    way, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    over: Any = asyncio if way == "tcp" else import_module("valkey_aiordma")
    reader, writer = await over.open_connection("127.0.0.1", port)

    async def put(value: bytes) -> None:
        writer.write(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n%s\r\n" % (len(value), value))
        if await reader.readline() != b"+OK\r\n":
            raise RuntimeError("SET was not answered by OK")

    async def get() -> bytes:
        writer.write(GET)
        size = int((await reader.readline())[1:])
        value: bytes = await reader.readexactly(size + 2)
        return value[:-2]

    large = bytes(range(256)) * (VALUE // 256)
    await put(large)
    print("the same" if await get() == large else "another value")
    await put(bytes(64))
    start = time.perf_counter()
    for _ in range(count):
        await get()
    print(f"{(time.perf_counter() - start) / count * 1e6:.1f} us/GET")
    writer.close()
    await writer.wait_closed()


asyncio.run(main())
