"""Test a process without free file descriptors, whose device cannot reach a peer by sockets."""

from __future__ import annotations

import subprocess
import sys

from aiordma import verbs
from aiordma.verbs import AccessFlags, Endpoint
from conftest import EMBEDDED

# The child uses up its file descriptors, connects its queue pair, and writes to the peer.
CHILD = """
import os, resource, sys
from aiordma import verbs
from aiordma.verbs import Endpoint, SendFlags, WROpcode

device, remote, address, rkey = sys.argv[1:]
with verbs.open_device(device) as context, context.alloc_pd() as pd, context.create_cq(4) as cq:
    with pd.reg_mr(8) as mr, pd.create_qp(cq) as qp:
        here = qp.endpoint()
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        try:
            while True:
                os.dup(0)
        except OSError:
            print(here.pack().hex(), flush=True)
        sys.stdin.readline()
        qp.connect(here, Endpoint.unpack(bytes.fromhex(remote)), timeout=0.01, retry_cnt=2)
        qp.post_send_one(
            1, WROpcode.RDMA_WRITE, SendFlags.SIGNALED, mr.addr, 8, mr.lkey, int(address), int(rkey)
        )
        while not (found := cq.poll()):
            pass
        print(found[0].error())
"""


def test_retry_exceeded_error_reports_the_open_files_limit(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue
) -> None:
    device = pd.context.name
    rights = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
    with pd.reg_mr(8, rights) as mr, pd.create_qp(cq) as qp:
        here = qp.endpoint()
        arguments = [device, here.pack().hex(), str(mr.addr), str(mr.rkey)]
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stdout is not None
            there = Endpoint.unpack(bytes.fromhex(child.stdout.readline()))
            qp.connect(here, there, access=AccessFlags.REMOTE_WRITE)
            said, _ = child.communicate("connected\n", timeout=60)
    if device != EMBEDDED:
        assert said == "None\n"  # other devices need no sockets
    else:
        assert "(IBV_WC_RETRY_EXC_ERR)" in said
        hint = "the limit on open files (RLIMIT_NOFILE) of this process is 64 "
        assert f"; this process cannot open more files: {hint}" in said
