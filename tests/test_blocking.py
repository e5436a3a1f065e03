"""aiordma.blocking: calls from any thread, time limits, errors, the end of its thread, fork."""

from __future__ import annotations

import asyncio
import errno
import inspect
import os
import signal
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import pytest

from aiordma import Rights, blocking, errors, transport
from aiordma.streams import start_stream_server
from tests.conftest import kind_of
from tests.transport.inside import figures

# Of the asynchronous interface, what has no method here; `call` reaches it.
LEFT_OUT = {
    "alloc": "its memory is given back in the loop's thread",
    "lease": "likewise",
    "batch": "its scope is an async with",
    "max_message": "a figure",
    "pool_statistics": "figures",
    "queue_pair": "the verbs, from the loop's thread",
    "register_dmabuf": "memory of a GPU, by its number",
    "registration_statistics": "figures",
    "request_data": "a figure",
    "send_nowait": "a future",
}


@pytest.fixture(autouse=True)
def stopped(no_leaks: None) -> Iterator[None]:
    """No thread of it is left for the leak check."""
    yield
    blocking.stop()


@pytest.fixture
def serve(host: str, device_name: str) -> Iterator[blocking.Listener]:
    with blocking.listen(host, 0, device=device_name) as listener:
        yield listener


@contextmanager
def connected(
    listener: blocking.Listener,
) -> Iterator[tuple[blocking.Connection, blocking.Connection]]:
    client = blocking.connect(
        listener.address[0], listener.port, device=listener.asynchronous.device
    )
    with client, listener.accept() as server:
        yield client, server


def until_it_receives(conn: blocking.Connection) -> None:
    """Until a `recv` of another thread waits."""
    while not blocking.call(lambda: figures(conn.asynchronous)["receivers"]):
        pass


def test_messages(serve: blocking.Listener) -> None:
    with connected(serve) as (client, server):
        client.send(b"hello")
        assert server.recv() == b"hello"
        memory = bytearray(10)
        server.send(b"0123456789", imm=7)
        received = client.recv_into(memory)
        assert (received.length, received.imm) == (10, 7)
        assert memory == b"0123456789"
        for n in range(3):
            client.send(b"%d" % n)
        client.close()
        assert client.closed
        assert list(server) == [b"0", b"1", b"2"]
        assert client.statistics().messages_sent == 4


def test_a_block_that_an_exception_leaves(serve: blocking.Listener) -> None:
    """The peer gets what was sent, and then an error with the type of the exception."""
    with connected(serve) as (client, server):
        with pytest.raises(ZeroDivisionError), client:
            raise ZeroDivisionError("secret")
        with pytest.raises(errors.ConnectionBrokenError, match="ZeroDivisionError ended") as caught:
            server.recv()
        assert "secret" not in str(caught.value)


def test_memory(serve: blocking.Listener) -> None:
    memory = bytearray(16)
    with connected(serve) as (client, server), server.register(memory) as region:
        share = server.send_region(region, access=Rights.READ | Rights.WRITE | Rights.ATOMIC)
        remote = client.recv_region()
        client.write(b"8 bytes ", remote[8:])
        got = bytearray(8)
        client.read(remote[8:], got)
        assert got == memory[8:] == b"8 bytes "

        def add(_: int) -> int:
            return client.fetch_and_add(remote[:8], 1)

        with ThreadPoolExecutor(8) as threads:
            assert sorted(threads.map(add, range(40))) == list(range(40))
        assert struct.unpack_from("=Q", memory) == (40,)
        blocking.call(share.revoke)


def test_memory_that_is_handed_over(serve: blocking.Listener) -> None:
    with connected(serve) as (client, server):
        lent = client.request_region(100)
        client.write(bytes(range(100)), lent)
        client.hand_over(lent)
        assert server.recv_buffer() == bytes(range(100))


def test_several_threads_at_a_time(serve: blocking.Listener) -> None:
    """Each thread has a connection of its own; they wait at the same time."""

    def echo(_: int) -> None:
        with serve.accept() as conn:
            for message in conn:
                conn.send(message)

    def ask(number: int) -> None:
        with blocking.connect(*serve.address, device=serve.asynchronous.device) as conn:
            for n in range(20):
                conn.send(b"%d %d" % (number, n))
                assert conn.recv() == b"%d %d" % (number, n)

    with ThreadPoolExecutor(12) as threads:
        served = [threads.submit(echo, n) for n in range(6)]
        asked = [threads.submit(ask, n) for n in range(6)]
        for each in (*asked, *served):
            each.result()


def test_streams(host: str, device_name: str) -> None:
    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read()).upper())
        writer.close()

    server = blocking.call(start_stream_server, shout, host, 0, device=device_name)
    with blocking.open_stream(host, server.sockets[0].getsockname()[1], device=device_name) as it:
        it.write(b"a line\nand the rest")
        it.write_eof()
        assert it.readline() == b"A LINE\n"
        assert it.readexactly(3) == b"AND"
        assert it.within(100).read() == b" THE REST"
    blocking.call(server.close)
    blocking.call(server.wait_closed)


# ---- time limits, errors, interrupts ------------------------------------------------------------


def test_a_call_that_takes_too_long(serve: blocking.Listener) -> None:
    """Its object goes on, and nothing is lost."""
    with connected(serve) as (client, server):
        with pytest.raises(TimeoutError, match=r"within 0\.01 seconds"):
            server.within(0.01).recv()
        with pytest.raises(TimeoutError):
            serve.within(0).accept()
        client.send(b"late")
        assert server.within(100).recv() == b"late"


@pytest.mark.parametrize(
    ("seconds", "kind"), [("x", TypeError), (1j, TypeError), (float("nan"), ValueError)]
)
def test_a_limit_that_is_no_time(
    serve: blocking.Listener, seconds: Any, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match="within takes a number of seconds"):
        serve.within(seconds)


def test_errors_are_those_of_the_asynchronous_interface(
    serve: blocking.Listener, host: str, device_name: str
) -> None:
    with connected(serve) as (client, server):
        server.close()
        with pytest.raises(errors.ConnectionClosedError):
            client.recv()
    serve.close()
    with pytest.raises(errors.RejectedError):
        blocking.connect(host, serve.port, device=device_name)

    async def own() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        blocking.call(own)


def test_an_interrupt_ends_the_call(serve: blocking.Listener) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def interrupt_when_it_waits(thread: int) -> None:
        until_it_receives(server)
        signal.pthread_kill(thread, signal.SIGALRM)

    with connected(serve) as (client, server), ThreadPoolExecutor(1) as threads:
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            threads.submit(interrupt_when_it_waits, threading.get_ident())
            with pytest.raises(KeyboardInterrupt):
                server.recv()
        finally:
            signal.signal(signal.SIGALRM, before)
        client.send(b"for the next call")
        assert server.recv() == b"for the next call"


def test_an_interrupt_before_the_wait_ends_the_call(
    serve: blocking.Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has been submitted, and its thread does not wait for it yet."""
    with connected(serve) as (client, server):
        lock = server._thread._lock

        @contextmanager
        def interrupted() -> Iterator[None]:
            with lock:
                yield
            raise KeyboardInterrupt

        with monkeypatch.context() as during:
            during.setattr(server._thread, "_lock", interrupted())
            with pytest.raises(KeyboardInterrupt):
                server.recv()
        client.send(b"for the next call")
        assert server.within(100).recv() == b"for the next call"


# ---- the thread ---------------------------------------------------------------------------------


def test_not_in_its_own_thread(serve: blocking.Listener) -> None:
    with pytest.raises(errors.WrongLoopError, match="own event loop"):
        blocking.call(serve.accept)


def test_stop_ends_what_waits(serve: blocking.Listener) -> None:
    with connected(serve) as (client, server), ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(server.recv)
        until_it_receives(server)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            blocking.stop()
        assert any(it.category is ResourceWarning for it in told)
        with pytest.raises(errors.ConnectionClosedError):
            waiting.result()
        with pytest.raises(errors.WrongLoopError, match=r"before a fork or before blocking\.stop"):
            client.send(b"")
        with pytest.raises(errors.WrongLoopError, match=r"before a fork or before blocking\.stop"):
            client.within(1).send(b"")
    blocking.stop()  # there is nothing to end


def test_a_cancellation_of_its_own_is_not_stop(serve: blocking.Listener) -> None:
    """Neither of a call, nor of one with a time limit; its thread goes on."""

    async def cancel() -> None:
        waiting = asyncio.create_task(asyncio.Event().wait())
        waiting.cancel()
        await waiting

    with pytest.raises(CancelledError):
        blocking.call(cancel)
    with pytest.raises(CancelledError):
        serve.within(100)._call(cancel)
    with connected(serve) as (client, server):
        client.send(b"after it")
        assert server.recv() == b"after it"


def test_a_thread_that_cannot_begin(
    monkeypatch: pytest.MonkeyPatch, host: str, device_name: str
) -> None:
    """The caller gets the error, and the next use works."""

    def fail() -> asyncio.AbstractEventLoop:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as during:
        during.setattr(asyncio.events, "new_event_loop", fail)
        with pytest.raises(OSError, match="Too many open files"):
            blocking.listen(host, 0, device=device_name)
    with blocking.listen(host, 0, device=device_name) as listener:
        assert listener.port


def test_a_call_that_exits(serve: blocking.Listener) -> None:
    """The caller exits; the thread and what is open go on."""
    with connected(serve) as (client, server):
        for function in (sys.exit, exit_later):
            with pytest.raises(SystemExit) as raised:
                blocking.call(function, 3)
            assert raised.value.code == 3
        client.send(b"after it")
        assert server.recv() == b"after it"


async def exit_later(status: int) -> None:
    await asyncio.sleep(0)
    sys.exit(status)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_task_that_exits(serve: blocking.Listener, host: str, device_name: str) -> None:
    """It ends the event loop, and with it what waits; the next use begins another thread."""
    tasks = []

    async def begin() -> None:
        tasks.append(asyncio.create_task(exit_later(3)))
        await asyncio.Event().wait()

    with pytest.raises(errors.ConnectionClosedError):
        blocking.call(begin)
    with blocking.listen(host, 0, device=device_name) as listener:
        assert listener.port
    with pytest.raises(errors.WrongLoopError, match="SystemExit"):
        serve.accept()
    assert isinstance(tasks[0].exception(), SystemExit)


def test_the_thread_does_not_stop_itself() -> None:
    with pytest.raises(errors.WrongLoopError, match="own event loop"):
        blocking.call(blocking.stop)
    assert blocking.call(len, b"goes on") == 7


@pytest.mark.any_device
@pytest.mark.parametrize(
    ("daemon", "last", "printed"),
    [
        (True, "", "ConnectionClosedError\n"),  # the end of the program ends the call
        (False, "listener.close()", "ConnectionClosedError\n"),
        (False, "", "b'hello'\n"),  # the program ends after the thread
    ],
)
def test_the_end_of_a_program(
    host: str, device_name: str, daemon: bool, last: str, printed: str
) -> None:
    """As docs/blocking.md says of a thread that waits while the program ends."""
    code = f"""
import atexit, threading
atexit.register(lambda: accepting.join())  # after what blocking registers
from aiordma import blocking
def accept():
    try:
        with listener.accept() as conn:
            print(conn.recv())
    except Exception as error:
        print(type(error).__name__, flush=True)
def connect():
    threading.main_thread().join()
    with blocking.connect({host!r}, listener.port, device={device_name!r}) as conn:
        conn.send(b"hello")
listener = blocking.listen({host!r}, 0, device={device_name!r})
accepting = threading.Thread(target=accept, daemon={daemon})
accepting.start()
if not {daemon} and not {last!r}:
    threading.Thread(target=connect).start()
while not blocking.call(lambda: listener.asynchronous._waiters._waiters):
    pass
{last}
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


def in_child(function: Callable[[], object]) -> int:
    """The exit status of a child of fork that runs the function."""
    with warnings.catch_warnings():  # of threads: here none of them holds a lock that matters
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        status = 1
        try:
            function()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_after_fork(serve: blocking.Listener, host: str, device_name: str) -> None:
    if kind_of(device_name) != "embedded":
        return  # RDMAV_FORK_SAFE has to be set before: tests/transport/test_fork.py
    with connected(serve) as (client, server):

        def child() -> None:
            with client, pytest.raises(errors.WrongLoopError, match="before a fork"):
                client.send(b"")
            with blocking.connect(host, serve.port, device=device_name) as own:
                own.send(b"from the child")
                assert own.recv() == b"heard"  # one that ends before its accept is not accepted
                blocking.stop()

        def take() -> bytes:
            with serve.accept() as conn:
                told = conn.recv()
                conn.send(b"heard")
                return told

        with ThreadPoolExecutor(1) as threads:
            accepting = threads.submit(take)
            assert in_child(child) == 0
            assert accepting.result() == b"from the child"
        client.send(b"the parent goes on")
        assert server.recv() == b"the parent goes on"


def test_a_registration_that_ends_in_a_child_or_after_stop(
    serve: blocking.Listener, device_name: str
) -> None:
    with connected(serve) as (client, _):
        registered = ExitStack()
        registered.enter_context(client.register(bytearray(16)))
        if kind_of(device_name) == "embedded":
            assert in_child(registered.close) == 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            blocking.stop()
        registered.close()


# ---- derived ------------------------------------------------------------------------------------


def test_nothing_of_a_connection_is_missing() -> None:
    for ours, theirs, left_out in (
        (blocking.Connection, transport.Connection, LEFT_OUT),
        (blocking.Listener, transport.Listener, {"addresses", "host", "stop"}),
    ):
        names = {name for name in dir(theirs) if not name.startswith("_")}
        assert names - set(dir(ours)) == set(left_out)


def test_signatures_are_those_of_the_asynchronous_interface() -> None:
    for name in ("write", "send_region", "compare_and_swap"):
        ours, theirs = (getattr(it, name) for it in (blocking.Connection, transport.Connection))
        assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters
    assert inspect.signature(blocking.connect).parameters.keys() >= {"host", "auth", "encrypt"}
