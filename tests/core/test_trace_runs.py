"""Files of traces: the runs in them, and what the end of one may look like."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma._core.trace_runs import Run, offsets, parse_runs
from aiordma.errors import TraceFormatError

from .trace_model import Writer, header, text


def written(sends: int, *, ended: bool = True) -> Writer:
    writer = Writer()
    for _ in range(sends):
        writer.complete(writer.send())
    if ended:
        writer.end()
    return writer


def test_runs_one_after_the_other() -> None:
    first, second = written(2), written(1, ended=False)
    runs = parse_runs(first.data() + second.data(pid=8), "file")
    assert [run.header.pid for run in runs] == [7, 8]
    assert runs[0].records == first.records
    assert runs[1].records == second.records
    assert runs[0].end == first.records[-1]
    assert runs[1].end is None
    assert not any(run.torn for run in runs)


@given(st.data(), st.booleans())
def test_a_run_may_be_cut_off_anywhere(data: st.DataObject, goes_on: bool) -> None:
    """What is whole is read; the rest is said to be torn, also when another process goes on."""
    writer = written(3)
    whole = writer.data()
    first = len(text(header()))
    length = data.draw(st.integers(first, len(whole)))
    torn = whole[:length]
    # The device begins a line of its own behind one that is torn.
    behind = b"\n" if not torn.endswith(b"\n") else b""
    content = torn + behind + written(1).data(pid=9) if goes_on else torn
    runs = parse_runs(content, "file")
    assert len(runs) == 1 + goes_on
    complete = torn.count(b"\n") - 1
    assert runs[0].records[:complete] == writer.records[:complete]
    assert len(runs[0].records) - complete in (0, 1)  # a line may lack its newline alone
    whole_line = torn.endswith((b"\n", b"}"))
    assert runs[0].torn == (not torn.endswith(b"\n") if not goes_on else not whole_line)
    if goes_on:
        assert runs[1].records == written(1).records


@pytest.mark.parametrize(
    ("content", "number", "why"),
    [
        (b"", 1, "there is no trace in it"),
        (b"not a trace", 1, "there is no trace in it"),
        (b"not a trace\n", 1, "it is no JSON"),
        (b"not a trace\n" + text(header()), 1, "it is no JSON"),
        (b"\xff\xfe\n" + text(header()), 1, "it is no JSON"),
        (text(*written(1).records), 1, "does not begin with the header"),
        (text(header()) + b"broken\n" + text(*written(1).records), 2, "it is no JSON"),
        (text(header()) + b"broken\nbroken\n" + text(header()), 2, "it is no JSON"),
        (text(header()) + b"broken\n", 2, "it is no JSON"),
        (text(header()) + b"{}\n" + text(*written(1).records), 2, "no record of type"),
        (text(header(), *written(0).records, *written(1).records), 3, "after the end"),
        (text(header(version=2)), 1, "version 2 of the schema; this aiordma reads 1"),
        (text(header()) + text(header(version=9)), 2, "version 9"),
    ],
)
def test_the_line_that_is_wrong_is_named(content: bytes, number: int, why: str) -> None:
    with pytest.raises(TraceFormatError, match=why) as caught:
        parse_runs(content, "some/file")
    assert (caught.value.path, caught.value.line) == ("some/file", number)
    assert str(caught.value).startswith(f"some/file, line {number}: ")


def test_one_axis_of_time() -> None:
    """In one boot the monotonic clock is common, whatever the wall clock was set to."""
    runs = [
        Run(header(t=1000, realtime_ns=50_000)),
        Run(header(t=3000, realtime_ns=1)),
        Run(header(t=700, realtime_ns=50_400, boot_id="another")),
    ]
    assert offsets(runs) == [0, 0, 700]
    first, _, third = runs
    assert third.header.t + 700 - first.header.t == 400  # as the wall clocks have it
    assert offsets([]) == []
