"""Traces of the embedded device, which record every work request and completion as a line of JSON.

Example::

    with trace.recording("run.jsonl") as path:
        ...                                      # what this process does with embedded0
    for run in trace.read(path):
        for request in trace.requests(run):
            print(request.operation, request.status, request.took)

To trace a whole run without changing the program, set the environment variable
``AIORDMA_TRACE=run.jsonl``. The command ``aiordma trace`` shows trace files, and ``docs/trace.md``
describes their format.
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
    """Start tracing this process's use of the embedded device, and return the trace file's path.

    ``%p`` in ``path`` is replaced by the process ID. If the file exists, the trace is appended to
    it. If another process is writing to the file, the trace goes to a file whose name is ``path``
    followed by a dot and the process ID.

    A trace contains keys and addresses, so only the file's owner can read it. An existing file must
    belong to this user, must not be accessible to others, and must not have other hard links.

    Raises:
        BusyError: If this process is already being traced.
        OSError: If the file cannot be written. The error is EFBIG or ENOSPC if there is no space,
            ESPIPE if it is not a regular file, EPERM if it belongs to another user or is accessible
            to others, ELOOP if it is a symbolic link, or EMLINK if it has other hard links.
    """
    used = ffi.new("char[]", 4097)
    code = softdev.trace_start(to_c("the name of the trace file", path), used, len(used))
    if code == errno.EBUSY:
        raise BusyError("this process is already being traced; call stop() first")
    if code:
        why = ffi.string(used).decode() or os.strerror(code)
        raise OSError(code, why, os.fspath(path))
    return Path(os.fsdecode(ffi.string(used)))


def stop() -> None:
    """Stop tracing, even if AIORDMA_TRACE started it. If no trace is active, do nothing."""
    softdev.trace_stop()


@contextmanager
def recording(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Return a context manager that traces this process during the `with` block.

    It calls :func:`start` at the beginning and :func:`stop` at the end, and raises the same
    exceptions as :func:`start`.

    Yields:
        The path of the trace file.
    """
    used = start(path)
    try:
        yield used
    finally:
        stop()


def read(path: str | os.PathLike[str]) -> list[Run]:
    """Return the runs in a trace file, in the order in which they were recorded.

    The file can be read while a process is still writing to it, or after a process was killed while
    writing to it.

    Raises:
        OSError: If the file cannot be read.
        TraceFormatError: If the file is not a valid trace. The message contains the line number.
    """
    return parse_runs(Path(path).read_bytes(), os.fspath(path))
