"""Test that an ENOMEM of a registration names the limit on locked memory if that is the reason."""

from __future__ import annotations

import errno
import re
import resource

import pytest

from aiordma import verbs
from aiordma._native import failure
from aiordma.verbs._memory import memlock
from tests.processes import run_python

# The child limits locked memory to 1 MiB and drops CAP_IPC_LOCK. It then executes itself again,
# because the drop takes effect at the next exec (capabilities(7)).
CHILD = """
import ctypes, os, resource, sys

PR_CAPBSET_DROP, CAP_IPC_LOCK = 24, 14
if sys.argv[1] == "drop":
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
    if os.geteuid() == 0:  # other users do not have it
        assert ctypes.CDLL(None, use_errno=True).prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0) == 0
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:-2], "go", sys.argv[2]])

from aiordma import verbs

with verbs.open_device(sys.argv[2]) as context, context.alloc_pd() as pd:
    with pd.reg_mr(64 << 10):
        try:
            with pd.reg_mr(8 << 20):
                print("registered")
        except OSError as error:
            print(error.errno, error)
"""


def test_failed_registration_reports_the_memlock_limit(device: verbs.Device) -> None:
    """rdma_rxe pins pages as a card does.

    The embedded device pins none, so the limit does not apply to it.
    """
    done = run_python("-c", CHILD, "drop", device.name, check=True)
    if device.library.name == "embedded":
        assert done.stdout == "registered\n"
        return
    code, _, text = done.stdout.partition(" ")
    assert int(code) == errno.ENOMEM, done
    for part in (
        "ibv_reg_mr: ",
        "cannot register 8388608 bytes",
        "limit on locked memory (RLIMIT_MEMLOCK) of this process is 1048576 bytes",
        "ulimit -l",
        "limits.conf",
        "LimitMEMLOCK=",
    ):
        assert part in text
    assert re.search(r"\d+ kB are already pinned", text)


@pytest.mark.parametrize(
    ("soft", "capabilities", "reason"),
    [
        (1 << 20, 0, "of this process is 1048576 bytes (hard limit: 1048576 bytes), and 12 kB are"),
        (1 << 20, 1 << 14, "this process has CAP_IPC_LOCK"),
        (-1, 0, "is unlimited; the machine is out of memory"),
    ],
)
def test_locked_memory_hint_explains_the_cause(
    monkeypatch: pytest.MonkeyPatch, soft: int, capabilities: int, reason: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, soft))
    assert memlock._status()["VmPin"].endswith(" kB")
    assert memlock.locked_memory_hint(failure("ibv_reg_mr", errno.EINVAL)) == ""
    status = {"CapEff": f"{capabilities:016x}", "VmPin": "12 kB"}
    monkeypatch.setattr(memlock, "_status", lambda: status)
    text = memlock.locked_memory_hint(failure("ibv_reg_mr", errno.ENOMEM))
    assert reason in text
