"""A doorbell batch: one call posts sixteen writes, and one completion reports all of them."""

from aiordma import verbs
from aiordma.verbs import AccessFlags

COUNT, SIZE = 16, 8
RIGHTS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE

with (
    verbs.open_device() as context,
    context.alloc_pd() as pd,
    context.create_cq(64) as cq,
    pd.reg_mr(bytearray(range(COUNT * SIZE))) as source,
    pd.reg_mr(bytearray(COUNT * SIZE), RIGHTS) as target,  # access rights for the peer
    pd.create_qp(cq, capabilities=verbs.QPCapabilities(max_send_wr=COUNT)) as qp,
):
    here = qp.endpoint()
    qp.connect(here, here, access=RIGHTS)  # the queue pair must also grant the rights

    with qp.batch() as batch:  # a list of struct ibv_send_wr, linked by `next`
        for number in range(COUNT):
            there = target.addr + (COUNT - 1 - number) * SIZE  # in reverse order
            batch.write(
                [source.sge(number * SIZE, SIZE)],  # struct ibv_sge
                there,  # wr.rdma.remote_addr
                target.rkey,  # wr.rdma.rkey
                wr_id=number,
                signaled=number == COUNT - 1,  # IBV_SEND_SIGNALED
            )
    # On exit, the `with` block posted the whole list with one call of ibv_post_send(3).

    while not (completions := cq.poll()):  # ibv_poll_cq(3)
        pass
    completions[0].raise_for_status()
    pieces = [bytes(source.buf[at : at + SIZE]) for at in range(0, COUNT * SIZE, SIZE)]
    print("completions:", [wc.wr_id for wc in completions])
    print("written in reverse order:", bytes(target.buf) == b"".join(reversed(pieces)))
    print("free send queue entries:", qp.free_send_slots)
