"""Tests of `aiordma top` and of the sockets by which it asks the processes of its user."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from aiordma import monitoring_socket, testing
from aiordma.cli.app import app
from aiordma.cli.top import p99, rail_rows, tables, traffic_cells
from aiordma.monitoring import snapshot
from aiordma.monitoring_socket import VARIABLE, ask, directory, serve_request

PROGRAM = """
import asyncio, os, sys, time
import aiordma
from aiordma import testing

async def main():
    async with testing.connected_pair(device=sys.argv[1]) as (client, server):
        for _ in range(7):
            await client.send(bytes(1000))
            (await server.recv()).release()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        if sys.argv[2:] == ["stuck"]:
            print("stuck", flush=True)
            sys.stdin.readline()

asyncio.run(main())
"""


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The monitoring socket directory, set in AIORDMA_MONITOR."""
    where = tmp_path / "sockets"
    monkeypatch.setenv(VARIABLE, str(where))
    return where


Process = subprocess.Popen[str]


@pytest.fixture
def program(sockets: Path, device_name: str) -> Iterator[Process]:
    """A process that has opened two connections and sent seven messages of 1000 bytes."""
    with run(device_name, "stuck") as process:
        try:
            yield process
        finally:
            process.kill()


def run(*arguments: str) -> Process:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", PROGRAM, *arguments]
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    expect(process, "ready")
    return process


def expect(process: Process, line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == f"{line}\n"


def enter(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def top(*words: str) -> Result:
    return CliRunner().invoke(app, ["top", *words], env={"COLUMNS": "200"})


def snapshots_by_top(*words: str) -> list[dict[str, Any]]:
    done = top("--json", *words)
    assert done.exit_code == 0, done.output
    taken: list[dict[str, Any]] = json.loads(done.output)
    return taken


@pytest.mark.any_device
def test_top_shows_processes_and_connections(program: Process, device_name: str) -> None:
    (taken,) = snapshots_by_top()
    assert taken["pid"] == program.pid
    assert taken["traffic"]["bytes_sent"] == taken["traffic"]["bytes_received"] == 7000
    assert [state["device"] for state in taken["connections"]] == [device_name] * 2
    assert all(state["wire"] for state in taken["connections"])
    assert snapshots_by_top(str(program.pid))[0]["pid"] == program.pid
    table = top("--once").output
    assert re.search(rf"^ *{program.pid} +2 +1 +14 +6\.8 KiB +6\.8 KiB ", table, re.M)
    assert len(re.findall(rf"^ *{program.pid} .* open .* 6\.8 KiB", table, re.M)) == 2
    assert "1 more connections; use --limit 0" in top("--once", "--limit", "1").output
    enter(program)
    expect(program, "stuck")  # the event loop; a thread answers
    assert snapshots_by_top()[0]["traffic"]["messages_sent"] == 7


WITH_A_PORT = """
import sys
from aiordma import verbs
with verbs.open_device("embedded0") as context:
    print("ready", flush=True)
    for _ in sys.stdin:
        print(context.query_port(1).state.name, flush=True)
"""


def test_port_command_changes_the_port_state(sockets: Path) -> None:
    def port(pid: int, device: str, state: str) -> str:
        return CliRunner().invoke(app, ["port", str(pid), device, state]).output

    pipe = subprocess.PIPE
    command = [sys.executable, "-c", WITH_A_PORT]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        expect(process, "ready")
        for state, shown in (("down", "DOWN"), ("up", "ACTIVE")):
            assert port(process.pid, "embedded0", state) == ""
            enter(process)
            expect(process, shown)
        for name in "embedded9", "", "embedded0 up", "embedded0 ":
            no_device = f"Error: {name}: no such embedded device is open in this process\n"
            assert port(process.pid, name, "up") == no_device
        assert port(1, "embedded0", "up").startswith("Error: process 1 not found, or")
        process.kill()


HEADINGS = [
    "pid connections listeners messages sent received memory waited p99 broken failed",
    "pid peer side device wire state age messages sent received queue unread",
]


@pytest.mark.any_device
@pytest.mark.parametrize("updated", [False, True])
@pytest.mark.parametrize(
    ("width", "hidden"),
    [(80, [["listeners", "waited"], ["device", "side", "age", "wire"]]), (200, [[], []])],
)
async def test_top_hides_whole_columns_when_narrow(
    device_name: str, width: int, hidden: list[list[str]], updated: bool
) -> None:
    """A note names the hidden columns."""
    async with testing.connected_pair(device=device_name):
        taken = snapshot()
    counts = taken["traffic"] | {"bytes_sent": 123 << 30, "bytes_received": 45 << 20}
    counts["messages_sent"] = 12_345_678
    shown: Any = {"1": {**taken, "pid": 4_194_304, "traffic": counts}}
    for number, each in enumerate(shown["1"]["connections"]):
        each |= {"traffic": counts, "peer": "10.255.255.255:65535", "qp_num": number}
        each |= {"state": "GOODBYE_SENT", "wire": "shared memory", "age": 12_345.0}
    none = dict.fromkeys(counts, 0)
    earlier = shown["1"]["connections"][1:] if updated else []
    connections = [{**each, "traffic": none} for each in earlier]
    known = {"time": taken["time"] - 2, "traffic": none, "connections": connections}
    before: Any = {"1": {**shown["1"], **known}}
    text = io.StringIO()
    console = Console(file=text, width=width)
    console.print(tables(shown, before, 0, width))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    heads = [line.split() for line in lines if line.startswith(" pid ")]
    for head, every, without in zip(heads, HEADINGS, hidden, strict=True):
        assert head == [name for name in every.split() if name not in without]
    notes = [line.strip() for line in lines if "hidden" in line]
    assert notes == [f"hidden columns: {', '.join(names)}" for names in hidden if names]


@pytest.mark.any_device
def test_traffic_is_shown_as_totals_and_rates() -> None:
    counts: Any = dict.fromkeys(snapshot()["traffic"], 0)
    counts |= {"bytes_sent": 4096, "bytes_received": 10, "messages_sent": 3}
    known: Any = counts | {"bytes_sent": 1024, "bytes_received": 0}
    now = {"messages": 3, "sent": "4.0 KiB (1.5 KiB/s)", "received": "10 B (5 B/s)"}
    assert traffic_cells(counts, known, 2.0) == (3082, now)
    ever = {"messages": 3, "sent": "4.0 KiB", "received": "10 B"}
    assert traffic_cells(counts, None, 0.0) == (4106, ever)


@pytest.mark.any_device
@pytest.mark.parametrize(
    ("field", "heading"),
    [
        ("bytes_sent", "sent"),
        ("bytes_written", "sent"),
        ("peer_bytes_read", "sent"),
        ("bytes_received", "received"),
        ("bytes_read", "received"),
        ("peer_bytes_written", "received"),
    ],
)
def test_columns_sum_messages_and_one_sided_operations(field: str, heading: str) -> None:
    none: Any = dict.fromkeys(snapshot()["traffic"], 0)
    rail: Any = {"device": "mlx5_0", "state": "lead", "age": 1.0, "error": None} | none
    busy, cells = traffic_cells(none | {field: 2048}, None, 0.0)
    assert busy == 2048
    _, row = rail_rows([rail, rail | {"device": "mlx5_1", field: 2048}], [rail], 2.0)
    other = ({"sent", "received"} - {heading}).pop()
    for shown in cells, row:
        assert (shown[heading], shown[other]) == ("2.0 KiB", "0 B")
    _, row = rail_rows([rail, rail | {field: 2048}], [rail], 2.0)
    assert row[heading] == "2.0 KiB (1.0 KiB/s)"


@pytest.mark.any_device
def test_rail_row_treats_missing_counters_as_zero() -> None:
    none: Any = dict.fromkeys(snapshot()["traffic"], 0)
    rail: Any = {"device": "mlx5_0", "state": "lead", "age": 1.0, "error": None} | none
    rail |= {"bytes_written": 3, "peer_bytes_read": None, "peer_bytes_written": None}
    assert [row["sent"] for row in rail_rows([rail, rail], [], 0.0)] == ["3 B", "3 B"]


@pytest.mark.any_device
@pytest.mark.parametrize(
    ("counts", "before", "shown"),
    [
        ([0, 0, 0], None, "-"),
        ([99, 100, 100], None, "5 us"),
        ([98, 100, 100], None, "1000 us"),
        ([98, 98, 100], None, "> 1 s"),
        ([98, 98, 100], [97, 97, 98], "> 1 s"),
        ([98, 98, 100], [0, 0, 2], "5 us"),
    ],
)
def test_p99_is_computed_over_the_interval(
    counts: list[int], before: list[int] | None, shown: str
) -> None:
    def taken(counts: list[int]) -> Any:
        up_to = dict(zip(("5e-06", "0.001", "+Inf"), counts, strict=True))
        return {"latencies": {"send": {"seconds": 1, "up_to": up_to}}}

    assert p99(taken(counts), taken(before) if before else None) == shown


@pytest.mark.any_device
def test_top_socket_is_private_and_removed_at_exit(sockets: Path, device_name: str) -> None:
    with run(device_name) as process:
        (path,) = sockets.iterdir()
        assert re.fullmatch(rf"{process.pid}-[0-9a-f]{{8}}\.sock", path.name)
        modes = [stat.S_IMODE(it.stat().st_mode) for it in (sockets, path)]
        assert modes == [0o700, 0o600]  # no access for other users
        _, errors = process.communicate("\n", timeout=100)
    assert (errors, process.returncode) == ("", 0)
    assert list(sockets.iterdir()) == []
    done = top("--once")
    assert done.exit_code == 1
    assert "no process found in" in done.output
    assert f"with {VARIABLE}={os.environ[VARIABLE]} in its" in done.output
    assert "process 1 not found in" in top("--once", "1").output


@pytest.mark.any_device
def test_top_continues_while_a_process_is_unresponsive(
    program: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"1-1": snapshots_by_top()[0]}
    looks = iter([(found, []), (found, []), ({}, ["process 1 does not respond"]), ({}, [])])
    monkeypatch.setattr("aiordma.cli.top.collect", lambda where, pid: next(looks))
    assert top("--interval", "0.1").exit_code == 0
    assert not list(looks)


def test_top_searches_default_directory_when_own_socket_is_disabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "0")
    assert "no process" in top("--once").output
    monkeypatch.setenv(VARIABLE, f"{tmp_path}/service")
    assert f"with {VARIABLE}={tmp_path}/service in its" in top("--once").output


@pytest.mark.any_device
def test_top_removes_the_socket_of_a_killed_process(program: Process, sockets: Path) -> None:
    program.kill()
    program.wait()
    assert len(list(sockets.iterdir())) == 1
    assert top("--once").exit_code == 1
    assert list(sockets.iterdir()) == []


@pytest.mark.any_device
def test_process_removes_stale_sockets_with_its_own_pid(sockets: Path) -> None:
    """Killed processes leave at most one socket per PID, even if `aiordma top` never runs."""
    sockets.mkdir(0o700)
    for name in ("7-00000002", "71-00000003"):
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(sockets / f"{name}.sock"))
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(sockets / "7-00000001.sock"))
        living.listen()
        monitoring_socket.remove_dead(sockets, 7)
        assert sorted(path.stem for path in sockets.iterdir()) == ["7-00000001", "71-00000003"]


@contextmanager
def serving(path: Path, *, parts: Iterable[bytes]) -> Iterator[None]:
    """Listen on `path` and answer each client with `parts`."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            with suppress(OSError):
                while True:
                    peer, _ = listener.accept()
                    with peer, suppress(OSError):
                        peer.recv(100)
                        for part in parts:
                            peer.sendall(part)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def serving_snapshot(path: Path, value: object) -> AbstractContextManager[None]:
    """Listen on `path` and answer each client with `value` as JSON."""
    return serving(path, parts=[json.dumps(value).encode()])


@pytest.mark.any_device
def test_top_distinguishes_containers_with_equal_pids(sockets: Path) -> None:
    """The containers share the directory, but not the PID namespace.

    Their rows have the names of the sockets.
    """
    sockets.mkdir(0o700)
    one, other = (json.loads(json.dumps(snapshot() | {"pid": 1})) for _ in range(2))
    other["traffic"] = dict.fromkeys(other["traffic"], 0) | {"bytes_sent": 3 << 30}
    with (
        serving_snapshot(sockets / "1-aaaaaaaa.sock", one),
        serving_snapshot(sockets / "1-bbbbbbbb.sock", other),
    ):
        assert [taken["pid"] for taken in snapshots_by_top("1")] == [1, 1]
        table = top("--once").output
    assert re.search(r"^ *1-aaaaaaaa .*", table, re.M)
    assert re.search(r"^ *1-bbbbbbbb .* 3\.0 GiB ", table, re.M)


NO_SNAPSHOTS: list[object] = [None, [], 3, "text", {}]


@pytest.mark.any_device
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": "9.1"}, None),  # extra fields, and all fields of the table
        ({"version": "9.1", "traffic": {}}, "aiordma 9.1"),
        ({"version": "9.1\x1b[2J", "devices": None}, "aiordma 9.1[2J"),
        ({"version": "9.1", "errors": None}, None),  # not shown in the table
        ({"version": "9.1", "time": None}, "aiordma 9.1"),
        ({"version": "9.1", "connections": [{}]}, "aiordma 9.1"),
        *zip(NO_SNAPSHOTS, repeat("aiordma of another version")),
    ],
)
def test_top_reports_a_process_running_another_version(
    sockets: Path, program: Process, change: Any, named: str | None
) -> None:
    """It is named in one line, and the other processes are still shown."""
    is_changed = isinstance(change, dict) and change
    other = snapshot() | {"pid": 7, "new": 1} | change if is_changed else change
    with serving_snapshot(sockets / "7-aaaaaaaa.sock", other):
        done = top("--once")
        assert done.exit_code == 0
        assert re.search(rf"^ *{program.pid} +2 ", done.stdout, re.M)
        if named is None:
            assert re.search(r"^ *7 +0 ", done.stdout, re.M)
            assert done.stderr == ""
        else:
            assert f"process 7 uses {named}, " in done.stderr
            assert done.stderr.count("\n") == 1
        assert snapshots_by_top("7") == [other]
        alone = top("--once", "7")
        assert alone.exit_code == (0 if named is None else 1)
        assert (named or "") in alone.output


@pytest.mark.any_device
def test_top_queries_processes_concurrently(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process sends JSON that is nested too deeply, and the others do not respond."""
    sockets.mkdir(0o700)
    for n in range(3):
        (sockets / f"{n}-aaaaaaaa.sock").touch()
    asked = threading.Barrier(3, timeout=100)

    def silent(path: Path, seconds: float) -> bytes:
        asked.wait()
        if path.stem.startswith("0-"):
            return b"[" * 200_000  # nested too deeply for the parser
        raise TimeoutError(f"{path} is silent for {seconds:g} s")

    monkeypatch.setattr(sys.modules[traffic_cells.__module__], "ask", silent)
    done = top("--once")
    assert done.exit_code == 1
    assert len(re.findall(r"process [12] does not respond: .* is silent for 5 s", done.stderr)) == 2
    assert "process 0 does not respond: " in done.stderr


@pytest.mark.any_device
def test_forked_child_has_its_own_socket(sockets: Path) -> None:
    code = """
import os, sys
import aiordma
reading, writing = os.pipe()
if not (child := os.fork()):
    os.close(writing)
    os.read(reading, 1)
    os._exit(0)
print(child, flush=True)
sys.stdin.readline()
os.close(writing)
os.waitpid(child, 0)
"""
    pipe = subprocess.PIPE
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        # The parent prints the PID before the child is sure to be listening.
        while not list(sockets.glob(f"{child}-*.sock")):
            os.sched_yield()
        assert {taken["pid"] for taken in snapshots_by_top()} == {process.pid, child}
        process.communicate("\n", timeout=100)
    assert process.returncode == 0


@pytest.mark.any_device
def test_process_creates_no_socket_unless_the_variable_is_set(
    sockets: Path, device_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    with run(device_name) as process:
        assert not sockets.exists()
        process.communicate("\n", timeout=100)


@pytest.mark.any_device
def test_monitoring_socket_rejects_other_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The request is refused even if another user's process can connect to the socket."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        serve_request(there)
        there.close()
        assert here.recv(1) == b""
    assert f"request from user {os.getuid()}\n" in caplog.text


@pytest.mark.any_device
def test_snapshot_response_times_out_when_the_peer_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitoring_socket, "snapshot", lambda: "x" * (1 << 22))
    monkeypatch.setattr(monitoring_socket, "RESPONSE_TIMEOUT", 0.01)
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there, pytest.raises(TimeoutError):
        serve_request(there)


@pytest.mark.any_device
def test_ask_limits_size_and_total_time_of_the_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time limit is for the whole answer. Sending a little at a time does not extend it."""
    monkeypatch.setattr(monitoring_socket, "MAX_RESPONSE", 1 << 20)
    path = tmp_path / "1.sock"
    endless = serving(path, parts=repeat(bytes(1 << 16)))
    with endless, pytest.raises(OSError, match="exceeds 1048576 bytes"):
        ask(path, 100)
    path.unlink()
    monkeypatch.setattr(monitoring_socket, "time", SimpleNamespace(monotonic=count().__next__))
    with serving(path, parts=repeat(b" ")), pytest.raises(TimeoutError, match="100 s"):
        ask(path, 100)


@pytest.mark.any_device
def test_insecure_or_invalid_directories_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "open"
    where.mkdir()
    for mode in (0o755, 0o770, 0o701):
        where.chmod(mode)
        expected = rf"accessible to other users \({mode & 0o77:03o}\); run chmod 700 /"
        with pytest.raises(PermissionError, match=expected):
            directory(str(where))
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(NotADirectoryError):
        directory(str(tmp_path / "link"))
    with pytest.raises(ValueError, match="absolute path"):
        directory("yes")
    long = Path("/" + "x" * (monitoring_socket.MAX_DIRECTORY_PATH - 1))
    with pytest.raises(ValueError, match=rf"{long}x is too long .*: 86 bytes \(maximum 85\); "):
        directory(f"{long}x")
    with socket.socket(socket.AF_UNIX) as listener, pytest.raises(FileNotFoundError):
        listener.bind(f"{long}/4194304-00000000.sock")  # not "path too long"
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    expected = f"user {other - 1}, but this process runs as user {other}"
    with pytest.raises(PermissionError, match=expected):
        directory(str(tmp_path))


@pytest.mark.any_device
def test_shared_directory_is_used_without_a_runtime_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service has no runtime directory, so `aiordma top` also looks in /tmp."""
    assert Path("/tmp") == monitoring_socket.SHARED_DIRECTORY
    monkeypatch.setattr(monitoring_socket, "SHARED_DIRECTORY", tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    runtime = tmp_path / "r"  # socket paths must be short
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    there = monitoring_socket.default_directories()
    assert there[1] == Path(f"/run/user/{os.geteuid()}/aiordma")
    monkeypatch.setattr(monitoring_socket, "default_directories", lambda: [there[0], there[2]])
    own = tmp_path / f"aiordma-{os.geteuid()}"
    own.symlink_to("/")
    with pytest.raises(NotADirectoryError):
        directory("1")
    own.unlink()
    assert directory("1") == own
    assert own.stat().st_mode & 0o777 == 0o700
    with serving_snapshot(own / "1-1.sock", snapshot()):
        runtime.mkdir()  # as if the user had logged in
        assert directory("1") == runtime / "aiordma"
        assert len(snapshots_by_top()) == 1
        own.chmod(0o755)
        assert "no process" in top("--once").output


@pytest.mark.any_device
def test_program_runs_when_its_socket_cannot_be_created(sockets: Path, device_name: str) -> None:
    sockets.write_text("no directory")
    with run(device_name) as process:
        _, errors = process.communicate("\n", timeout=100)
    assert process.returncode == 0
    assert errors == (
        f"{VARIABLE} is '{sockets}', but `aiordma top` cannot show this process: "
        f"{sockets} is not a directory\n"
    )
    assert (
        top("--once").output
        == f"Error: cannot use {VARIABLE}='{sockets}': {sockets} is not a directory\n"
    )
