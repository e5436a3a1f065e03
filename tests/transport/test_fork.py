"""Test processes that fork while they have connections. They run `forking.py` as a program."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aiordma import ConnectionBrokenError, listen
from aiordma.errors import AddressError
from aiordma.transport import Via
from conftest import EMBEDDED
from tests.processes import run

from .connection_factory import ConnectionFactory, ends
from .marks import by_cm, by_tcp, one_loop

ROOT = Path(__file__).parents[2]

PROCESSES = [f"Process by {method}" for method in ("fork", "spawn", "forkserver")]


@pytest.fixture(params=["shared", "tcp"])
def wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select how embedded devices of different processes on this host are linked."""
    wire: str = request.param
    monkeypatch.setenv("AIORDMA_EMBEDDED_LINKS", wire)
    return wire


def command(factory: ConnectionFactory, role: str, loop: str) -> list[str]:
    return [
        # Python 3.12 warns whenever a process with threads forks.
        sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-m",
        "tests.transport.forking", role, loop, factory.device, factory.via, factory.host,
        str(factory.slow),
    ]  # fmt: skip


def start(factory: ConnectionFactory, role: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(factory, role, "asyncio"),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def report(factory: ConnectionFactory, role: str, loop: str) -> list[str]:
    """Run the program and return the lines printed. Fail unless it exits with status 0."""
    done = run(*command(factory, role, loop), timeout=100 * factory.slow, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


FORK = ["uses_what_it_inherited", "has_its_own"]


@by_tcp
def test_forked_child_can_only_use_connections_it_opened(factory: ConnectionFactory) -> None:
    """The parent's connections continue, while the child may use only connections it has opened
    itself.
    """
    assert report(factory, "fork", "asyncio") == FORK


@by_cm
def test_forked_child_cannot_connect_after_parent_used_librdmacm(
    factory: ConnectionFactory,
) -> None:
    """The child of a process that has used librdmacm cannot open connections.

    It is told so, and what to do instead.
    """
    if factory.device == EMBEDDED:
        assert report(factory, "fork", "asyncio") == FORK
    else:
        refused = ["uses_what_it_inherited", "is_refused"]
        assert report(factory, "fork_with_librdmacm", "asyncio") == refused


# The remaining tests use the embedded device: librdmacm does not support forked children.


@pytest.fixture
def embedded_factory(connection_method: Via) -> ConnectionFactory:
    return ConnectionFactory(EMBEDDED, "127.0.0.1", connection_method, 1.0)


def test_forked_child_can_connect_with_every_bootstrap_and_loop(
    embedded_factory: ConnectionFactory, wire: str, loop_name: str
) -> None:
    assert report(embedded_factory, "fork", loop_name) == FORK


# uvloop is not tested. If the parent has libuv threads, libuv crashes when a forked child exits.
def test_child_exit_does_not_disturb_the_parent(embedded_factory: ConnectionFactory) -> None:
    """The cleanup at interpreter exit must not hang in the child."""
    assert report(embedded_factory, "exits", "asyncio") == ["exits"]


@by_cm
def test_grandchildren_can_open_connections(embedded_factory: ConnectionFactory, wire: str) -> None:
    assert report(embedded_factory, "grandchildren", "asyncio") == ["grandchildren"]


async def port_is_free(embedded_factory: ConnectionFactory, port: int) -> None:
    """Wait until the port is free. The kernel may close a dead process's sockets late."""
    while True:
        try:
            listener = await listen(
                embedded_factory.host,
                port,
                device=embedded_factory.device,
                via=embedded_factory.via,
            )
        except AddressError:
            await asyncio.sleep(0.01)
            continue
        await listener.close()
        return


@one_loop
async def test_connection_breaks_when_the_parent_dies_before_its_child(
    embedded_factory: ConnectionFactory,
) -> None:
    """The child inherits the parent's sockets, but must not keep its connections open or its port
    in use.
    """
    process = start(embedded_factory, "outlived")
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        try:
            lines = [await asyncio.to_thread(process.stdout.readline) for _ in range(2)]
            child, port = map(int, lines)
            async with await embedded_factory.connect(port) as conn:
                await conn.send(b"hello")
                assert bytes(await conn.recv()) == b"hello"
                process.kill()
                await ends(conn.recv(), ConnectionBrokenError)
            await asyncio.to_thread(process.wait)
            os.kill(child, 0)  # the child is still alive
            await port_is_free(embedded_factory, port)
            os.kill(child, 0)
        finally:
            process.kill()


@by_cm
def test_multiprocessing_children_can_open_connections(
    embedded_factory: ConnectionFactory, wire: str
) -> None:
    assert report(embedded_factory, "processes", "asyncio") == PROCESSES


def test_file_descriptors_are_not_inherited_by_executed_programs(
    embedded_factory: ConnectionFactory,
) -> None:
    assert report(embedded_factory, "programs", "asyncio") == ["no descriptor"]
