"""Two processes that connect their queue pairs over a socket and send a message back and forth.

Usage: python examples/verbs/pingpong.py serve [PORT]
       python examples/verbs/pingpong.py connect HOST [PORT]
"""

import math
import sys
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener

from aiordma import verbs
from aiordma.verbs import Endpoint, SendFlags, WROpcode

ROUNDS, SIZE, RECV, SEND = 1000, 64, 1, 2


def pingpong(peer: Connection, begins: bool) -> None:
    with (
        verbs.open_device() as context,
        context.alloc_pd() as pd,
        context.create_cq(16) as cq,
        pd.reg_mr(bytearray(2 * SIZE)) as mr,
        pd.create_qp(cq) as qp,
    ):
        here = qp.endpoint()
        peer.send_bytes(here.pack())  # in C, a structure you define: LID, GID, qp_num, PSN
        there = Endpoint.unpack(peer.recv_bytes())
        qp.connect(here, there)  # ibv_modify_qp(3): INIT, RTR, RTS
        qp.post_recv_one(RECV, mr.addr + SIZE, SIZE, mr.lkey)
        peer.send_bytes(b"")  # the first receive is posted, so the peer may send
        peer.recv_bytes()

        def send() -> None:
            qp.post_send_one(SEND, WROpcode.SEND, SendFlags.SIGNALED, mr.addr, SIZE, mr.lkey)

        mr.buf[:4] = b"ping" if begins else b"pong"
        sent = received = 0
        if begins:
            send()
        while sent < ROUNDS or received < ROUNDS:
            for wc in cq.wait(spin=math.inf):  # ibv_poll_cq(3) until one arrives
                wc.raise_for_status()
                if wc.wr_id == SEND:
                    sent += 1
                    continue
                received += 1
                qp.post_recv_one(RECV, mr.addr + SIZE, SIZE, mr.lkey)  # before the peer may send
                if not begins or received < ROUNDS:
                    send()
        print(ROUNDS, "round trips; the last message was", bytes(mr.buf[SIZE : SIZE + 4]))
        peer.send_bytes(b"")  # keep this queue pair until the peer has finished
        peer.recv_bytes()


def serve(port: str = "18515") -> None:
    with Listener(("", int(port))) as listener:
        print("waiting on port", listener.address[1], flush=True)
        with listener.accept() as peer:
            pingpong(peer, False)


def connect(host: str, port: str = "18515") -> None:
    with Client((host, int(port))) as peer:
        pingpong(peer, True)


COMMANDS: dict[str, Callable[..., None]] = {"serve": serve, "connect": connect}
COMMANDS[sys.argv[1]](*sys.argv[2:])
