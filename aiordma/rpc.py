"""Concurrent remote procedure calls over a connection, with timeouts and cancellation.

A server publishes coroutine functions, and a client calls them by name. Each function takes one
argument and returns one value. The argument and the value can be of any type that can be converted
to bytes. `dumps` converts an object to bytes before sending, and `loads` converts the received
bytes back. By default, `dumps` and `loads` use msgpack. If you use other functions, pass matching
functions to the client and the server.

`loads` is called with a memoryview of the received bytes. The memoryview stays valid for as long as
`loads` or the result refers to it. To send and receive buffers without copying, pass `memoryview`
as both `dumps` and `loads`. Do not use `pickle.loads` if you do not trust the peer.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from inspect import isawaitable
from itertools import count
from typing import Any, NamedTuple, Never, NoReturn, Self, Unpack

import msgpack  # type: ignore[import-untyped]

from . import transport
from ._core import arguments
from ._core.arguments import callback, instance, integer, refusal, seconds, signature_error
from ._core.async_only import AsyncContext
from ._core.refusal import printable
from ._datapath.packed import check_packed
from ._event_loop.shutdown import EXITS, background
from ._options import CONNECT, LISTEN, ConnectOptions, ListenOptions, complete, shows
from .errors import (
    ConnectionBrokenError,
    ConnectionClosedError,
    ProtocolError,
    RDMAError,
    cause_text,
)
from .mr_pool import LocalMemory
from .transport import Connection, Message, MessageClaim, Server, check_handler
from .verbs import bytes_of

Function = Callable[[Any], Awaitable[Any]]
Dumps = Callable[[Any], Any]
Loads = Callable[[memoryview], Any]

logger: logging.Logger = logging.getLogger("aiordma.rpc")

_CALL, _CANCEL, _RESULT, _ERROR = range(4)
# The header contains the message kind, the length of the name in bytes, and the call number. It is
# followed by the name of the function or exception type, and by the encoded value or error message.
_HEADER = struct.Struct("<BB6xQ")
_MAX_TEXT = 4096


class CallError(Exception):
    """A call failed on the server, usually because the called function raised an exception.

    `kind` is the name of the exception's type, and `text` is the exception's message. If the server
    rejected or cancelled the call, `kind` is one of these names:

    - "LookupError": The server has no function with this name.
    - "TooManyCalls": The server has reached its limit on concurrent calls.
    - "CancelledError": The call was cancelled, for example because the server is shutting down.

    CallError is also raised if `loads` fails on either side, usually because the two sides use
    different `dumps` and `loads`.
    """

    def __init__(self, function: str, kind: str, text: str) -> None:
        super().__init__(function, kind, text)
        self.function: str = function
        self.kind: str = kind
        self.text: str = text

    def __str__(self) -> str:
        return f"{self.function}: {self.kind}: {self.text}"


class _Frame(NamedTuple):
    kind: int
    number: int
    name: str
    data: memoryview


def _pack(kind: int, number: int, name: str = "") -> bytes:
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the function name must be valid Unicode, not {name!r}") from None
    if len(encoded) > 255:
        raise ValueError(
            f"function name {name[:30]!r}... is too long: {len(encoded)} bytes (maximum 255)"
        )
    return _HEADER.pack(kind, len(encoded), number) + encoded


def _pack_call(number: int, name: str) -> bytes:
    return _pack(_CALL, number, arguments.text("the function name", name))


def _unpack(message: memoryview, *kinds: int) -> _Frame:
    """Parse a message. Raise ProtocolError if it is invalid or its kind is not in `kinds`."""
    with suppress(struct.error, UnicodeDecodeError):
        kind, length, number = _HEADER.unpack_from(message)
        end = _HEADER.size + length
        if kind in kinds and end <= len(message):
            name = str(message[_HEADER.size : end], "utf-8")
            return _Frame(kind, number, name, message[end:])
    raise ProtocolError(
        f"the peer sent {len(message)} bytes that are not a valid aiordma.rpc message; use "
        "rpc.connect with rpc.start_server, and rpc.Client with rpc.serve"
    )


_ENCODING_HINT = "pass dumps= and loads= on both sides, or send arrays with aiordma.arrays"


def _packb(value: Any) -> bytes:
    try:
        packed: bytes = msgpack.packb(value, default=_raise_unsupported)
        check_packed(packed)
    except (ValueError, BufferError) as error:
        raise ValueError(f"msgpack cannot serialize the value: {error}; {_ENCODING_HINT}") from None
    return packed


def _raise_unsupported(value: object) -> NoReturn:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    what = f"an int of {value.bit_length()} bits" if isinstance(value, int) else kind
    raise TypeError(f"msgpack cannot serialize {what}; {_ENCODING_HINT}")


def _unpackb(data: memoryview) -> Any:
    try:
        check_packed(data)
        return msgpack.unpackb(data)
    except ValueError as error:
        raise ValueError(f"cannot decode {len(data)} bytes as msgpack: {error}") from None


def _error_text(error: BaseException) -> str:
    try:
        return str(error)
    except EXITS:
        raise
    except BaseException:
        return "the message is not available, because __str__ of the exception failed"


def _dump(dumps: Dumps, value: Any) -> Any:
    """Return `value` encoded by `dumps`, or raise TypeError if the result is not bytes-like."""
    data = dumps(value)
    if not isinstance(data, bytes | LocalMemory):
        try:
            bytes_of(data).release()
        except TypeError as error:
            raise TypeError(f"dumps must return a bytes-like object: {error}") from None
    return data


def _load(loads: Loads, data: memoryview, function: str, role: str, side: str) -> Any:
    """Return the value decoded from `data`.

    Args:
        loads: The function that decodes the value.
        data: The encoded value.
        function: The name of the called function, for the error.
        role: "argument" or "result", for the error.
        side: "server" or "client", for the error.

    Raises:
        CallError: If `loads` fails, probably because the peer uses a different `dumps`.
    """
    try:
        return loads(data)
    except Exception as error:
        text = (
            f"loads of the {side} cannot decode the {role}; use the same dumps= and loads= on "
            f"both sides: {_error_text(error)}"
        )
        raise CallError(function, type(error).__name__[:60], printable(text[:_MAX_TEXT])) from error


def _claim_messages(conn: Connection, owner: str) -> MessageClaim:
    instance(
        "conn",
        conn,
        Connection,
        "an aiordma.Connection, such as the result of connect() or accept()",
    )
    return conn.claim_messages(owner)


def _check_arguments(dumps: object, loads: object, max_calls: object) -> int:
    """Check the arguments of a client or server, and return `max_calls` as an int."""
    callback("dumps", dumps, "the value to encode, such as pickle.dumps")
    callback("loads", loads, "the bytes to decode, such as pickle.loads")
    return integer("max_calls", max_calls, 1)


def _check_functions(functions: Mapping[str, Function]) -> None:
    """Raise TypeError for an invalid mapping, or ValueError for a name that no client can call."""
    if not isinstance(functions, Mapping):
        wanted = "a mapping of names to coroutine functions, such as {'add': add}"
        raise TypeError(refusal("functions", wanted, functions))
    for name, function in functions.items():
        _pack_call(0, name)
        if not callable(function):
            raise TypeError(refusal(name, "a coroutine function of one argument", function))
        if why := signature_error(function, [None]):
            raise TypeError(f"function {name!r} must accept one argument: {why}")


_caller: ContextVar[Connection] = ContextVar("caller")


def caller() -> Connection:
    """Return the connection to the client whose call is being served.

    For example, a function serving a call can use this connection to share memory with the client.
    `caller` also works in tasks that the function creates.

    Raises:
        LookupError: If no call is being served in the current task.
    """
    try:
        return _caller.get()
    except LookupError:
        raise LookupError(
            "rpc.caller() was called outside an RPC call; use it in a function that serves a call, "
            "or in a task created by that function"
        ) from None


async def serve(
    conn: Connection,
    functions: Mapping[str, Function],
    *,
    dumps: Dumps = _packb,
    loads: Loads = _unpackb,
    max_calls: int = 256,
) -> None:
    """Serve calls on a connection until the connection ends.

    Each call runs in its own task. The task is cancelled in these cases:

    - The client cancels the call, or the call times out.
    - The connection ends.
    - The grace period of `Server.close` ends.

    If a function raises an exception, `serve` logs it, and the client's call raises CallError.
    While `max_calls` calls are in progress, further calls are rejected with CallError. A server
    created by `start_server` runs `serve` for each connection.

    Raises:
        ProtocolError: If the client sends a message that is not an RPC call.
    """
    _check_functions(functions)
    max_calls = _check_arguments(dumps, loads, max_calls)
    tasks: dict[int, asyncio.Task[None]] = {}
    # Tasks that are sending a response. Their calls no longer count towards `max_calls`.
    responding = set[asyncio.Task[None]]()
    is_ending = False
    loop = asyncio.get_running_loop()
    messages = _claim_messages(conn, "rpc.serve")

    async def serve_call(number: int, name: str, data: memoryview) -> None:
        _caller.set(conn)
        try:
            try:
                try:
                    argument = _load(loads, data, name, "argument", "server")
                except CallError as error:
                    logger.info("%s: the call of %s failed", conn, name, exc_info=True)
                    await send_error(number, error.kind, error.text)
                    return
                called = functions[name](argument)
                del argument, data  # both may keep the message's memory in use
                if not isawaitable(called):
                    wanted = "awaitable (define the function with async def)"
                    raise TypeError(refusal(f"the return value of {name}()", wanted, called))
                result = _dump(dumps, await called)
                responding.add(tasks[number])
                await messages.send([_pack(_RESULT, number), result])
            except (asyncio.CancelledError, *EXITS):
                raise
            except BaseException as error:
                # Garbage collection of the task closes this coroutine outside of the task, by
                # raising GeneratorExit. No response can be sent then.
                if asyncio.current_task(loop) is not tasks[number]:
                    raise
                if not conn.closed:
                    logger.info("%s: the call of %s failed", conn, name, exc_info=True)
                    await send_error(number, type(error).__name__[:60], _error_text(error))
        except asyncio.CancelledError:  # possibly while the response is being sent
            await send_error(number, "CancelledError", "the call was cancelled")
        finally:
            responding.discard(tasks.pop(number))

    async def send_error(number: int, kind: str, text: str) -> None:
        if number in tasks:  # a rejected call has no task
            responding.add(tasks[number])
        head = _pack(_ERROR, number, kind)
        max_length = max(0, min(_MAX_TEXT, conn.max_message - len(head)))
        parts = [head, text.encode("utf-8", "replace")[:max_length]]
        with suppress(RDMAError):  # if the connection has ended, `serve` will end too
            sent = asyncio.gather(messages.send_nowait(parts), return_exceptions=True)
            if not is_ending:  # a client that does not read must not delay shutdown
                await sent

    try:
        async for message in messages:
            kind, number, name, data = _unpack(message.data, _CALL, _CANCEL)
            if kind == _CANCEL:
                # Let the task start, because a task that is cancelled before it starts does not
                # send a response.
                await asyncio.sleep(0)
                if task := tasks.get(number):
                    task.cancel()
                else:  # the call has ended or was never sent
                    await send_error(number, "CancelledError", "the call was cancelled")
            elif number in tasks:
                raise ProtocolError(f"the peer used call number {number} for two calls")
            elif name not in functions:
                await send_error(number, "LookupError", "the server has no such function")
            elif len(tasks) - len(responding) >= max_calls:
                text = f"{max_calls} calls are in progress, the limit (max_calls) of the server"
                logger.info("%s: rejected a call of %s: %s", conn, name, text)
                await send_error(number, "TooManyCalls", text)
            else:
                # Wait for a task to end if necessary. A client may make its next call as soon as it
                # has received a response, while the task that sent the response is still ending.
                while len(tasks) >= max_calls:
                    await asyncio.wait(responding, return_when=asyncio.FIRST_COMPLETED)
                # Do not use `create_task`: it could run the task eagerly, before it is in `tasks`.
                tasks[number] = asyncio.Task(serve_call(number, name, data))
            del message, data
        if tasks and not conn.closed:  # the server is closing, possibly with a grace period
            await asyncio.wait(tasks.values())
    except ProtocolError as error:
        conn.abort(error)  # report the error to the client
        raise
    finally:
        is_ending = True
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        messages.close()


@shows(ListenOptions, LISTEN)
async def start_server(
    functions: Mapping[str, Function],
    host: str = "",
    port: int = 0,
    *,
    dumps: Dumps = _packb,
    loads: Loads = _unpackb,
    max_calls: int = 256,
    **options: Unpack[ListenOptions],
) -> Server:
    """Start a server whose clients can call `functions` by name.

    The server runs `serve` for each connection. The remaining arguments are passed to
    `aiordma.start_server`.

    Raises:
        TypeError: If a function is not a coroutine function that takes one argument.
    """
    _check_functions(functions)
    for name, function in functions.items():
        try:
            check_handler(function)
        except TypeError:
            text = (
                f"{name} must be a coroutine function of one argument (async def), not {function}"
            )
            raise TypeError(text) from None
    given = complete("rpc.start_server", options, LISTEN)
    calls = _check_arguments(dumps, loads, max_calls)
    handler = partial(serve, functions=dict(functions), dumps=dumps, loads=loads, max_calls=calls)
    return await transport.start_server(handler, host, port, **given)


class _Calls:
    """The unfinished calls of a client.

    The reader task refers to this object instead of the client or the connection. Both can
    therefore be garbage-collected while the task is running, which ends the task.
    """

    def __init__(self, max_calls: int) -> None:
        # A cancelled call stays in this dict until the server has responded to it.
        self.waiting: dict[int, asyncio.Future[_Frame | None]] = {}
        self.slots = asyncio.Semaphore(max_calls)
        self.error: RDMAError | None = None  # the error that ended the connection

    def release(self, number: int, frame: _Frame | None = None) -> None:
        """End a call and free its slot. `frame` is the response, or None if there will be none."""
        if answer := self.waiting.pop(number, None):  # ignore a second response
            self.slots.release()
            if not answer.done():
                answer.set_result(frame)

    async def read(self, messages: AsyncIterator[Message], conn: weakref.ref[Connection]) -> None:
        """Pass each response to the call that waits for it, until the connection ends."""
        try:
            async for message in messages:
                frame = _unpack(message.data, _RESULT, _ERROR)
                self.release(frame.number, frame)
                del message, frame  # both keep the message's memory in use
        except RDMAError as error:
            self.error = error.with_traceback(None)
            # No more results can be read. Report a violation of the protocol to the server.
            if connection := conn():
                connection.abort(error if isinstance(error, ProtocolError) else None)
        finally:
            for number in list(self.waiting):
                self.release(number)


class Client(AsyncContext):
    """A client that calls functions on the server at the other end of a connection.

    `connect` opens a connection and returns a client for it. You can also create a client for an
    existing connection, but only in the connection's event loop. The client reads all messages on
    the connection, so calling `Connection.recv` raises BusyError. If the connection already has a
    reader, creating the client raises BusyError.

    At most `max_calls` calls can be in progress on the server at a time. Further calls wait until
    another call has ended. Leaving the `async with` block closes the connection.
    """

    def __init__(
        self,
        conn: Connection,
        *,
        dumps: Dumps = _packb,
        loads: Loads = _unpackb,
        max_calls: int = 256,
    ) -> None:
        self._calls = _Calls(_check_arguments(dumps, loads, max_calls))
        self._messages = _claim_messages(conn, "an rpc.Client")
        self.connection: Connection = conn
        self._dumps, self._loads = dumps, loads
        self._numbers = count()
        reading = self._calls.read(self._messages, weakref.ref(conn))
        self._reader = background(asyncio.get_running_loop(), reading)

    async def call(
        self,
        name: str,
        data: Any = None,
        *more: Never,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> Any:
        """Call the server's function `name` with the argument `data`, and return its result.

        If the call times out or is cancelled, the server cancels the function. Do not modify the
        buffer returned by `dumps` until the result has arrived.

        Raises:
            TimeoutError: If the result does not arrive within `timeout` seconds.
            CallError: If the function raised an exception, or the server rejected the call.
            ConnectionClosedError: If the connection was closed before the result arrived. The
                function may have run.
            ConnectionBrokenError: If the connection broke before the result arrived. The function
                may have run.
        """
        number = next(self._numbers)
        head = _pack_call(number, name)
        if more:
            text = f"{name}() must be called with one argument, not {1 + len(more)}; pass a list"
            raise TypeError(text)
        limit = None if timeout is None else seconds("timeout", timeout, allow_infinity=True)
        request = [head, _dump(self._dumps, data)]
        calls = self._calls
        try:
            async with asyncio.timeout(limit) as deadline:
                await calls.slots.acquire()
                answer = calls.waiting[number] = asyncio.get_running_loop().create_future()
                try:
                    await self._messages.send(request)
                    # The reader has ended with the connection, and no longer releases calls.
                    if self._reader.done():
                        calls.release(number)
                    frame = await answer
                except asyncio.CancelledError:
                    if number in calls.waiting:  # the server's response frees this call's slot
                        with suppress(RDMAError):  # the connection has ended
                            cancellation = self._messages.send_nowait(_pack(_CANCEL, number))
                            asyncio.gather(cancellation, return_exceptions=True)  # ignore errors
                    raise
                except BaseException:  # nothing was sent
                    calls.release(number)
                    raise
        except TimeoutError:
            if deadline.expired():
                text = f"the call of {name} timed out after {limit:g} seconds"
                raise TimeoutError(text) from None
            raise
        if frame is None:
            error = ConnectionBrokenError if calls.error else ConnectionClosedError
            why = f": {cause_text(calls.error)}" if calls.error else ""
            raise error(
                f"the connection ended before the function {name} returned{why}"
            ) from calls.error
        if frame.kind == _RESULT:
            return _load(self._loads, frame.data, name, "result", "client")
        text = str(frame.data[:_MAX_TEXT], "utf-8", "replace")
        raise CallError(name, printable(frame.name), printable(text))

    async def close(self) -> None:
        """Close the connection. All calls in progress end with an error."""
        await self.connection.close()
        await asyncio.wait([self._reader])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


@shows(ConnectOptions, CONNECT)
async def connect(
    host: str,
    port: int,
    *,
    dumps: Dumps = _packb,
    loads: Loads = _unpackb,
    max_calls: int = 256,
    **options: Unpack[ConnectOptions],
) -> Client:
    """Connect to a server started with `start_server`, and return a client for it.

    The remaining arguments are passed to `aiordma.connect`. This function can raise any exception
    that `aiordma.connect` raises.
    """
    given = complete("rpc.connect", options, CONNECT)
    _check_arguments(dumps, loads, max_calls)  # check before connecting
    conn = await transport.connect(host, port, **given)
    return Client(conn, dumps=dumps, loads=loads, max_calls=max_calls)
