"""A server that uses the connection manager without an event loop and responds to one message.

Usage: python examples/verbs/cm_server.py [HOST [PORT]]

The server listens on HOST (default: all addresses of the device) and PORT (default: 7474).
"""

import select
import sys

from aiordma import cm, verbs
from aiordma.cm import EventType
from aiordma.verbs import SendFlags, WROpcode


def next_event(channel: cm.EventChannel, wanted: EventType) -> cm.ConnectionEvent:
    while (event := channel.get_event()) is None:  # rdma_get_cm_event(3), rdma_ack_cm_event(3)
        select.select([channel.fd], [], [])
    if event.type is not wanted:
        raise event.error() or RuntimeError(f"{event.type.name} instead of {wanted.name}")
    return event


def main(host: str = "0.0.0.0", port: str = "7474") -> None:
    library = verbs.find_device().library
    # rdma_create_event_channel(3), rdma_create_id(3)
    with cm.EventChannel(library) as channel, channel.create_id() as listener:
        listener.bind_addr((host, int(port)))  # rdma_bind_addr(3)
        listener.listen()  # rdma_listen(3)
        assert listener.local_address is not None  # rdma_get_local_addr(3)
        print("listening on port", listener.local_address[1], flush=True)

        request = next_event(channel, EventType.CONNECT_REQUEST)
        context = request.id.context  # id->verbs: the device that the client reached
        assert context is not None
        with (
            request.id as id,
            context.alloc_pd() as pd,
            context.create_comp_channel() as completions,
            context.create_cq(16, completions) as cq,
            pd.reg_mr(bytearray(64)) as mr,
        ):
            qp = id.create_qp(pd, cq)  # rdma_create_qp(3)
            qp.post_recv_one(1, mr.addr, 64, mr.lkey)  # before the client can send
            id.accept(cm.ConnectionParameters(b"welcome"))  # rdma_accept(3)
            next_event(channel, EventType.ESTABLISHED)

            (wc,) = cq.wait(1)  # ibv_req_notify_cq(3), ibv_get_cq_event(3), ibv_poll_cq(3)
            wc.raise_for_status()
            message = bytes(mr.buf[: wc.byte_len])
            print("received:", message)
            mr.buf[: len(message)] = message.upper()
            qp.post_send_one(
                2, WROpcode.SEND, SendFlags.SIGNALED, mr.addr, len(message), mr.lkey
            )  # ibv_post_send(3)
            (wc,) = cq.wait(1)
            wc.raise_for_status()

            next_event(channel, EventType.DISCONNECTED)
            id.disconnect()  # rdma_disconnect(3), called by both ends
            print("disconnected")


main(*sys.argv[1:])
