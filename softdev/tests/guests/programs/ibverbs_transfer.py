"""Transfer 16 MiB by WRITE or READ with PyPI's ibverbs, which opens libibverbs with dlopen.

Run `ibverbs_transfer.py target PORT`, then `ibverbs_transfer.py WRITE PORT`.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from importlib import import_module
from typing import Any

ib: Any = import_module("ibverbs")
meeting: Any = import_module("meeting")  # beside this file

ACCESS = ib.AccessFlags.LOCAL_WRITE | ib.AccessFlags.REMOTE_WRITE | ib.AccessFlags.REMOTE_READ
PORT, GID_INDEX = 1, 0


def main() -> None:
    operation, port = sys.argv[1], int(sys.argv[2])
    target = operation == "target"
    memory = mmap.mmap(-1, meeting.SIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(address, meeting.BEFORE if target else meeting.AFTER, meeting.SIZE)
    with ib.get_device_list()[0].open() as context, context.alloc_pd() as pd:
        cq = context.create_cq(16)
        mr = pd.reg_mr(address, meeting.SIZE, ACCESS)
        qp = pd.create_qp(ib.QPInitAttr(send_cq=cq, recv_cq=cq, qp_type=ib.QPType.RC))
        gid = context.query_gid(PORT, GID_INDEX)
        info = ib.local_qp_info(qp, context.query_port(PORT), gid, port=PORT)
        own = {"qp": info.to_bytes().hex(), "address": address, "rkey": mr.rkey}

        def meet(peer: Any) -> object:
            remote = ib.QPInfo.from_bytes(bytes.fromhex(peer["qp"]))
            ib.connect_rc(qp, remote, port=PORT, sgid_index=GID_INDEX, access=ACCESS)
            return own

        def transfer(peer: Any) -> None:
            request = ib.SendWR(
                wr_id=1,
                sg_list=[ib.SGE(mr, meeting.SIZE)],
                opcode=getattr(ib.WROpcode, f"RDMA_{operation}"),
                send_flags=ib.SendFlags.SIGNALED,
                remote_addr=peer["address"],
                rkey=peer["rkey"],
            )
            qp.post_send(request)
            while not (done := cq.poll(1)):
                pass
            done[0].raise_for_status()

        if target:
            meeting.serve(port, own, meet)
            print("written" if memory[-1] == meeting.AFTER else "not written")
        else:
            meeting.initiate(port, transfer, meet)
            if operation == "READ":
                print("read" if memory[-1] == meeting.BEFORE else "not read")
        sys.stdout.flush()
        qp.close()
        mr.close()
        cq.close()


main()
