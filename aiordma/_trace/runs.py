"""A trace file: a sequence of runs, each beginning with a header.

A process that was killed may have left an incomplete line at the end of its run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from aiordma._trace.records import (
    VERSION,
    AccessRefused,
    Completion,
    End,
    Header,
    KeyEnded,
    Record,
    RegisteredMR,
    parse,
)
from aiordma.errors import TraceFormatError


@dataclass(slots=True)
class Run:
    """The header and the other records that one process wrote to a trace."""

    header: Header
    records: list[Record] = field(default_factory=list)
    torn: bool = False
    """Whether its last line is incomplete, because the process was killed while writing it."""

    @property
    def end(self) -> End | None:
        """The end record, or None if the process was killed or is still running."""
        last = self.records[-1] if self.records else None
        return last if isinstance(last, End) else None


def parse_runs(data: bytes, path: str) -> list[Run]:
    """Parse the contents of a trace file into runs.

    Raises:
        TraceFormatError: If ``data`` is not a valid trace. The message contains ``path``.
    """
    lines = data.decode(errors="replace").split("\n")
    incomplete_line = lines.pop()  # the text after the last newline
    runs: list[Run] = []
    ended_keys: set[int] = set()  # memory keys that are no longer valid at this point of the run
    pending_error: TraceFormatError | None = None  # error of the previous line
    for number, line in enumerate(lines, 1):
        try:
            record = parse(line)
        except ValueError as error:
            if pending_error:
                raise pending_error from None
            # Only a header in the next line can excuse this one, as an incomplete last line.
            pending_error = TraceFormatError(str(error), path, number)
            continue
        if isinstance(record, Header):
            if record.version != VERSION:
                text = (
                    f"schema version {record.version} is not supported; this aiordma reads version "
                )
                raise TraceFormatError(f"{text}{VERSION}", path, number)
            if pending_error and runs:  # a later process continued after an incomplete line
                runs[-1].torn = True
                pending_error = None
        if pending_error:
            raise pending_error
        if isinstance(record, Header):
            runs.append(Run(record))
            ended_keys.clear()
        elif not runs:
            raise TraceFormatError("the file does not start with a trace header", path, number)
        elif runs[-1].end:
            raise TraceFormatError("found a record after the end of the run", path, number)
        else:
            runs[-1].records.append(_refine_reason(record, ended_keys))
    if pending_error or not runs:
        raise pending_error or TraceFormatError("the file contains no trace", path, 1)
    runs[-1].torn |= bool(incomplete_line)
    return runs


def _refine_reason(record: Record, ended_keys: set[int]) -> Record:
    """Return the record, with the reason KEY replaced by ENDED if the key used to be valid.

    The device reports KEY for unknown keys and for keys that have ended.
    """
    match record:
        case RegisteredMR():
            ended_keys.discard(record.key)
        case KeyEnded():
            ended_keys.add(record.key)
        case AccessRefused(reason="KEY", rkey=key) | Completion(reason="KEY", lkey=key):
            if key in ended_keys:
                return replace(record, reason="ENDED")
    return record


def offsets(runs: Iterable[Run]) -> list[int]:
    """Return the offset in nanoseconds from each run's clock to the first run's clock.

    Runs of the same boot share a monotonic clock. The offsets of other runs are computed from the
    wall clocks, and are only as accurate as these clocks.
    """
    headers = [run.header for run in runs]
    return [
        0
        if header.boot_id == headers[0].boot_id
        else header.realtime_ns - header.t - (headers[0].realtime_ns - headers[0].t)
        for header in headers
    ]
