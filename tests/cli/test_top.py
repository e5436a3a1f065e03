"""`aiordma top` shows processes that let it, to their own user."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from aiordma import monitoring_socket
from aiordma.cli.app import app
from aiordma.cli.top import rates
from aiordma.monitoring_socket import VARIABLE, answer, ask, directory

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
    """The directory that AIORDMA_MONITOR names."""
    where = tmp_path / "sockets"
    monkeypatch.setenv(VARIABLE, str(where))
    return where


Process = subprocess.Popen[str]


@pytest.fixture
def program(sockets: Path, device_name: str) -> Iterator[Process]:
    """A process with two connections, after seven messages of 1000 bytes."""
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


def told(*words: str) -> list[dict[str, Any]]:
    done = top("--json", *words)
    assert done.exit_code == 0, done.output
    taken: list[dict[str, Any]] = json.loads(done.output)
    return taken


@pytest.mark.any_device
def test_json(program: Process, device_name: str) -> None:
    (taken,) = told()
    assert taken["pid"] == program.pid
    assert taken["traffic"]["bytes_sent"] == taken["traffic"]["bytes_received"] == 7000
    assert [state["device"] for state in taken["connections"]] == [device_name] * 2
    assert all(state["wire"] for state in taken["connections"])
    assert told(str(program.pid))[0]["pid"] == program.pid


@pytest.mark.any_device
def test_table(program: Process) -> None:
    done = top("--once")
    assert done.exit_code == 0
    assert re.search(rf"^ *{program.pid} +2 +1 +14 +6\.8 KiB +6\.8 KiB ", done.output, re.M)
    assert len(re.findall(rf"^ *{program.pid} .* open .* 6\.8 KiB", done.output, re.M)) == 2
    assert "1 more: --limit 0" in top("--once", "--limit", "1").output


@pytest.mark.any_device
def test_rates() -> None:
    """Totals, and what was added since the last update."""
    taken: Any = {"pid": 1, "time": 12.0}
    history = {(1, 7): (10.0, 1024, 0)}
    assert rates(taken, 7, 4096, 10, history) == ("4.0 KiB (1.5 KiB/s)", "10 B (5 B/s)")
    assert rates(taken, 8, 4096, 10, history) == ("4.0 KiB", "10 B")


@pytest.mark.any_device
def test_a_process_whose_loop_is_stuck(program: Process) -> None:
    enter(program)
    expect(program, "stuck")
    (taken,) = told()
    assert taken["traffic"]["messages_sent"] == 7


@pytest.mark.any_device
def test_the_end_of_a_process(sockets: Path, device_name: str) -> None:
    with run(device_name) as process:
        assert [path.name for path in sockets.iterdir()] == [f"{process.pid}.sock"]
        _, errors = process.communicate("\n", timeout=100)
    assert (errors, process.returncode) == ("", 0)
    assert list(sockets.iterdir()) == []
    done = top("--once")
    assert done.exit_code == 1
    assert "AIORDMA_MONITOR=1" in done.output


@pytest.mark.any_device
def test_a_process_that_was_killed(program: Process, sockets: Path) -> None:
    program.kill()
    program.wait()
    assert len(list(sockets.iterdir())) == 1
    assert top("--once").exit_code == 1
    assert list(sockets.iterdir()) == []


@pytest.mark.any_device
def test_a_child_has_a_socket_of_its_own(sockets: Path) -> None:
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
        # It begins to listen after the parent has gone on.
        path = sockets / f"{child}.sock"
        while not path.exists():
            os.sched_yield()
        assert {taken["pid"] for taken in told()} == {process.pid, child}
        process.communicate("\n", timeout=100)
    assert process.returncode == 0


@pytest.mark.any_device
def test_without_the_variable_there_is_no_socket(
    sockets: Path, device_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    with run(device_name) as process:
        assert not sockets.exists()
        process.communicate("\n", timeout=100)


@pytest.mark.any_device
def test_the_socket_is_closed_to_others(program: Process, sockets: Path) -> None:
    assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
    (path,) = sockets.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.any_device
def test_another_user_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that has reached the socket."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        answer(there)
        there.close()
        assert here.recv(1) == b""
    assert f"user {os.getuid()} asked" in caplog.text


@pytest.mark.any_device
def test_a_peer_that_reads_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring_socket, "snapshot", lambda: "x" * (1 << 22))
    monkeypatch.setattr(monitoring_socket, "ANSWER_TIMEOUT", 0.01)
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there, pytest.raises(TimeoutError):
        answer(there)


@contextmanager
def flooding(path: Path, part: bytes) -> Iterator[None]:
    """Something listens there that answers without end."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def flood() -> None:
            peer, _ = listener.accept()
            with peer, suppress(OSError):
                while True:
                    peer.sendall(part)

        thread = threading.Thread(target=flood)
        thread.start()
        yield
        thread.join()


@pytest.mark.any_device
def test_an_answer_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring_socket, "MOST_BYTES", 1000)
    path = tmp_path / "1.sock"
    with flooding(path, bytes(1 << 16)), pytest.raises(OSError, match="more than 1000 bytes"):
        ask(path, 100)


@pytest.mark.any_device
def test_an_answer_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is that of the whole answer: a process that goes on a little at a time is left."""
    monkeypatch.setattr(monitoring_socket, "time", SimpleNamespace(monotonic=count().__next__))
    monkeypatch.setattr(monitoring_socket, "MOST_BYTES", 1 << 20)
    path = tmp_path / "1.sock"
    with flooding(path, b" "), pytest.raises(TimeoutError, match="100 s"):
        ask(path, 100)


@pytest.mark.any_device
@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_that_is_open_to_others(tmp_path: Path, mode: int) -> None:
    where = tmp_path / "open"
    where.mkdir()
    where.chmod(mode)
    with pytest.raises(PermissionError, match="open to others"):
        directory(str(where))


@pytest.mark.any_device
def test_what_is_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(NotADirectoryError):
        directory(str(tmp_path / "link"))
    with pytest.raises(ValueError, match="absolute path"):
        directory("yes")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError, match="XDG_RUNTIME_DIR"):
        directory("1")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert directory("1") == tmp_path / "aiordma"


@pytest.mark.any_device
def test_a_program_runs_where_it_cannot_be_shown(sockets: Path, device_name: str) -> None:
    sockets.write_text("no directory")
    with run(device_name) as process:
        _, errors = process.communicate("\n", timeout=100)
    assert process.returncode == 0
    assert errors == (f"this process is not shown to `aiordma top`: {sockets} is not a directory\n")
