"""Test a device without the optional calls of softdev/abi/device_calls.h, such as a card.

Everything that does not need these calls must work.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from aiordma import verbs
from aiordma._native import Library, embedded, ffi
from aiordma.errors import UnsupportedError
from aiordma.mr_pool import MemoryPool
from aiordma.verbs import SendFlags, WROpcode
from aiordma.verbs._memory.memory_region import reg_local_dma
from aiordma.verbs.experimental import efa
from tests.event_loop.test_driver import the_driver, two_ends
from tests.verbs.draining import drain

if TYPE_CHECKING:
    from conftest import ConnectedPair

pytestmark = pytest.mark.any_device

F: Any = ffi


@pytest.fixture(scope="module")
def device() -> Iterator[verbs.Device]:
    """Provide the embedded device without its optional device calls."""
    none = F.new("struct aiordma_device_calls *")
    complete: Any = embedded().table
    table = F.new("struct aiordma_calls *", complete[0])
    table.device = none
    kept = none, table
    yield replace(verbs.find_device("embedded0"), library=Library("bare", table))
    del kept


def test_device_without_optional_calls_reports_no_extensions(
    device: verbs.Device, pd: verbs.ProtectionDomain
) -> None:
    library = device.library
    assert not any(
        library.offers(name) for name, _ in F.typeof("struct aiordma_device_calls").fields
    )
    assert library.reg_own_mr is library.calls.ibv_reg_mr
    assert reg_local_dma(pd) is None
    with pytest.raises(UnsupportedError, match="fault injection"):
        device.set_faults("loss=1")
    with pytest.raises(UnsupportedError, match="SRD"):
        efa.query_device(pd.context)
    pool = MemoryPool(pd, limit=1 << 24)
    assert pool.local_dma_lkey == 0
    pool.close()


def test_drain_returns_completions_without_optional_device_calls(
    connected_pair: ConnectedPair, channel: verbs.CompletionChannel
) -> None:
    before = channel._peer_wakeups()
    one, two = connected_pair(channel=channel)
    two.cq.req_notify()
    assert not drain(channel, spin_us=50)[0]
    two.qp.post_recv_one(1, two.mr.addr, 8, two.mr.lkey)
    one.qp.post_send_one(2, WROpcode.SEND, SendFlags.SIGNALED, one.mr.addr, 8, one.mr.lkey)
    found: list[int] = []
    while not found:
        assert select.select([channel.fd], [], [], 30)[0], "the fd did not become readable in 30 s"
        found += [record[0] for record in drain(channel)[0]]
    assert found == [1]
    assert not channel._wrote_to_polling_peers(before)
    one.completion()


async def test_event_loop_handles_device_without_optional_calls(device: verbs.Device) -> None:
    async with the_driver(device) as driver, two_ends(driver) as (first, second):
        first.send(1)
        second.send(2)
        await asyncio.gather(first.sink.wait(1), second.sink.wait(1))
