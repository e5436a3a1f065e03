"""`aiordma trace`: traces as tables, as JSON and as a picture."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from aiordma import trace
from aiordma.cli import trace_picture
from aiordma.cli.app import app
from aiordma.cli.trace_picture import Axis, depth_steps, lanes_of, picture, rows_of
from aiordma.cli.trace_selection import Selection, TimeType, load
from aiordma.cli.trace_tables import quantile, summary, timeline
from tests.core.trace_model import Writer

SVG = "{http://www.w3.org/2000/svg}"


def aiordma_trace(*words: object) -> Result:
    return CliRunner().invoke(app, ["trace", *map(str, words)])


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Of two processes: one with failures on a queue pair and its events, one that was killed."""
    writer = Writer(3)
    writer.add(trace.CreatedQP(t=writer.now(), qp_num=3, qp_type="RC", send_cq=1, recv_cq=1))
    writer.state("RESET", "INIT")
    receives = [writer.receive() for _ in range(3)]
    writer.state("INIT", "RTS")
    writer.send(signaled=False, opcode="RDMA_WRITE", length=100)
    writer.complete(writer.send(length=10))
    writer.complete(receives[0], byte_len=20)
    wrong = writer.send(opcode="RDMA_READ", length=4000)
    late = writer.send()
    writer.complete(wrong, "REM_ACCESS_ERR")
    writer.state("RTS", "ERR")
    writer.complete(late, "WR_FLUSH_ERR")
    for receive in receives[1:]:
        writer.complete(receive, "WR_FLUSH_ERR")
    writer.add(trace.AsyncEvent(t=writer.now(), event_type="QP_FATAL", qp_num=3))
    writer.add(trace.AsyncEvent(t=writer.now(), event_type="CQ_ERR", cq=1))
    writer.add(
        trace.Refused(
            t=writer.now(), qp_num=3, wr_id=99, opcode="SEND", errno=12, error="No <memory>"
        )
    )
    writer.destroy()
    writer.end()
    killed = Writer(4)
    killed.t = 1100
    killed.send(opcode="ATOMIC_FETCH_AND_ADD")
    paths = [tmp_path / "first", tmp_path / "second"]
    paths[0].write_bytes(writer.data())
    # Half a line, and the zeros of a file that is written in blocks.
    paths[1].write_bytes(killed.data(pid=8, t=1050) + b'{"t":5,"ty' + b"\0" * 100)
    return paths


# ---- tables -------------------------------------------------------------------------------------


def test_the_summary(files: list[Path]) -> None:
    done = aiordma_trace(*files)
    assert done.exit_code == 0
    found = rows(done.output)
    assert ["7", "3", "RECV", "3", "20", "0.0", "0.0", "0.0", "2", "WR_FLUSH_ERR"] in found
    assert ["7", "3", "RDMA_WRITE", "1", "100", "-", "-", "-", "1", "implicit"] in found
    assert ["7", "3", "RDMA_READ", "1", "0", "-", "-", "-", "1", "REM_ACCESS_ERR"] in found
    assert ["8", "4", "ATOMIC_FETCH_AND_ADD", "1", "8", "-", "-", "-", "1", "open"] in found
    assert "process 7 on here, embedded0: program" in done.output
    assert f"{len(trace.read(files[0])[0].records) + 1} lines, complete" in done.output
    assert "2 lines, the last line is torn: the process was killed" in done.output


def test_the_numbers_of_the_summary(tmp_path: Path) -> None:
    writer = Writer()
    for took in (3000, 1000, 2000, 9000):
        posted = writer.send(length=5)
        writer.t += took - 1
        writer.complete(posted)
    path = tmp_path / "trace"
    path.write_bytes(writer.data())
    (line,) = summary(load([path]), Selection())
    assert line.times == [1000, 2000, 3000, 9000]
    assert (line.count, line.bytes, line.outcomes) == (4, 20, {})
    assert ["7", "3", "SEND", "4", "20", "2.0", "9.0", "9.0"] in rows(aiordma_trace(path).output)
    assert [quantile([1, 2, 3, 4], part) for part in (0, 0.25, 0.5, 0.51, 1)] == [1, 1, 2, 3, 4]


def test_the_timeline(files: list[Path]) -> None:
    found = [row[1:] for row in rows(aiordma_trace(*files).output)]
    after = found[found.index(["7", "3", "created", "(RC)"]) :]
    assert after[: after.index(["7", "3", "destroyed"]) + 2] == [
        ["7", "3", "created", "(RC)"],
        ["7", "3", "RESET", "->", "INIT"],
        ["7", "3", "RECV", "10", "20", "0.0", "SUCCESS"],
        ["7", "3", "RECV", "20", "0", "0.0", "WR_FLUSH_ERR"],
        ["7", "3", "RECV", "30", "0", "0.0", "WR_FLUSH_ERR"],
        ["7", "3", "INIT", "->", "RTS"],
        ["7", "3", "RDMA_WRITE", "40", "100", "<0.0", "implicit"],
        ["7", "3", "SEND", "50", "10", "0.0", "SUCCESS"],
        ["7", "3", "RDMA_READ", "60", "4,000", "0.0", "REM_ACCESS_ERR"],
        ["7", "3", "SEND", "70", "8", "0.0", "WR_FLUSH_ERR"],
        ["7", "3", "RTS", "->", "ERR"],
        ["7", "3", "event", "QP_FATAL"],
        ["7", "-", "event", "CQ_ERR", "of", "CQ", "1"],
        ["7", "3", "refused", "SEND", "99:", "No", "<memory>"],
        ["7", "3", "destroyed"],
        ["8", "4", "ATOMIC_FETCH_AND_ADD", "10", "8", "open"],
    ]


def test_the_limit(files: list[Path]) -> None:
    done = aiordma_trace(*files, "--limit", 2)
    assert "14 more: --limit 0 shows all" in done.output
    assert "RECV  " in done.output.partition("took us")[0]  # in the summary alone
    assert " RECV " not in done.output.partition("took us")[2]
    assert "more:" not in aiordma_trace(*files, "--limit", 0).output


@pytest.mark.parametrize(
    ("options", "wr_ids", "incidents"),
    [
        ({}, [10, 20, 30, 40, 50, 60, 70, 10], 8),
        ({"qps": frozenset({4})}, [10], 0),
        ({"statuses": frozenset({"WR_FLUSH_ERR"})}, [20, 30, 70], 0),
        ({"statuses": frozenset({"FAILED"})}, [20, 30, 60, 70], 0),
        ({"statuses": frozenset({"SUCCESS", "OPEN"})}, [10, 40, 50, 10], 0),
        ({"stop": 4}, [10, 20], 2),
        # What was under way then, when it was posted earlier, too.
        ({"start": 11, "stop": 11}, [20, 30, 60], 0),
        ({"start": 50}, [10], 0),
    ],
)
def test_a_selection(
    options: dict[str, object], wr_ids: list[int], incidents: int, files: list[Path]
) -> None:
    found = timeline(load(files), Selection(**options))  # type: ignore[arg-type]
    requests = [row.what.wr_id for row in found if isinstance(row.what, trace.Request)]
    assert requests == wr_ids
    assert len(found) - len(requests) == incidents


def test_the_options_of_a_selection(files: list[Path]) -> None:
    done = aiordma_trace(
        *files, "--qp", 3, "--status", "failed", "--from", "11ns", "--to", "11ns", "--json"
    )
    assert [it["wr_id"] for it in json.loads(done.output)] == [20, 30, 60]


@pytest.mark.parametrize(
    ("text", "time"),
    [("2", 2_000_000), ("1.5ms", 1_500_000), ("200us", 200_000), ("3 µs", 3000), ("2s", 2 * 10**9),
     (".5s", 500_000_000), ("7ns", 7)],
)  # fmt: skip
def test_times(text: str, time: int) -> None:
    assert TimeType().convert(text, None, None) == time


@pytest.mark.parametrize("text", ["", "ms", "-1", "1 m", "1..2s", "1h"])
def test_what_is_no_time(text: str, files: list[Path]) -> None:
    done = aiordma_trace(*files, f"--from={text}")
    assert done.exit_code == 2
    assert "is not a time; as in 1.5ms, 200us or 2s" in done.output


def test_json(files: list[Path]) -> None:
    told = json.loads(aiordma_trace(*files, "--json").output)
    assert len(told) == 8
    assert told[5] == {
        "pid": 7,
        "qp_num": 3,
        "operation": "RDMA_READ",
        "wr_id": 60,
        "bytes": 4000,
        "posted_ns": 11,
        "ended_ns": 13,
        "took_ns": 2,
        "outcome": "completed",
        "status": "REM_ACCESS_ERR",
    }


# ---- files --------------------------------------------------------------------------------------


def test_a_file_that_is_no_trace(tmp_path: Path, files: list[Path]) -> None:
    path = tmp_path / "other"
    path.write_bytes(files[0].read_bytes().replace(b'"opcode"', b'"code"', 1))
    done = aiordma_trace(files[0], path)
    assert done.exit_code == 1
    assert done.output == f"Error: {path}, line 8: it has no opcode\n"
    assert aiordma_trace(tmp_path / "missing").exit_code == 2
    assert aiordma_trace().exit_code == 2


def test_a_trace_that_ended_early(tmp_path: Path) -> None:
    writer = Writer()
    writer.end("No space left on device")
    (tmp_path / "full").write_bytes(writer.data())
    (tmp_path / "open").write_bytes(Writer().data())
    text = aiordma_trace(tmp_path / "full", tmp_path / "open").output
    assert "2 lines, ended early: No space left on device" in text
    assert "1 lines, without an end: the process was killed, or is still at work" in text


def test_the_last_line_alone_may_be_torn(files: list[Path]) -> None:
    """A process that went on behind it changes nothing."""
    content = files[1].read_bytes().rstrip(b"\0") + b"\n" + files[0].read_bytes()
    files[1].write_bytes(content)
    done = aiordma_trace(files[1])
    assert done.exit_code == 0
    assert "the last line is torn" in done.output


# ---- the picture --------------------------------------------------------------------------------


def titles(svg: str, kind: str) -> list[str]:
    """What the tooltips of all shapes of a kind say."""
    return [
        title.text or ""
        for shape in ElementTree.fromstring(svg).iter(SVG + kind)
        for title in shape.iter(SVG + "title")
    ]


def texts(svg: str) -> list[str]:
    return [it.text or "" for it in ElementTree.fromstring(svg).iter(SVG + "text")]


def test_the_picture(files: list[Path], tmp_path: Path) -> None:
    target = tmp_path / "picture.svg"
    done = aiordma_trace(*files, "--picture", target)
    assert f"The picture is in {target}" in done.output
    assert "took us" not in done.output
    svg = target.read_text()
    assert {"process 7", "process 8", "QP 3", "QP 4"} <= set(texts(svg))
    assert "2 processes, 2 queues, 8 requests, 1 failed, 3 flushed, in 98 ns" in texts(svg)
    bars = titles(svg, "rect")
    assert "RDMA_READ wr_id 60: 4,000 B, 0.0 µs, REM_ACCESS_ERR, posted at 0.0000 ms" in bars
    assert any(bar.startswith("ATOMIC_FETCH_AND_ADD wr_id 10: 8 B, OPEN") for bar in bars)
    assert sum(bar.startswith(("QP 3 INIT", "QP 3 RTS", "QP 3 ERR")) for bar in bars) == 3
    marks = titles(svg, "path")
    assert any(mark.startswith("event QP_FATAL") for mark in marks)
    assert any(mark.startswith("refused SEND 99: No <memory>") for mark in marks)
    assert sum("REM_ACCESS_ERR" in mark for mark in marks) == 2  # the cross, and what it stands on


def test_retries_and_faults(tmp_path: Path) -> None:
    writer = Writer()
    posted = writer.send()
    for _ in range(3):
        writer.add(trace.Retry(t=writer.now(), qp_num=3, cause="RNR"))
    writer.t += 1000
    writer.add(trace.Fault(t=writer.now(), fault="LOSS", qp_num=3))
    writer.add(trace.Fault(t=writer.now(), fault="OVERRUN", cq=2))
    writer.t += 1000
    writer.complete(posted)
    path = tmp_path / "trace"
    path.write_bytes(writer.data())
    found = [row[1:] for row in rows(aiordma_trace(path).output)]
    assert found.count(["7", "3", "retry:", "receiver", "not", "ready"]) == 3
    assert ["7", "3", "fault", "LOSS"] in found
    assert ["7", "-", "fault", "OVERRUN", "of", "CQ", "2"] in found
    svg = picture(load([path]), Selection())
    marks = titles(svg, "path")
    assert marks[0].startswith("2 x retry: receiver not ready, ")  # in one pixel
    assert sum("fault LOSS" in mark for mark in marks) == 1
    assert {"retry: receiver not ready", "fault LOSS"} <= set(texts(svg))


def test_a_picture_that_cannot_be_written(files: list[Path], tmp_path: Path) -> None:
    done = aiordma_trace(*files, "--picture", tmp_path / "none" / "picture.svg")
    assert done.exit_code == 1
    assert "No such file" in done.output


def test_a_picture_of_nothing(files: list[Path]) -> None:
    svg = picture(load(files), Selection(qps=frozenset({99})))
    assert "0 processes, 0 queues, 0 requests" in svg
    ElementTree.fromstring(svg)


def test_requests_under_way_at_the_same_time_have_rows_of_their_own(tmp_path: Path) -> None:
    writer = Writer()
    for _ in range(20):
        posts = [writer.send() for _ in range(4)]
        writer.t += 1_000_000
        for posted in posts:
            writer.t += 1_000_000
            writer.complete(posted)
    path = tmp_path / "trace"
    path.write_bytes(writer.data())
    traces = load([path])
    axis = Axis(0, traces[0].at(writer.t))
    found = rows_of(traces[0], traces[0].requests, axis)
    assert [len(row) for row in found] == [20] * 4
    for row in found:
        for before, after in itertools.pairwise(row):
            assert before.right <= after.left


def test_a_great_many_requests_are_still_a_picture(tmp_path: Path) -> None:
    writer = Writer()
    for _ in range(50):
        for posted in [writer.send() for _ in range(200)]:
            writer.complete(posted)
    path = tmp_path / "trace"
    path.write_bytes(writer.data())
    (traced,) = load([path])
    svg = picture([traced], Selection())
    assert "10,000 requests" in svg
    bars = [bar for bar in titles(svg, "rect") if "SEND" in bar]
    assert len(bars) < 60 * 200
    total = sum(
        int(bar.partition(" x ")[0].replace(",", "")) if " x " in bar else 1 for bar in bars
    )
    assert total == 10_000
    assert len(rows_of(traced, traced.requests, Axis(0, 30_000))) <= trace_picture.MOST_ROWS


def test_posted_receives(files: list[Path]) -> None:
    traced = load(files)[0]
    (lane,) = lanes_of(traced, Selection())
    assert [depth for _, depth in depth_steps(traced, lane.receives)] == [1, 2, 3, 2, 1, 0]


def test_a_shared_receive_queue_has_a_lane(tmp_path: Path) -> None:
    writer = Writer()
    posts = [
        trace.PostedSharedReceive(
            t=writer.now(), request=writer.number(), wr_id=5, length=64, num_sge=1, srq=9
        )
        for _ in range(2)
    ]
    for posted in posts:
        writer.add(posted)
    writer.complete(posts[0], byte_len=8)
    path = tmp_path / "trace"
    path.write_bytes(writer.data())
    (traced,) = load([path])
    assert {lane.name for lane in lanes_of(traced, Selection())} == {"QP 3", "SRQ 9"}
    assert {"QP 3", "SRQ 9"} <= set(texts(picture([traced], Selection())))


@pytest.mark.parametrize(
    ("start", "stop", "labels"),
    [
        (0, 100, ["0 ns", "20 ns", "40 ns", "60 ns", "80 ns", "100 ns"]),
        (1_400_000, 1_450_000, ["1,400 µs", "1,410 µs", "1,420 µs", "1,430 µs", "1,440 µs",
                                "1,450 µs"]),
        (0, 7 * 10**9, ["0 s", "1 s", "2 s", "3 s", "4 s", "5 s", "6 s", "7 s"]),
        (5, 6, ["5 ns", "6 ns"]),
    ],
)  # fmt: skip
def test_the_axis(start: int, stop: int, labels: list[str]) -> None:
    axis = Axis(start, stop)
    assert [axis.label(at) for at in axis.ticks()] == labels
    assert axis.x(start) == trace_picture.LEFT
    assert axis.x(start - 5) == trace_picture.LEFT
    assert axis.x(stop) == trace_picture.LEFT + trace_picture.PLOT


# ---- of programs that know nothing of it --------------------------------------------------------

# By the public names of the calls, as a program has them that is linked with libibverbs.
IN_C = """
import ctypes
verbs = ctypes.CDLL(None)
verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
for name in ("ibv_open_device", "ibv_alloc_pd", "ibv_create_cq", "ibv_create_qp"):
    getattr(verbs, name).restype = ctypes.c_void_p
context = ctypes.c_void_p(
    verbs.ibv_open_device(ctypes.c_void_p(verbs.ibv_get_device_list(None)[0]))
)
pd = ctypes.c_void_p(verbs.ibv_alloc_pd(context))
cq = ctypes.c_void_p(verbs.ibv_create_cq(context, 4, None, None, 0))
init = (ctypes.c_uint64 * 10)(0, cq.value, cq.value, 0)
caps = (ctypes.c_uint32 * 6).from_buffer(init, 32)
caps[:] = [1, 1, 1, 1, 0, 2]  # and the type, RC
qp = ctypes.c_void_p(verbs.ibv_create_qp(pd, init))
assert verbs.ibv_destroy_qp(qp) == 0
"""


def test_under_aiordma_run(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    subprocess.run(
        [sys.executable, "-m", "aiordma", "run", sys.executable, "-c", IN_C],
        env={**os.environ, "AIORDMA_TRACE": str(path)},
        timeout=100,
        check=True,
    )
    (run,) = trace.read(path)
    assert [type(record) for record in run.records] == [
        trace.CreatedQP,
        trace.DestroyedQP,
        trace.End,
    ]
