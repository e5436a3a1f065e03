"""Tests of `aiordma trace`: traces as a listing and in the Chrome trace format."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from aiordma import trace
from aiordma.cli.app import app
from aiordma.cli.trace_chrome import chrome_trace
from aiordma.cli.trace_listing import Traced, load
from tests.trace.model import Writer


def aiordma_trace(*words: object) -> Result:
    return CliRunner().invoke(app, ["trace", *map(str, words)])


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Write two traces: one with a queue pair's failures and events, one of a killed process."""
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
            t=writer.now(), qp_num=3, wr_id=99, opcode="SEND", reason="FULL", errno=12, error="<N>"
        )
    )
    writer.destroy()
    writer.end()
    killed = Writer(4)
    killed.t = 1100
    killed.send(opcode="ATOMIC_FETCH_AND_ADD")
    paths = [tmp_path / "first", tmp_path / "second"]
    paths[0].write_bytes(writer.data())
    paths[1].write_bytes(killed.data(pid=8, t=1050) + b'{"t":5,"ty')  # half a line
    return paths


# ---- the listing --------------------------------------------------------------------------------


def test_trace_listing_shows_requests_and_events(files: list[Path]) -> None:
    done = aiordma_trace(*files)
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert lines[0] == "process 7 on here, embedded0: program"
    assert lines[1].startswith(f"  {files[0]}, from ")
    assert lines[1].endswith(f": {len(trace.read(files[0])[0].records) + 1} lines, complete")
    assert lines[3].endswith(": 2 lines, the last line is truncated: the process was killed")
    assert lines[4].split() == ["ms", "process", "queue", "pair"]
    assert lines[5].split()[0] == "0.0000"
    refused = "wr_id=99 errno=12 error=<N> reason=FULL opcode=SEND"
    assert [line.split(maxsplit=1)[1].split("  ")[-2:] for line in lines[5:]] == [
        ["3", "create_qp qp_type=RC send_cq=1 recv_cq=1"],
        ["3", "qp_state cur_qp_state=RESET qp_state=INIT"],
        ["3", "RECV wr_id=10 bytes=20 took=0.0us SUCCESS"],
        ["3", "RECV wr_id=20 bytes=0 took=0.0us WR_FLUSH_ERR"],
        ["3", "RECV wr_id=30 bytes=0 took=0.0us WR_FLUSH_ERR"],
        ["3", "qp_state cur_qp_state=INIT qp_state=RTS"],
        ["3", "RDMA_WRITE wr_id=40 bytes=100 took<0.0us implicit"],
        ["3", "SEND wr_id=50 bytes=10 took=0.0us SUCCESS"],
        [
            "3",
            "RDMA_READ wr_id=60 bytes=4000 took=0.0us REM_ACCESS_ERR: see the peer's "
            "trace for the reason",
        ],
        ["3", "SEND wr_id=70 bytes=8 took=0.0us WR_FLUSH_ERR"],
        ["3", "qp_state cur_qp_state=RTS qp_state=ERR"],
        ["3", "async_event event_type=QP_FATAL"],
        ["-", "async_event event_type=CQ_ERR cq=1"],
        ["3", f"refused {refused}: {trace.REASONS['FULL']}"],
        ["3", "destroy_qp"],
        ["4", "ATOMIC_FETCH_AND_ADD wr_id=10 bytes=8 open"],
    ]


@pytest.mark.parametrize(
    ("options", "wr_ids", "incidents"),
    [
        ([], [10, 20, 30, 40, 50, 60, 70, 10], 8),
        (["--qp", "4"], [10], 0),
        (["--status", "WR_FLUSH_ERR"], [20, 30, 70], 0),
        (["--status", "failed"], [20, 30, 60, 70], 0),
        (["--status", "success", "--status", "OPEN"], [10, 40, 50, 10], 0),
        (["--status", "failed", "--qp", "4"], [], 0),
    ],
)
def test_trace_options_filter_requests(
    options: list[str], wr_ids: list[int], incidents: int, files: list[Path]
) -> None:
    found = aiordma_trace(*files, *options).output.splitlines()[5:]
    requests = [line.partition(" wr_id=")[2].split()[0] for line in found if " bytes=" in line]
    assert list(map(int, requests)) == wr_ids
    assert len(found) - len(requests) == incidents


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--qp", "99", "queue pair 99 not found in the traces (found: 3, 4)"),
        ("--qp", "0x63", "queue pair 99 not found in the traces (found: 3, 4)"),
        *(("--qp", text, "invalid queue pair number") for text in ("-1", "1_0", "\u0663", "x", "")),
        ("--status", "failde", "'failde' is not one of 'failed', 'success', "),
    ],
)
def test_trace_rejects_invalid_filter_values(
    option: str, value: str, text: str, files: list[Path]
) -> None:
    done = aiordma_trace(*files, option, value)
    assert done.exit_code == 2
    assert text in " ".join(done.output.lower().split())


# ---- files --------------------------------------------------------------------------------------


def test_file_that_is_not_a_trace_is_rejected(tmp_path: Path, files: list[Path]) -> None:
    path = tmp_path / "other"
    path.write_bytes(files[0].read_bytes().replace(b'"opcode"', b'"code"', 1))
    done = aiordma_trace(files[0], path)
    assert done.exit_code == 1
    assert done.output == f"Error: {path}, line 8: missing field opcode\n"
    assert aiordma_trace(tmp_path / "missing").exit_code == 2
    assert aiordma_trace().exit_code == 2


def test_trace_listing_reports_incomplete_traces(tmp_path: Path, files: list[Path]) -> None:
    writer = Writer()
    writer.end("No space left on device")
    (tmp_path / "full").write_bytes(writer.data())
    (tmp_path / "open").write_bytes(Writer().data())
    # A truncated line is reported even if another trace follows in the same file.
    torn = files[1].read_bytes().rstrip(b"\0") + b"\n" + files[0].read_bytes()
    files[1].write_bytes(torn)
    text = aiordma_trace(tmp_path / "full", tmp_path / "open", files[1]).output
    assert "2 lines, ended early: No space left on device" in text
    assert "1 lines, incomplete: the process was killed or is still running" in text
    assert "the last line is truncated" in text


# ---- the Chrome trace format --------------------------------------------------------------------


def in_chrome_format(traces: list[Traced]) -> list[dict[str, Any]]:
    told = json.loads(chrome_trace(traces))
    assert told["displayTimeUnit"] == "ns"
    events: list[dict[str, Any]] = told["traceEvents"]
    return events


def written(folder: Path, *parts: tuple[Writer, dict[str, object]]) -> list[Traced]:
    """Write the traces of several processes to files and load them."""
    paths = []
    for number, (writer, header) in enumerate(parts):
        paths.append(folder / f"{number}.jsonl")
        paths[-1].write_bytes(writer.data(**header))
    return load(paths)


def of_phase(events: list[dict[str, Any]], *phases: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] in phases]


def processes(events: list[dict[str, Any]]) -> dict[int, int]:
    """Map the `pid` of the events to the process IDs in the traces."""
    return {
        event["pid"]: int(event["args"]["name"].rpartition(" ")[2][:-1])
        for event in events
        if event["name"] == "process_name"
    }


def threads(events: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }


def test_chrome_export_of_a_small_trace_matches_expected_events(tmp_path: Path) -> None:
    writer = Writer(17)
    writer.add(trace.CreatedQP(t=writer.now(), qp_num=17, qp_type="RC", send_cq=1, recv_cq=2))
    writer.complete(writer.send(length=10))
    writer.add(
        trace.PostedSend(
            t=writer.now(), request=writer.number(), wr_id=1 << 63, length=4, num_sge=1, qp_num=17,
            opcode="RDMA_WRITE", send_flags=("SIGNALED",), remote_addr=0xFFFF800000000000, rkey=255,
        )
    )  # fmt: skip
    writer.add(trace.AsyncEvent(t=writer.now(), event_type="CQ_ERR", cq=1))
    (traced,) = written(tmp_path, (writer, {}))
    process, thread = {"pid": 1}, {"pid": 1, "tid": 2}
    assert in_chrome_format([traced]) == [
        {
            "ph": "M", "name": "process_name", **process,
            "args": {"name": "program (here, process 7)"},
        },
        {"ph": "M", "name": "thread_name", **thread, "args": {"name": "QP 0x000011 RC"}},
        {
            "ph": "i", "s": "t", "name": "create_qp qp_type=RC send_cq=1 recv_cq=2",
            "cat": "create_qp", "ts": 0.001, **thread,
            "args": {"qp_type": "RC", "send_cq": 1, "recv_cq": 2},
        },
        {
            "ph": "X", "name": "SEND", "cat": "send", "ts": 0.002, "dur": 0.001, **thread,
            "args": {
                "wr_id": "10", "length": 10, "num_sge": 1, "opcode": "SEND",
                "send_flags": ["SIGNALED"], "cq": 1, "status": "SUCCESS", "bytes": 10,
                "outcome": "completed",
            },
        },
        {
            "ph": "X", "name": "RDMA_WRITE", "cat": "send,unfinished", "ts": 0.004, "dur": 0.001,
            **thread,
            "args": {
                "wr_id": "0x8000000000000000", "length": 4, "num_sge": 1, "opcode": "RDMA_WRITE",
                "send_flags": ["SIGNALED"], "remote_addr": "0xffff800000000000", "rkey": "0xff",
                "bytes": 4, "status": "OPEN", "outcome": "open",
            },
        },
        {
            "ph": "i", "s": "p", "name": "async_event event_type=CQ_ERR cq=1",
            "cat": "async_event", "ts": 0.005, **process,
            "args": {"event_type": "CQ_ERR", "cq": 1},
        },
    ]  # fmt: skip


def test_chrome_file_has_mode_0600_and_contains_every_request(
    files: list[Path], tmp_path: Path
) -> None:
    target = tmp_path / "run.json"
    done = aiordma_trace(*files, "--chrome", target)
    assert done.exit_code == 0
    where = "open it in https://ui.perfetto.dev or chrome://tracing"
    assert done.output == f"Wrote {target}: {where}\n"
    assert target.stat().st_mode & 0o777 == 0o600
    events = json.loads(target.read_text())["traceEvents"]
    assert events == in_chrome_format(load(files))
    spans, pids = of_phase(events, "X"), processes(events)
    found = [(pids[it["pid"]], it["args"]["wr_id"], it["name"], it["cat"]) for it in spans]
    assert sorted(found) == [
        (7, "10", "RECV", "receive"),
        (7, "20", "RECV WR_FLUSH_ERR", "receive,flushed"),
        (7, "30", "RECV WR_FLUSH_ERR", "receive,flushed"),
        (7, "40", "RDMA_WRITE", "send"),
        (7, "50", "SEND", "send"),
        (7, "60", "RDMA_READ REM_ACCESS_ERR", "send,failed"),
        (7, "70", "SEND WR_FLUSH_ERR", "send,flushed"),
        (8, "10", "ATOMIC_FETCH_AND_ADD", "send,unfinished"),
    ]


def test_span_starts_with_the_trace_when_the_post_was_not_recorded(tmp_path: Path) -> None:
    """The span of a request that was posted before the trace begins with the trace."""
    writer = Writer()
    writer.t = 5000
    writer.add(
        trace.Completion(
            t=writer.now(), request=0, cq=1, qp_num=3, wr_id=1, status="SUCCESS", opcode="SEND"
        )
    )
    writer.send()
    writer.destroy()
    early, forgotten = of_phase(in_chrome_format(written(tmp_path, (writer, {}))), "X")
    assert (early["ts"], early["dur"], early["name"]) == (0, 4.001, "SEND")
    assert forgotten["args"]["outcome"] == "forgotten"
    assert (forgotten["cat"], forgotten["dur"]) == ("send,unfinished", 0.001)


def test_spans_of_a_thread_do_not_overlap(tmp_path: Path) -> None:
    """Spans do not overlap even when viewers truncate times to nanoseconds."""
    writer = Writer()
    for turn in range(50):
        posts = [writer.send() for _ in range(1 + turn % 7)]
        if turn % 3:
            writer.receive()
        for posted in posts:
            writer.complete(posted)
            writer.t -= 1  # so that the next post has the same time
    events = in_chrome_format(written(tmp_path, (writer, {})))
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in threads(events).values()}
    for event in of_phase(events, "X"):
        rows[threads(events)[event["pid"], event["tid"]]].append(event)
    assert {"QP 0x000003", "QP 0x000003 (2)", "QP 0x000003 receives"} <= set(rows)
    assert sum(map(len, rows.values())) == len(
        [it for it in writer.records if "Posted" in repr(it)]
    )
    for name, row in rows.items():
        assert {it["cat"].startswith("receive") for it in row} == {"receives" in name}
        for before, after in itertools.pairwise(row):
            assert int(before["ts"] * 1e3) + int(before["dur"] * 1e3) <= int(after["ts"] * 1e3)


def test_trace_listing_shows_retries_faults_and_refusals(tmp_path: Path) -> None:
    writer = Writer()
    posted = writer.send()
    for _ in range(3):
        writer.add(trace.Retry(t=writer.now(), qp_num=3, cause="RNR"))
    writer.add(trace.Fault(t=writer.now(), fault="LOSS", qp_num=3))
    writer.add(trace.Fault(t=writer.now(), fault="OVERRUN", cq=2))
    refusal = trace.AccessRefused(t=writer.now(), qp_num=3, reason="RANGE", rkey=16)
    writer.add(replace(refusal, access=("REMOTE_READ",), remote_addr=256, length=4096))
    writer.add(trace.AccessRefused(t=writer.now(), qp_num=3, reason="NEWER", rkey=16))
    writer.add(trace.RequestRefused(t=writer.now(), qp_num=3, reason="NO_RECEIVE"))
    dropped = trace.Dropped(t=writer.now(), qp_num=3, remote_qpn=4, reason="PSN")
    writer.add(replace(dropped, psn=7, expected_psn=8, omitted=2))
    writer.add(replace(dropped, remote="10.0.0.1", reason="NEWER", t=writer.now()))
    writer.complete(posted)
    traces = written(tmp_path, (writer, {}))
    wanted = "access=REMOTE_READ remote_addr=0x100 length=4096"
    expected = [
        *["retry cause=RNR: the peer has no receive posted"] * 3,
        "fault fault=LOSS",
        "fault fault=OVERRUN cq=2",
        f"access_refused reason=RANGE rkey=0x10 {wanted}: {trace.REASONS['RANGE']}",
        "access_refused reason=NEWER rkey=0x10",
        "request_refused reason=NO_RECEIVE: no receive is posted",
        "dropped reason=PSN remote_qpn=4 psn=7 expected_psn=8 omitted=2: " + trace.REASONS["PSN"],
        "dropped reason=NEWER remote_qpn=4 remote=10.0.0.1",
    ]
    lines = aiordma_trace(traces[0].path).output.splitlines()
    assert [line.split("  ")[-1] for line in lines[4:]] == expected
    events = in_chrome_format(traces)
    (tid,) = {tid for _, tid in threads(events)}
    marks = of_phase(events, "i")
    assert [it["name"] for it in marks] == expected
    assert [(it["s"], it.get("tid")) for it in marks] == [
        ("p", None) if "cq" in it["args"] else ("t", tid) for it in marks
    ]


def test_chrome_export_shows_unused_srq_receives_on_their_own_thread(tmp_path: Path) -> None:
    """The thread shows receives that no queue pair has taken from the shared receive queue."""
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
    events = in_chrome_format(written(tmp_path, (writer, {})))
    names = threads(events)
    assert [
        (names[it["pid"], it["tid"]], it["args"]["status"]) for it in of_phase(events, "X")
    ] == [("QP 0x000003 receives", "SUCCESS"), ("SRQ 9 receives", "OPEN")]


def test_chrome_process_and_thread_ids_are_unique(tmp_path: Path) -> None:
    """Processes and queue pairs on two machines may have equal numbers."""
    parts = []
    for header in ({"pid": 7}, {"pid": 8}, {"pid": 7, "host": "there", "boot_id": "other"}):
        writer = Writer(8)
        writer.complete(writer.send())
        parts.append((writer, {**header}))
    again = Writer(8)
    again.t = 2000
    again.complete(again.send())
    events = in_chrome_format(written(tmp_path, *parts, (again, {"pid": 8, "t": 1900})))
    names = processes(events)
    assert sorted(names.values()) == [7, 7, 8]
    assert len({tid for _, tid in threads(events)} | set(names)) == 6
    assert [names[it["pid"]] for it in of_phase(events, "X")].count(8) == 2


def connected(qp_num: int, peer: int, qp_type: str = "RC") -> Writer:
    writer = Writer(qp_num)
    writer.add(
        trace.CreatedQP(t=writer.now(), qp_num=qp_num, qp_type=qp_type, send_cq=1, recv_cq=1)
    )
    writer.add(
        trace.QPStateChange(
            t=writer.now(), qp_num=qp_num, cur_qp_state="INIT", qp_state="RTR", dest_qp_num=peer
        )
    )
    return writer


def two_ends(qp_type: str = "RC") -> tuple[Writer, Writer]:
    """Return the traces of both ends after three messages, one RDMA write and one lost message."""
    sender, receiver = connected(3, 4, qp_type), connected(4, 3, qp_type)
    receives = [receiver.receive() for _ in range(4)]
    receiver.t = 2000
    for number, opcode in enumerate(("SEND", "RDMA_WRITE", "SEND_WITH_INV", "RDMA_WRITE_WITH_IMM")):
        sender.t = 1500 + 10 * number
        sender.complete(sender.send(opcode=opcode))
    for number, receive in enumerate(receives[:3]):
        receiver.t = 1600 + 10 * number
        receiver.complete(receive, byte_len=8)
    sender.send()
    receiver.complete(receives[3], "WR_FLUSH_ERR")
    return sender, receiver


def test_chrome_flows_link_sends_to_their_receives(tmp_path: Path) -> None:
    sender, receiver = two_ends()
    traces = written(tmp_path, (sender, {}), (receiver, {"pid": 8}))
    events = in_chrome_format(traces)
    flows = of_phase(events, "s", "f")
    assert all((it["name"], it["cat"]) == ("message", "message") for it in flows)
    pids = processes(events)
    found = {(it["ph"], it["id"], pids[it["pid"]], it["ts"]) for it in flows}
    assert found == {
        ("s", 1, 7, 0.501), ("f", 1, 8, 0.601), ("s", 2, 7, 0.521), ("f", 2, 8, 0.611),
        ("s", 3, 7, 0.531), ("f", 3, 8, 0.621),
    }  # fmt: skip
    # Each flow event follows the event it binds to: the request, or the arrival of the message.
    for before, flow in itertools.pairwise(events):
        if flow["ph"] in ("s", "f"):
            assert [before[key] for key in ("pid", "tid", "ts")] == [
                flow[key] for key in ("pid", "tid", "ts")
            ]
            assert before["ph"] == ("X" if flow["ph"] == "s" else "i")
    assert {it["bp"] for it in of_phase(events, "f")} == {"e"}
    # A flow needs the traces of both ends.
    one = in_chrome_format(load([traced.path for traced in traces], qps={3}))
    assert of_phase(one, "s", "f") == []
    assert len(of_phase(one, "X")) == 5


@pytest.mark.parametrize("why", ["unreliable", "two peers with one number", "it began before"])
def test_ambiguous_messages_have_no_flows(tmp_path: Path, why: str) -> None:
    sender, receiver = two_ends("UC" if why == "unreliable" else "RC")
    parts: list[tuple[Writer, dict[str, object]]] = [(sender, {}), (receiver, {"pid": 8})]
    if why == "two peers with one number":
        parts.append((two_ends()[1], {"pid": 9}))
    if why == "it began before":
        del receiver.records[1]  # transition to RTR
    assert not of_phase(in_chrome_format(written(tmp_path, *parts)), "s", "f")


def test_chrome_flows_are_correct_after_queue_pair_number_reuse(tmp_path: Path) -> None:
    first, second = two_ends(), two_ends()
    for writer, later in zip(first, second, strict=True):
        writer.t = 1700
        writer.destroy()
        writer.records += [replace(it, t=it.t + 1000) for it in later.records]
    events = in_chrome_format(written(tmp_path, (first[0], {}), (first[1], {"pid": 8})))
    ends = {it["id"]: it["ts"] for it in of_phase(events, "f")}
    took = [round(ends[it["id"]] - it["ts"], 3) for it in of_phase(events, "s")]
    assert took == [0.1, 0.09, 0.09] * 2


@pytest.mark.parametrize(
    ("target", "code", "text"),
    [
        ("none/run.json", 1, "No such file or directory"),
        (".", 2, "is a directory"),
        ("first", 2, "first, which is one of the traces"),
        ("link", 1, "is a symbolic link; use the path of the file itself"),
        ("linked", 1, "has 2 hard links instead of one; choose another file"),
        ("open", 1, "is accessible to other users (066); run chmod 600 "),
        ("fifo", 1, "is not a regular file"),
    ],
)
def test_unwritable_chrome_file_is_rejected(
    target: str, code: int, text: str, files: list[Path], tmp_path: Path
) -> None:
    before = files[0].read_bytes()
    os.mkfifo(tmp_path / "fifo")
    for name in ("open", "linked", "aim"):
        (tmp_path / name).write_text("kept")
        (tmp_path / name).chmod(0o666 if name == "open" else 0o600)
    (tmp_path / "link").symlink_to(tmp_path / "aim")
    (tmp_path / "also linked").hardlink_to(tmp_path / "linked")
    done = aiordma_trace(*files, "--chrome", tmp_path / target)
    assert {(tmp_path / name).read_text() for name in ("open", "linked", "aim")} == {"kept"}
    assert done.exit_code == code
    assert text in done.output
    assert "Traceback" not in done.output
    assert files[0].read_bytes() == before
