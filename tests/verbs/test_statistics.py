"""Test the statistics of devices, channels and completion queues."""

from __future__ import annotations

from aiordma import testing, verbs
from aiordma.errors import RemoteAccessError
from aiordma.verbs import SendFlags, WROpcode
from conftest import End
from tests.transport.connection_factory import ends


def test_device_statistics_count_open_objects_and_failures(
    pair: tuple[End, End], context: verbs.Context
) -> None:
    a, b = pair
    before = context.statistics()
    assert before.device == context.name
    assert before.open["QueuePair"] == 2
    with a.qp.pd.reg_mr(8):
        after = context.statistics()
        assert after.open["MemoryRegion"] == before.open["MemoryRegion"] + 1
    for number in (1, 2):
        a.qp.post_send_one(
            number, WROpcode.RDMA_READ, SendFlags.SIGNALED, a.mr.addr, 8, a.mr.lkey, b.mr.addr, 123
        )
    a.completion()
    failures = context.statistics().failures
    assert failures["REM_ACCESS_ERR"] == before.failures.get("REM_ACCESS_ERR", 0) + 1


def test_cq_statistics_count_completions_polls_and_arms(pair: tuple[End, End]) -> None:
    a, b = pair
    before = a.cq.statistics()
    assert before.entries == a.cq.cqe
    assert before.reserved == a.cq.reserved
    for number in range(3):
        a.qp.post_send_one(
            number, WROpcode.RDMA_WRITE, SendFlags.SIGNALED, a.mr.addr, 8, a.mr.lkey, b.mr.addr,
            b.mr.rkey,
        )  # fmt: skip
    a.completions(3)
    a.cq.req_notify()
    after = a.cq.statistics()
    assert after.completions == before.completions + 3
    assert after.polls > before.polls
    assert after.arms == before.arms + 1


async def test_channel_and_device_statistics_count_connection_traffic(device_name: str) -> None:
    """The connection's queue pair leads to the device, and to the channel that the event loop
    drains.
    """
    async with testing.connected_pair(device=device_name) as (client, server):
        channel = client.queue_pair.send_cq.channel
        assert channel is not None
        before = channel.statistics()
        for _ in range(10):
            await client.send(b"there")
            (await server.recv()).release()
        after = channel.statistics()
        assert after.queues >= 1
        assert after.completions >= before.completions + 10
        assert after.drains > before.drains
        context = client.queue_pair.context
        assert context.statistics().open["QueuePair"] >= 2
        failed = context.statistics().failures.get("REM_ACCESS_ERR", 0)
        with server.alloc(64) as memory:
            share = await server.send_region(memory)
            remote = await client.recv_region()
            share.revoke()
            await ends(client.read(remote, bytearray(64)), RemoteAccessError)
        assert context.statistics().failures["REM_ACCESS_ERR"] == failed + 1
