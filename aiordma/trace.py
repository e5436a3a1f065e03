"""Traces of the embedded device: every work request and every completion, as lines of JSON.

::

    with trace.recording("run.jsonl") as path:
        ...                                      # what this process does with embedded0
    for run in trace.read(path):
        for request in trace.requests(run):
            print(request.operation, request.status, request.took)

Without a change to the program, ``AIORDMA_TRACE=run.jsonl`` in the environment does the same for
all of its life. ``aiordma trace`` shows such files, and ``docs/trace.md`` says what is in them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiordma._core.trace_records import (
    AsyncEvent,
    Completion,
    CreatedQP,
    DestroyedQP,
    End,
    Fault,
    Header,
    Posted,
    PostedReceive,
    PostedSend,
    PostedSharedReceive,
    QPStateChange,
    Record,
    Refused,
    Retry,
)
from aiordma._core.trace_requests import Outcome, Request, requests
from aiordma._core.trace_runs import Run, offsets, parse_runs
from aiordma._native import ffi, lib
from aiordma.errors import BusyError

__all__ = [
    "AsyncEvent",
    "Completion",
    "CreatedQP",
    "DestroyedQP",
    "End",
    "Fault",
    "Header",
    "Outcome",
    "Posted",
    "PostedReceive",
    "PostedSend",
    "PostedSharedReceive",
    "QPStateChange",
    "Record",
    "Refused",
    "Request",
    "Retry",
    "Run",
    "flush",
    "offsets",
    "read",
    "recording",
    "requests",
    "start",
    "stop",
]


def start(path: str | os.PathLike[str]) -> Path:
    """Trace what this process does with the embedded device from now on; the file's name.

    ``%p`` in ``path`` is the number of this process. What is in the file stays, and the trace goes
    behind it; where another process is writing its own, the file is ``path`` with ``.`` and the
    number of this process. It is readable for its owner alone, since keys and addresses are in it.

    Raises BusyError when there is a trace already, OSError for a file that cannot be written:
    EFBIG and ENOSPC without room for it, ESPIPE for what is no regular file.
    """
    used = ffi.new("char[]", 4097)
    code = lib.aiordma_trace_start(os.fsencode(path), used, len(used))
    if code == errno.EBUSY:
        raise BusyError("this process has a trace already; stop() it first")
    if code:
        raise OSError(code, os.strerror(code), os.fspath(path))
    return Path(os.fsdecode(ffi.string(used)))


def stop() -> None:
    """End the trace, whoever has begun it. Nothing happens when there is none."""
    lib.aiordma_trace_stop()


def flush() -> None:
    """Cut off what the file has beyond its last line, for who wants to read it now.

    Nothing is lost without that: see ``docs/trace.md``.
    """
    lib.aiordma_trace_flush()


@contextmanager
def recording(path: str | os.PathLike[str]) -> Iterator[Path]:
    """:func:`start` and, when the block is left, :func:`stop`. Raises what :func:`start` raises."""
    used = start(path)
    try:
        yield used
    finally:
        stop()


def read(path: str | os.PathLike[str]) -> list[Run]:
    """The runs in a file, as they were written. A process may be writing it, or have been killed.

    Raises OSError when it cannot be read, TraceFormatError for what is no trace, with the line.
    """
    return parse_runs(Path(path).read_bytes(), os.fspath(path))
