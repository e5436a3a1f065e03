"""aiordma without await: for notebooks, torch, Ray, and threads without an event loop::

    with blocking.connect("127.0.0.1", port) as conn:
        conn.send(b"hello")
        answer = conn.within(5).recv()

An event loop in a background thread does the work, so each call here is a call of the asynchronous
interface there, and has its arguments, results and errors. Any thread may use any object, several
threads the same one; so may a signal handler, and a destructor, which may run anywhere. `within`
bounds the time of a call.

No thread holds a lock here: a destructor or a signal handler can begin between any two steps, also
in a thread that holds one, and would wait for it for ever. What threads share is changed by single
steps of the interpreter (`deque.append`, `dict.setdefault`), and a thread that waits for its call
waits for a lock that only the background thread releases.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import inspect
import logging
import socket
import threading
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial, wraps
from queue import SimpleQueue
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar, overload

from . import mr_pool, streams, transport
from ._core import arguments
from ._loop import shutdown
from ._native import fork
from ._native.service_thread import ServiceThread, in_service_thread
from .errors import (
    BusyError,
    ConnectionClosedError,
    MessageTooLongError,
    UnreachableError,
    WrongLoopError,
)
from .mr_pool import LocalMemory
from .transport import Address, Received, ReceivedMemory, RemoteRegion, Share
from .verbs._memory.buffers import AnyMemory, bytes_of

__all__ = [
    "Connection",
    "Listener",
    "Region",
    "Stream",
    "call",
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


# ---- the thread ---------------------------------------------------------------------------------


class _Call:
    """A call: what the background thread is to run, and what became of it."""

    def __init__(
        self,
        thread: _LoopThread,
        function: Callable[[], Any],
        seconds: float | None = None,
        undo: Callable[[Any], object] | None = None,
        *,
        awaited: bool = True,
    ) -> None:
        self._thread = thread
        self._function: Callable[[], Any] | None = function
        self._seconds = seconds
        self._undo = undo
        self._awaited = awaited
        self._task: asyncio.Task[None] | None = None
        self._over = self._interrupted = False
        self.result: Any = None
        self.error: BaseException | None = None
        # SimpleQueue's `put` and `get` hold no lock while Python code runs.
        self.done: SimpleQueue[None] = SimpleQueue()
        self.undone: SimpleQueue[None] = SimpleQueue()

    def begin(self) -> None:
        """In the background thread, or in any after its end."""
        if self._thread.over:
            self.end(None, self._thread.ended_error())
        else:
            self._thread.calls[self] = None
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        limit = asyncio.timeout(self._seconds)
        try:
            async with limit:
                function, self._function = self._function, None
                assert function is not None
                result = function()
                if inspect.isawaitable(result):
                    result = await result
        except BaseException as error:  # also a SystemExit, which is the caller's
            self.end(None, self._explained(error, limit))
        else:
            self.end(result, None)

    def _explained(self, error: BaseException, limit: asyncio.Timeout) -> BaseException:
        told: BaseException
        if isinstance(error, TimeoutError) and limit.expired():
            told = TimeoutError(f"the call did not end within {self._seconds:g} seconds")
        elif not isinstance(error, asyncio.CancelledError):
            return error
        elif self._thread.over:
            return self._thread.ended_error()
        else:  # the function has cancelled itself, or what it awaits
            told = CancelledError()
        told.__cause__ = error
        return told

    def end(self, result: Any, error: BaseException | None) -> None:
        """There is a result, or an error: its caller goes on."""
        if self._over:
            return
        self._over = True
        self._thread.calls.pop(self, None)
        self._function = None
        self.result, self.error = result, error
        if not self._awaited and error is not None:
            self.error = None
            logger.error("what was to end without waiting has failed", exc_info=error)
        self.done.put(None)
        if self._interrupted:
            self._give_back()

    def interrupt(self) -> None:
        """Its caller does not wait any more: the call is cancelled, or its result given back.

        In the background thread, after `begin`, or in any after its end.
        """
        self._interrupted = True
        if self._over:
            self._give_back()
            return
        if self._task is not None:
            self._task.cancel()
        if self._function is not None:  # a task that has not begun is cancelled without a step
            self.end(None, CancelledError())

    def _give_back(self) -> None:
        if self._undo is None or self.error is not None or self._thread.over:
            self.error = None
            self.undone.put(None)
        else:
            self._thread.calls[self] = None
            self._task = asyncio.get_running_loop().create_task(self._undone(self._undo))

    async def _undone(self, undo: Callable[[Any], object]) -> None:
        try:
            given_back = undo(self.result)
            if inspect.isawaitable(given_back):
                await given_back
        except Exception:
            logger.exception("the result of an interrupted call was lost")
        finally:
            self._thread.calls.pop(self, None)
            self.undone.put(None)


class _LoopThread:
    """A background thread with its event loop, which the first call begins."""

    def __init__(self) -> None:
        self.over: bool = False
        """Whether it takes no more calls."""
        self.calls: dict[_Call, None] = {}
        """The calls that have begun. For the thread itself."""
        self._forks = fork.generation()
        self._unbegun: list[None] = [None]  # a thread that takes it out becomes the one
        self._steps: deque[Callable[[], None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        self._ended = threading.Lock()  # until the end
        self._ended.acquire()
        self._thread: threading.Thread | None = None
        self._following: dict[str, _LoopThread] = {}

    @property
    def usable(self) -> bool:
        """Whether it takes calls of this process."""
        return not self.over and self._forks == fork.generation()

    def following(self) -> _LoopThread:
        """The one after this, the same for all that ask."""
        return self._following.setdefault("", _LoopThread())

    # ---- in the thread ----

    def _main(self) -> None:
        try:
            self._unbegun.pop()
        except IndexError:
            return  # another one was quicker
        self._thread = threading.current_thread()
        try:
            with asyncio.Runner() as runner:
                self._serve(runner.get_loop())
        except BaseException as error:
            if self._loop is not None:
                logger.exception("the thread of aiordma.blocking has failed")
            self._failure = error  # such as too many open files
        finally:
            self.over = True
            self._take_steps()
            for call in list(self.calls):
                call.end(None, self.ended_error())
            self._ended.release()

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        self._end = loop.create_future()
        self._loop = loop
        loop.call_soon(self._take_steps)
        while not self.over:
            try:
                loop.run_until_complete(self._end)
            except (SystemExit, KeyboardInterrupt):  # it has ended the task and left the loop
                logger.exception("a task in the event loop of aiordma.blocking has exited")

    def _take_steps(self) -> None:
        while True:
            try:
                step = self._steps.popleft()
            except IndexError:
                return
            step()

    # ---- in any thread ----

    def ended_error(self) -> BaseException:
        """Why a call was not done, or not to its end."""
        return self._failure or ConnectionClosedError("blocking.stop() has ended the call")

    def submit(self, step: Callable[[], None]) -> None:
        """Has it run in the thread; here if that has ended."""
        self._steps.append(step)
        self._wake()

    def _wake(self) -> None:
        if self.over:
            self._take_steps()
        elif self._loop is not None:
            with suppress(RuntimeError):  # closed just now: `_main` takes it
                self._loop.call_soon_threadsafe(self._take_steps)
        # else it will look, as soon as it has begun

    def begin(self) -> None:
        """Each thread that finds it not begun begins one, since it cannot wait for another thread,
        which may be below it on the stack. All but one end at once.
        """
        if self._unbegun:
            ServiceThread(self._main, "aiordma.blocking").start()

    def call(
        self,
        function: Callable[[], Any],
        seconds: float | None = None,
        undo: Callable[[Any], object] | None = None,
    ) -> Any:
        """The result of the function. `undo` gets it when an interrupt has kept it from the caller.

        Nothing may stand between the last step here and the program: an interrupt there would lose
        the result. Python has none between returns (it looks for signals in calls and loops).
        """
        call = _Call(self, function, seconds, undo)
        try:
            self.submit(call.begin)
            call.done.get()
            if call.error is None:
                return call.result
        except BaseException:
            self._steps.append(call.interrupt)  # the first thing: another interrupt may come
            self._wake()
            call.undone.get()
            raise
        error, call.error = call.error, None
        if isinstance(error, LATE) and _get_running_loop() is not None:
            error.add_note(OWN_LOOP)
        try:
            raise error
        finally:
            del error  # it refers to this frame

    def stop(self) -> None:
        """Ends it, and waits for that; nothing if it has not begun, or is the parent's."""
        if self._unbegun or self._forks != fork.generation():
            return
        self.over = True
        if self._loop is not None and self._end is not None:
            with suppress(RuntimeError):  # closed: it has ended by itself
                self._loop.call_soon_threadsafe(set_done, self._end)
        with self._ended:
            pass
        assert self._thread is not None
        self._thread.join()

    def then(self) -> _LoopThread | None:
        """The one after this, if anything has asked for it."""
        return self._following.get("")


def set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


_latest = _LoopThread()  # or one before it, which leads to it


def check_thread() -> None:
    """WrongLoopError in a thread that must not wait for the event loop."""
    if in_service_thread():
        raise WrongLoopError(
            f"aiordma.blocking was called in thread {threading.current_thread().name!r}: it waits "
            "for its own event loop, which may wait for this thread; only `close` and `abort` are "
            "for it, and do not wait there"
        )


def _started() -> _LoopThread:
    global _latest  # noqa: PLW0603 - one for the process
    check_thread()
    thread = _latest
    while not thread.usable:
        thread = thread.following()
    _latest = thread
    thread.begin()
    return thread


@atexit.register
def stop() -> None:
    """End the background thread; what is still open is closed, with a ResourceWarning.

    The next use begins another one. The end of the program does the same, after the end of the
    threads that are not daemons.
    """
    check_thread()
    thread: _LoopThread | None = _latest
    while thread is not None:
        thread.stop()
        thread = thread.then()


def _end(thread: _LoopThread, function: Callable[[], Any], seconds: float | None = None) -> None:
    """Closes what belongs to the thread: done already if that has ended, or is the parent's.

    In a thread that must not wait, where a destructor may run, this only begins it.
    """
    if not thread.usable:
        return
    if in_service_thread():
        thread.submit(_Call(thread, function, awaited=False).begin)
        return
    try:
        thread.call(function, seconds)
    except ConnectionClosedError:
        if thread.usable:
            raise


LATE = (TimeoutError, UnreachableError)
OWN_LOOP = (
    "An event loop runs in this thread, and could do nothing during the call. If the peer is a "
    "task of it, each waited for the other: await aiordma.connect() there, or call from another "
    "thread (asyncio.to_thread)."
)


@overload
def call(
    function: Callable[P, Coroutine[Any, Any, T]], *arguments: P.args, **options: P.kwargs
) -> T: ...
@overload
def call(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T: ...
def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function, asynchronous or not, in the background thread, and return its result.

    For what has no method here: `call(remote.renew, 60)`, or a coroutine function of your own that
    uses `Connection.asynchronous`. An interrupt (Ctrl-C) cancels the call, and waits until that has
    been done; what it has returned already is lost.
    """
    return _started().call(partial(function, *arguments, **options), None)


# ---- derived from the asynchronous interface ----------------------------------------------------


class _Handle(Generic[A]):
    """An asynchronous object, and the time that a call of it may take."""

    def __init__(self, thread: _LoopThread, asynchronous: A) -> None:
        self.asynchronous = asynchronous
        """The asynchronous object, for `call`; it belongs to the background thread."""
        self._thread = thread
        self._timeout: float | None = None

    def __repr__(self) -> str:
        return f"<blocking {self.asynchronous!r}>"

    def close(self) -> None:
        raise NotImplementedError

    def _drop(self) -> object:
        """Ends the object, which an interrupt has kept from the program. In the thread."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """Closes it at the end of its `with`, which `error` has ended."""
        self.close()

    def within(self, seconds: float | None) -> Self:
        """The same object, whose calls raise TimeoutError when they take longer; None: no limit."""
        bounded = copy.copy(self)
        bounded._timeout = (
            None if seconds is None else arguments.seconds("within()", seconds, endless=True)
        )
        return bounded

    @overload
    def _call(
        self,
        function: Callable[[], Coroutine[Any, Any, T]],
        undo: Callable[[T], object] | None = None,
    ) -> T: ...
    @overload
    def _call(self, function: Callable[[], T], undo: Callable[[T], object] | None = None) -> T: ...
    def _call(
        self, function: Callable[[], Any], undo: Callable[[Any], object] | None = None
    ) -> Any:
        check_thread()
        if not self._thread.usable:
            raise WrongLoopError(f"{self!r} was made before a fork or before blocking.stop()")
        return self._thread.call(function, self._timeout, undo)


def _derived(function: Callable[..., Any], derived: Callable[..., Any]) -> Any:
    """`derived` with name and signature of the asynchronous function that it is derived from."""
    wraps(function)(derived)
    derived.__module__ = __name__
    derived.__doc__ = f"As `{function.__qualname__}`, in the background thread."
    return derived


@overload
def _method(
    function: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
    undo: Callable[[T], object] | None = None,
) -> Callable[Concatenate[Any, P], T]: ...
@overload
def _method(
    function: Callable[Concatenate[Any, P], T], undo: Callable[[T], object] | None = None
) -> Callable[Concatenate[Any, P], T]: ...
def _method(function: Callable[..., Any], undo: Callable[[Any], object] | None = None) -> Any:
    def method(self: _Handle[Any], *arguments: Any, **options: Any) -> Any:
        return self._call(partial(function, self.asynchronous, *arguments, **options), undo)

    return _derived(function, method)


def _ending(function: Callable[[Any], Any]) -> Callable[[Any], None]:
    """A method that closes; once the thread has ended it has nothing to do."""

    def method(self: _Handle[Any]) -> None:
        _end(self._thread, partial(function, self.asynchronous), self._timeout)

    result: Callable[[Any], None] = _derived(function, method)
    return result


def _maker(
    function: Callable[P, Coroutine[Any, Any, A]], handle: Callable[[_LoopThread, A], H]
) -> Callable[P, H]:
    """A function whose result is an object of this module."""

    def maker(*arguments: P.args, **options: P.kwargs) -> H:
        thread = _started()
        if function is not transport.listen and _get_running_loop() is not None:
            check_server(*arguments, **options)

        async def make() -> H:
            return handle(thread, await function(*arguments, **options))

        made: H = thread.call(make, None, handle_drop)
        return made

    result: Callable[P, H] = _derived(function, maker)
    return result


def handle_drop(handle: _Handle[Any]) -> object:
    return handle._drop()


def check_server(host: object = None, port: object = None, *_: object, **__: object) -> None:
    """WrongLoopError for a server of the event loop that the caller keeps from running."""
    loop = _get_running_loop()
    for thing in shutdown.all_open():
        if isinstance(thing, transport.Listener) and thing._affinity.loop is loop:
            at = next((address for address in thing.addresses if address[1] == port), None)
            if at is not None and is_local(host):
                raise WrongLoopError(
                    f"{thing!r} belongs to the event loop of this thread, which cannot answer "
                    "while aiordma.blocking waits here: await aiordma.connect(), or make the call "
                    "in another thread (asyncio.to_thread)"
                )


def is_local(host: object) -> bool:
    """True if `host` names an address of this machine."""
    with suppress(OSError, UnicodeError):
        for family, kind, _, _, address in socket.getaddrinfo(
            str(host), None, type=socket.SOCK_DGRAM
        ):
            with socket.socket(family, kind) as trying, suppress(OSError):
                trying.bind(address)
                return True
    return False


# ---- the interface ------------------------------------------------------------------------------


class Region(mr_pool.Region):
    """Memory of the caller's, registered until `close` or the end of its `with`, in any thread.

    It is an argument of `send_region`, `send`, `recv_into`, `read` and `write`, as are its slices.
    """

    __slots__ = ("_loop_thread",)

    def __init__(self, thread: _LoopThread, region: mr_pool.Region) -> None:
        super().__init__(region._mr)
        self._loop_thread = thread

    def close(self) -> None:
        """Deregisters; a second call does nothing."""
        _end(self._loop_thread, super().close)

    def __exit__(self, *_: object) -> None:
        self.close()


class Connection(_Handle[transport.Connection]):
    """A connection to be used from any thread: `aiordma.Connection` without await.

    A message is received as bytes, or by `recv_into` and `recv_with` into memory of the caller's.
    What an interrupt (Ctrl-C) keeps from the caller of `recv`, `recv_into`, `recv_with`,
    `recv_region` and `recv_buffer` is there for the next one.
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
    close: Final = _ending(transport.Connection.close)
    abort: Final = _ending(transport.Connection.abort)
    wait_closed: Final = _ending(transport.Connection.wait_closed)

    def __init__(self, thread: _LoopThread, asynchronous: transport.Connection) -> None:
        super().__init__(thread, asynchronous)
        # What interrupts have kept from the program, which goes before what arrives.
        self._messages: deque[_Message] = deque()
        self._regions: deque[RemoteRegion] = deque()
        self._buffers: deque[bytes] = deque()

    def _drop(self) -> object:
        return self.asynchronous.close()

    def _leave(self, error: BaseException | None) -> None:
        kind = None if error is None else type(error)
        leave = partial(self.asynchronous.__aexit__, kind, error, None)
        _end(self._thread, leave, self._timeout)

    def recv(self) -> bytes:
        """The next message. It is copied: `recv_into` receives into memory of the caller's."""
        return self._call(self._next_message, self._messages.appendleft)[0]

    async def _next_message(self) -> _Message:
        if self._messages:
            return self._messages.popleft()
        with await self.asynchronous.recv() as message:
            return bytes(message), message.imm

    def recv_into(self, memory: LocalMemory | AnyMemory) -> Received:
        """As `aiordma.Connection.recv_into`, in the background thread."""

        async def receive() -> Received:
            if self._messages:
                return Received(*self._fill(memory))
            return await self.asynchronous.recv_into(memory)

        return self._call(receive, lambda received: self._keep(memory, received))

    def recv_with(self, allocate: Callable[[int], Any]) -> ReceivedMemory:
        """As `aiordma.Connection.recv_with`, in the background thread, which calls `allocate`."""

        async def receive() -> ReceivedMemory:
            if self._messages:
                memory = allocate(len(self._messages[0][0]))
                return ReceivedMemory(memory, *self._fill(memory))
            return await self.asynchronous.recv_with(allocate)

        return self._call(receive, lambda received: self._keep(received.memory, received))

    def _fill(self, memory: LocalMemory | AnyMemory) -> tuple[int, int | None]:
        """Puts the message that was kept into the memory; it stays if it does not fit."""
        data, imm = self._messages[0]
        view = _view(memory)
        if view.readonly:
            raise ValueError(f"cannot receive into {type(memory).__name__}: it is read-only")
        if len(data) > len(view):
            raise MessageTooLongError(len(data), len(view), received=True)
        view[: len(data)] = data
        self._messages.popleft()
        return len(data), imm

    def _keep(self, memory: LocalMemory | AnyMemory, received: Received | ReceivedMemory) -> None:
        self._messages.appendleft((bytes(_view(memory)[: received.length]), received.imm))

    def recv_region(self) -> RemoteRegion:
        """As `aiordma.Connection.recv_region`, in the background thread."""
        return self._call(
            partial(_kept_or, self._regions, self.asynchronous.recv_region),
            self._regions.appendleft,
        )

    def recv_buffer(self) -> bytes:
        """Memory that the peer has handed over, as `aiordma.Connection.recv_buffer`; copied."""
        return self._call(
            partial(_kept_or, self._buffers, partial(_handed_over, self.asynchronous)),
            self._buffers.appendleft,
        )

    def register(self, memory: AnyMemory) -> Region:
        """Registers memory of the caller's, until `Region.close` or the end of its `with`."""
        return self._call(
            lambda: Region(self._thread, self.asynchronous.register(memory)), mr_pool.Region.close
        )

    def __iter__(self) -> Iterator[bytes]:
        """Messages, until the peer closes the connection."""
        while True:  # with a condition here, Python would look for signals between it and `yield`
            message = self._call(self._message_or_none, self._keep_message)
            if message is None:
                return
            yield message[0]

    async def _message_or_none(self) -> _Message | None:
        try:
            return await self._next_message()
        except ConnectionClosedError:
            return None

    def _keep_message(self, message: _Message | None) -> None:
        if message is not None:
            self._messages.appendleft(message)

    @property
    def device(self) -> str:
        """As `aiordma.Connection.device`."""
        return self._call(lambda: self.asynchronous.device)

    @property
    def wire(self) -> str | None:
        """As `aiordma.Connection.wire`."""
        return self._call(lambda: self.asynchronous.wire)

    @property
    def rails(self) -> tuple[transport.RailStatus, ...]:
        """As `aiordma.Connection.rails`."""
        return self._call(lambda: self.asynchronous.rails)

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
        """As `aiordma.Connection.closed`; true also after `stop`, and in the child of a fork."""
        return not self._thread.usable or self._call(lambda: self.asynchronous.closed)


_Message = tuple[bytes, int | None]
"""A message and its immediate data."""


def _view(memory: LocalMemory | AnyMemory) -> memoryview:
    return memory.view if isinstance(memory, LocalMemory) else bytes_of(memory)


async def _kept_or(kept: deque[T], receive: Callable[[], Awaitable[T]]) -> T:
    return kept.popleft() if kept else await receive()


async def _handed_over(connection: transport.Connection) -> bytes:
    with await connection.recv_buffer() as buffer:
        return bytes(buffer.view)


class Listener(_Handle[transport.Listener]):
    """A listener to be used from any thread: `aiordma.Listener` without await."""

    close: Final = _ending(transport.Listener.close)

    def _drop(self) -> object:
        return self.asynchronous.close()

    def accept(self) -> Connection:
        """The next connection, as `aiordma.Listener.accept`; an interrupt loses none."""
        return self._call(self._accepted, self._take_back)

    async def _accepted(self) -> Connection:
        return Connection(self._thread, await self.asynchronous.accept())

    def _take_back(self, connection: Connection) -> None:
        self.asynchronous._deliver(connection.asynchronous)

    @property
    def address(self) -> Address:
        """As `aiordma.Listener.address`."""
        return self.asynchronous.address

    @property
    def port(self) -> int:
        """As `aiordma.Listener.port`."""
        return self.asynchronous.port


class Stream(_Handle[tuple[asyncio.StreamReader, asyncio.StreamWriter]]):
    """A byte stream to be used from any thread: asyncio's reader and writer without await.

    Bytes that a time limit or an interrupt (Ctrl-C) keeps from a reader are there for the next one.
    One thread reads at a time: BusyError.
    """

    def __del__(self) -> None:
        """Dropped, it ends in the thread of its loop, by the destructor of asyncio's writer."""
        if self._thread.usable:
            self._thread.submit(partial(_forget, self.asynchronous))

    def _drop(self) -> None:
        self.asynchronous[1].transport.abort()

    def _read(self, read: Callable[[asyncio.StreamReader], Coroutine[Any, Any, bytes]]) -> bytes:
        data, error = self._call(partial(_read, self.asynchronous[0], read), self._unread)
        if error is not None:
            raise error
        return data

    def _unread(self, outcome: tuple[bytes, Exception | None]) -> None:
        unread(self.asynchronous[0], outcome[0])

    def read(self, size: int = -1) -> bytes:
        """As `asyncio.StreamReader.read`."""
        size = arguments.integer("size", size, None, None)
        return self._read(_to_the_end if size < 0 else lambda reader: reader.read(size))

    def readexactly(self, size: int) -> bytes:
        """As `asyncio.StreamReader.readexactly`."""
        size = arguments.integer("size", size)
        return self._read(lambda reader: reader.readexactly(size))

    def readline(self) -> bytes:
        """As `asyncio.StreamReader.readline`."""
        return self._read(asyncio.StreamReader.readline)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of the data; wait while the peer reads too slowly (`drain`)."""
        self._call(partial(_written, self.asynchronous[1], data))

    def write_eof(self) -> None:
        """As `asyncio.StreamWriter.write_eof`."""
        self._call(self.asynchronous[1].write_eof)

    def close(self) -> None:
        """Close the stream, after what was written."""
        _end(self._thread, partial(_closed, self.asynchronous[1]), self._timeout)


def _forget(*_: object) -> None:
    """The last of what refers to them."""


def unread(reader: asyncio.StreamReader, data: bytes) -> None:
    """Puts bytes back in front. A StreamReader has no method for that."""
    vars(reader)["_buffer"][:0] = data


async def _read(
    reader: asyncio.StreamReader, read: Callable[[asyncio.StreamReader], Coroutine[Any, Any, bytes]]
) -> tuple[bytes, Exception | None]:
    """The bytes, and the error with which they are to be returned: both can be put back."""
    try:
        return await read(reader), None
    except asyncio.IncompleteReadError as error:
        return error.partial, error
    except RuntimeError as error:  # whose text is of coroutines
        raise BusyError("another thread is reading this stream") from error


async def _to_the_end(reader: asyncio.StreamReader) -> bytes:
    """As `reader.read()`, which loses what it has when it is cancelled."""
    parts = []
    try:
        while part := await reader.read(1 << 16):
            parts.append(part)
    except BaseException:
        unread(reader, b"".join(parts))
        raise
    return b"".join(parts)


async def _written(writer: asyncio.StreamWriter, data: bytes | bytearray | memoryview) -> None:
    writer.write(data)
    await writer.drain()


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


connect: Final = _maker(transport.connect, Connection)
listen: Final = _maker(transport.listen, Listener)
open_stream: Final = _maker(streams.open_connection, Stream)
