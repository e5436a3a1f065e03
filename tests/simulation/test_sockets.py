"""Tests that the simulated TCP behaves like the kernel's.

Calls that would leave the simulation are refused.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from typing import Any

import pytest

import aiordma
from aiordma import blocking, testing

pytestmark = pytest.mark.needs("faults")

Program = Callable[[], Coroutine[Any, Any, Any]]
PROGRAMS: list[Program] = []


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as trying, suppress(OSError):
        trying.bind(("::1", 0))
        return True
    return False


def free_port() -> int:
    """Return a free port below the ephemeral range, starting at a number derived from the PID."""
    for port in range(16_384 + os.getpid() % 16_000, 1 << 15):
        with socket.socket() as trying, suppress(OSError):
            trying.bind(("", port))
            return port
    raise AssertionError


FREE = free_port()


def program(function: Program) -> Program:
    PROGRAMS.append(function)
    return function


async def outcome(work: Awaitable[Any] | Callable[[], Any]) -> Any:
    """Return the result of `work`, or the type of its error (and the errno of an OSError)."""
    try:
        return work() if callable(work) else await work
    except OSError as error:
        return type(error).__name__, errno.errorcode.get(error.errno or 0)
    except Exception as error:
        return type(error).__name__


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1000):
        writer.write(data)
    writer.close()


async def answer(host: str, port: Any, **options: Any) -> Any:
    async def ask() -> bytes:
        reader, writer = await asyncio.open_connection(host, port, **options)
        writer.write(b"x" * 10_000)
        writer.write_eof()
        try:
            return await reader.read()
        finally:
            writer.close()

    return await outcome(ask())


async def served(listen: Any, *connect: Any, port: Any = FREE, **options: Any) -> Any:
    """Return the responses that a client gets from an echo server at each of the addresses."""
    server = await outcome(asyncio.start_server(echo, listen, port, **options))
    if isinstance(server, str | tuple):
        return server
    async with server:
        number = server.sockets[0].getsockname()[1]
        return [await answer(host, number) for host in connect]


async def readable(sock: socket.socket) -> None:
    loop, is_so = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, is_so.set)
    await is_so.wait()
    loop.remove_reader(sock)


def tcp(family: int = socket.AF_INET) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setblocking(False)
    return made


@program
async def addresses() -> Any:
    by_all = "127.0.0.1", "127.8.9.1", "0.0.0.0", "localhost"
    lists: list[Any] = [None, "", "0.0.0.0", "127.0.0.1", "127.8.9.1", ["127.0.0.1", "127.8.9.1"]]
    found = [await served(listen, *by_all) for listen in lists]
    return found, [await served(listen, "127.0.0.1") for listen in ("192.0.2.1", "no.such.name.")]


@program
async def addresses_of_ipv6() -> Any:
    if not has_ipv6():
        pytest.skip("this machine has no IPv6")
    lists = "::1", "::", None
    found = [await served(listen, "::1", "::") for listen in lists]
    return [*found, *[await while_in_use(*hosts) for hosts in (("::", "127.0.0.1"), ("::", "::1"))]]


@program
async def ports() -> Any:
    wrong = [-1, 65536, "65536", "no such service", 1.5]
    listened = [
        await served("127.0.0.1", "127.0.0.1", port=port) for port in [str(FREE), 0, *wrong]
    ]
    return listened, [await answer("127.0.0.1", port) for port in [FREE, 0, *wrong]]


async def while_in_use(by: str, wanted: str, **options: Any) -> Any:
    async with await asyncio.start_server(echo, by, FREE, **options):
        return await served(wanted, wanted, **options)


@program
async def addresses_in_use() -> Any:
    one, two, every = "127.0.0.1", "127.0.0.2", "0.0.0.0"
    pairs = [(one, one), (every, one), (one, every), (one, two)]
    return [await while_in_use(*hosts, reuse_port=it) for hosts in pairs for it in (False, True)]


@program
async def states() -> Any:
    loop, found = asyncio.get_running_loop(), []
    with tcp() as one, tcp() as two:
        found += [await outcome(call) for call in (one.accept, one.getpeername)]
        found += [await outcome(lambda: one.shutdown(socket.SHUT_WR)), one.getsockname()]
        found += [await outcome(lambda: one.send(b"x"))]
        one.bind(("127.0.0.1", FREE))
        found += [await outcome(lambda: one.bind(("127.0.0.1", FREE + 1))), one.getsockname()]
        found += [await outcome(loop.sock_connect(two, ("127.0.0.1", FREE)))]
        one.listen()
        one.listen(1)
        found += [await outcome(one.accept)]
        two.close()
    return found


@program
async def connecting() -> Any:
    loop, found = asyncio.get_running_loop(), []
    with socket.create_server(("127.0.0.1", FREE)) as listening, tcp() as one:
        listening.setblocking(False)
        found += [await outcome(loop.sock_connect(one, ("127.0.0.1", FREE)))]
        one.connect_ex(("127.0.0.1", FREE))  # updates the state of Linux's socket
        found += [one.connect_ex(("127.0.0.1", FREE)), one.getpeername(), one.getsockname()[0]]
        accepted, peer = await loop.sock_accept(listening)
        with accepted:
            accepted.setblocking(False)
            found += [peer == one.getsockname(), accepted.getsockname(), accepted.family]
            await loop.sock_sendall(one, b"hello")
            found += [await loop.sock_recv(accepted, 3), await loop.sock_recv(accepted, 3)]
            found += [await outcome(lambda: accepted.recv(1))]
            one.shutdown(socket.SHUT_WR)
            found += [await loop.sock_recv(accepted, 1), await outcome(lambda: one.send(b"x"))]
            await loop.sock_sendall(accepted, b"still open")
            found += [await loop.sock_recv(one, 100)]
    own = await answer("127.0.0.1", FREE, local_addr=("192.0.2.1", 0))
    return [*found, own]


@program
async def an_end_with_bytes_that_were_not_read() -> Any:
    """Close with unread data, which resets the peer. Without it, only a further send does."""
    loop, found = asyncio.get_running_loop(), []

    async def send_on() -> None:
        while True:
            await loop.sock_sendall(one, b"more")
            await asyncio.sleep(0)

    with socket.create_server(("127.0.0.1", FREE)) as listening:
        listening.setblocking(False)
        for sent in b"not read", b"":
            with tcp() as one:
                await loop.sock_connect(one, ("127.0.0.1", FREE))
                await loop.sock_sendall(one, sent)
                accepted, _ = await loop.sock_accept(listening)
                if sent:
                    await readable(accepted)
                accepted.close()
                found += [await outcome(loop.sock_recv(one, 1)), await outcome(send_on())]
        with tcp() as one:
            await loop.sock_connect(one, ("127.0.0.1", FREE))
            await readable(listening)
            listening.close()
            found += [await outcome(loop.sock_recv(one, 1))]
    return found


@program
async def files() -> Any:
    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with tempfile.TemporaryFile() as file:
            file.write(b"y" * 300_000)
            await asyncio.get_running_loop().sendfile(writer.transport, file)
        await reader.read()
        writer.close()

    async with await asyncio.start_server(send, "127.0.0.1", FREE):
        return await answer("127.0.0.1", FREE)


@pytest.mark.parametrize("ran", PROGRAMS, ids=lambda it: it.__name__)
def test_simulated_sockets_behave_like_the_kernel(ran: Program) -> None:
    async def main(_: testing.World) -> Any:
        return await ran()

    assert testing.simulate(main, seed=1) == asyncio.run(ran())


# ---- between hosts, and out of the simulation ----------------------------------------------------


async def caught(call: Callable[[], Any]) -> str:
    try:
        made = call()
        return str(await made if hasattr(made, "__await__") else made)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def check(
    expected: list[tuple[Callable[[], Any], str]], hosts: dict[str, Program] | None = None
) -> None:
    """Run calls on the host `main` next to the host `other`, and check their results."""

    async def main(world: testing.World) -> list[str]:
        world.host("other")
        return [await caught(call) for call, _ in expected]

    for found, (_, text) in zip(testing.simulate(main, seed=1, hosts=hosts), expected, strict=True):
        assert text in found


async def hold(conn: aiordma.Connection) -> None:
    await conn.wait_closed()


def test_host_accepts_only_its_own_addresses() -> None:
    async def serve() -> None:
        async with (
            await asyncio.start_server(echo, "127.0.0.1", 1) as streams,
            await aiordma.start_server(hold, "127.0.0.1", 2),
            await aiordma.start_server(hold, "127.0.0.1", 3, via="tcp"),
        ):
            await streams.serve_forever()

    loopback: Any = ("127.0.0.1", 0)
    says_so = "a listener on 127.0.0.1 accepts connections only from its own host"
    check([
        (lambda: asyncio.open_connection("server", 1), "'server' listens only on 127.0.0.1"),
        (lambda: aiordma.connect("server", 2), says_so),
        (lambda: aiordma.connect("server", 3, via="tcp"), says_so),
        (lambda: asyncio.start_server(echo, "other", 1), "cannot assign requested address"),
        (lambda: aiordma.listen("other", 2), "Cannot assign requested address"),
        (lambda: aiordma.listen("other", 3, via="tcp"), "Cannot assign requested address"),
        (lambda: asyncio.open_connection("server", 1, local_addr=loopback), "Invalid argument"),
        (lambda: aiordma.connect("server", 2, source=loopback), "Network is unreachable"),
        (lambda: asyncio.open_connection("server", 70_000), "port must be 0-65535, not 70000"),
        (lambda: asyncio.open_connection("192.0.2.1", 1), "Network is unreachable"),
        (lambda: asyncio.open_connection("no.host", 1), "Name or service not known"),
        (lambda: socket.gethostbyname("other") + socket.gethostname(), "10.0.0.3main"),
    ], hosts={"server": serve})  # fmt: skip


def test_listener_accepts_at_most_its_backlog() -> None:
    """TCP retries, so the other connections are established when there is room."""

    async def serve() -> list[float]:
        loop, taken = asyncio.get_running_loop(), []
        with socket.create_server(("", 1), backlog=1) as listening:
            listening.setblocking(False)
            await asyncio.sleep(0.5)
            for _ in range(4):
                accepted, _ = await loop.sock_accept(listening)
                accepted.close()
                taken.append(loop.time())
        return [time - taken[0] for time in taken]

    async def main(world: testing.World) -> list[float]:
        asked = asyncio.gather(*(answer("server", 1) for _ in range(4)))
        times = await world.host("server").run(serve)
        await asked
        return times

    times = testing.simulate(main, seed=1)
    assert times[1] < 0.01
    assert 0.4 < times[2] <= times[3] < 0.6


def accept() -> None:
    with socket.create_server(("", 1)) as listening:
        listening.accept()


def connect() -> None:
    with socket.socket() as connecting:
        connecting.connect(("other", 1))


def test_calls_that_would_leave_the_simulation_are_rejected() -> None:
    loop, any_port, taken_before = asyncio.get_running_loop, ("127.0.0.1", 0), os.fork
    with socket.create_server(("127.0.0.1", 0)) as real, tcp() as own:
        check([
            (lambda: loop().create_datagram_endpoint(asyncio.Protocol, any_port), "SOCK_DGRAM"),
            (lambda: asyncio.open_unix_connection("/nowhere"), "sockets of AF_UNIX"),
            (lambda: asyncio.start_server(echo, sock=real), "real sockets"),
            (lambda: loop().sock_connect(own, ("127.0.0.1", 1)), "real sockets"),
            (connect, "blocking sockets"),
            (accept, "blocking sockets"),
            (lambda: socket.getnameinfo(("10.0.0.1", 1), 0), "blocking name resolution"),
            (lambda: threading.Thread(target=print).start(), "threads"),
            (lambda: ThreadPoolExecutor().submit(print), "threads"),
            (lambda: blocking.listen("127.0.0.1"), "threads (aiordma.blocking)"),
            (
                lambda: loop().run_in_executor(ProcessPoolExecutor(1), print),
                "executors other than thread pools",
            ),
            (lambda: asyncio.create_subprocess_exec("true"), "processes"),
            (lambda: subprocess.run(["true"], check=True), "processes"),
            (lambda: get_context("spawn").Process(target=print).start(), "processes"),
            (taken_before, "processes"),
            (lambda: signal.alarm(1), "signals"),
            (lambda: loop().add_signal_handler(signal.SIGTERM, print), "None"),
            (lambda: loop().remove_signal_handler(signal.SIGTERM), "True"),
            (lambda: loop().remove_signal_handler(signal.SIGTERM), "False"),
            (lambda: loop().connect_read_pipe(asyncio.Protocol, sys.stdin), "pipes"),
            (lambda: loop().add_reader(sys.__stdin__ or 0, print), "standard input"),
            (lambda: select.select([own], [], [], 1), "select.select and select.poll"),
        ])  # fmt: skip


def test_existing_blocking_thread_is_rejected_in_a_simulation() -> None:
    """The thread would use the device of whichever host is running."""
    blocking.call(int)
    try:
        check([(lambda: blocking.listen("127.0.0.1"), "threads (aiordma.blocking)")])
    finally:
        blocking.stop()
