"""Test that asynchronous events are taken without waiting, acknowledged, and routed to their
objects.
"""

from __future__ import annotations

import gc
import select
import warnings
from typing import TYPE_CHECKING

import pytest

from aiordma import verbs
from aiordma.verbs import AsyncEvent, EventType, QPCapabilities, QPState, SendFlags, WROpcode

if TYPE_CHECKING:
    from conftest import ConnectedPair, End


def next_event(context: verbs.Context, timeout: float = 30) -> AsyncEvent:
    """Wait up to ``timeout`` seconds for an event and return it. No second event may be pending."""
    while not (events := context.async_events()):
        if not select.select([context.async_fd], [], [], timeout)[0]:
            pytest.fail(f"no event within {timeout} s")
    assert len(events) == 1, events
    return events[0]


def test_completion_queue_overrun_reports_cq_err(
    context: verbs.Context, connected_pair: ConnectedPair
) -> None:
    """IBTA volume 1, clause 11.6.3.2 requires the event.

    Reserved entries normally prevent an overrun.

    The test therefore makes the queues smaller without updating aiordma's count of their entries.
    """
    one, two = connected_pair(QPCapabilities(max_send_wr=600, max_recv_wr=600))
    for end in (one, two):
        context.library.calls.ibv_resize_cq(end.cq.pointer, 256)
    for wr_id in range(one.cq.pointer.cqe + 1):  # one more than one.cq holds, without polling it
        two.qp.post_recv_one(wr_id, 0, 0, 0)
        one.qp.post_send_one(wr_id, WROpcode.SEND, SendFlags.SIGNALED, 0, 0, 0)
        two.cq.poll()
    overrun: list[object] = []
    while not any(element is one.cq for element in overrun):  # the CQ of two may overrun too
        assert select.select([context.async_fd], [], [], 30)[0]
        overrun += [e.element for e in context.async_events() if e.type is EventType.CQ_ERR]
    assert {type(element) for element in overrun} == {verbs.CompletionQueue}


def test_event_element_is_none_after_the_queue_pair_is_collected(context: verbs.Context) -> None:
    pd, cq = context.alloc_pd(), context.create_cq(16)
    qp = pd.create_qp(cq)
    mine = qp.endpoint()
    qp.connect(mine, mine)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        qp.modify(qp_state=QPState.SQD, en_sqd_async_notify=True)
        del qp
        gc.collect()
    assert next_event(context) == AsyncEvent(EventType.SQ_DRAINED, None)
    pd.close()
    cq.close()


def test_queue_pair_closes_with_events_pending(
    context: verbs.Context, pair: tuple[End, End]
) -> None:
    """ibv_destroy_qp waits for events that were taken but not acknowledged, so aiordma must leave
    none.
    """
    one, _ = pair
    one.qp.modify(qp_state=QPState.SQD, en_sqd_async_notify=True)
    assert select.select([context.async_fd], [], [], 30)[0]
    one.qp.close()
    assert all(event.element is None for event in context.async_events())
