"""A block store for KV caches of language models, read and written over RDMA.

async with aiordma_kv.Client(["127.0.0.1:7480"]) as client:
    await client.put([b"key"], [b"value"])
    if all(await client.locate([b"key"])):
        target = bytearray(5)
        await client.get([b"key"], [target])
        await client.unlock([b"key"])
"""

from .client import Client
from .server import Store, allocate, start_server
from .thread_client import ThreadClient

__all__ = ["Client", "Store", "ThreadClient", "allocate", "start_server"]
