"""Tests of aiordma.blocking: threads, time limits, errors, exit and fork."""

from __future__ import annotations

import _thread
import asyncio
import errno
import inspect
import itertools
import os
import signal
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, cast

import pytest

from aiordma import Rights, blocking, errors, transport
from aiordma._datapath.memory import MACHINE
from aiordma._transport import lease_thread
from aiordma.streams import start_stream_server
from conftest import kind_of
from tests.processes import run_python
from tests.transport.inside import figures

# Names of the asynchronous interface that have no blocking counterpart, and the reasons. They
# remain accessible through `call`.
LEFT_OUT = {
    "alloc": "its memory is given back in the loop's thread",
    "lease": "likewise",
    "batch": "its scope is an async with",
    "claim_messages": "its owner is a protocol in the loop's thread",
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
    """Stop the loop's thread after the test, so that the leak check does not report it."""
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


def wait_until_receiving(conn: blocking.Connection) -> None:
    """Wait until another thread waits in `recv`."""
    while not blocking.call(lambda: figures(conn.asynchronous)["receivers"]):
        pass


def test_exception_in_with_block_sends_only_its_type_to_the_peer(serve: blocking.Listener) -> None:
    """The peer gets the type of the exception, but not its text."""
    with connected(serve) as (client, server):
        with pytest.raises(ZeroDivisionError), client:
            raise ZeroDivisionError("secret")
        with pytest.raises(errors.ConnectionBrokenError, match="with ZeroDivisionError") as caught:
            server.recv()
        assert "secret" not in str(caught.value)


def test_remote_memory_operations_are_thread_safe(serve: blocking.Listener) -> None:
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


def test_threads_use_separate_connections_concurrently(serve: blocking.Listener) -> None:
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


def test_second_thread_reading_a_stream_raises_busy_error(host: str, device_name: str) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reading.set()
        await reader.read()
        writer.close()

    reading = threading.Event()
    server = blocking.call(start_stream_server, silent, host, 0, device=device_name)
    port = server.sockets[0].getsockname()[1]
    with blocking.open_stream(host, port, device=device_name) as it, ThreadPoolExecutor() as pool:
        reads = [pool.submit(it.read, 1) for _ in range(2)]
        busy = next(each for each in as_completed(reads))
        with pytest.raises(errors.BusyError, match="another thread is reading this stream"):
            busy.result()
        for size in "5", None, 2.5:
            for read in it.read, it.readexactly:
                with pytest.raises(TypeError, match="size must be an int"):
                    read(size)  # type: ignore[arg-type]
        it.write_eof()
    blocking.call(server.close)
    blocking.call(server.wait_closed)


@pytest.mark.skipif(not hasattr(asyncio.StreamWriter, "__del__"), reason="new in Python 3.11.5")
class WaitingThread:
    """Stands in for the background thread: a call waits until the loop has run it."""

    usable = True

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = self
        self._loop = loop

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: object) -> None:
        self._loop.call_soon_threadsafe(callback, *args)
        done = threading.Event()
        self._loop.call_soon_threadsafe(done.set)
        assert done.wait(100)


@pytest.mark.parametrize("is_loop_faster", [False, True])
def test_garbage_collected_stream_warns_and_sends_eof(
    host: str, device_name: str, is_loop_faster: bool
) -> None:
    """The stream ends in its loop's thread, which emits the warning."""
    ended = SimpleQueue[bytes]()

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.put(await reader.read())
        writer.close()

    server = blocking.call(start_stream_server, read, host, 0, device=device_name)
    port = server.sockets[0].getsockname()[1]
    kept = [blocking.open_stream(host, port, device=device_name)]
    kept[0].within(100).write(b"hello")
    if is_loop_faster:
        kept[0]._thread = cast(Any, WaitingThread(kept[0]._thread.loop))

    def drop() -> bytes:
        kept.clear()
        return ended.get()

    with pytest.warns(ResourceWarning, match="unclosed <StreamWriter"):
        assert drop() == b"hello"
    blocking.call(server.close)
    blocking.call(server.wait_closed)


# ---- time limits, errors, interrupts ------------------------------------------------------------


def test_timed_out_recv_does_not_lose_a_message(serve: blocking.Listener) -> None:
    """The connection stays usable after the timeout."""
    with connected(serve) as (client, server):
        with pytest.raises(TimeoutError, match=r"after 0\.01 seconds"):
            server.within(0.01).recv()
        with pytest.raises(TimeoutError):
            serve.within(0).accept()
        client.send(b"late")
        assert server.within(100).recv() == b"late"


@pytest.mark.parametrize(
    ("seconds", "kind", "number"),
    [
        ("x", TypeError, "number"),
        (1j, TypeError, "number"),
        (float("nan"), ValueError, "non-negative number"),
    ],
)
def test_within_rejects_invalid_times(
    serve: blocking.Listener, seconds: Any, kind: type[Exception], number: str
) -> None:
    with pytest.raises(kind, match=rf"within\(\) must be a {number} of seconds"):
        serve.within(seconds)


def test_blocking_calls_raise_the_same_errors_as_async_calls(
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


@contextmanager
def handling(handler: Callable[[], object], conn: blocking.Connection) -> Iterator[None]:
    """Run a signal handler in this thread as soon as the thread waits in `recv`."""

    def raise_when_it_waits(thread: int) -> None:
        wait_until_receiving(conn)
        signal.pthread_kill(thread, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, lambda *_: handler())
    try:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(raise_when_it_waits, threading.get_ident())
            yield
    finally:
        signal.signal(signal.SIGALRM, before)


def test_interrupt_during_recv_raises_keyboard_interrupt(serve: blocking.Listener) -> None:
    with connected(serve) as (client, server):
        with (
            pytest.raises(KeyboardInterrupt),
            handling(partial(signal.default_int_handler, 2, None), server),
        ):
            server.recv()
        client.send(b"for the next call")
        assert server.recv() == b"for the next call"
        assert client.statistics().messages_sent == 1


def test_call_interrupted_before_waiting_is_cancelled(serve: blocking.Listener) -> None:
    """The call has been submitted, but its thread is not waiting for it yet."""
    with connected(serve) as (client, server):
        interrupt(server.recv, has_result=False)
        client.send(b"for the next call")
        assert server.within(100).recv() == b"for the next call"


def interrupt(function: Callable[[], object], *, has_result: bool = True) -> None:
    """Interrupt a call before it waits, or after its result arrives but before it returns."""

    class Interrupts(SimpleQueue[None]):
        def get(self, *_: Any) -> None:
            if has_result:
                super().get()
            during.undo()
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as during:
        during.setattr(blocking, "SimpleQueue", Interrupts)
        with pytest.raises(KeyboardInterrupt):
            function()


def call_recv(conn: blocking.Connection) -> tuple[bytes, int | None]:
    return conn.recv(), None


def call_next(conn: blocking.Connection) -> tuple[bytes, int | None]:
    return next(iter(conn)), None


def call_recv_into(conn: blocking.Connection) -> tuple[bytes, int | None]:
    memory = bytearray(3)
    length, imm = conn.recv_into(memory)
    return bytes(memory[:length]), imm


def call_recv_with(conn: blocking.Connection) -> tuple[bytes, int | None]:
    memory, length, imm = conn.recv_with(bytearray)
    return bytes(memory[:length]), imm


RECEIVERS = [call_recv, call_next, call_recv_into, call_recv_with]


def test_interrupted_receive_does_not_lose_a_message(serve: blocking.Listener) -> None:
    """The next call may be of another kind. The message keeps its place and its immediate data."""
    with connected(serve) as (client, server):
        for lost, then in itertools.product(RECEIVERS, repeat=2):
            client.send(b"1st", imm=1)
            client.send(b"2nd", imm=2)
            interrupt(partial(lost, server))
            shows_imm = then in (call_recv_into, call_recv_with)
            for data, imm in ((b"1st", 1), (b"2nd", 2)):
                assert then(server.within(100)) == (data, imm if shows_imm else None)


class Signal(int):
    sent = property(_thread.interrupt_main)
    """Raises the signal. Unlike after a call, Python does not check for signals here."""


def check_signals() -> None:
    """Do nothing. Python handles pending signals when it enters a function."""


def test_interrupt_after_receive_completes_does_not_lose_a_message(
    serve: blocking.Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No code between a result and its return to the program may check for signals.

    A loop's condition, for example, would do so.
    """
    call, calls = blocking._LoopThread.call, itertools.count(1)

    def interrupted(*arguments: Any) -> Any:
        result, interrupt = call(*arguments), Signal(signal.SIGINT)
        if next(calls) in (1, 2, 3, 5):
            interrupt.sent  # noqa: B018
        return result

    def call_recv(conn: blocking.Connection) -> Iterator[bytes]:
        yield conn.recv()

    received: list[bytes] = []
    interrupts = 0
    with connected(serve) as (client, server):
        sent = [b"%d" % number for number in range(9)]
        for data in sent:
            client.send(data)
        with monkeypatch.context() as during:
            during.setattr(blocking._LoopThread, "call", interrupted)
            while len(received) < len(sent):
                try:
                    for message in call_recv(server) if interrupts < 2 else server.within(100):
                        received.append(message)
                        check_signals()
                        if len(received) == len(sent):
                            break
                except KeyboardInterrupt:
                    interrupts += 1
    assert (received, interrupts) == (sent, 4)


def test_recv_into_validates_memory_after_an_interrupted_recv(serve: blocking.Listener) -> None:
    with connected(serve) as (client, server), server.register(bytearray(9)) as region:
        client.send(b"kept", imm=1)
        client.send(b"until the end")
        interrupt(server.recv)
        with pytest.raises(errors.MessageTooLongError, match="has 4 bytes, but the memory"):
            server.recv_into(bytearray(3))
        with pytest.raises(TypeError, match="read-only"):
            server.recv_into(bytes(4))
        assert server.recv_into(region) == (4, 1)
        assert bytes(region.view[:4]) == b"kept"
        interrupt(server.recv)
        client.close()
        assert server.recv() == b"until the end"
        interrupt(server.recv)  # loses the error, which the next call raises again
        with pytest.raises(errors.ConnectionClosedError):
            server.recv()
        assert list(server) == []


def test_interrupted_receive_does_not_lose_a_region_or_buffer(serve: blocking.Listener) -> None:
    with connected(serve) as (client, server), server.register(bytearray(8)) as region:
        for _ in range(2):
            server.send_region(region)
        interrupt(client.recv_region)
        shown = [client.recv_region().token for _ in range(2)]
        assert shown[1].region_id == shown[0].region_id + 1

        for data in (b"1st", b"2nd"):
            lent = client.request_region(3)
            client.write(data, lent)
            client.hand_over(lent)
        interrupt(server.recv_buffer)
        assert [server.recv_buffer() for _ in range(2)] == [b"1st", b"2nd"]


def test_result_of_an_interrupted_call_is_released(
    serve: blocking.Listener, host: str, device_name: str
) -> None:
    with connected(serve) as (client, server), server.register(bytearray(8)) as region:

        def shared() -> int:
            return blocking.call(lambda: sharing_figures(server)["shared_regions"])

        interrupt(partial(server.send_region, region))
        interrupt(partial(server.share, region))
        assert shared() == 0
        interrupt(partial(client.request_region, 8))
        client.send(b"behind the release")
        assert server.recv() == b"behind the release"
        assert shared() == 0
        kept = bytearray(8)
        interrupt(partial(client.register, kept))
        kept.append(1)  # resizable again, because it is no longer pinned

        interrupt(partial(blocking.connect, *serve.address, device=device_name))
        assert list(serve.within(100).accept()) == []  # the connection was closed

        again = blocking.connect(*serve.address, device=device_name)
        interrupt(serve.accept)
        with again, serve.within(100).accept() as accepted:
            again.send(b"accepted")
            assert accepted.recv() == b"accepted"
    with blocking.listen(host, 0, device=device_name) as listener:
        port = listener.port
    interrupt(partial(blocking.listen, host, port, device=device_name))
    with blocking.listen(host, port, device=device_name):
        pass


def sharing_figures(conn: blocking.Connection) -> dict[str, int]:
    return conn.asynchronous._sharing.figures()


def test_interrupted_stream_read_does_not_lose_bytes(host: str, device_name: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"0123456789a line\nthe rest")
        await reader.read()
        writer.close()

    server = blocking.call(start_stream_server, answer, host, 0, device=device_name)
    port = server.sockets[0].getsockname()[1]
    interrupt(partial(blocking.open_stream, host, port, device=device_name))
    with blocking.open_stream(host, port, device=device_name) as stream:
        interrupt(partial(stream.readexactly, 3))
        interrupt(partial(stream.read, 2))
        assert stream.readexactly(3) == b"012"
        with pytest.raises(TimeoutError):
            stream.within(0.01).read()  # waits for EOF
        interrupt(stream.readline)
        assert stream.readline() == b"3456789a line\n"
        stream.write_eof()
        interrupt(partial(stream.readexactly, 100))
        with pytest.raises(asyncio.IncompleteReadError) as incomplete:
            stream.readexactly(50)
        assert incomplete.value.partial == b"the rest"
        interrupt(stream.read)
        assert stream.read() == b""
    blocking.call(server.close)
    blocking.call(server.wait_closed)


# ---- destructors and signal handlers ------------------------------------------------------------


REENTRANT_PROGRAM = """
import signal, sys
from aiordma import blocking
depth = 0
def nested(*_):
    assert blocking.call(len, b"from it") == 7
def step(frame, event, argument):
    # Not traced itself. A signal handler, like a destructor, may run between any two lines.
    signal.raise_signal(signal.SIGUSR1)
    return step
def of_blocking(frame, event, argument):
    return step if frame.f_code.co_filename == blocking.__file__ else None
signal.signal(signal.SIGUSR1, nested)
for _ in range(3):  # the first of them begins the thread
    sys.settrace(of_blocking)
    assert blocking.call(len, b"outer") == 5
    sys.settrace(None)
    blocking.stop()
print("no deadlock")
"""


@pytest.mark.any_device
def test_reentrant_call_at_any_line_does_not_deadlock() -> None:
    """A signal handler, or a destructor run by the garbage collector, may call at any time."""
    done = run_python("-c", REENTRANT_PROGRAM)
    assert (done.returncode, done.stdout, done.stderr) == (0, "no deadlock\n", "")


def test_signal_handler_can_send_during_a_blocking_recv(serve: blocking.Listener) -> None:
    with (
        connected(serve) as (client, server),
        handling(partial(client.send, b"from the handler"), server),
    ):
        assert server.recv() == b"from the handler"


@pytest.mark.parametrize("where", ["its own thread", "the thread of leases"])
def test_destructor_in_an_internal_thread_can_close_connections(
    serve: blocking.Listener, where: str
) -> None:
    """It only starts the close. Waiting for it could block the thread that has to finish it."""
    refused: SimpleQueue[type[Exception]] = SimpleQueue()

    class Owner:
        def __init__(self, *owned: blocking.Connection | blocking.Region) -> None:
            self.owned = owned

        def __del__(self) -> None:
            for each in self.owned:
                each.close()
            try:
                client.send(b"")
            except errors.WrongLoopError as error:
                refused.put(type(error))

    with connected(serve) as (client, server):
        memory = bytearray(8)
        left = [Owner(server, server.register(memory))]
        if where == "its own thread":
            blocking.call(left.clear)
        else:
            lease_thread.schedule(MACHINE, MACHINE.now(), left.clear)
        refused.get()
        server.wait_closed()
        memory.append(1)
        assert list(client) == []


def test_unawaited_close_failure_is_logged(
    serve: blocking.Listener, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OSError("the device has gone")

    blocking.call(blocking._close_in_thread, serve._thread, fail)
    blocking.call(asyncio.sleep, 0)
    assert "the device has gone" in caplog.text


# ---- beside an event loop -----------------------------------------------------------------------


def test_connect_to_server_on_the_same_loop_raises_wrong_loop_error(
    serve: blocking.Listener, host: str, device_name: str
) -> None:
    """The server could not respond while the call blocks its loop.

    Calls that can complete are allowed, as in a notebook.
    """

    async def echo(conn: transport.Connection) -> None:
        async for message in conn:
            await conn.send(message)

    def ask(port: int) -> bytes:
        with blocking.connect(host, port, device=device_name) as conn:
            conn.send(b"hello")
            return conn.recv()

    async def main() -> None:
        async with await transport.start_server(echo, host, device=device_name) as server:
            with pytest.raises(errors.WrongLoopError, match="to_thread"):
                ask(server.port)
            with pytest.raises(errors.WrongLoopError, match="to_thread"):
                blocking.open_stream(host=host, port=server.port, device=device_name)
            assert await asyncio.to_thread(ask, server.port) == b"hello"
            loop = asyncio.get_running_loop()
            await blocking.check_server(loop, "203.0.113.7", server.port)  # another machine
        with connected(serve) as (client, there):
            client.send(b"in another thread")
            assert there.recv() == b"in another thread"
            with pytest.raises(TimeoutError) as late:
                there.within(0).recv()
            assert "The call blocks this thread's event loop" in late.value.__notes__[0]

    asyncio.run(main())


def test_registered_region_can_be_closed_from_any_thread(serve: blocking.Listener) -> None:
    memory = bytearray(8)
    with connected(serve) as (client, server):
        region = client.register(memory)
        client.send_region(region[2:])
        assert len(server.recv_region()) == 6
        with pytest.raises(BufferError):
            memory.append(1)
        ThreadPoolExecutor(1).submit(region.close).result()
        region.close()
        blocking.call(client.asynchronous._sharing.end_keys)
        memory.append(1)


# ---- the thread ---------------------------------------------------------------------------------


def test_call_from_the_loop_thread_raises_wrong_loop_error(serve: blocking.Listener) -> None:
    with pytest.raises(errors.WrongLoopError, match="could deadlock"):
        blocking.call(serve.accept)


def test_stop_fails_pending_calls_and_warns_about_open_objects(serve: blocking.Listener) -> None:
    with connected(serve) as (client, server), ThreadPoolExecutor(1) as threads:
        region = client.register(bytearray(16))
        waiting = threads.submit(list, server)  # `stop` must not look like a close by the peer
        wait_until_receiving(server)
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
        for late in (client, client.within(1), server, serve, region):
            late.close()
        client.abort()
        client.wait_closed()
        assert client.closed
    blocking.stop()  # no effect


def test_cancelled_error_in_a_call_does_not_stop_the_loop_thread(serve: blocking.Listener) -> None:
    """The thread keeps working after a cancelled call, with or without a time limit."""

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


def test_call_can_be_retried_after_the_loop_thread_fails_to_start(
    monkeypatch: pytest.MonkeyPatch, host: str, device_name: str
) -> None:
    def fail() -> asyncio.AbstractEventLoop:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as during:
        during.setattr(asyncio, "new_event_loop", fail)
        with pytest.raises(OSError, match="Too many open files"):
            blocking.listen(host, 0, device=device_name)
    with blocking.listen(host, 0, device=device_name) as listener:
        assert listener.port


def test_system_exit_in_a_call_is_raised_to_the_caller(serve: blocking.Listener) -> None:
    """The thread and its open connections keep working."""
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


def test_system_exit_in_a_background_task_is_logged(
    serve: blocking.Listener, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread and its open connections keep working."""
    tasks = []

    async def begin() -> None:
        tasks.append(asyncio.create_task(exit_later(3)))
        await asyncio.wait(tasks)

    with connected(serve) as (client, server):
        blocking.call(begin)
        client.send(b"after it")
        assert server.recv() == b"after it"
    assert isinstance(tasks[0].exception(), SystemExit)
    assert "exit_later" in caplog.text  # in its traceback


def test_stopped_loop_is_replaced_by_the_next_call(caplog: pytest.LogCaptureFixture) -> None:
    """The call that stopped the loop raises an error."""

    async def stop() -> None:
        asyncio.get_running_loop().stop()
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="stopped"):
        blocking.call(stop)
    assert "thread of aiordma.blocking failed" in caplog.text
    assert blocking.call(lambda: 7) == 7
    blocking.stop()


def test_concurrent_first_calls_share_one_thread() -> None:
    barrier = threading.Barrier(8)

    def first() -> int:
        barrier.wait()
        return blocking.call(threading.get_ident)

    with ThreadPoolExecutor(8) as threads:
        each = [threads.submit(first) for _ in range(8)]
        assert len({one.result() for one in each}) == 1


def test_stop_from_the_loop_thread_raises_wrong_loop_error() -> None:
    with pytest.raises(errors.WrongLoopError, match="could deadlock"):
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
def test_waiting_thread_behaves_as_documented_at_program_exit(
    host: str, device_name: str, daemon: bool, last: str, printed: str
) -> None:
    """docs/blocking.md describes how a thread that waits behaves when the program ends."""
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
    done = run_python("-W", "ignore", "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


def in_child(function: Callable[[], object]) -> int:
    """Run a function in a forked child and return the child's exit status."""
    with warnings.catch_warnings():  # about threads, none of which holds a relevant lock
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


def test_forked_child_opens_its_own_connections(
    serve: blocking.Listener, host: str, device_name: str
) -> None:
    if kind_of(device_name) != "embedded":
        pytest.skip("it needs RDMAV_FORK_SAFE: see tests/transport/test_fork.py")
    with connected(serve) as (client, server), client.register(bytearray(16)) as region:

        def child() -> None:
            region.close()
            with client, pytest.raises(errors.WrongLoopError, match="before a fork"):
                client.send(b"")
            client.abort()
            serve.close()
            assert client.closed
            with blocking.connect(host, serve.port, device=device_name) as own:
                own.send(b"from the child")
                assert own.recv() == b"heard"  # closing before the accept would lose the connection
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


# ---- derived ------------------------------------------------------------------------------------


def test_blocking_classes_mirror_the_public_async_methods() -> None:
    for ours, theirs, left_out in (
        (blocking.Connection, transport.Connection, LEFT_OUT),
        (blocking.Listener, transport.Listener, {"addresses", "host", "stop"}),
    ):
        names = {name for name in dir(theirs) if not name.startswith("_")}
        assert names - set(dir(ours)) == set(left_out)


def test_blocking_signatures_match_async_signatures() -> None:
    for name in ("write", "send_region", "compare_and_swap"):
        ours, theirs = (getattr(it, name) for it in (blocking.Connection, transport.Connection))
        assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters
    assert inspect.signature(blocking.connect).parameters.keys() >= {"host", "auth", "encrypt"}
