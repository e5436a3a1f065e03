"""Tests of `aiordma echo` with two processes on the device under test.

Most tests run the client in the test's own process, because starting an interpreter is slow in an
emulated machine.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from aiordma import verbs
from aiordma.cli import echo as echo_module
from aiordma.cli.app import app
from tests.processes import run_python

pytestmark = pytest.mark.any_device

SMALL = ["--count", "2", "--sizes", "1,4K,1M"]


def echo(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["echo", *arguments], prog_name="aiordma")


def echo_json(device_name: str, *arguments: str) -> dict[str, Any]:
    done = echo("--device", device_name, "--json", *arguments)
    assert (done.stderr, done.exit_code) == ("", 0)
    reported: dict[str, Any] = json.loads(done.stdout)
    return reported


@pytest.mark.parametrize(("via", "loop"), [("cm", "uvloop"), ("tcp", "asyncio")])
def test_echo_verifies_messages_over_cm_and_tcp(device: verbs.Device, via: str, loop: str) -> None:
    reported = echo_json(device.name, *SMALL, "--via", via, "--loop", loop)
    expected = {
        "device": device.name,
        "library": device.library.name,
        "via": via,
        "loop": loop,
        "verified": True,
    }
    assert {key: reported[key] for key in expected} == expected
    rows = [(row["size"], row["messages"]) for row in reported["results"]]
    assert rows == [(1, 2), (4096, 2), (1 << 20, 2)]


def test_echo_uses_default_sizes(device_name: str) -> None:
    results = echo_json(device_name, "--count", "1")["results"]
    assert [row["size"] for row in results] == [4**power for power in range(13)]
    assert all(row["verified"] for row in results)


def test_echo_omits_escape_codes_without_a_terminal(device_name: str) -> None:
    done = run_python("-W", "error", "-m", "aiordma", "echo", *SMALL, AIORDMA_DEVICE=device_name)
    assert done.stderr == ""
    assert done.returncode == 0
    assert f"device {device_name}" in done.stdout
    assert done.stdout.count("yes") == 3
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("length", "rows"), [(100_000, [(1, False), (4096, False), (100_000, True)]), (0, [(0, True)])]
)
def test_echo_sends_a_file_in_pieces_and_as_a_whole(
    device_name: str, tmp_path: Path, length: int, rows: list[tuple[int, bool]]
) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(length))
    results = echo_json(device_name, *SMALL, str(file))["results"]
    assert [(row["size"], row["whole_file"]) for row in results] == rows
    assert all(row["verified"] for row in results)


# ---- what goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--device", "nonsense0"], 1, "device 'nonsense0' not found; available devices: "),
        (["--sizes", "many"], 2, "invalid size 'many'"),
        (["--sizes", "1000000000G"], 2, "the message size must be at most 1 GiB, not"),
        (["--count", "0"], 2, "0 is not in the range"),
        (["--timeout", "0"], 2, "0.0 is not in the range"),
        (["--timeout", "nan"], 2, "'nan' is not a finite number"),
        (["--timeout", "inf"], 2, "'inf' is not a finite number"),
        (["/nonsense/file"], 2, "'/nonsense/file' does not exist"),
    ],
)
def test_echo_rejects_invalid_arguments(arguments: list[str], status: int, text: str) -> None:
    done = echo(*arguments)
    assert done.exit_code == status
    assert text in done.stderr


def test_echo_reports_an_address_that_is_not_local(
    device_name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    done = echo("--device", device_name, "--host", "203.0.113.1", *SMALL)
    assert done.exit_code == 1
    assert done.stderr == (
        "Error: the server process ended with exit status 1 before it started listening\n"
    )
    server_errors = capfd.readouterr().err
    assert server_errors.startswith("Error: echo server: ")
    assert "203.0.113.1" in server_errors


# Runs `aiordma echo-server` with a different message handler.
OTHER_END = """\
import asyncio, os, sys
from aiordma.cli import echo_server, main

async def handle(conn):
    async for message in conn:
        {handler}

echo_server.echo_messages = handle
sys.argv[1:1] = ["echo-server"]
main()
"""


def other_end(handler: str) -> list[str]:
    return [sys.executable, "-c", OTHER_END.format(handler=handler)]


def test_echo_reports_corrupted_messages(device_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = "await conn.send(bytes(message)[:-1] + b'?' * (len(message) > 1), imm=message.imm)"
    monkeypatch.setattr(echo_module, "SERVER", other_end(handler))
    done = echo("--device", device_name, *SMALL, "--json")
    assert done.exit_code == 1
    reported = json.loads(done.stdout)
    assert reported["verified"] is False
    shorter, changed, also_changed = (row["mismatch"] for row in reported["results"])
    assert shorter == "message 0: 0 bytes instead of 1"
    assert "byte 4095 is" in changed
    assert "byte 1048575 is" in also_changed


@pytest.mark.parametrize(
    ("handler", "text", "timeout"),
    [
        ("os.kill(os.getpid(), 9)", "the server process was killed by SIGKILL", "100"),
        ("os._exit(3)", "the server process ended with exit status 3", "100"),
        ("await conn.close()", "the peer has closed the connection", "100"),
        ("pass", "timed out after 0.5 s waiting for the echo of a 1-byte message", "0.5"),
    ],
)
def test_echo_reports_server_failures(
    device_name: str, monkeypatch: pytest.MonkeyPatch, handler: str, text: str, timeout: str
) -> None:
    monkeypatch.setattr(echo_module, "SERVER", other_end(handler))
    done = echo("--device", device_name, *SMALL, "--timeout", timeout)
    assert done.exit_code == 1
    assert done.stderr == f"Error: {text}\n"


# Runs `aiordma echo` in a child process, because the server sends it signals.
THIS_END = """\
import sys
from aiordma.cli import echo, main

echo.SERVER = {other_end!r}
main()
"""


@pytest.mark.parametrize(
    ("number", "status", "text"),
    [(signal.SIGINT, 1, "\nAborted!\n"), (signal.SIGKILL, -signal.SIGKILL, "")],
)
def test_echo_server_exits_when_its_parent_dies(
    device_name: str, number: signal.Signals, status: int, text: str
) -> None:
    code = THIS_END.format(other_end=other_end(f"os.kill(os.getppid(), {int(number)})"))
    done = run_python("-c", code, "echo", "--device", device_name, *SMALL)
    assert done.returncode == status
    assert done.stderr == text
