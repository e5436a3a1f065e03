"""The server: one arena, and the functions with which clients reserve and find blocks in it.

Data never passes through this program unless connections are encrypted. Each client gets the right
to read the whole arena, and the right to write exactly the extents it has reserved. Both rights end
with the connection, and the right to write also ends when the client commits the reservation.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import aiordma
from aiordma import Rights, rpc

from .arena import MAX_EVICTIONS, Arena, Place, memory_length
from .common import MAX_KEYS, MAX_SIZE, RegisteredMemory, check_keys, make_config, max_calls

MAX_HOSTS = 1000  # client hosts that are counted separately; further ones count as "other"
MADV_POPULATE_WRITE = 23  # since Linux 5.14; not in the module mmap

logger = logging.getLogger("aiordma_kv.server")


def allocate(size: int) -> mmap.mmap:
    """Return zeroed memory for an arena of `size` bytes, on huge pages if the kernel has any.

    Raises:
        OSError: The machine does not have enough memory.
    """
    # The kernel does not use transparent huge pages for shared memory, mmap's default.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, memory_length(size), flags)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    try:
        memory.madvise(MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # which older kernels return
            raise
    return memory


def _check_list(items: object) -> list[Any]:
    if not isinstance(items, list) or len(items) > MAX_KEYS:
        raise ValueError(f"invalid argument: expected a list of at most {MAX_KEYS} items")
    return items


def _check_key_list(keys: object) -> list[bytes]:
    return check_keys(_check_list(keys))


def _check_numbers(numbers: object) -> list[int]:
    items = _check_list(numbers)
    checked = [item for item in items if type(item) is int and 0 < item <= MAX_SIZE]
    if len(checked) != len(items):
        raise ValueError(f"invalid argument: expected numbers from 1 to {MAX_SIZE}")
    return checked


def _check_pairs(pairs: object) -> list[tuple[bytes, Any]]:
    """Check a list of lists of two items, of which the first is a key."""
    items = _check_list(pairs)
    checked = [item for item in items if isinstance(item, list) and len(item) == 2]
    if len(checked) != len(items):
        raise ValueError("invalid argument: expected lists of two items")
    return list(
        zip(check_keys([key for key, _ in checked]), [it for _, it in checked], strict=True)
    )


def _merge(places: Iterable[Place]) -> list[list[Place]]:
    """Group places into runs of adjacent extents."""
    runs: list[list[Place]] = []
    for place in sorted(places):
        if runs and runs[-1][-1].end == place.offset:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


class ClientSession:
    """The functions that one client can call, and its shares of the memory.

    Clients are not trusted: every argument is checked, and no call can affect what another session
    has reserved or locked.
    """

    def __init__(self, store: Store, conn: aiordma.Connection) -> None:
        self.conn = conn
        self._store, self._arena = store, store.arena
        self._region = None if store.encrypt else store.registered.region(conn)
        self._read_share = None if self._region is None else self._share(self._region, Rights.READ)
        self._counters = store.counters(conn)
        self.holder = self._arena.attach()
        self._write_shares: dict[int, aiordma.Share] = {}  # by generation
        self.released: asyncio.Task[None] = asyncio.create_task(self._release_when_closed())

    def functions(self) -> dict[str, rpc.Function]:
        """Return the functions that this client can call, by name."""
        names = ["open", "locate", "unlock", "delete", "contains", "stats"]
        names += ["store", "load"] if self._store.encrypt else ["reserve", "commit"]
        return {name: getattr(self, name) for name in names}

    async def _release_when_closed(self) -> None:
        """Free what the session holds as soon as its client cannot reach the memory any more."""
        await self.conn.wait_closed()
        self._arena.release(self.holder)
        del self._store._sessions[self]

    def _share(self, region: Any, access: Rights) -> aiordma.Share:
        return self.conn.share(region, access=access, lease=None)

    async def open(self, _: object) -> bytes | None:
        """Return the token for reading the arena, or None if the connection is encrypted."""
        return None if self._read_share is None else self._read_share.token.pack()

    async def reserve(self, wanted: object) -> dict[str, Any]:
        """Reserve an extent for each [key, size], and give the client access for writing.

        Returns:
            "tokens" has a token for each run of adjacent extents. "places" has an item for each
            key: [index of the token, offset in the run, generation], True if the key is already
            stored, or None if the key is reserved or there is no room for the block.
        """
        blocks = _check_pairs(wanted)
        _check_numbers([size for _, size in blocks])
        assert self._region is not None
        reserved = await self._reserve(blocks)
        tokens: list[bytes] = []
        places: dict[Place | None, list[int]] = {}
        try:
            for run in _merge(filter(None, reserved)):
                start, end = run[0].offset, run[-1].end
                share = self._share(self._region[start:end], Rights.WRITE)
                for place in run:
                    self._write_shares[place.generation] = share
                    places[place] = [len(tokens), place.offset - start, place.generation]
                tokens.append(share.token.pack())
        except BaseException:
            self.conn.abort()  # this releases the reservations
            raise
        # The tokens arrive after the keys have become valid, because both use the same connection.
        found = [
            places.get(place) or self._arena.contains(key) or None
            for (key, _), place in zip(blocks, reserved, strict=True)
        ]
        return {"places": found, "tokens": tokens}

    async def _reserve(self, blocks: list[tuple[bytes, int]]) -> list[Place | None]:
        """Reserve extents, if necessary with room taken from clients that are too slow."""
        places: list[Place | None] = [None] * len(blocks)
        if self._try_to_reserve(blocks, places):
            return places
        ending = self._store.end_expired_sessions()
        if ending:
            # No call can commit the reserved blocks in the meantime: they have no shares.
            await asyncio.wait([session.released for session in ending])
            self._try_to_reserve(blocks, places)
        return places

    def _try_to_reserve(self, blocks: list[tuple[bytes, int]], places: list[Place | None]) -> bool:
        """Reserve extents for blocks without a place. Returns whether no block remains."""
        arena, now = self._arena, self._store.clock()
        max_evictions = arena.evictions + MAX_EVICTIONS
        for i, block in enumerate(blocks):
            remaining = max_evictions - arena.evictions
            places[i] = places[i] or arena.reserve(self.holder, *block, now, remaining)
        found = zip(blocks, places, strict=True)
        return all(place or arena.contains(key) for (key, _), place in found)

    async def commit(self, generations: object) -> list[bool]:
        """Make written blocks visible. Each result is False for an unknown reservation."""
        checked = _check_numbers(generations)
        # A block that another call reserves while this one waits must not be committed: its write
        # share is not revoked here.
        reserved = self._write_shares.keys() & checked
        shares = {self._write_shares[generation] for generation in reserved}
        for share in shares:
            await share.ready()  # revoking takes effect immediately only if the key works
        for share in shares:
            share.revoke()
        for generation in reserved:
            self._write_shares.pop(generation, None)
        return [generation in reserved and self._commit(generation) for generation in checked]

    def _commit(self, generation: int) -> bool:
        place = self._arena.commit(self.holder, generation)
        self._counters["stored_bytes"] += 0 if place is None else place.size
        return place is not None

    async def locate(self, keys: object) -> list[tuple[int, int, int] | None]:
        """Lock blocks, and return the offset, size and generation of each one that is stored."""
        now = self._store.clock()
        places = [self._arena.locate(self.holder, key, now) for key in _check_key_list(keys)]
        sizes = [place.size for place in places if place is not None]
        misses = len(places) - len(sizes)
        self._counters.update(hits=len(sizes), misses=misses, located_bytes=sum(sizes))
        return [place and (place.offset, place.size, place.generation) for place in places]

    async def unlock(self, generations: object) -> list[bool]:
        """Release one lock of each block."""
        checked = _check_numbers(generations)
        return [self._arena.unlock(self.holder, generation) for generation in checked]

    async def delete(self, keys: object) -> list[bool]:
        """Remove blocks. A locked block becomes invisible now, and is freed when it is unlocked."""
        return [self._arena.delete(key) for key in _check_key_list(keys)]

    async def contains(self, keys: object) -> list[bool]:
        """Return whether each key is stored, without locking it."""
        return [self._arena.contains(key) for key in _check_key_list(keys)]

    async def stats(self, _: object) -> dict[str, Any]:
        """Return the counters of the server."""
        return self._store.stats()

    async def store(self, pair: object) -> bool:
        """Store a block that arrived in the message. True also if the key is already stored."""
        [(key, data)] = _check_pairs([pair])
        if not isinstance(data, bytes):
            raise ValueError("invalid argument: expected a key and bytes")
        [place] = await self._reserve([(key, len(data))])
        if place is not None:
            self._store.memory[place.offset : place.offset + place.size] = data
            self._commit(place.generation)
        return self._arena.contains(key)

    async def load(self, generation: object) -> bytes | None:
        """Return the data of a block, or None if the client has not locked it."""
        [checked] = _check_numbers([generation])
        place = self._arena.locked_place(self.holder, checked)
        return place and bytes(self._store.memory[place.offset : place.offset + place.size])


class Store:
    """A block store: an arena in memory, and the sessions of its clients.

    Args:
        memory: The memory of the arena, which must be zero. See `allocate`.
        encrypt: Whether connections are encrypted. Blocks then travel in messages, because
            one-sided operations cannot be encrypted.
    """

    def __init__(self, memory: bytearray | mmap.mmap, *, encrypt: bool = False) -> None:
        self.memory, self.encrypt = memory, encrypt
        self.arena = Arena(memory)
        self.registered = RegisteredMemory(memory)
        self.clock: Callable[[], float] = asyncio.get_running_loop().time
        self._sessions: dict[ClientSession, None] = {}
        self._counters: dict[str, Counter[str]] = {}  # by the client's host

    async def serve(self, conn: aiordma.Connection) -> None:
        """Serve the calls of one client until its connection ends."""
        session = ClientSession(self, conn)
        self._sessions[session] = None
        with suppress(aiordma.ProtocolError):  # aiordma has logged it
            await rpc.serve(conn, session.functions(), max_calls=max_calls(self.encrypt))

    def end_expired_sessions(self) -> list[ClientSession]:
        """End the sessions that hold expired locks or reservations, and return them.

        Closing the connection revokes the client's access. What a session holds is freed when its
        `released` is done. The client then connects again.
        """
        self.arena.suspend_expired(self.clock())
        ending = [session for session in self._sessions if session.holder.is_suspended]
        for session in ending:
            if not session.conn.closed:
                logger.info("ending %r: a lock or reservation has expired", session.conn)
                session.conn.abort()
        return ending

    def counters(self, conn: aiordma.Connection) -> Counter[str]:
        """Return the counters for all clients on the host of this one."""
        host: str = conn.peer_address[0] if conn.peer_address else "unknown"
        if host not in self._counters and len(self._counters) >= MAX_HOSTS:
            host = "other"
        names = ("hits", "misses", "located_bytes", "stored_bytes")
        return self._counters.setdefault(host, Counter(dict.fromkeys(names, 0)))

    def stats(self) -> dict[str, Any]:
        """Return the counters of the store, and those of each client host. Thread-safe."""
        clients = {host: dict(counters) for host, counters in self._counters.copy().items()}
        totals = {
            name: sum(counters[name] for counters in clients.values())
            for name in ("hits", "misses")
        }
        return {**self.arena.stats(), **totals, "clients": clients}

    def close(self) -> None:
        """Unregister the memory. Close the server first."""
        self.registered.close()


async def start_server(
    store: Store, host: str, port: int = 0, *, auth: bytes | None = None, device: str | None = None
) -> aiordma.Server:
    """Start to serve a store.

    Args:
        store: The store. Connections are encrypted if it was created with `encrypt`.
        host: The address to listen on, as for `aiordma.start_server`.
        port: The port. 0 selects a free port.
        auth: The pre-shared key that clients need. Required for encryption.
        device: The name of the RDMA device, as for `aiordma.start_server`.
    """
    config = make_config(store.encrypt)
    return await aiordma.start_server(
        store.serve, host, port, auth=auth, encrypt=store.encrypt, device=device, config=config
    )
