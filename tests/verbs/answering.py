"""A process that answers one datagram, knowing nothing of the sender but what came with it.

Run as ``python -m tests.verbs.answering DEVICE``. It prints its endpoint, receives a message whose
immediate data is the sender's Q_Key, and sends it back reversed; then it waits for the end of its
standard input.
"""

from __future__ import annotations

import sys

from aiordma import verbs
from aiordma.verbs import (
    GRH_SIZE,
    Destination,
    QPCapabilities,
    QPType,
    ScatterGatherElement,
    WorkCompletion,
)


def completion(cq: verbs.CompletionQueue) -> WorkCompletion:
    # Bounded: the parent may have been killed.
    (found,) = cq.wait(1, timeout=120)
    assert found.ok, found.error()
    return found


def answer(device: str) -> None:
    with (
        verbs.find_device(device).open() as context,
        context.alloc_pd() as pd,
        context.create_comp_channel() as channel,
        context.create_cq(4, channel) as cq,
        pd.reg_mr(4096) as mr,
        pd.create_qp(cq, capabilities=QPCapabilities(), qp_type=QPType.UD) as qp,
    ):
        endpoint = qp.endpoint()
        qp.start(endpoint)
        qp.post_recv_one(1, mr.addr, mr.length, mr.lkey)
        print(endpoint.pack().hex(), flush=True)
        asked = completion(cq)
        length = asked.byte_len - GRH_SIZE
        mr.buf[2048 : 2048 + length] = bytes(mr.buf[GRH_SIZE : asked.byte_len])[::-1]
        assert asked.imm_data is not None
        with pd.create_ah_from_wc(asked, mr.buf[:GRH_SIZE]) as ah:
            piece = ScatterGatherElement(mr.addr + 2048, length, mr.lkey)
            with qp.batch() as batch:
                batch.send([piece], to=Destination(ah, asked.src_qp, asked.imm_data))
            completion(cq)
        sys.stdin.read()


if __name__ == "__main__":
    answer(sys.argv[1])
