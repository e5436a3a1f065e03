"""Traces of the embedded device: every work request and every completion, as lines of JSON.

::

    with trace.recording("run.jsonl") as path:
        ...                                      # what this process does with embedded0
    for run in trace.read(path):
        for request in trace.requests(run):
            print(request.operation, request.status, request.took)

Without a change to the program, ``AIORDMA_TRACE=run.jsonl`` in the environment traces all of its
run. ``aiordma trace`` shows such files, and ``docs/trace.md`` describes their format.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiordma._core.trace_records import (
    REASONS,
    AccessRefused,
    AsyncEvent,
    CallRefused,
    Completion,
    CreatedQP,
    DestroyedQP,
    Dropped,
    End,
    Fault,
    Header,
    KeyEnded,
    Posted,
    PostedReceive,
    PostedSend,
    PostedSharedReceive,
    QPStateChange,
    Record,
    Refused,
    RegisteredMR,
    RequestRefused,
    Retry,
)
from aiordma._core.trace_requests import Outcome, Request, requests
from aiordma._core.trace_runs import Run, offsets, parse_runs
from aiordma._native import ffi, softdev, to_c
from aiordma.errors import BusyError

__all__ = [
    "REASONS",
    "AccessRefused",
    "AsyncEvent",
    "CallRefused",
    "Completion",
    "CreatedQP",
    "DestroyedQP",
    "Dropped",
    "End",
    "Fault",
    "Header",
    "KeyEnded",
    "Outcome",
    "Posted",
    "PostedReceive",
    "PostedSend",
    "PostedSharedReceive",
    "QPStateChange",
    "Record",
    "Refused",
    "RegisteredMR",
    "Request",
    "RequestRefused",
    "Retry",
    "Run",
    "offsets",
    "read",
    "recording",
    "requests",
    "start",
    "stop",
]


def start(path: str | os.PathLike[str]) -> Path:
    """Start to trace this process's use of the embedded device; return the name of the file.

    ``%p`` in ``path`` is replaced by the process id. The trace is appended to the file; while
    another process writes to it, the file is ``path`` with ``.`` and the process id. Only its owner
    can read it, since it contains keys and addresses. A file that is there already must belong to
    this user, must not be accessible to others, and must have no other name.

    Raises:
        BusyError: This process is being traced already.
        OSError: The file cannot be written: EFBIG and ENOSPC without room for it, ESPIPE if it is
            not a regular file, EPERM if it belongs to another user or is accessible to others,
            ELOOP if it is a symbolic link, EMLINK if it has other hard links.
    """
    used = ffi.new("char[]", 4097)
    code = softdev.trace_start(to_c("the name of the trace file", path), used, len(used))
    if code == errno.EBUSY:
        raise BusyError("this process is being traced already: call stop() first")
    if code:
        why = ffi.string(used).decode() or os.strerror(code)
        raise OSError(code, why, os.fspath(path))
    return Path(os.fsdecode(ffi.string(used)))


def stop() -> None:
    """End the trace, also one that the environment started; without a trace nothing happens."""
    softdev.trace_stop()


@contextmanager
def recording(path: str | os.PathLike[str]) -> Iterator[Path]:
    """:func:`start` and, when the block is left, :func:`stop`. Raises what :func:`start` raises."""
    used = start(path)
    try:
        yield used
    finally:
        stop()


def read(path: str | os.PathLike[str]) -> list[Run]:
    """The runs in a file, in their order. A process may still write it, or have been killed.

    Raises OSError when the file cannot be read, TraceFormatError with the line when it is no trace.
    """
    return parse_runs(Path(path).read_bytes(), os.fspath(path))
