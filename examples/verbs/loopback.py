"""Loopback: a reliable queue pair (RC) that is connected to itself and sends itself a message."""

from aiordma import verbs
from aiordma.verbs import SendFlags, WROpcode

with (
    verbs.open_device() as context,  # ibv_get_device_list(3), ibv_open_device(3)
    context.alloc_pd() as pd,  # ibv_alloc_pd(3)
    context.create_cq(16) as cq,  # ibv_create_cq(3)
    pd.reg_mr(bytearray(64)) as mr,  # ibv_reg_mr(3), which pins the bytearray
    pd.create_qp(cq) as qp,  # ibv_create_qp(3)
):
    # An endpoint contains the address, queue pair number and first PSN that a peer needs. In a real
    # program, send here.pack() to the peer over any channel. This queue pair is its own peer.
    here = qp.endpoint()  # ibv_query_port(3), ibv_query_gid(3)
    qp.connect(here, here)  # ibv_modify_qp(3) three times: to INIT, RTR and RTS

    qp.post_recv_one(1, mr.addr + 32, 32, mr.lkey)  # ibv_post_recv(3)
    mr.buf[:5] = b"hello"
    qp.post_send_one(2, WROpcode.SEND, SendFlags.SIGNALED, mr.addr, 5, mr.lkey)  # ibv_post_send(3)

    done: dict[int, verbs.WorkCompletion] = {}
    while len(done) < 2:
        for wc in cq.poll():  # ibv_poll_cq(3)
            wc.raise_for_status()
            done[wc.wr_id] = wc
    print("sent:", done[2].status.name)
    print("received:", done[1].byte_len, bytes(mr.buf[32 : 32 + done[1].byte_len]))
# On exit, the `with` block closes the objects in reverse order, with ibv_destroy_qp(3),
# ibv_dereg_mr(3), ibv_destroy_cq(3), ibv_dealloc_pd(3) and ibv_close_device(3).
