"""A shared receive queue (SRQ) that reports when it runs low, so that the program can refill it."""

import select
from contextlib import ExitStack

from aiordma import verbs
from aiordma.verbs import EventType, SendFlags, WROpcode

QUEUE_PAIRS, RECEIVES, LOW, SIZE = 3, 8, 4, 16

with ExitStack() as stack:
    context = stack.enter_context(verbs.open_device())
    pd = stack.enter_context(context.alloc_pd())
    cq = stack.enter_context(context.create_cq(64))
    srq = stack.enter_context(pd.create_srq(RECEIVES))  # ibv_create_srq(3)
    mr = stack.enter_context(pd.reg_mr(bytearray((RECEIVES + 1) * SIZE)))
    message = mr.addr + RECEIVES * SIZE  # after the receives

    def post(number: int) -> None:
        srq.post_recv_one(number, mr.addr + number * SIZE, SIZE, mr.lkey)  # ibv_post_srq_recv(3)

    for number in range(RECEIVES):
        post(number)
    srq.modify(srq_limit=LOW)  # ibv_modify_srq(3) with IBV_SRQ_LIMIT: one event

    qps = []
    for _ in range(QUEUE_PAIRS):
        qp = stack.enter_context(pd.create_qp(cq, srq=srq))  # ibv_create_qp(3) with `srq`
        here = qp.endpoint()
        qp.connect(here, here)  # each queue pair to itself
        qps.append(qp)

    taken: list[int] = []  # receives used by messages
    events: list[verbs.AsyncEvent] = []
    for sent in range(RECEIVES - LOW + 1):
        qp = qps[sent % QUEUE_PAIRS]
        qp.post_send_one(RECEIVES, WROpcode.SEND, SendFlags.SIGNALED, message, SIZE, mr.lkey)
        ends: list[int] = []
        while len(ends) < 2:  # the send and the receive that it used
            for wc in cq.poll():
                wc.raise_for_status()
                ends.append(wc.wr_id)  # wc.qp_num is the receiving queue pair
        taken += [wr_id for wr_id in ends if wr_id < RECEIVES]
    while not events:
        select.select([context.async_fd], [], [])
        events = context.async_events()  # ibv_get_async_event(3), ibv_ack_async_event(3)
    (event,) = events
    if event.type is EventType.SRQ_LIMIT_REACHED and event.element is srq:
        print("fewer than", LOW, "receives remain:", RECEIVES - len(taken))
        for number in taken:
            post(number)
        srq.modify(srq_limit=LOW)  # request the next event
        print("reposted:", len(taken), "- limit rearmed:", srq.query().srq_limit)
