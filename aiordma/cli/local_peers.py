"""Checks for the shared memory and CMA that `embedded0` uses between one user's processes."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import subprocess
import sys
from dataclasses import dataclass

SHARED_BYTES = 24576 + 2 * (1 << 20)  # size of the memory that two processes share

# A program that copies 8 bytes from its parent's memory and prints the errno value. Only this
# direction shows whether cross-memory attach is allowed, because a parent may always copy from its
# child.
COPY_PROGRAM = """
import ctypes, os, sys
class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
there = Piece(int(sys.argv[1]), 8)
word = ctypes.create_string_buffer(8)
here = Piece(ctypes.addressof(word), 8)
copy = ctypes.CDLL(None, use_errno=True).process_vm_readv
pieces = [ctypes.c_void_p, ctypes.c_ulong]
copy.argtypes = [ctypes.c_int, *pieces, *pieces, ctypes.c_ulong]
copy.restype = ctypes.c_ssize_t
done = copy(os.getppid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
print(0 if done == 8 else ctypes.get_errno())
"""


@dataclass(frozen=True, slots=True)
class LocalPeerFacts:
    """How `embedded0` can exchange data with other processes on this machine.

    Each ``*_problem`` attribute is the reason that a mechanism does not work, or an empty string if
    the mechanism works.
    """

    links: str = "shared"  # value of AIORDMA_EMBEDDED_LINKS
    share_problem: str = ""  # why shared memory does not work
    pidfd_problem: str = ""  # why the end of a process cannot be detected
    copy_problem: str = ""  # why cross-memory attach does not work

    @classmethod
    def collect(cls) -> LocalPeerFacts:
        return cls(
            os.environ.get("AIORDMA_EMBEDDED_LINKS") or "shared",
            share_problem(),
            pidfd_problem(),
            copy_problem(),
        )


def share_problem() -> str:
    """Return why a sealed memfd cannot be created, or an empty string if it can.

    RLIMIT_FSIZE is checked first, because the kernel kills a process that exceeds this limit.
    """
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and limit < SHARED_BYTES:
        return f"the limit on the length of files (ulimit -f) is {limit:,} bytes"
    try:
        fd = os.memfd_create("aiordma-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return f"memfd_create: {error.strerror}"
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        return f"sealing: {error.strerror}"
    finally:
        os.close(fd)
    return ""


def pidfd_problem() -> str:
    """Return why pidfd_open(2) fails, or an empty string if it works."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"pidfd_open: {error.strerror}"
    return ""


def copy_problem() -> str:
    """Return why another process cannot copy this process's memory, or "" if it can.

    A child process tries it, because a seccomp filter may kill the process that calls
    process_vm_readv(2).
    """
    word = ctypes.create_string_buffer(8)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", COPY_PROGRAM, str(ctypes.addressof(word))],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or not done.stdout.strip().isdecimal():
        return "process_vm_readv: a process that calls it is killed"
    code = int(done.stdout)
    return f"process_vm_readv: {os.strerror(code)}" if code else ""
