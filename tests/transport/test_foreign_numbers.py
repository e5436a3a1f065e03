"""Test that computed numbers, such as those of numpy, are accepted, and that an error names an
argument that is not a number.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any, cast

import numpy as np
import pytest

from aiordma import Connection, RemoteRegion, Rights
from aiordma._transport.arguments import check_source

from .connection_factory import ConnectionFactory
from .marks import by_cm, one_loop

pytestmark = [one_loop, by_cm]


@pytest.mark.parametrize("kind", [np.int64, np.uint16, np.array], ids=lambda kind: kind.__name__)
async def test_numpy_numbers_are_accepted_as_arguments(
    factory: ConnectionFactory, kind: Any
) -> None:
    async with factory.pair() as (client, server):
        memory = bytearray(64)
        with server.register(memory) as region, client.alloc(kind(16)) as local:
            minute: Any = np.float32(60)
            rights = Rights.READ | Rights.WRITE | Rights.ATOMIC
            share = await server.send_region(region, access=rights, lease=minute)
            remote = await client.recv_region()
            await share.renew(Decimal(60))  # type: ignore[arg-type]
            assert await client.fetch_and_add(remote[kind(0) : kind(8)], kind(5)) == 0
            assert await client.compare_and_swap(remote[:8], kind(5), kind(7)) == 5
            async with client.batch() as batch:
                added = batch.fetch_and_add(remote[:8], kind(1))
            assert (await added, memory[0]) == (7, 8)
            await client.read(remote[: kind(16)], local[kind(0) :])
            await client.write(local[:4], remote[:4], imm=kind(9))
            await client.send(b"", imm=kind(8))
            assert [(await server.recv()).imm for _ in range(2)] == [9, 8]
            with await client.lease(kind(100)) as lease:
                assert len(lease) == 100
            async with await client.request_region(kind(32), lease=minute) as borrowed:
                await borrowed.renew(np.float64(50))
                assert len(borrowed) == 32


Use = Callable[[Connection, RemoteRegion, Any], object]

USES: dict[str, Use] = {
    "size": lambda conn, _, value: conn.alloc(value),
    "size (lease)": lambda conn, _, value: conn.lease(value),
    "size (request_region)": lambda conn, _, value: conn.request_region(value),
    "imm": lambda conn, _, value: conn.send(b"", imm=value),
    "imm (write)": lambda conn, remote, value: conn.write(b"x" * 8, remote, imm=value),
    "expected": lambda conn, remote, value: conn.compare_and_swap(remote, value, 0),
    "desired": lambda conn, remote, value: conn.compare_and_swap(remote, 0, value),
    "add": lambda conn, remote, value: conn.fetch_and_add(remote, value),
    "length": lambda conn, _, value: conn.register_dmabuf(0, value),
    "a number of seconds": lambda conn, _, value: conn.request_region(8, lease=value),
    "lease must be a number of seconds": lambda _, remote, value: remote.renew(value),
    "access must be a member of Rights": lambda conn, _, value: conn.request_region(
        8, access=value
    ),
}


async def awaited(use: Use, conn: Connection, remote: RemoteRegion, value: Any) -> None:
    made = use(conn, remote, value)
    if isinstance(made, Awaitable):
        await made


@pytest.mark.parametrize("name", USES)
async def test_non_numeric_arguments_raise_type_error(
    factory: ConnectionFactory, name: str
) -> None:
    async with factory.pair() as (client, server):
        with server.register(bytearray(8)) as region:
            await server.send_region(region, access=Rights.WRITE | Rights.ATOMIC)
            remote = await client.recv_region()
            whole = () if "seconds" in name else (1.0, np.float32(1))
            for value in (True, "1", b"1", [1], *whole):
                said = f"{name.partition(' (')[0]}.*, not {type(value).__name__}"
                with pytest.raises(TypeError, match=said):
                    await awaited(USES[name], client, remote, value)
            await client.send(b"")  # none of them costs the connection


@pytest.mark.any_device
def test_source_port_may_be_a_numpy_integer() -> None:
    assert check_source(("127.0.0.1", cast(Any, np.int64(5)))) == ("127.0.0.1", 5)
