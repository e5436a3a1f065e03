"""Transfer memory with NIXL and its UCX backend.

Run `python nixl_transfer.py target|READ|WRITE PORT`.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import numpy as np

nixl: Any = import_module("nixl._api")
meeting: Any = import_module("meeting")  # beside this file
role, port = sys.argv[1], int(sys.argv[2])
agent = nixl.nixl_agent(role, nixl.nixl_agent_config(backends=["UCX"]))
memory = np.full(meeting.SIZE, meeting.BEFORE if role == "target" else meeting.AFTER, np.uint8)
address = memory.ctypes.data
registered = agent.register_memory([(address, meeting.SIZE, 0, "")], mem_type="DRAM")


def transfer(about: tuple[str, int]) -> None:
    metadata, there = about
    peer = agent.add_remote_agent(bytes.fromhex(metadata))
    handle = agent.initialize_xfer(
        role,
        agent.get_xfer_descs([(address, meeting.SIZE, 0)], mem_type="DRAM"),
        agent.get_xfer_descs([(there, meeting.SIZE, 0)], mem_type="DRAM"),
        peer,
    )
    state = agent.transfer(handle)
    while state != "DONE":
        if state == "ERR":
            sys.exit("the transfer failed")
        state = agent.check_xfer_state(handle)
    agent.release_xfer_handle(handle)


if role == "target":
    meeting.serve(port, (agent.get_agent_metadata().hex(), address))
    print("written" if (memory == meeting.AFTER).all() else "untouched")
else:
    meeting.initiate(port, transfer)
    print("read" if (memory == meeting.BEFORE).all() else "unchanged")
agent.deregister_memory(registered)
if os.environ["UCX_TLS"].startswith("tcp"):
    # Exit without running destructors. After UCX has used TCP, a destructor of the wheel's libnl
    # crashes (rtnl_tc_unregister).
    sys.stdout.flush()
    os._exit(0)
