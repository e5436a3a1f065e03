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

from aiordma._native import ffi, softdev, to_c
from aiordma._trace.records import (
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
from aiordma._trace.requests import Outcome, Request, requests
from aiordma._trace.runs import Run, offsets, parse_runs
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

    ``%p`` in ``path`` is replaced by the process ID. If the file exists, the new trace is appended.
    If another process is writing to the file, this process writes to a separate file instead. The
    separate file's name consists of ``path``, a dot and the process ID.

    A trace contains keys and addresses, so only the file's owner can read it. An existing file must
    be owned by the current user, must not be accessible to other users, and must not have other
    hard links.

    Raises:
        BusyError: If this process is already being traced.
        OSError: If the file cannot be written. ``errno`` is EFBIG or ENOSPC if there is no space,
            EPERM if the file is owned by or accessible to another user, EMLINK if the file has
            other hard links, ELOOP for a symbolic link, and ESPIPE for any other special file.
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
    """Stop tracing, even if AIORDMA_TRACE started the trace.

    If no trace is active, calling this function has no effect.
    """
    softdev.trace_stop()


@contextmanager
def recording(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Return a context manager that traces this process during the `with` block.

    The context manager calls :func:`start` on entry and :func:`stop` on exit. It raises the same
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

    You can read the file while a process is still writing to it. You can also read a file whose
    writer has been killed.

    Raises:
        OSError: If the file cannot be read.
        TraceFormatError: If the file is not a valid trace. The message contains the line number.
    """
    return parse_runs(Path(path).read_bytes(), os.fspath(path))
