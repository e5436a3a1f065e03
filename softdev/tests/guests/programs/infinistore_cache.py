"""Store values of 64 KiB in InfiniStore, a cache for inference, and read them back.

Run `infinistore_cache.py server PORT`, then `infinistore_cache.py client PORT`.
"""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module
from typing import Any

import numpy as np

store: Any = import_module("infinistore")

BLOCK = 1 << 16
SIZE = 1 << 24
ON_DEVICE = {"dev_name": "embedded0", "link_type": store.LINK_ETHERNET}


def serve(port: int) -> None:
    """Run the package's server, without its HTTP port, until it is terminated."""
    uvloop: Any = import_module("uvloop")
    loop = uvloop.new_event_loop()
    # The smallest pool is 1 GiB.
    config = store.ServerConfig(service_port=port, prealloc_size=1, **ON_DEVICE)
    store.register_server(loop, config)
    loop.run_forever()


async def write_and_read(conn: Any) -> None:
    """Write all blocks, read them back and compare them. Then read a missing key."""
    source = np.random.default_rng(seed=1).integers(256, size=SIZE, dtype=np.uint8)
    target = np.zeros_like(source)
    for memory in (source, target):
        conn.register_mr(memory.ctypes.data, SIZE)
    blocks = [(f"key {offset}", offset) for offset in range(0, SIZE, BLOCK)]
    await conn.rdma_write_cache_async(blocks, BLOCK, source.ctypes.data)
    await conn.rdma_read_cache_async(blocks, BLOCK, target.ctypes.data)
    print("equal" if (source == target).all() else "different")
    try:
        await conn.rdma_read_cache_async([("missing", 0)], BLOCK, target.ctypes.data)
    except store.InfiniStoreKeyNotFound:
        print("not found")


def main() -> None:
    role, port = sys.argv[1], int(sys.argv[2])
    if role == "server":
        serve(port)
    config = store.ClientConfig(
        host_addr="127.0.0.1", service_port=port, connection_type=store.TYPE_RDMA, **ON_DEVICE
    )
    conn = store.InfinityConnection(config)
    conn.connect()
    asyncio.run(write_and_read(conn))
    conn.close()


main()
