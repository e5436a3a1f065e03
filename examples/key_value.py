"""A key-value store whose clients get small values by RPC and read large ones from its memory."""

import asyncio

import aiordma
from aiordma import rpc

LARGE = 64 << 10


class Store:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    async def put(self, item: tuple[str, bytes]) -> None:
        key, value = item
        self.values[key] = value

    async def get(self, key: str) -> bytes | dict[str, bytes]:
        value = self.values[key]
        if len(value) < LARGE:
            return value
        conn = rpc.caller()
        with conn.register(value) as region:
            share = conn.share(region, access=aiordma.Rights.READ, lease=5)
        return {"token": share.token.pack()}


async def get(client: rpc.Client, key: str) -> bytes | bytearray:
    found = await client.call("get", key)
    if isinstance(found, bytes):
        return found
    region = client.connection.open_region(found["token"])
    value = bytearray(len(region))
    await client.connection.read(region, value)
    return value


async def main() -> None:
    store = Store()
    functions: dict[str, rpc.Function] = {"put": store.put, "get": store.get}
    async with (
        await rpc.start_server(functions, "127.0.0.1") as server,
        await rpc.connect("127.0.0.1", server.port) as client,
    ):
        await client.call("put", ("short", b"a value"))
        await client.call("put", ("long", bytes(1 << 20)))
        for key in ("short", "long"):
            print(key, len(await get(client, key)))


asyncio.run(main())
