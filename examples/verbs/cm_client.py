"""A client for cm_server.py that uses the connection manager without an event loop.

Usage: python examples/verbs/cm_client.py HOST [PORT]
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


def main(host: str, port: str = "7474") -> None:
    library = verbs.find_device().library
    with cm.EventChannel(library) as channel, channel.create_id() as id:
        id.resolve_addr((host, int(port)), timeout=2)  # rdma_resolve_addr(3); milliseconds in C
        next_event(channel, EventType.ADDR_RESOLVED)
        id.resolve_route(timeout=2)  # rdma_resolve_route(3)
        next_event(channel, EventType.ROUTE_RESOLVED)

        context = id.context  # id->verbs: the device with a route to the server
        assert context is not None
        with (
            context.alloc_pd() as pd,
            context.create_comp_channel() as completions,
            context.create_cq(16, completions) as cq,
            pd.reg_mr(bytearray(128)) as mr,
        ):
            qp = id.create_qp(pd, cq)  # rdma_create_qp(3)
            qp.post_recv_one(1, mr.addr + 64, 64, mr.lkey)  # before the server can respond
            id.connect()  # rdma_connect(3)
            established = next_event(channel, EventType.ESTABLISHED)
            print("the server said:", established.private_data.rstrip(b"\0"))

            mr.buf[:5] = b"hello"
            qp.post_send_one(2, WROpcode.SEND, SendFlags.SIGNALED, mr.addr, 5, mr.lkey)
            for _ in "send", "receive":
                (wc,) = cq.wait(1)
                wc.raise_for_status()
            print("response:", bytes(mr.buf[64:69]))
            id.disconnect()  # rdma_disconnect(3)
            next_event(channel, EventType.DISCONNECTED)


main(*sys.argv[1:])
