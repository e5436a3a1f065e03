"""Tests of the single fork hook, which runs every registered function in the child."""

from __future__ import annotations

import os
import socket

import pytest

from aiordma._native import fork
from tests.processes import run_python

pytestmark = pytest.mark.any_device

PROGRAM = """
import os
from aiordma._native import fork

fork.reset_in_child(lambda: print("first", flush=True))
fork.reset_in_child(lambda: 1 / 0)
fork.reset_in_child(lambda: print("last", flush=True))
if child := os.fork():
    os.waitpid(child, 0)
print(fork.generation(), flush=True)
"""


def test_every_fork_reset_runs_in_order() -> None:
    done = run_python("-c", PROGRAM, check=True)
    assert done.stdout == "first\nlast\n1\n0\n"
    assert "ZeroDivisionError" in done.stderr


def test_registered_socket_is_replaced_in_the_child() -> None:
    """Another file that has since received the number of a closed socket is not replaced."""
    here, there = socket.socketpair()
    closed, other = socket.socketpair()
    kept = fork.register_socket(here.fileno())
    stale = fork.register_socket(closed.fileno())
    number = closed.fileno()
    closed.close()
    readable, writable = os.pipe()
    os.dup2(readable, number)
    if not (child := os.fork()):
        same = os.fstat(number).st_ino == os.fstat(readable).st_ino
        os._exit(os.readlink(f"/proc/self/fd/{here.fileno()}") == os.devnull and same)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    for inode in (kept, stale, stale):
        fork.unregister_socket(inode)
    for fd in {readable, writable, number}:
        os.close(fd)
    for end in (here, there, other):
        end.close()
