"""Test examples/service.py: its messages to systemd, its probes, and its shutdown."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest

import aiordma

PROGRAM = Path(__file__).parents[2] / "examples" / "service.py"


async def probe(address: tuple[str, int], path: str) -> str:
    """Send a GET request and return the status line."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: pod\r\n\r\n".encode())
    status = (await reader.readline()).decode().strip()
    writer.close()
    await writer.wait_closed()
    return status


@pytest.mark.any_device
@pytest.mark.parametrize("watchdog", ["", "20000"])
@pytest.mark.parametrize("is_abstract", [False, True])
async def test_service_example_notifies_systemd_and_responds_to_probes(
    tmp_path: Path, device_name: str, host: str, is_abstract: bool, watchdog: str
) -> None:
    """The service sends READY, WATCHDOG until it ends, and STOPPING after SIGTERM.

    After SIGTERM it is no longer ready, but still answers the request in progress.
    """
    name = f"@aiordma-test-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    environment = {
        **os.environ,
        "AIORDMA_DEVICE": device_name,
        "PYTHONPATH": str(PROGRAM.parents[1]),
        "NOTIFY_SOCKET": name,
        "WATCHDOG_USEC": watchdog,
    }
    states: list[str] = []
    state_received = asyncio.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(name.replace("@", "\0"))
        systemd.setblocking(False)

        async def listen() -> None:  # always: the service waits while the queue is full
            while True:
                states.append((await asyncio.get_running_loop().sock_recv(systemd, 100)).decode())
                state_received.set()

        async def wait_for_state(wanted: str) -> None:
            before = len(states) if wanted in states else 0
            while wanted not in states[before:]:
                state_received.clear()
                await state_received.wait()

        listening = asyncio.create_task(listen())
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "error", str(PROGRAM), host, "0", "0"),
            env=environment,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            await wait_for_state("READY=1")
            assert process.stdout is not None
            lines = [(await process.stdout.readline()).decode() for _ in "12"]
            pattern = r"service on (\w+), port (\d+)\nprobes on (.+), port (\d+)\n"
            said = re.fullmatch(pattern, "".join(lines))
            assert said
            assert said[1] == device_name
            port, health = int(said[2]), (said[3], int(said[4]))
            assert await probe(health, "/ready") == "HTTP/1.1 200 OK"
            idle = await aiordma.connect(host, port, device=device_name)
            busy = await aiordma.connect(host, port, device=device_name)
            await busy.send(b"2")
            await busy.send(b"one, ")
            process.send_signal(signal.SIGTERM)
            await wait_for_state("STOPPING=1")
            with pytest.raises(aiordma.ConnectionClosedError, match="its server is shutting down"):
                await idle.recv()
            assert await probe(health, "/ready") == "HTTP/1.1 503 RejectedError"
            assert await probe(health, "/live") == "HTTP/1.1 200 OK"
            if watchdog:
                await wait_for_state("WATCHDOG=1")
            await busy.send(b"two")
            assert [bytes(message) async for message in busy] == [b"one, two"]
            await idle.close()
            await busy.close()
            assert await process.wait() == 0
        finally:
            listening.cancel()
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert [state for state in states if state != "WATCHDOG=1"] == ["READY=1", "STOPPING=1"]
    assert ("WATCHDOG=1" in states) == bool(watchdog)
