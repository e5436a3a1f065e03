"""An event loop that serves many queue pairs by waiting on one completion channel's descriptor."""

import asyncio
from contextlib import ExitStack

from aiordma import verbs
from aiordma.verbs import SendFlags, WROpcode

QUEUE_PAIRS, MESSAGES, RECV, SEND = 3, 100, 1, 2
Waiting = dict[tuple[int, int], asyncio.Future[verbs.WorkCompletion]]


def readable(channel: verbs.CompletionChannel, waiting: Waiting) -> None:
    while (cq := channel.get_event()) is not None:  # ibv_get_cq_event(3), ibv_ack_cq_events(3)
        cq.req_notify()  # ibv_req_notify_cq(3): arm first, then poll until the queue is empty
        while completions := cq.poll():  # ibv_poll_cq(3)
            for wc in completions:
                waiting.pop((wc.qp_num, wc.wr_id)).set_result(wc)


async def count(qp: verbs.QueuePair, mr: verbs.MemoryRegion, waiting: Waiting) -> int:
    """Send numbers one at a time, and return the sum of the numbers received."""
    loop, total = asyncio.get_running_loop(), 0
    for number in range(MESSAGES):
        both = [loop.create_future(), loop.create_future()]
        waiting[qp.qp_num, RECV], waiting[qp.qp_num, SEND] = both
        qp.post_recv_one(RECV, mr.addr + 8, 8, mr.lkey)  # ibv_post_recv(3)
        mr.buf[:8] = number.to_bytes(8)
        qp.post_send_one(SEND, WROpcode.SEND, SendFlags.SIGNALED, mr.addr, 8, mr.lkey)
        for wc in await asyncio.gather(*both):
            wc.raise_for_status()
        total += int.from_bytes(mr.buf[8:16])
    return total


async def main() -> None:
    loop = asyncio.get_running_loop()
    waiting: Waiting = {}
    with ExitStack() as stack:
        context = stack.enter_context(verbs.open_device())
        pd = stack.enter_context(context.alloc_pd())
        channel = stack.enter_context(context.create_comp_channel())  # ibv_create_comp_channel(3)
        counts = []
        for _ in range(QUEUE_PAIRS):
            cq = stack.enter_context(context.create_cq(16, channel))
            cq.req_notify()
            mr = stack.enter_context(pd.reg_mr(bytearray(16)))
            qp = stack.enter_context(pd.create_qp(cq))
            here = qp.endpoint()
            qp.connect(here, here)
            counts.append(count(qp, mr, waiting))
        loop.add_reader(channel.fd, readable, channel, waiting)  # epoll_ctl(2) on channel->fd
        print("sums:", await asyncio.gather(*counts))
        loop.remove_reader(channel.fd)


asyncio.run(main())
