"""Tests of several embedded devices in one process: AIORDMA_EMBEDDED_DEVICES.

The number of devices is fixed for each process, so every test runs a program.
``softdev/tests/soft/test_devices.c`` tests how their queue pairs work together.
"""

from __future__ import annotations

import textwrap

import pytest

from .processes import run_python

BEGIN = """
import asyncio
from aiordma import connect, listen, testing, verbs
from aiordma._native import lib
from aiordma.errors import VerbsError
from aiordma.verbs import EventType

def state(device):
    with device.open() as context:
        return context.query_port(1).state.name

async def echo(host, to=None, **named):
    '''The devices of both ends.'''
    async with await listen(host, 0) as listener:
        accepting = asyncio.create_task(anext(aiter(listener)))
        async with await connect(to or host, listener.port, **named) as client:
            async with await accepting as server:
                await client.send(b"there")
                await server.send(bytes(await server.recv()))
                assert bytes(await client.recv()) == b"there"
                return client.device, server.device, client.wire
"""


def printed(program: str, **environment: str) -> str:
    environment = {"AIORDMA_EMBEDDED_DEVICES": "2", **environment}
    done = run_python("-W", "error", "-c", BEGIN + textwrap.dedent(program), **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_devices_can_be_found_by_name_address_and_guid() -> None:
    assert printed("""
        one, two = verbs.devices()
        assert two.guid != one.guid and verbs.find_device(guid=two.guid) == two
        print(one.name, two.name, verbs.find_device(ip="127.0.0.2").name)
        with verbs.open_device() as context:
            print(context.name, *[entry.gid.ip for entry in context.query_gid_table()])
    """, AIORDMA_DEVICE="embedded1").splitlines() == [
        "embedded0 embedded1 embedded1",
        "embedded1 127.0.0.2",
    ]  # fmt: skip


def test_doctor_describes_the_first_device() -> None:
    assert printed("""
        from aiordma.cli.doctor_facts import Facts
        print(Facts.collect().embedded.name)
    """, AIORDMA_DEVICE="embedded1") == "embedded0\n"  # fmt: skip


@pytest.mark.parametrize("links", ["shared", "tcp"])
def test_connect_and_listen_select_the_device_by_address(links: str) -> None:
    wire = {"shared": "shared memory", "tcp": "tcp"}[links]
    assert printed("""
        print(*asyncio.run(echo("127.0.0.1")), sep=", ")
        print(*asyncio.run(echo("127.0.0.2", device="embedded1")), sep=", ")
        print(*asyncio.run(echo("127.0.0.2", source=("127.0.0.1", 0))), sep=", ")
        print(*asyncio.run(echo("0.0.0.0", "127.0.0.2")), sep=", ")
    """, AIORDMA_DEVICE="", AIORDMA_EMBEDDED_LINKS=links).splitlines() == [
        f"embedded0, embedded0, {wire}",
        f"embedded1, embedded1, {wire}",
        f"embedded0, embedded1, {wire}",
        f"embedded1, embedded1, {wire}",
    ]  # fmt: skip


def test_port_state_and_faults_are_separate_for_each_device() -> None:
    assert printed("""
        lib.aiordma_embedded_raise_on(b"embedded0", EventType.PORT_ERR)
        print(*map(state, verbs.devices()))
        print(*asyncio.run(echo("127.0.0.2", device="embedded1"))[:2])
        lib.aiordma_embedded_raise_on(b"embedded0", EventType.PORT_ACTIVE)
        for name in "embedded1", None:
            with testing.faults(device=name, seed=1, register="@1-") as faults:
                for device in verbs.devices():
                    with device.open() as context, context.alloc_pd() as pd:
                        try:
                            pd.reg_mr(bytearray(64)).close()
                            print("registered")
                        except VerbsError as error:
                            print(error.errno)
            print(faults.plan, faults.counts().registrations)
    """, AIORDMA_DEVICE="").splitlines() == [
        "DOWN ACTIVE",
        "embedded1 embedded1",
        "registered",
        "12",
        "seed=1,register=@1-,device=embedded1 1",
        "12",
        "12",
        "seed=1,register=@1- 2",
    ]  # fmt: skip


def test_memory_is_registered_on_demand_with_a_second_device() -> None:
    """The lkey of another device's domain is refused. The key to all memory is disabled here."""
    assert printed("""
        from aiordma import MemoryPool, mr_pool
        from aiordma._datapath.keys import ReadKeys
        mr_pool.reg_local_dma = lambda _: None
        home, other = (device.open().alloc_pd() for device in verbs.devices())
        pool, keys = MemoryPool(home, limit=1 << 24), ReadKeys(MemoryPool(other, limit=1 << 24))
        cq = other.context.create_cq(16)
        with pool.alloc(64) as source, pool.alloc(64) as target:
            source.view[:] = bytes(range(64))
            for lkey in (source.lkey, keys.local_key(source.pinned)):
                one, two = (other.create_qp(cq, cq) for _ in range(2))
                ends = one.endpoint(), two.endpoint()
                one.connect(*ends)
                two.connect(*ends[::-1])
                two.post_recv_one(1, target.address, 64, keys.local_key(target.pinned))
                one.post_send_one(
                    2, verbs.WROpcode.SEND, verbs.SendFlags.SIGNALED, source.address, 64, lkey
                )
                found = []
                while 2 not in [wc.wr_id for wc in found]:
                    found += cq.poll(4)
                print(*[wc.status.name for wc in found if wc.wr_id == 2], sum(target.view))
                one.close()
                two.close()
        for pd in (home, other):
            pd.context.close()
    """, AIORDMA_DEVICE="").splitlines() == ["LOC_PROT_ERR 0", "SUCCESS 2016"]  # fmt: skip
