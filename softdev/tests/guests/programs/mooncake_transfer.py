"""Transfer memory with Mooncake's transfer engine.

Run `python mooncake_transfer.py target|initiator PORT rdma|tcp`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import numpy as np

mooncake: Any = import_module("mooncake.engine")
meeting: Any = import_module("meeting")  # beside this file
role, port, protocol = sys.argv[1], int(sys.argv[2]), sys.argv[3]
engine = mooncake.TransferEngine()
device = "embedded0" if protocol == "rdma" else ""
memory = np.full(meeting.SIZE, meeting.BEFORE if role == "target" else meeting.AFTER, np.uint8)
address = memory.ctypes.data
if engine.initialize("127.0.0.1", "P2PHANDSHAKE", protocol, device):
    sys.exit("the engine does not start")
if engine.register_memory(address, meeting.SIZE):
    sys.exit("the memory is not registered")


def transfer(about: tuple[int, int]) -> None:
    there, target = about
    if engine.transfer_sync_write(f"127.0.0.1:{there}", address, target, meeting.SIZE):
        sys.exit("the transfer failed")


if role == "target":
    meeting.serve(port, (engine.get_rpc_port(), address))
    print("written" if (memory == meeting.AFTER).all() else "untouched")
else:
    meeting.initiate(port, transfer)
engine.unregister_memory(address)
