"""aiordma without await, for notebooks, torch, Ray, and threads without an event loop.

Example::

    with blocking.connect("127.0.0.1", port) as conn:
        conn.send(b"hello")
        answer = conn.within(5).recv()

An event loop in a background thread does the work. Each function in this module calls the
asynchronous function of the same name in that thread, with the same arguments, results and
exceptions. `within` sets a time limit for calls.

You can use every object in any thread, in several threads at the same time, in signal handlers and
in destructors. A destructor or a signal handler can interrupt another call in the same thread. For
this reason, no call holds a lock that a second call in the same thread would wait for. Calls are
passed to the background thread with `call_soon_threadsafe`, and each one waits on its own queue.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import inspect
import logging
import threading
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial, wraps
from queue import SimpleQueue
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeAlias, TypeVar, overload

from . import mr_pool, streams, transport
from ._core import arguments
from ._core.arguments import refusal
from ._core.finalizers import finalizer
from ._event_loop import shutdown
from ._native import fork
from ._native.service_thread import ServiceThread, in_service_thread
from ._transport.arguments import check_host
from ._transport.listening import is_local_address
from .config import LoopConfig
from .errors import (
    BusyError,
    ConnectionClosedError,
    MessageTooLongError,
    UnreachableError,
    WrongLoopError,
)
from .mr_pool import LocalMemory, Registration
from .transport import Address, Received, ReceivedMemory, RemoteRegion, Share
from .verbs._memory.buffers import AnyMemory, bytes_of

__all__ = [
    "Connection",
    "Listener",
    "Region",
    "Stream",
    "call",
    "configure_loop",
    "connect",
    "listen",
    "open_stream",
    "stop",
]

logger: logging.Logger = logging.getLogger("aiordma.blocking")

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")
H = TypeVar("H", bound="_Handle[Any]")
_Undo: TypeAlias = Callable[[T], object] | None
"""A function that undoes a call in the background thread if an interrupt discards its result."""


# ---- the thread ---------------------------------------------------------------------------------


async def _result_of(function: Callable[[], Any]) -> Any:
    result = function()
    return await result if inspect.isawaitable(result) else result


async def _log_failure(function: Callable[[], Any], failure: str) -> None:
    """Call a function and log its exception, because nothing waits for the result."""
    try:
        await _result_of(function)
    except Exception:
        logger.exception(failure)


class _Call:
    """A function call in the background thread, with its result or error."""

    def __init__(
        self, thread: _LoopThread, function: Callable[[], Any], seconds: float | None = None
    ) -> None:
        self._thread = thread
        self._function = function
        self._seconds = seconds
        self._task: asyncio.Task[None] | None = None
        self.result: Any = None
        # None means that `result` is valid. Until then, an interrupt leaves nothing to undo.
        self.error: BaseException | None = CancelledError()
        # SimpleQueue runs no Python code while it holds its lock. An interrupt (Ctrl-C) therefore
        # cannot leave the lock held.
        self.done: SimpleQueue[None] = SimpleQueue()

    def begin(self) -> None:
        self._thread.calls.add(self)
        try:
            self._thread.loop.call_soon_threadsafe(self._create_task)
        except RuntimeError:  # the loop has just been closed
            self.end(None, self._thread.ended_error())

    def _create_task(self) -> None:
        self._task = self._thread.loop.create_task(self._run())

    async def _run(self) -> None:
        limit = asyncio.timeout(self._seconds)
        try:
            async with limit:
                result = await _result_of(self._function)
        except BaseException as error:  # including SystemExit, which is raised in the caller
            self.end(None, self._caller_error(error, limit))
        else:
            self.end(result, None)

    def _caller_error(self, error: BaseException, limit: asyncio.Timeout) -> BaseException:
        """Return the exception to raise in the calling thread when the function has failed."""
        outcome: BaseException
        if isinstance(error, TimeoutError) and limit.expired():
            outcome = TimeoutError(f"the call timed out after {self._seconds:g} seconds")
        elif not isinstance(error, asyncio.CancelledError):
            return error
        else:  # the thread has ended, or the function has cancelled itself
            outcome = CancelledError() if self._thread.usable else self._thread.ended_error()
        outcome.__cause__ = error
        return outcome

    def end(self, result: Any, error: BaseException | None) -> None:
        """Store the result or exception of the call, and wake the caller."""
        with suppress(KeyError):  # the call has already ended
            self._thread.calls.remove(self)
            del self._function
            self.result, self.error = result, error
            self.done.put(None)

    async def withdraw(self, undo: _Undo[Any]) -> None:
        """Cancel the call, or pass its result to `undo` if it has already finished."""
        if self._task is None:  # interrupted before the task was created
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        if self.error is None and undo is not None:
            await _log_failure(
                partial(undo, self.result), "the result of an interrupted call was lost"
            )
        self.error = None  # its traceback may refer to frames that refer to this call


class _LoopThread:
    def __init__(self) -> None:
        self.calls: set[_Call] = set()
        """The calls in progress."""
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.loop: asyncio.AbstractEventLoop = self._runner.get_loop()
        self._end: asyncio.Event = asyncio.Event()
        self.stopped: bool = False
        """Whether the thread is ending or has ended."""
        self._failure: BaseException | None = None
        self._thread = ServiceThread(self._main, "aiordma.blocking")
        self._thread.start()

    @property
    def usable(self) -> bool:
        """Whether the thread accepts calls and belongs to this process."""
        return self in _threads and not self.stopped

    def _main(self) -> None:
        try:
            with self._runner:
                try:
                    self._serve()
                except BaseException as error:  # for example, a task has stopped the loop
                    logger.exception("the background thread of aiordma.blocking failed")
                    self._failure = error
                finally:
                    self.stopped = True
        finally:
            for call in list(self.calls):
                call.end(None, self.ended_error())

    def _serve(self) -> None:
        """Run the event loop until `stop`, even if a task raises an exit exception."""
        while not self._end.is_set():
            try:
                self.loop.run_until_complete(self._end.wait())
            except (SystemExit, KeyboardInterrupt):  # these also end run_until_complete()
                logger.exception(
                    "a task in the event loop of aiordma.blocking raised an exit exception"
                )

    def ended_error(self) -> BaseException:
        """Return the exception for calls that fail because the thread has ended."""
        return self._failure or ConnectionClosedError("the call was ended by blocking.stop()")

    def call(
        self, function: Callable[[], Any], seconds: float | None = None, undo: _Undo[Any] = None
    ) -> Any:
        """Run the function in the thread and return its result.

        An interrupt (Ctrl-C) that arrives after the result has been taken would lose the result.
        This method therefore returns the result without calling anything else, because Python runs
        signal handlers only in calls and loops.
        """
        call = _Call(self, function, seconds)
        try:
            call.begin()
            call.done.get()
            if call.error is None:
                return call.result
        except BaseException:
            withdrawal = _Call(self, partial(call.withdraw, undo))
            withdrawal.begin()
            withdrawal.done.get()
            raise
        if isinstance(call.error, TIMEOUT_ERRORS) and _get_running_loop() is not None:
            call.error.add_note(OWN_LOOP_HINT)
        try:
            raise call.error
        finally:
            call.error = None  # its traceback refers to this frame

    def stop(self) -> None:
        """Stop the thread and wait for it to end."""
        self.stopped = True
        with suppress(RuntimeError):  # the loop has already ended
            self.loop.call_soon_threadsafe(self._end.set)
        self._thread.join()


_threads: list[_LoopThread] = []  # more than one only after a re-entrant call of `_running_thread`
_threads_lock = threading.RLock()  # re-entrant, because its holder may call this module again


def _forget_threads() -> None:
    """Forget the parent process's threads after a fork."""
    global _threads_lock  # noqa: PLW0603 - one for the process
    _threads_lock = threading.RLock()
    _threads.clear()


fork.reset_in_child(_forget_threads)


def check_thread() -> None:
    """Raise WrongLoopError if the current thread must not wait for the background thread."""
    if in_service_thread():
        raise WrongLoopError(
            f"cannot make a blocking call in aiordma's thread {threading.current_thread().name!r}: "
            "the call could deadlock; only close() and abort() can be called in this thread"
        )


def _running_thread() -> _LoopThread:
    """Return the background thread, starting it if necessary."""
    check_thread()
    with _threads_lock:
        if not _threads or _threads[-1].stopped:
            _threads.append(_LoopThread())
        return _threads[-1]


@atexit.register
def stop() -> None:
    """Stop the background thread. Objects that are still open are closed with a ResourceWarning.

    The next call to a function in this module starts a new thread. When the program exits, `stop`
    runs automatically after all non-daemon threads have ended.
    """
    check_thread()
    for thread in list(_threads):
        thread.stop()
        with suppress(ValueError):  # another thread has removed it
            _threads.remove(thread)


def _close_in_thread(
    thread: _LoopThread, function: Callable[[], Any], seconds: float | None = None
) -> None:
    """Close an object in its thread, unless the thread has ended or belongs to the parent process.

    A call from one of the library's own threads returns before the object is closed, because these
    threads must not block. A destructor may run in any thread.
    """
    if not thread.usable:
        return
    if in_service_thread():
        failure = "cannot close an object of aiordma.blocking"
        _Call(thread, partial(_log_failure, function, failure)).begin()
        return
    try:
        thread.call(function, seconds)
    except ConnectionClosedError:
        if thread.usable:  # otherwise, `stop` has ended the call and closed the object
            raise


TIMEOUT_ERRORS = (TimeoutError, UnreachableError)
OWN_LOOP_HINT = (
    "The call blocks this thread's event loop. If the peer is a task in this loop, neither "
    "side can continue: await aiordma.connect() instead, or make the call in another thread "
    "(asyncio.to_thread)."
)


@overload
def call(
    function: Callable[P, Coroutine[Any, Any, T]], *arguments: P.args, **options: P.kwargs
) -> T: ...
@overload
def call(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T: ...
def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function in the background thread and return its result.

    `function` may be a coroutine function or an ordinary function. Use `call` for operations not
    wrapped by this module, as in `call(remote.renew, 60)`, and for your own coroutine functions
    that use `Connection.asynchronous`.

    An interrupt (Ctrl-C) cancels the call and waits for the function to end. If the function has
    already returned, its result is lost.
    """
    if not callable(function):
        hint = "pass its arguments separately, as in call(function, 1)"
        raise TypeError(refusal("function", "a function", function, hint))
    return _running_thread().call(partial(function, *arguments, **options), None)


def configure_loop(config: LoopConfig) -> None:
    """Choose the settings of all devices that the background thread opens.

    This is `aiordma.configure_loop` for the thread's event loop. Because `stop` ends the loop, call
    this function again afterwards.
    """
    call(transport.configure_loop, config)


# ---- derived from the asynchronous interface ----------------------------------------------------


class _Handle(Generic[A]):
    """A blocking wrapper for an asynchronous object, with a time limit for each call."""

    def __init__(self, thread: _LoopThread, asynchronous: A) -> None:
        self.asynchronous = asynchronous
        """The asynchronous object. It belongs to the background thread; use `call` to access it."""
        self._thread = thread
        self._timeout: float | None = None

    def __repr__(self) -> str:
        return f"<blocking {self.asynchronous!r}>"

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close()

    def within(self, seconds: float | None) -> Self:
        """Return a view of this object that limits the duration of each call.

        A call that takes longer than `seconds` raises TimeoutError. None means no limit.
        """
        bounded = copy.copy(self)
        bounded._timeout = (
            None if seconds is None else arguments.seconds("within()", seconds, allow_infinity=True)
        )
        return bounded

    @overload
    def _call(self, function: Callable[[], Coroutine[Any, Any, T]], undo: _Undo[T] = None) -> T: ...
    @overload
    def _call(self, function: Callable[[], T], undo: _Undo[T] = None) -> T: ...
    def _call(self, function: Callable[[], Any], undo: _Undo[Any] = None) -> Any:
        check_thread()
        if not self._thread.usable:
            raise WrongLoopError(
                f"{self!r} was created before a fork or before blocking.stop(); create a new one"
            )
        return self._thread.call(function, self._timeout, undo)


def _copy_signature(
    function: Callable[..., Any], derived: Callable[..., Any], owner: str, **annotations: object
) -> Any:
    """Give `derived` the name and signature of an asynchronous function.

    `owner` is a class name followed by a dot, or empty. `annotations` replace those of `function`
    for the parameters and return value that they name.
    """
    wraps(function)(derived)
    # Overwrite the annotations even if `function` is compiled and has none. In that case, `wraps`
    # keeps the annotations of `derived`, which do not describe the parameters of `function`.
    derived.__annotations__ = {**getattr(function, "__annotations__", {}), **annotations}
    derived.__module__ = __name__
    derived.__doc__ = (
        f"Call `aiordma.{owner}{function.__name__}` in the background thread and return its result."
    )
    return derived


@overload
def _method(
    function: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], undo: _Undo[T] = None
) -> Callable[Concatenate[Any, P], T]: ...
@overload
def _method(
    function: Callable[Concatenate[Any, P], T], undo: _Undo[T] = None
) -> Callable[Concatenate[Any, P], T]: ...
def _method(function: Callable[..., Any], undo: _Undo[Any] = None) -> Any:
    def method(self: _Handle[Any], *arguments: Any, **options: Any) -> Any:
        return self._call(partial(function, self.asynchronous, *arguments, **options), undo)

    return _copy_signature(function, method, "Connection.")


def _closing_method(
    function: Callable[Concatenate[Any, P], Any], owner: str = "Connection."
) -> Callable[Concatenate[Any, P], None]:
    """Create a method that closes the object, or does nothing if the thread has ended."""

    def method(self: _Handle[Any], *arguments: P.args, **options: P.kwargs) -> None:
        close = partial(function, self.asynchronous, *arguments, **options)
        _close_in_thread(self._thread, close, self._timeout)

    result: Callable[Concatenate[Any, P], None] = _copy_signature(function, method, owner)
    return result


def _property(name: str) -> Any:
    def get(self: _Handle[Any]) -> Any:
        return self._call(lambda: getattr(self.asynchronous, name))

    return property(get, doc=f"The value of `aiordma.Connection.{name}`.")


def _blocking_factory(
    function: Callable[P, Coroutine[Any, Any, A]],
    handle: Callable[[_LoopThread, A], H],
    drop: Callable[[A], object],
) -> Callable[P, H]:
    """Create the blocking version of a function that returns a connection, listener or stream.

    If an interrupt occurs before the caller gets the object, `drop` closes the object.
    """

    def blocking(*arguments: P.args, **options: P.kwargs) -> H:
        thread = _running_thread()
        loop = _get_running_loop()

        async def make() -> H:
            # The call blocks the caller's own event loop, if there is one. A server in that loop
            # could not respond, so connecting to it would never end.
            if function is not transport.listen and loop is not None:
                await check_server(loop, *arguments, **options)
            return handle(thread, await function(*arguments, **options))

        made: H = thread.call(make, None, lambda made: drop(made.asynchronous))
        return made

    result: Callable[P, H] = _copy_signature(function, blocking, "", **{"return": handle})
    return result


async def check_server(
    loop: object, host: Any = "", port: Any = None, *_: object, **__: object
) -> None:
    """Raise WrongLoopError if the server runs in the event loop that the caller would block.

    Accepts the arguments of `connect` and `open_stream`, and ignores all but the host and the port.
    """
    check_host(host)
    for thing in shutdown.all_open():
        if (
            isinstance(thing, transport.Listener)
            and (thing._affinity.loop, thing.port) == (loop, port)
            and any(is_local_address(found[0]) for found in await transport.resolve(host, port))
        ):
            raise WrongLoopError(f"{thing!r} belongs to this thread's event loop. {OWN_LOOP_HINT}")


# ---- the interface ------------------------------------------------------------------------------


class Region(mr_pool.Region):
    """The caller's memory, registered for use in any thread.

    You can pass a region, or a slice of one, to `send_region`, `send`, `recv_into`, `read` and
    `write`. The memory stays registered until you call `close` or the `with` block ends.
    """

    __slots__ = ("_loop_thread",)

    def __init__(self, thread: _LoopThread, region: mr_pool.Region) -> None:
        super().__init__(region._mr)
        self.pinned: Registration = region.pinned  # take over the registration
        region.gone = True
        self._loop_thread = thread

    def _release_memory(self) -> None:
        _close_in_thread(self._loop_thread, super()._release_memory)


class Connection(_Handle[transport.Connection]):
    """A blocking version of `aiordma.Connection`, for use in any thread.

    `recv` returns a message as a bytes object. `recv_into` and `recv_with` receive a message into
    memory provided by the caller.

    An interrupt (Ctrl-C) does not lose a message. If `recv`, `recv_into` or `recv_with` is
    interrupted while returning a message, the next call to any of these methods returns the
    message. `recv_region` and `recv_buffer` also keep an interrupted result for their next call.
    """

    send: Final = _method(transport.Connection.send)
    read: Final = _method(transport.Connection.read)
    write: Final = _method(transport.Connection.write)
    compare_and_swap: Final = _method(transport.Connection.compare_and_swap)
    fetch_and_add: Final = _method(transport.Connection.fetch_and_add)
    send_region: Final = _method(transport.Connection.send_region, Share.revoke)
    request_region: Final = _method(transport.Connection.request_region, RemoteRegion._drop)
    hand_over: Final = _method(transport.Connection.hand_over)
    share: Final = _method(transport.Connection.share, Share.revoke)
    open_region: Final = _method(transport.Connection.open_region)
    statistics: Final = _method(transport.Connection.statistics)
    close: Final = _closing_method(transport.Connection.close)
    abort: Final = _closing_method(transport.Connection.abort)
    wait_closed: Final = _closing_method(transport.Connection.wait_closed)

    device: Final[str] = _property("device")
    wire: Final[str | None] = _property("wire")
    rails: Final[tuple[transport.RailStatus, ...]] = _property("rails")
    local_address: Final[Address | None] = _property("local_address")
    peer_address: Final[Address | None] = _property("peer_address")

    def __init__(self, thread: _LoopThread, asynchronous: transport.Connection) -> None:
        super().__init__(thread, asynchronous)
        # Results that interrupted calls could not return. They are returned before any new results.
        self._messages: deque[_Message] = deque()
        self._regions: deque[RemoteRegion] = deque()
        self._buffers: deque[bytes] = deque()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        leave = partial(self.asynchronous.__aexit__, error and type(error), error, None)
        _close_in_thread(self._thread, leave, self._timeout)

    def _receive(self, undelivered: deque[T], receive: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async def receive_or_take() -> T:
            return undelivered.popleft() if undelivered else await receive()

        return self._call(receive_or_take, undelivered.appendleft)

    def recv(self) -> bytes:
        """Receive a message and return a copy of it. To receive without a copy, use `recv_into`."""
        return self._receive(self._messages, partial(_receive_copy, self.asynchronous))[0]

    def recv_into(self, memory: LocalMemory | AnyMemory) -> Received:
        """Call `aiordma.Connection.recv_into` in the background thread and return its result."""

        async def receive() -> Received:
            if self._messages:
                return Received(*self._fill(memory))
            return await self.asynchronous.recv_into(memory)

        return self._call(receive, lambda received: self._keep_undelivered(memory, received))

    def recv_with(self, allocate: Callable[[int], Any]) -> ReceivedMemory:
        """Call `aiordma.Connection.recv_with` in the background thread and return its result.

        `allocate` is called in the background thread, too.
        """

        async def receive() -> ReceivedMemory:
            if self._messages:
                memory = allocate(len(self._messages[0][0]))
                return ReceivedMemory(memory, *self._fill(memory))
            return await self.asynchronous.recv_with(allocate)

        return self._call(
            receive, lambda received: self._keep_undelivered(received.memory, received)
        )

    def _fill(self, memory: LocalMemory | AnyMemory) -> tuple[int, int | None]:
        """Move the first message from `_messages` to `memory`.

        Raises:
            MessageTooLongError: If the message does not fit. It then stays in `_messages`.
        """
        data, imm = self._messages[0]
        view = _view(memory)
        if len(data) > len(view):
            raise MessageTooLongError(len(data), len(view), received=True)
        view[: len(data)] = data
        self._messages.popleft()
        return len(data), imm

    def _keep_undelivered(
        self, memory: LocalMemory | AnyMemory, received: Received | ReceivedMemory
    ) -> None:
        """Keep the message of an interrupted call for the next call that receives."""
        self._messages.appendleft((bytes(_view(memory)[: received.length]), received.imm))

    def recv_region(self) -> RemoteRegion:
        """Call `aiordma.Connection.recv_region` in the background thread and return its result."""
        return self._receive(self._regions, self.asynchronous.recv_region)

    def recv_buffer(self) -> bytes:
        """Wait for the peer to hand over memory, and return a copy of it as bytes.

        See `aiordma.Connection.recv_buffer`.
        """
        return self._receive(self._buffers, partial(_receive_buffer_copy, self.asynchronous))

    def register(self, memory: AnyMemory) -> Region:
        """Register memory and return its `Region`. Closing the region deregisters the memory."""

        def register() -> Region:
            return Region(self._thread, self.asynchronous.register(memory))

        return self._call(register, mr_pool.Region._release_memory)

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over received messages until the peer closes the connection."""
        try:
            while True:
                yield self.recv()
        except ConnectionClosedError:
            # If the thread was stopped, the peer may have sent more messages.
            if not self._thread.usable:
                raise

    @property
    def closed(self) -> bool:
        """Whether the connection is closed. Always True after `stop` and in a forked child."""
        return not self._thread.usable or self._call(lambda: self.asynchronous.closed)


_Message = tuple[bytes, int | None]
"""A message and its immediate data."""


def _view(memory: LocalMemory | AnyMemory) -> memoryview:
    return memory.view if isinstance(memory, LocalMemory) else bytes_of(memory, target=True)


async def _receive_copy(connection: transport.Connection) -> _Message:
    with await connection.recv() as message:
        return bytes(message), message.imm


async def _receive_buffer_copy(connection: transport.Connection) -> bytes:
    with await connection.recv_buffer() as buffer:
        return bytes(buffer.view)


class Listener(_Handle[transport.Listener]):
    """A blocking version of `aiordma.Listener`, for use in any thread."""

    close: Final = _closing_method(transport.Listener.close, "Listener.")

    def accept(self) -> Connection:
        """Wait for the next connection and return it. Ctrl-C does not discard a connection."""

        async def accept() -> Connection:
            return Connection(self._thread, await self.asynchronous.accept())

        def put_back(connection: Connection) -> None:
            self.asynchronous._deliver(connection.asynchronous)

        return self._call(accept, put_back)

    @property
    def address(self) -> Address:
        """The listener's address; see `aiordma.Listener.address`."""
        return self.asynchronous.address

    @property
    def port(self) -> int:
        """The listener's port; see `aiordma.Listener.port`."""
        return self.asynchronous.port


class Stream(_Handle[tuple[asyncio.StreamReader, asyncio.StreamWriter]]):
    """A blocking byte stream for use in any thread.

    The methods correspond to those of asyncio's StreamReader and StreamWriter. If a timeout or
    Ctrl-C interrupts a read, the next read returns the bytes received so far. Only one thread may
    read at a time. A second reader gets a BusyError.
    """

    @finalizer
    def __del__(self) -> None:
        """Drop the writer in the background thread, because its destructor may close the stream."""
        # The loop may run the callback before this method returns, so `held` must have the only
        # reference.
        held = [self.asynchronous]
        del self.asynchronous
        with suppress(RuntimeError):  # the loop has ended, or belongs to the parent process
            if self._thread.usable:
                self._thread.loop.call_soon_threadsafe(held.clear)

    def _read(self, read: Callable[[asyncio.StreamReader], Coroutine[Any, Any, bytes]]) -> bytes:
        """Run `read` in the background thread. An interrupt puts its data back into the buffer."""
        reader = self.asynchronous[0]
        read_in_thread = partial(_read, reader, read)
        data, error = self._call(read_in_thread, lambda outcome: unread(reader, outcome[0]))
        if error is not None:
            raise error
        return data

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes, or until the end of the stream by default.

        Works like `asyncio.StreamReader.read`.
        """
        size = arguments.integer("size", size, None, None)
        return self._read(_read_to_end if size < 0 else lambda reader: reader.read(size))

    def readexactly(self, size: int) -> bytes:
        """Read exactly `size` bytes. Works like `asyncio.StreamReader.readexactly`."""
        size = arguments.integer("size", size)
        return self._read(lambda reader: reader.readexactly(size))

    def readline(self) -> bytes:
        """Read up to and including the next newline. Works like `asyncio.StreamReader.readline`."""
        return self._read(asyncio.StreamReader.readline)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data`, waiting if the peer reads too slowly."""
        self._call(partial(_write_and_drain, self.asynchronous[1], data))

    def write_eof(self) -> None:
        """Close the writing side of the stream. Works like `asyncio.StreamWriter.write_eof`."""
        self._call(self.asynchronous[1].write_eof)

    def close(self) -> None:
        """Send all data written so far, then close the stream."""
        _close_in_thread(
            self._thread, partial(_close_and_wait, self.asynchronous[1]), self._timeout
        )


def unread(reader: asyncio.StreamReader, data: bytes) -> None:
    """Put bytes back at the front of a StreamReader's buffer. asyncio has no method for this."""
    vars(reader)["_buffer"][:0] = data


async def _read(
    reader: asyncio.StreamReader, read: Callable[[asyncio.StreamReader], Coroutine[Any, Any, bytes]]
) -> tuple[bytes, Exception | None]:
    """Return the data read, and the IncompleteReadError if the stream ended early.

    The caller raises the error. If the call is interrupted, partial data can be put back.
    """
    try:
        return await read(reader), None
    except asyncio.IncompleteReadError as error:
        return error.partial, error
    except RuntimeError as error:  # the original message refers to coroutines
        raise BusyError("another thread is reading this stream") from error


async def _read_to_end(reader: asyncio.StreamReader) -> bytes:
    """Read to the end like `reader.read()`, but put the bytes back if an error occurs."""
    parts = []
    try:
        while part := await reader.read(1 << 16):
            parts.append(part)
    except BaseException:
        unread(reader, b"".join(parts))
        raise
    return b"".join(parts)


async def _write_and_drain(
    writer: asyncio.StreamWriter, data: bytes | bytearray | memoryview
) -> None:
    writer.write(data)
    await writer.drain()


async def _close_and_wait(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


connect: Final = _blocking_factory(transport.connect, Connection, transport.Connection.close)
listen: Final = _blocking_factory(transport.listen, Listener, transport.Listener.close)
open_stream: Final = _blocking_factory(
    streams.open_connection, Stream, lambda it: it[1].transport.abort()
)
