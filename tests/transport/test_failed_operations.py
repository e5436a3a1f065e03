"""Test that a failed operation names itself, its peer, its region or queue pair, and the first
failure.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from unittest import mock

import pytest

from aiordma import Buffer, Connection, RemoteRegion, Rights
from aiordma.errors import (
    ConnectionBrokenError,
    ConnectionClosedError,
    RemoteAccessError,
    RemoteRangeError,
    RequestRefusedError,
    host_port,
)

from .connection_factory import ConnectionFactory, check_alive, ends, give, pattern, yield_loop
from .marks import on_pair

pytestmark = on_pair

ADVICE = (
    "the peer does not allow this access to its memory: the rkey is invalid or revoked, the "
    "range is outside the region, or the region lacks the right; ask the peer for a region that "
    "grants the right (IBV_WC_REM_ACCESS_ERR)"
)


async def withdrawn(owner: Connection, user: Connection, memory: Buffer) -> RemoteRegion:
    """Revoke the key of a shared region without notifying the user, and return the region."""
    share, region = await give(owner, user, memory)
    del user._sharing.remote_regions.by_id[region.token.region_id]
    share.revoke()
    return region


async def test_flushed_operations_report_the_failed_write_as_cause(
    factory: ConnectionFactory,
) -> None:
    async with factory.sharing(8192) as (client, server, _, remote):
        with client.alloc(4096) as local, server.alloc(64) as gone:
            revoked = await withdrawn(server, client, gone)
            assert client.peer_address is not None
            peer = host_port(client.peer_address)
            first, behind, sent, queued = (
                asyncio.ensure_future(call)
                for call in (
                    client.write(local[:32], revoked[16:48]),
                    client.read(remote[4096:], local),
                    client.send(b"x" * 10),
                    client.send(bytes(100_000)),
                )
            )
            failed = await ends(first, RemoteAccessError)
            qp = f"{client._queue.qp.qp_num:#x}"
            region = f"{revoked.token.region_id:#x}"
            root = (
                f"write of 32 bytes to offset 16 of region {region} of {peer} on queue pair "
                f"{qp}: {ADVICE}"
            )
            assert str(failed).partition(", vendor error")[0] == root
            error = await ends(behind, ConnectionBrokenError)
            other = f"{remote.token.region_id:#x}"
            broke = "the connection broke: write failed with RemoteAccessError"
            assert str(error) == (
                f"read of 4096 bytes from offset 4096 of region {other} of {peer}: {broke}"
            )
            assert repr(error.__cause__) == repr(failed)
            for task, size in ((sent, 10), (queued, 100_000)):
                error = await ends(task, ConnectionBrokenError)
                assert str(error) == f"send of {size} bytes to {peer}: {broke}"
                assert repr(error.__cause__) == repr(failed)


async def write_twice(conn: Connection, local: Buffer, remote: RemoteRegion) -> None:
    async with conn.batch() as batch:
        batch.write(local[:8], remote[:8])
        batch.write(local[:8], remote[8:16])


OPERATIONS: dict[str, Callable[[Connection, Buffer, RemoteRegion], Awaitable[object]]] = {
    "batch of 2 requests on": write_twice,
    "fetch and add of 8 bytes to offset 8 of": lambda conn, _, far: conn.fetch_and_add(
        far[8:16], 1
    ),
    "write of 64 bytes to offset 0 of": lambda conn, near, far: conn.write(near, far, imm=1),
    "read of 64 bytes from offset 0 of": lambda conn, near, far: conn.read(far, bytearray(64)),
}


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_failed_operation_error_contains_peer_and_region(
    factory: ConnectionFactory, operation: str
) -> None:
    async with factory.pair() as (client, server):
        with client.alloc(64) as local, server.alloc(64) as gone:
            revoked = await withdrawn(server, client, gone)
            failing = OPERATIONS[operation](client, local, revoked)
            error = await ends(failing, RemoteAccessError)
            assert client._queue.peer in str(error)
            region = f"{operation} region {revoked.token.region_id:#x} of {client._queue.peer} on"
            assert str(error).startswith(region), error


async def test_aborted_send_error_contains_size_and_peer(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, _):
        sends = [asyncio.ensure_future(client.send(pattern(600))) for _ in range(20)]
        await yield_loop(2)
        client.abort()
        error = await ends(sends[-1], ConnectionClosedError)
        assert re.fullmatch(r"send of 600 bytes to \S+: the connection was aborted", str(error))
        await asyncio.gather(*sends, return_exceptions=True)


async def test_refused_region_request_error_contains_the_peer(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with factory.pair() as (client, server):
        error = await ends(client.request_region(1 << 40), RequestRefusedError)
        assert str(error).startswith(f"{client._queue.peer} refused the request: ")
        monkeypatch.setattr(server._memory.pool, "alloc", mock.Mock(side_effect=MemoryError))
        await ends(client.request_region(64), RequestRefusedError)
        monkeypatch.undo()
        await check_alive(client, server)


async def test_range_error_contains_the_region_id(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):
        with server.alloc(64) as memory, client.alloc(64) as local:
            _, remote = await give(server, client, memory, Rights.READ)
            number = f"{remote.token.region_id:#x}"
            beyond = await ends(client.write(local, remote), RemoteRangeError)
            assert str(beyond) == (
                f"cannot access 64 bytes at offset 0 of remote region {number} (64 bytes): "
                "missing the right to "
                f"write"
            )
            with pytest.raises(RemoteRangeError) as raised:
                remote[60:70]
            assert str(raised.value) == (
                f"cannot access 10 bytes at offset 60 of remote region {number} (64 bytes): "
                "[60:70] is out of "
                f"range"
            )
