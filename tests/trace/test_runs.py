"""Tests of trace files: the runs in them, and how a run may end."""

from __future__ import annotations

import pytest

from aiordma._trace.runs import Run, offsets, parse_runs
from aiordma.errors import TraceFormatError

from .model import Writer, header, text


def written(sends: int) -> Writer:
    writer = Writer()
    for _ in range(sends):
        writer.complete(writer.send())
    writer.end()
    return writer


@pytest.mark.parametrize(
    ("content", "number", "why"),
    [
        (b"", 1, "the file contains no trace"),
        (b"not a trace", 1, "the file contains no trace"),
        (b"not a trace\n", 1, "invalid JSON"),
        (b"not a trace\n" + text(header()), 1, "invalid JSON"),
        (b"\xff\xfe\n" + text(header()), 1, "invalid JSON"),
        (text(*written(1).records), 1, "does not start with a trace header"),
        (text(header()) + b"broken\n" + text(*written(1).records), 2, "invalid JSON"),
        (text(header()) + b"broken\nbroken\n" + text(header()), 2, "invalid JSON"),
        (text(header()) + b"broken\n", 2, "invalid JSON"),
        (text(header()) + b"{}\n" + text(*written(1).records), 2, "unknown record type"),
        (text(header(), *written(0).records, *written(1).records), 3, "after the end"),
        (
            text(header(version=2)),
            1,
            "schema version 2 is not supported; this aiordma reads version 1",
        ),
        (text(header()) + text(header(version=9)), 2, "version 9"),
    ],
)
def test_trace_format_error_includes_the_path_and_line(
    content: bytes, number: int, why: str
) -> None:
    with pytest.raises(TraceFormatError, match=why) as caught:
        parse_runs(content, "some/file")
    assert (caught.value.path, caught.value.line) == ("some/file", number)
    assert str(caught.value).startswith(f"some/file, line {number}: ")


def test_offsets_align_runs_from_different_boots() -> None:
    """Runs of the same boot share a monotonic clock, whatever the wall clock was set to."""
    runs = [
        Run(header(t=1000, realtime_ns=50_000)),
        Run(header(t=3000, realtime_ns=1)),
        Run(header(t=700, realtime_ns=50_400, boot_id="another")),
    ]
    assert offsets(runs) == [0, 0, 700]
    first, _, third = runs
    assert third.header.t + 700 - first.header.t == 400  # as the wall clocks have it
    assert offsets([]) == []
