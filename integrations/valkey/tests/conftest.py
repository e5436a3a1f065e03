"""A Valkey server with its RDMA module on the embedded device, and a leak check for each test."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pytest
import uvloop

from aiordma import testing

HOST = "127.0.0.1"
SERVER = Path(__file__).parents[3] / "build" / "valkey" / "server"
RUN = [str(Path(sys.executable).with_name("python")), "-m", "aiordma", "run"]

# The time limit of a test in seconds. It is long, because it only has to stop tests that hang.
LIMIT = 100


class Server:
    """A server that can be killed and restarted on the same ports.

    The constructor chooses both ports by binding TCP sockets. The RDMA port is then free too,
    because the embedded device's connection manager shares its port space with TCP.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.create_server((HOST, 0)) as one, socket.create_server((HOST, 0)) as two:
            self.tcp_port: int = one.getsockname()[1]
            self.port: int = two.getsockname()[1]
        self.start()

    def start(self) -> None:
        words = [SERVER / "valkey-server", "--bind", HOST, "--port", str(self.tcp_port)]
        words += ["--loadmodule", SERVER / "valkey-rdma.so"]
        words += ["--rdma-bind", HOST, "--rdma-port", str(self.port)]
        words += ["--save", "", "--dir", self._folder, "--enable-debug-command", "yes"]
        words += ["--crash-memcheck-enabled", "no"]  # skip the memory test after a crash
        self._process = subprocess.Popen(
            [*RUN, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self._process.stdout is not None
        self._lines: list[str] = []
        ready = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout, ready))
        self._reader.start()
        ready.wait()
        if self._process.poll() is not None:
            pytest.fail(f"the server has ended:\n{self._output()}", pytrace=False)

    def _read(self, stdout: IO[str], ready: threading.Event) -> None:
        """Read the output continuously, so that the server never blocks on a full pipe."""
        with stdout:
            for line in stdout:
                self._lines.append(line)
                if "eady to accept connections rdma" in line:
                    ready.set()
        self._process.wait()
        ready.set()

    def _output(self) -> str:
        """Return the end of the output, or the start of a crash report with its stack trace."""
        self._reader.join()
        text = "".join(self._lines)
        start = text.find("VALKEY BUG REPORT START")
        return text[start : start + 5000] if start >= 0 else text[-5000:]

    def outlives(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until a process has exited.

        If the server exits first, kill the process, and fail with the server's output.
        """
        ends = [os.pidfd_open(each.pid) for each in (process, self._process)]
        try:
            ended, _, _ = select.select(ends, [], [])
        finally:
            for end in ends:
                os.close(end)
        if ends[1] in ended:
            process.kill()
            process.wait()
            pytest.fail(f"the server has died:\n{self._output()}", pytrace=False)
        process.wait()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def stop(self) -> None:
        """Stop the server, and fail if it crashed."""
        self._process.terminate()
        self._process.wait()
        assert self._process.returncode in (0, -signal.SIGTERM), self._output()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    try:
        yield server
    except BaseException:
        server.kill()
        raise
    server.stop()


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail the test if it leaks open files, threads or device objects."""
    with testing.check_leaks(timeout=30):
        yield


def pytest_configure() -> None:
    os.environ["AIORDMA_DEVICE"] = "embedded0"
    loop = uvloop.new_event_loop()  # starts libuv's threads before the leak check
    loop.run_until_complete(loop.getaddrinfo("localhost", 1))
    loop.close()


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Add a time limit to a coroutine test. pytest-timeout cannot interrupt a waiting uvloop."""
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        item.obj = within_limit(item.obj)


def within_limit(
    test: Callable[..., Coroutine[Any, Any, None]],
) -> Callable[..., Coroutine[Any, Any, None]]:
    """Wrap a coroutine test so that it fails after LIMIT seconds."""

    @functools.wraps(test)
    async def limited(*arguments: Any, **keywords: Any) -> None:
        __tracebackhide__ = True
        async with asyncio.timeout(LIMIT):
            await test(*arguments, **keywords)

    return limited


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT))
