"""A cache whose clients read the server's memory directly, without involving the server's program.

    python examples/cache.py serve [HOST [PORT]]
    python examples/cache.py set HOST PORT KEY VALUE
    python examples/cache.py get HOST PORT KEY

The cache is a table of slots. The hash of a key selects the slot of its entry, and a new entry
replaces the previous one in the same slot. If a client reads a slot while the server is writing it,
the checksum is wrong, and the client reads the slot again. The server listens on HOST (default: all
addresses) and PORT (default: 7474) until Ctrl-C is pressed.
"""

import asyncio
import inspect
import struct
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from zlib import crc32

import aiordma

SLOTS = 4096
SLOT = 1024  # bytes
HEADER = struct.Struct("<IHH")  # checksum of the rest, lengths of key and value


def place(key: bytes) -> slice:
    at = crc32(key) % SLOTS * SLOT
    return slice(at, at + SLOT)


def pack(key: bytes, value: bytes) -> bytes:
    """Return the slot contents for an entry, or raise ValueError if the entry is too long."""
    if HEADER.size + len(key) + len(value) > SLOT:
        raise ValueError(f"key and value together must not exceed {SLOT - HEADER.size} bytes")
    rest = struct.pack("<HH", len(key), len(value)) + key + value
    return (struct.pack("<I", crc32(rest)) + rest).ljust(SLOT, b"\0")


def unpack(slot: bytes) -> tuple[bytes, bytes] | None:
    """Return the key and value in a slot, or None if the server was writing to the slot."""
    checksum, key_size, value_size = HEADER.unpack_from(slot)
    end = HEADER.size + key_size + value_size
    if not checksum and end == HEADER.size:
        return b"", b""  # never written
    if end > SLOT or crc32(slot[4:end]) != checksum:
        return None
    return slot[HEADER.size : HEADER.size + key_size], slot[HEADER.size + key_size : end]


class Cache:
    def __init__(self) -> None:
        self.table = bytearray(SLOTS * SLOT)

    async def handle(self, conn: aiordma.Connection) -> None:
        with conn.register(self.table) as region:
            await conn.send_region(region, access=aiordma.Rights.READ, lease=None)
            async for message in conn:
                with message:
                    slot = bytes(message)
                if len(slot) == SLOT and (entry := unpack(slot)):
                    self.table[place(entry[0])] = slot
                    await conn.send(b"stored")
                else:
                    await conn.send(b"invalid entry")


async def serve(host: str = "", port: str = "7474") -> None:
    async with await aiordma.start_server(Cache().handle, host, int(port)) as server:
        print(f"cache on {server.device}, port {server.port}", flush=True)
        await server.serve_forever()


async def set(host: str, port: str, key: str, value: str) -> None:
    async with await aiordma.connect(host, int(port)) as conn:
        await conn.send(pack(key.encode(), value.encode()))
        print(bytes(await conn.recv()).decode())


async def get(host: str, port: str, key: str) -> None:
    async with await aiordma.connect(host, int(port)) as conn:
        remote = await conn.recv_region()
        slot = bytearray(SLOT)
        entry = None
        while entry is None:
            await conn.read(remote[place(key.encode())], slot)
            entry = unpack(bytes(slot))
        print(f"{key}: {entry[1].decode() if entry[0] == key.encode() else 'not in the cache'}")


def main(command: str = "", *arguments: str) -> None:
    commands: dict[str, Callable[..., Coroutine[None, None, None]]]
    commands = {"serve": serve, "set": set, "get": get}
    try:
        inspect.signature(commands[command]).bind(*arguments)
    except (KeyError, TypeError):  # unknown command, or the wrong number of arguments
        sys.exit(__doc__)
    try:
        asyncio.run(commands[command](*arguments))
    except (aiordma.RDMAError, OSError, ValueError) as error:
        sys.exit(f"cache: {error}")


with suppress(KeyboardInterrupt):
    main(*sys.argv[1:])
