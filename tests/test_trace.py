"""Tests of traces of the embedded device from Python. Other devices have no traces."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from aiordma import trace, verbs
from aiordma._native import ffi
from aiordma._private_files import open_private
from aiordma.cli.app import app
from aiordma.errors import BusyError, TraceFormatError, VerbsError
from aiordma.verbs import AccessFlags, QPAttrMask, QPState, SendFlags, SendWorkRequest
from tests.processes import run_python

PROGRAM = """
import os, signal
from aiordma import verbs
with verbs.find_device("embedded0").open() as context, context.alloc_pd() as pd:
    with context.create_cq(16) as cq, pd.create_qp(cq) as qp:
        own = qp.endpoint()
        qp.connect(own, own)
        for wr_id in range(3):
            qp.post_send([verbs.SendWorkRequest(wr_id, verbs.WROpcode.RDMA_WRITE)])
        {end}
"""


@pytest.fixture(autouse=True)
def no_trace_is_left() -> Iterator[None]:
    yield
    trace.stop()


def write_to_oneself(count: int) -> int:
    """Post RDMA writes of 8 bytes, of which the last is signaled. Return the queue pair number."""
    with verbs.find_device("embedded0").open() as context, context.alloc_pd() as pd:
        rights = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
        with context.create_cq(64) as cq, pd.reg_mr(64, rights) as mr, pd.create_qp(cq) as qp:
            own = qp.endpoint()
            qp.connect(own, own, access=AccessFlags.REMOTE_WRITE)
            for wr_id in range(1, count + 1):
                flags = SendFlags.SIGNALED if wr_id == count else SendFlags.NONE
                qp.post_send_one(
                    wr_id, verbs.WROpcode.RDMA_WRITE, flags, mr.addr, 8, mr.lkey, mr.addr, mr.rkey
                )
            while not cq.poll():
                os.sched_yield()
            return qp.qp_num


def test_recording_contains_requests_and_states(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with trace.recording(path) as used:
        assert used == path
        qp_num = write_to_oneself(3)
    write_to_oneself(1)  # not recorded
    (run,) = trace.read(path)
    (created,) = (it for it in run.records if isinstance(it, trace.CreatedQP))
    assert (created.qp_num, created.qp_type, created.sq_sig_all) == (qp_num, "RC", False)
    states = [it for it in run.records if isinstance(it, trace.QPStateChange)]
    assert [(it.qp_state, it.dest_qp_num) for it in states[:3]] == [
        ("INIT", None), ("RTR", qp_num), ("RTS", None),
    ]  # fmt: skip
    assert sum(isinstance(it, trace.DestroyedQP) for it in run.records) == 1
    assert run.header.pid == os.getpid()
    assert run.header.device == "embedded0"
    assert run.end == trace.End(t=run.records[-1].t)
    found = trace.requests(run)
    assert [(it.wr_id, it.outcome) for it in found] == [
        (1, trace.Outcome.IMPLICIT),
        (2, trace.Outcome.IMPLICIT),
        (3, trace.Outcome.COMPLETED),
    ]
    for it in found:
        assert (it.operation, it.qp_num, it.bytes, it.failed) == ("RDMA_WRITE", qp_num, 8, False)
    times = [record.t for record in run.records]
    assert times == sorted(times)
    assert run.header.t <= times[0]
    assert found[-1].took is not None
    assert 0 < found[-1].took < times[-1] - times[0]


def test_recording_includes_xrc_queue_pairs_and_requests(tmp_path: Path) -> None:
    device = verbs.find_device("embedded0")
    with (
        trace.recording(tmp_path / "trace") as path,
        device.open() as context,
        context.alloc_pd() as pd,
        context.create_cq(16) as cq,
        context.open_xrcd() as xrcd,
        pd.create_srq(4, xrcd=xrcd, cq=cq) as srq,
        pd.create_qp(cq, qp_type=verbs.QPType.XRC_SEND) as source,
        xrcd.create_qp() as target,
    ):
        here, there = source.endpoint(), target.endpoint()
        source.connect(here, there)
        target.connect(there, here)
        number = srq.srq_num
        srq.post_recv_one(7, 0, 0, 0)
        source.post_send([SendWorkRequest(8, verbs.WROpcode.SEND, remote_srqn=number)])
        completed = 0
        while completed < 2:
            completed += len(cq.poll())
            os.sched_yield()
    (run,) = trace.read(path)
    one, other = (it for it in run.records if isinstance(it, trace.CreatedQP))
    assert (one.qp_type, one.recv_cq) == ("XRC_SEND", None)
    assert (other.qp_type, other.send_cq, other.recv_cq) == ("XRC_RECV", None, None)
    (sent,) = (it for it in run.records if isinstance(it, trace.PostedSend))
    assert sent.remote_srqn == number
    assert [(it.wr_id, it.outcome) for it in trace.requests(run)] == [
        (7, trace.Outcome.COMPLETED),
        (8, trace.Outcome.COMPLETED),
    ]


def test_concurrent_recording_is_rejected_and_later_runs_are_appended(tmp_path: Path) -> None:
    with pytest.raises(KeyError), trace.recording(tmp_path / "failed") as failed:
        raise KeyError
    assert trace.read(failed)[0].end is not None
    path = trace.start(os.fspath(tmp_path / "trace.%p"))
    assert path == tmp_path / f"trace.{os.getpid()}"
    with pytest.raises(BusyError, match="is already being traced"):
        trace.start(tmp_path / "another")
    with pytest.raises(ValueError, match="null character"):
        trace.start(f"{tmp_path}/another\0")
    assert not (tmp_path / "another").exists()
    trace.stop()
    trace.stop()
    with trace.recording(path):
        write_to_oneself(1)
        assert len(trace.read(path)) == 2
    assert [run.end is not None for run in trace.read(path)] == [True, True]


@pytest.mark.parametrize(
    ("name", "code", "why"),
    [
        ("", errno.EISDIR, os.strerror(errno.EISDIR)),
        ("none/trace", errno.ENOENT, os.strerror(errno.ENOENT)),
        ("fifo", errno.ESPIPE, "it is not a regular file"),
        ("open", errno.EPERM, r"others may access it \(mode 0666\)"),
        ("link", errno.ELOOP, "it is a symbolic link"),
        ("linked", errno.EMLINK, r"it has other names \(2 hard links\)"),
    ],
)
def test_unwritable_trace_file_raises_os_error(
    name: str, code: int, why: str, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    for file in ("open", "linked"):
        (tmp_path / file).touch(0o600)
    (tmp_path / "open").chmod(0o666)
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    (tmp_path / "also linked").hardlink_to(tmp_path / "linked")
    with pytest.raises(OSError, match=why) as caught:
        trace.start(tmp_path / name)
    assert (caught.value.errno, caught.value.filename) == (code, os.fspath(tmp_path / name))
    assert (tmp_path / "open").stat().st_size == (tmp_path / "linked").stat().st_size == 0
    assert not (tmp_path / "missing").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_trace_file_of_another_user_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    path.touch(0o600)
    os.chown(path, 65533, 65533)
    with pytest.raises(OSError, match=r"it belongs to user 65533"):
        trace.start(path)
    told = "belongs to user 65533, but this process runs as user 0; choose another path"
    with pytest.raises(OSError, match=f"{path} {told}"):
        open_private(path)
    assert path.stat().st_size == 0
    done = run_python("-c", PROGRAM.format(end=""), AIORDMA_TRACE=str(path))
    assert f"AIORDMA_TRACE is '{path}': cannot write a trace there, because it" in done.stderr
    assert "VerbsError: [Errno 1] ibv_open_device: Operation not permitted" in done.stderr


def test_open_private_reports_the_owner_of_a_protected_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under fs.protected_regular, O_CREAT fails for another user's file in /tmp."""
    real_open, user = os.open, os.geteuid()

    def protected_open(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT and path.exists():
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real_open(path, flags, mode)

    path = tmp_path / "theirs"
    path.touch(0o600)
    monkeypatch.setattr(os, "open", protected_open)
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(PermissionError, match=f"{path} belongs to user {user}, but"):
        open_private(path)


def test_read_rejects_files_that_are_not_traces(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        trace.read(tmp_path / "missing")
    path = tmp_path / "other"
    path.write_text("text\n")
    with pytest.raises(TraceFormatError, match=f"^{path}, line 1: invalid JSON"):
        trace.read(path)


def test_trace_explains_memory_protection_errors(tmp_path: Path) -> None:
    """One key never existed, one has ended, and one belongs to another domain."""
    with (
        trace.recording(tmp_path / "trace") as path,
        verbs.open_device("embedded0") as context,
        context.alloc_pd() as pd,
        context.alloc_pd() as other,
        other.reg_mr(64) as foreign,
        context.create_cq(8) as cq,
    ):
        with pd.reg_mr(64) as mr:
            ended = mr.lkey
        keys = [ended ^ 1, ended, foreign.lkey]
        for lkey in keys:
            with pd.create_qp(cq, cq) as qp:
                qp.connect(qp.endpoint(), qp.endpoint())
                qp.post_send_one(1, verbs.WROpcode.SEND, 0, foreign.addr, 8, lkey, 0, 0)
                while not cq.poll():
                    os.sched_yield()
    lines = CliRunner().invoke(app, ["trace", str(path)]).output.splitlines()
    assert [line.partition(" LOC_PROT_ERR ")[2] for line in lines if "LOC_PROT_ERR" in line] == [
        f"reason={reason} lkey={lkey:#x}: {trace.REASONS[reason]}"
        for reason, lkey in zip(["KEY", "ENDED", "DOMAIN"], keys, strict=True)
    ]


def test_rejected_calls_are_traced_with_their_reasons(tmp_path: Path) -> None:
    attr = ffi.new("struct ibv_qp_attr *", {"qp_state": QPState.RTS})
    with (
        trace.recording(tmp_path / "trace") as path,
        verbs.open_device("embedded0") as context,
        context.alloc_pd() as pd,
        context.create_cq(8) as cq,
        pd.create_qp(cq) as qp,
    ):
        calls = context.library.calls  # raw calls, which do not check arguments
        with pytest.raises(VerbsError, match="ibv_resize_cq"):
            calls.ibv_resize_cq(cq.pointer, 1 << 24)
        with pytest.raises(VerbsError, match="ibv_modify_qp"):
            calls.ibv_modify_qp(qp.pointer, attr, QPAttrMask.STATE)
    (run,) = trace.read(path)
    resize, modify = (it for it in run.records if isinstance(it, trace.CallRefused))
    assert (resize.call, resize.errno, resize.reason) == ("ibv_resize_cq", 22, "LIMIT")
    assert (resize.field, resize.value, resize.limit) == ("cqe", 1 << 24, 1 << 20)
    assert (modify.call, modify.qp_num, modify.reason) == ("ibv_modify_qp", qp.qp_num, "TRANSITION")
    assert (modify.cur_qp_state, modify.qp_state) == ("RESET", "RTS")
    lines = CliRunner().invoke(app, ["trace", str(path)]).output.splitlines()
    refused = [line.partition("call_refused ")[2] for line in lines if "call_refused" in line]
    assert refused == [
        "call=ibv_resize_cq errno=22 error=Invalid argument reason=LIMIT field=cqe value=16777216"
        f" limit=1048576 cq={resize.cq}: the value exceeds what the device or the object allows",
        "call=ibv_modify_qp errno=22 error=Invalid argument reason=TRANSITION cur_qp_state=RESET"
        " qp_state=RTS: queue pairs of this type do not have this state transition",
    ]


def test_trace_reasons_match_the_device_sources() -> None:
    """The table has exactly the reasons that the device's sources write."""
    device = Path(__file__).parents[1] / "softdev/src"
    names = [
        "objects/*.[ch]",
        "rc/*.c",
        "ud/*.c",
        "link/*.c",
        "path/roce/*.c",
        "cm/cm_gsi.c",
        "trace/refusal.c",
    ]
    text = "".join(path.read_text() for name in names for path in device.glob(name))
    written = set(re.findall(r'"([A-Z_]{3,})"|\bR\(([A-Z_]+), E', text))
    others = ("AIORDMA_", "RDMA_")  # prefixes of other uppercase names
    reasons = {name for it in written if not (name := "".join(it)).startswith(others)}
    statuses = {status.name for status in verbs.WCStatus}
    faults = {"CUT", "DUPLICATE"}
    assert reasons - faults == trace.REASONS.keys() - statuses - {"ENDED"}


# ---- by the environment -------------------------------------------------------------------------


def run_traced(end: str, path: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", PROGRAM.format(end=end), AIORDMA_TRACE=path)


@pytest.mark.parametrize(
    ("end", "status"),
    [("pass", 0), ("os._exit(0)", 0), ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL)],
)
def test_aiordma_trace_records_every_request_before_process_exit(
    end: str, status: int, tmp_path: Path
) -> None:
    """However the process ends, every posted request is in the trace."""
    done = run_traced(end, str(tmp_path / "%p.jsonl"))
    assert (done.returncode, done.stderr) == (status, "")
    (path,) = tmp_path.iterdir()
    (run,) = trace.read(path)
    assert path.name == f"{run.header.pid}.jsonl"
    assert [it.wr_id for it in trace.requests(run)] == [0, 1, 2]
    assert (run.end is not None) == (end == "pass")
    assert "-c" in run.header.command
