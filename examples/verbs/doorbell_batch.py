"""A doorbell batch: sixteen writes are posted by one call, and one completion reports them all."""

from aiordma import verbs
from aiordma.verbs import AccessFlags

COUNT, SIZE = 16, 8
RIGHTS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE

with (
    verbs.open_device() as context,
    context.alloc_pd() as pd,
    context.create_cq(64) as cq,
    pd.reg_mr(bytearray(range(COUNT * SIZE))) as source,
    pd.reg_mr(bytearray(COUNT * SIZE), RIGHTS) as target,  # the rights of a peer
    pd.create_qp(cq, capabilities=verbs.QPCapabilities(max_send_wr=COUNT)) as qp,
):
    here = qp.endpoint()
    qp.connect(here, here, access=RIGHTS)  # the queue pair must give the peer the right as well

    with qp.batch() as batch:  # a list of struct ibv_send_wr, linked by `next`
        for number in range(COUNT):
            there = target.addr + (COUNT - 1 - number) * SIZE  # the last piece first
            batch.write(
                [source.sge(number * SIZE, SIZE)],  # struct ibv_sge
                there,  # wr.rdma.remote_addr
                target.rkey,  # wr.rdma.rkey
                wr_id=number,
                signaled=number == COUNT - 1,  # IBV_SEND_SIGNALED
            )
    # The end of `with` has called ibv_post_send(3) once, with the first of the list.

    while not (completions := cq.poll()):  # ibv_poll_cq(3)
        pass
    completions[0].raise_for_status()
    pieces = [bytes(source.buf[at : at + SIZE]) for at in range(0, COUNT * SIZE, SIZE)]
    print("completions:", [wc.wr_id for wc in completions])
    print("written in the other order:", bytes(target.buf) == b"".join(reversed(pieces)))
    print("free entries of the send queue:", qp.free_send_slots)
