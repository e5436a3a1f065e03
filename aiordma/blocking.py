"""aiordma without await: for notebooks, torch, Ray, and threads without an event loop::

    with blocking.connect("127.0.0.1", port) as conn:
        conn.send(b"hello")
        answer = conn.within(5).recv()

An event loop in a background thread does the work, so each call here is a call of the asynchronous
interface there, and has its arguments, results and errors. Any thread may use any object, several
threads the same one. `within` bounds the time of a call.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import inspect
import math
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from functools import partial, wraps
from numbers import Real
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar, overload

from . import streams, transport
from ._native import fork
from .errors import ConnectionClosedError, WrongLoopError
from .mr_pool import Region
from .transport import Address
from .verbs._memory.buffers import AnyMemory

__all__ = ["Connection", "Listener", "Stream", "call", "connect", "listen", "open_stream", "stop"]

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")
H = TypeVar("H")


# ---- the thread ---------------------------------------------------------------------------------


class _LoopThread:
    """The background thread, with its event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: Future[asyncio.AbstractEventLoop] = Future()
        self._stopped = False
        self._thread = threading.Thread(target=self._main, name="aiordma.blocking", daemon=True)
        self._thread.start()
        self._loop = self._running.result()

    def _main(self) -> None:
        try:
            with asyncio.Runner() as runner:
                try:
                    runner.run(self._serve())
                finally:  # also when a task raises SystemExit, which ends an event loop
                    with self._lock:
                        self._stopped = True
                    _drop(self)
                    runner.run(asyncio.sleep(0))  # begins what was submitted; the runner cancels it
        except BaseException as error:
            if not self._running.done():
                self._running.set_exception(error)  # such as too many open files
            elif not isinstance(error, SystemExit):  # which the task has, too
                raise

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        self._running.set_result(asyncio.get_running_loop())
        await self._end.wait()

    def check_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise WrongLoopError("aiordma.blocking is not for the thread of its own event loop")

    def call(self, function: Callable[[], Any], seconds: float | None) -> Any:
        self.check_thread()
        result = None
        try:
            with self._lock:  # what is submitted before `stop` runs, and is cancelled there
                if self._stopped:
                    raise WrongLoopError("the thread of aiordma.blocking was stopped")
                result = asyncio.run_coroutine_threadsafe(_bounded(function, seconds), self._loop)
            value, leaving = result.result()
        except CancelledError:
            if not self._stopped:
                raise  # the function has cancelled itself, or what it awaits
            raise ConnectionClosedError("blocking.stop() has ended the call") from None
        finally:
            if result is not None:
                result.cancel()  # for an interrupt of this thread: else it has ended
        if leaving is not None:
            raise leaving
        return value

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
        with suppress(RuntimeError):  # its loop has just ended by itself
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()


async def _bounded(
    function: Callable[[], Any], seconds: float | None
) -> tuple[Any, BaseException | None]:
    """The result, or the SystemExit of the function: raised here, it would end the event loop."""
    try:
        async with asyncio.timeout(seconds) as limit:
            result = function()
            return (await result if inspect.isawaitable(result) else result), None
    except (SystemExit, KeyboardInterrupt) as leaving:
        return None, leaving
    except TimeoutError as error:
        if limit.expired():
            raise TimeoutError(f"the call did not end within {seconds:g} seconds") from error
        raise


_lock = threading.Lock()
_thread: _LoopThread | None = None


def _started() -> _LoopThread:
    global _thread  # noqa: PLW0603 - one for the process
    with _lock:
        if _thread is None:
            _thread = _LoopThread()
        return _thread


def _drop(ended: _LoopThread) -> None:
    """The next use begins another thread."""
    global _thread  # noqa: PLW0603 - one for the process
    with _lock:
        if _thread is ended:
            _thread = None


def _forget() -> None:
    """In the child of a fork: the thread is the parent's."""
    global _thread, _lock
    _thread, _lock = None, threading.Lock()


fork.reset_in_child(_forget)


@atexit.register
def stop() -> None:
    """End the background thread; what is still open is closed, with a ResourceWarning.

    The next use begins another one. The end of the program does the same, after the end of the
    threads that are not daemons.
    """
    global _thread
    with _lock:
        if _thread is not None:
            _thread.check_thread()
        ended, _thread = _thread, None
    if ended is not None:
        ended.stop()


@overload
def call(
    function: Callable[P, Coroutine[Any, Any, T]], *arguments: P.args, **options: P.kwargs
) -> T: ...
@overload
def call(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T: ...
def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function, asynchronous or not, in the background thread, and return its result.

    For what has no method here: `call(remote.renew, 60)`, or a coroutine function of your own that
    uses `Connection.asynchronous`.
    """
    return _started().call(partial(function, *arguments, **options), None)


# ---- derived from the asynchronous interface ----------------------------------------------------


class _Handle(Generic[A]):
    """An asynchronous object, and the time that a call of it may take."""

    def __init__(self, asynchronous: A) -> None:
        self.asynchronous = asynchronous
        """The asynchronous object, for `call`; it belongs to the background thread."""
        self._timeout: float | None = None
        self._thread = _started()

    def __repr__(self) -> str:
        return f"<blocking {self.asynchronous!r}>"

    def close(self) -> None:
        """Closes the object, as its class says."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._thread is _thread:  # else it is closed, or the parent's
            self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """Closes it at the end of its `with`, which `error` has ended."""
        self.close()

    def within(self, seconds: float | None) -> Self:
        """The same object, whose calls raise TimeoutError when they take longer; None: no limit."""
        if seconds is not None and not isinstance(seconds, Real):
            raise TypeError(f"within takes a number of seconds, or None, not {seconds!r}")
        if seconds is not None and math.isnan(seconds):
            raise ValueError("within takes a number of seconds, or None, not nan")
        bounded = copy.copy(self)
        bounded._timeout = seconds
        return bounded

    @overload
    def _call(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T: ...
    @overload
    def _call(self, function: Callable[[], T]) -> T: ...
    def _call(self, function: Callable[[], Any]) -> Any:
        if self._thread is not _thread:
            raise WrongLoopError(
                f"{self!r} was made before a fork or before blocking.stop(), or a task of its "
                "event loop has raised SystemExit"
            )
        return self._thread.call(function, self._timeout)


def _derived(function: Callable[..., Any], derived: Callable[..., Any]) -> Any:
    """`derived` with name and signature of the asynchronous function that it is derived from."""
    wraps(function)(derived)
    derived.__module__ = __name__
    derived.__doc__ = f"As `{function.__qualname__}`, in the background thread."
    return derived


@overload
def _method(
    function: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]: ...
@overload
def _method(function: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]: ...
def _method(function: Callable[..., Any]) -> Any:
    def method(self: _Handle[Any], *arguments: Any, **options: Any) -> Any:
        return self._call(partial(function, self.asynchronous, *arguments, **options))

    return _derived(function, method)


def _maker(
    function: Callable[P, Coroutine[Any, Any, A]], handle: Callable[[A], H]
) -> Callable[P, H]:
    """A function whose result is an object of this module."""

    def maker(*arguments: P.args, **options: P.kwargs) -> H:
        return handle(call(function, *arguments, **options))

    result: Callable[P, H] = _derived(function, maker)
    return result


# ---- the interface ------------------------------------------------------------------------------


class Connection(_Handle[transport.Connection]):
    """A connection to be used from any thread: `aiordma.Connection` without await.

    A message is received as bytes, or by `recv_into` and `recv_with` into memory of the caller's.
    """

    send: Final = _method(transport.Connection.send)
    recv_into: Final = _method(transport.Connection.recv_into)
    recv_with: Final = _method(transport.Connection.recv_with)
    read: Final = _method(transport.Connection.read)
    write: Final = _method(transport.Connection.write)
    compare_and_swap: Final = _method(transport.Connection.compare_and_swap)
    fetch_and_add: Final = _method(transport.Connection.fetch_and_add)
    send_region: Final = _method(transport.Connection.send_region)
    recv_region: Final = _method(transport.Connection.recv_region)
    request_region: Final = _method(transport.Connection.request_region)
    hand_over: Final = _method(transport.Connection.hand_over)
    share: Final = _method(transport.Connection.share)
    open_region: Final = _method(transport.Connection.open_region)
    statistics: Final = _method(transport.Connection.statistics)
    close: Final = _method(transport.Connection.close)
    abort: Final = _method(transport.Connection.abort)
    wait_closed: Final = _method(transport.Connection.wait_closed)

    def _leave(self, error: BaseException | None) -> None:
        kind = None if error is None else type(error)
        self._call(partial(self.asynchronous.__aexit__, kind, error, None))

    def recv(self) -> bytes:
        """The next message. It is copied: `recv_into` receives into memory of the caller's."""
        return self._call(partial(_received, self.asynchronous.recv))

    def recv_buffer(self) -> bytes:
        """What the peer has handed over, as `aiordma.Connection.recv_buffer`; copied."""
        return self._call(partial(_handed_over, self.asynchronous))

    @contextmanager
    def register(self, memory: AnyMemory) -> Iterator[Region]:
        """Memory of the caller's, registered until the end of the `with`."""
        region = self._call(partial(self.asynchronous.register, memory))
        try:
            yield region
        finally:
            if self._thread is _thread:  # else it has ended, or is the parent's
                self._call(region.close)

    def __iter__(self) -> Iterator[bytes]:
        """Messages, until the peer closes the connection."""
        messages = self._call(self.asynchronous.__aiter__)
        while (message := self._call(partial(_next, messages))) is not None:
            yield message

    @property
    def device(self) -> str:
        """As `aiordma.Connection.device`."""
        return self._call(lambda: self.asynchronous.device)

    @property
    def wire(self) -> str | None:
        """As `aiordma.Connection.wire`."""
        return self._call(lambda: self.asynchronous.wire)

    @property
    def local_address(self) -> Address | None:
        """As `aiordma.Connection.local_address`."""
        return self._call(lambda: self.asynchronous.local_address)

    @property
    def peer_address(self) -> Address | None:
        """As `aiordma.Connection.peer_address`."""
        return self._call(lambda: self.asynchronous.peer_address)

    @property
    def closed(self) -> bool:
        """As `aiordma.Connection.closed`."""
        return self._call(lambda: self.asynchronous.closed)


async def _received(recv: Callable[[], Coroutine[Any, Any, transport.Message]]) -> bytes:
    with await recv() as message:
        return bytes(message)


async def _handed_over(connection: transport.Connection) -> bytes:
    with await connection.recv_buffer() as buffer:
        return bytes(buffer.view)


async def _next(messages: AsyncIterator[transport.Message]) -> bytes | None:
    try:
        return await _received(messages.__anext__)  # type: ignore[arg-type]
    except StopAsyncIteration:
        return None


class Listener(_Handle[transport.Listener]):
    """A listener to be used from any thread: `aiordma.Listener` without await."""

    close: Final = _method(transport.Listener.close)

    def accept(self) -> Connection:
        """The next connection, as `aiordma.Listener.accept`."""
        return Connection(self._call(self.asynchronous.accept))

    @property
    def address(self) -> Address:
        """As `aiordma.Listener.address`."""
        return self.asynchronous.address

    @property
    def port(self) -> int:
        """As `aiordma.Listener.port`."""
        return self.asynchronous.port


class Stream(_Handle[tuple[asyncio.StreamReader, asyncio.StreamWriter]]):
    """A byte stream to be used from any thread: asyncio's reader and writer without await."""

    def read(self, size: int = -1) -> bytes:
        """As `asyncio.StreamReader.read`."""
        return self._call(lambda: self.asynchronous[0].read(size))

    def readexactly(self, size: int) -> bytes:
        """As `asyncio.StreamReader.readexactly`."""
        return self._call(lambda: self.asynchronous[0].readexactly(size))

    def readline(self) -> bytes:
        """As `asyncio.StreamReader.readline`."""
        return self._call(self.asynchronous[0].readline)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of the data; wait while the peer reads too slowly (`drain`)."""
        self._call(partial(_written, self.asynchronous[1], data))

    def write_eof(self) -> None:
        """As `asyncio.StreamWriter.write_eof`."""
        self._call(self.asynchronous[1].write_eof)

    def close(self) -> None:
        """Close the stream, after what was written."""
        self._call(partial(_closed, self.asynchronous[1]))


async def _written(writer: asyncio.StreamWriter, data: bytes | bytearray | memoryview) -> None:
    writer.write(data)
    await writer.drain()


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


connect: Final = _maker(transport.connect, Connection)
listen: Final = _maker(transport.listen, Listener)
open_stream: Final = _maker(streams.open_connection, Stream)
