"""The file of a trace: one run after the other, each of which begins with a header.

A process that was killed may have left half a line at the end of its run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from aiordma._core.trace_records import VERSION, End, Header, Record, parse
from aiordma.errors import TraceFormatError


@dataclass(slots=True)
class Run:
    """The records of one process, from the beginning of its trace to the end."""

    header: Header
    records: list[Record] = field(default_factory=list)
    torn: bool = False
    """Its last line is incomplete: the process was killed while it wrote it."""

    @property
    def end(self) -> End | None:
        """The last record, or None when the process was killed, or is still at work."""
        last = self.records[-1] if self.records else None
        return last if isinstance(last, End) else None


def parse_runs(data: bytes, path: str) -> list[Run]:
    """The runs of a file; TraceFormatError, with ``path`` in it, for what is no trace."""
    lines = data.decode(errors="replace").split("\n")
    torn = lines.pop()  # what follows the last newline
    runs: list[Run] = []
    problem: tuple[int, str] | None = None  # of the line before
    for number, line in enumerate(lines, 1):
        try:
            record = parse(line)
        except ValueError as error:
            _raise(problem, path)
            problem = number, str(error)
            continue
        if isinstance(record, Header):
            _check_version(record, path, number)
            if problem and runs:  # a later process has gone on behind a torn line
                runs[-1].torn = True
                problem = None
            _raise(problem, path)
            runs.append(Run(record))
            continue
        _raise(problem, path)
        if not runs:
            raise TraceFormatError("it does not begin with the header of a trace", path, number)
        if runs[-1].end:
            raise TraceFormatError("there is a record after the end of its run", path, number)
        runs[-1].records.append(record)
    _raise(problem, path)
    if not runs:
        raise TraceFormatError("there is no trace in it", path, 1)
    if torn:
        runs[-1].torn = True
    return runs


def _raise(problem: tuple[int, str] | None, path: str) -> None:
    if problem:
        raise TraceFormatError(problem[1], path, problem[0])


def _check_version(header: Header, path: str, number: int) -> None:
    if header.version != VERSION:
        text = f"it has version {header.version} of the schema; this aiordma reads {VERSION}"
        raise TraceFormatError(text, path, number)


def offsets(runs: Iterable[Run]) -> list[int]:
    """Corrections to the times of each run, so that those of all are nanoseconds of one clock.

    Runs of one boot have the same monotonic clock; those of others are brought to that of the first
    run by the wall clocks, and are as exact as these agree.
    """
    found: list[int] = []
    first: Header | None = None
    for run in runs:
        header = run.header
        first = first or header
        if header.boot_id == first.boot_id:
            found.append(0)
        else:
            found.append(header.realtime_ns - header.t - (first.realtime_ns - first.t))
    return found
