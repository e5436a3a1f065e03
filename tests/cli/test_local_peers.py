"""Tests of the facts about sharing memory between processes of one user."""

from __future__ import annotations

import errno
import os
import resource
from dataclasses import replace

import pytest

from aiordma.cli import local_peers
from aiordma.cli.local_peers import LocalPeerFacts
from tests.processes import run_python

# A program that blocks one of its system calls with seccomp(2) and prints LocalPeerFacts.
FILTERED = """
import ctypes, struct, sys
number, action = int(sys.argv[1]), int(sys.argv[2])
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, action), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
program = struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, program, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
from aiordma.cli.local_peers import LocalPeerFacts
print(LocalPeerFacts.collect())
"""
KILL = 0x80000000  # SECCOMP_RET_KILL_PROCESS
REFUSE = 0x00050000  # SECCOMP_RET_ERRNO
# System call numbers of x86-64 and of AArch64, which uses the asm-generic table.
NUMBERS = {
    "memfd_create": {"x86_64": 319, "aarch64": 279},
    "pidfd_open": {"x86_64": 434, "aarch64": 434},
    "process_vm_readv": {"x86_64": 310, "aarch64": 270},
}


def filtered(call: str, action: int) -> str:
    number = NUMBERS[call][os.uname().machine]
    done = run_python(
        "-c", FILTERED, str(number), str(action), check=True, AIORDMA_EMBEDDED_LINKS=""
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("call", "action", "field", "reason"),
    [
        ("memfd_create", REFUSE | errno.EPERM, "share_problem", "Operation not permitted"),
        ("pidfd_open", REFUSE | errno.ENOSYS, "pidfd_problem", "Function not implemented"),
        ("process_vm_readv", REFUSE | errno.EPERM, "copy_problem", "Operation not permitted"),
        ("process_vm_readv", KILL, "copy_problem", "a process that calls it is killed"),
    ],
)
def test_denied_system_call_is_reported(call: str, action: int, field: str, reason: str) -> None:
    """A call that the seccomp filter forbids is reported, and nothing else changes."""
    expected = replace(LocalPeerFacts.collect(), links="shared", **{field: f"{call}: {reason}"})
    assert filtered(call, action) == str(expected)


def test_share_problem_reports_a_low_file_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (100_000, 100_000))
    assert local_peers.share_problem() == (
        "the limit on the length of files (ulimit -f) is 100,000 bytes"
    )


def test_collected_facts_include_the_links_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIORDMA_EMBEDDED_LINKS", "tcp")
    assert LocalPeerFacts.collect().links == "tcp"
