"""Traces of the embedded device: every work request and every completion, as lines of JSON.

::

    with trace.recording("run.jsonl") as path:
        ...                                      # what this process does with embedded0
    for run in trace.read(path):
        for request in trace.requests(run):
            print(request.operation, request.status, request.took)

To trace a whole run without changing the program, set ``AIORDMA_TRACE=run.jsonl`` in the
environment. ``aiordma trace`` shows these files, and ``docs/trace.md`` describes their format.
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
    """Start tracing this process's use of the embedded device, and return the path of the file.

    ``%p`` in ``path`` is replaced by the process id. The trace is appended to the file. If another
    process is writing to that file, the path becomes ``path`` followed by ``.`` and the process id.
    Only the file's owner can read it, because it contains keys and addresses. An existing file must
    belong to this user, must not be accessible to others, and must not have other hard links.

    Raises:
        BusyError: If this process is already being traced.
        OSError: If the file cannot be written: EFBIG or ENOSPC if there is no space, ESPIPE if it
            is not a regular file, EPERM if it belongs to another user or is accessible to others,
            ELOOP if it is a symbolic link, EMLINK if it has other hard links.
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
    """Stop tracing, even if the environment started the trace. Otherwise, do nothing."""
    softdev.trace_stop()


@contextmanager
def recording(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Trace the `with` block, using :func:`start` and :func:`stop`.

    The exceptions are those of :func:`start`.

    Yields:
        The path of the file.
    """
    used = start(path)
    try:
        yield used
    finally:
        stop()


def read(path: str | os.PathLike[str]) -> list[Run]:
    """Return the runs in a trace file, in order.

    A process may still be writing to the file, or may have been killed while it was writing.

    Raises:
        OSError: If the file cannot be read.
        TraceFormatError: If the file is not a trace; the message contains the line number.
    """
    return parse_runs(Path(path).read_bytes(), os.fspath(path))
