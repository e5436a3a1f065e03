"""Remote procedure calls over a connection: many at a time, with timeouts and cancellation.

A server names coroutine functions of one argument; a client calls them by name.  Argument and
result are one value each, serialized by `dumps` and `loads`: msgpack unless others are given, the
same on both sides.  `loads` gets a memoryview of the received bytes, which it may keep; so
`dumps=memoryview, loads=memoryview` moves buffers without a copy.  Never give `pickle.loads` what
a peer sends that you do not trust.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Self, Unpack

import msgpack  # type: ignore[import-untyped]

from . import transport
from ._core.arguments import integer
from ._core.refusal import printable
from ._loop.shutdown import background
from ._options import CONNECT, LISTEN, ConnectOptions, ListenOptions, complete, shows
from .errors import ConnectionBrokenError, ConnectionClosedError, ProtocolError, RDMAError
from .transport import Connection, Server, check_handler

Function = Callable[[Any], Awaitable[Any]]
Dumps = Callable[[Any], Any]
Loads = Callable[[memoryview], Any]

logger: logging.Logger = logging.getLogger("aiordma.rpc")

_CALL, _CANCEL, _RESULT, _ERROR = range(4)
# Kind, bytes of the name, number of the call.  The name follows (of the function, or of the type of
# the error), then the value, or the text of the error.
_HEADER = struct.Struct("<BB6xQ")
_MAX_TEXT = 4096


class CallError(Exception):
    """The server could not answer a call: its function raised an exception, for instance.

    `kind` is the name of the exception's type, `text` what it says.  `kind` is "LookupError" where
    the server has no such function, "TooManyCalls" where more calls are under way than it takes,
    and "CancelledError" where it has cancelled the call, as at its end.
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
    encoded = name.encode()
    if len(encoded) > 255:
        raise ValueError(f"the name {name[:30]!r}... has {len(encoded)} bytes; 255 are the most")
    return _HEADER.pack(kind, len(encoded), number) + encoded


def _unpack(message: memoryview) -> _Frame:
    """ProtocolError unless it is the message of a call or of an answer."""
    try:
        kind, length, number = _HEADER.unpack_from(message)
        end = _HEADER.size + length
        name = str(message[_HEADER.size : end], "utf-8")
    except (struct.error, UnicodeDecodeError) as error:
        raise ProtocolError(f"{len(message)} bytes are no call, nor an answer: {error}") from None
    if end > len(message):
        raise ProtocolError(f"{len(message)} bytes are no call, nor an answer: {end=}")
    return _Frame(kind, number, name, message[end:])


async def serve(
    conn: Connection,
    functions: Mapping[str, Function],
    *,
    dumps: Dumps = msgpack.packb,
    loads: Loads = msgpack.unpackb,
    max_calls: int = 256,
) -> None:
    """Answers the calls of one connection until its end: the handler of `start_server`.

    Each call is a task.  A call that the client cancels, or whose time passes there, is cancelled;
    so are all when the connection ends, or the grace of `Server.close`.  An exception of a function
    is logged and goes to the client as CallError, with its type's name and its text.  More than
    `max_calls` calls under way are refused.  ProtocolError for a client that sends something else
    than calls.
    """
    tasks: dict[int, asyncio.Task[None]] = {}
    answering = set[asyncio.Task[None]]()  # of these, whose functions have ended
    at_end = False

    async def answer(number: int, name: str, data: memoryview) -> None:
        try:
            try:
                called = functions[name](loads(data))
                del data  # which keeps the memory that it was received in
                result = dumps(await called)
                answering.add(tasks[number])
                await conn.send([_pack(_RESULT, number), result])
            except Exception as error:
                if not conn.closed:
                    logger.info("%s: the call of %s failed", conn, name, exc_info=True)
                    text = "its text cannot be had"
                    with suppress(Exception):
                        text = str(error)
                    await refuse(number, type(error).__name__[:60], text)
        except asyncio.CancelledError:  # also in the middle of its answer
            await refuse(number, "CancelledError", "the call was cancelled")
        finally:
            answering.discard(tasks.pop(number))

    async def refuse(number: int, kind: str, text: str) -> None:
        answering.update([tasks[number]] if number in tasks else [])
        parts = [_pack(_ERROR, number, kind), text.encode("utf-8", "replace")[:_MAX_TEXT]]
        with suppress(RDMAError):  # the connection has ended, as is noticed below
            sent = asyncio.gather(conn.send_nowait(parts), return_exceptions=True)
            if not at_end:  # else a client that does not read would hold up the end
                await sent

    try:
        async for message in conn:
            kind, number, name, data = _unpack(message.data)
            if kind == _CANCEL:
                await asyncio.sleep(0)  # one that is cancelled before it has begun sends no answer
                if task := tasks.get(number):
                    task.cancel()
                else:  # it has been answered, or was cancelled before it was sent
                    await refuse(number, "CancelledError", "the call was cancelled")
            elif kind != _CALL or number in tasks:
                raise ProtocolError(f"the client sent kind {kind} with call {number}")
            elif name not in functions:
                await refuse(number, "LookupError", "the server has no such function")
            elif len(tasks) - len(answering) >= max_calls:
                await refuse(number, "TooManyCalls", f"{max_calls} calls are under way")
            else:
                # A client that has its answer may call again before this side knows that it has.
                while len(tasks) >= max_calls:
                    await asyncio.wait(answering, return_when=asyncio.FIRST_COMPLETED)
                tasks[number] = asyncio.create_task(answer(number, name, data))
            del message, data
        if tasks and not conn.closed:  # its server is closing, and may give the calls time
            await asyncio.wait(tasks.values())
    finally:
        at_end = True
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


@shows(ListenOptions, LISTEN)
async def start_server(
    functions: Mapping[str, Function],
    host: str = "",
    port: int = 0,
    *,
    dumps: Dumps = msgpack.packb,
    loads: Loads = msgpack.unpackb,
    max_calls: int = 256,
    **options: Unpack[ListenOptions],
) -> Server:
    """Listens, and answers calls of `functions`, by `serve`; otherwise as `aiordma.start_server`.

    TypeError for a function that is no coroutine function of one argument.
    """
    for name, function in functions.items():
        try:
            check_handler(function)
        except TypeError:
            text = f"{name}: no coroutine function of one argument (async def): {function}"
            raise TypeError(text) from None
    given = complete("rpc.start_server", options, LISTEN)
    calls = integer("max_calls", max_calls, 1)
    handler = partial(serve, functions=dict(functions), dumps=dumps, loads=loads, max_calls=calls)
    return await transport.start_server(handler, host, port, **given)


class Client:
    """Calls functions of the server at the other end of a connection, which it takes over.

    Made by `connect`, or on the running loop for a connection that was made in another way.
    Leaving its `async with` closes it.  At most `max_calls` calls are under way at the server;
    others wait.
    """

    def __init__(
        self,
        conn: Connection,
        *,
        dumps: Dumps = msgpack.packb,
        loads: Loads = msgpack.unpackb,
        max_calls: int = 256,
    ) -> None:
        self.connection: Connection = conn
        self._dumps, self._loads = dumps, loads
        self._numbers = count()
        # What is not answered yet; a call that was cancelled stays until the server has ended it.
        self._waiting: dict[int, asyncio.Future[_Frame | None]] = {}
        self._room = asyncio.Semaphore(integer("max_calls", max_calls, 1))
        self._end: RDMAError | None = None
        self._reader = background(asyncio.get_running_loop(), self._read())

    async def call(self, name: str, data: Any = None, *, timeout: float | None = None) -> Any:  # noqa: ASYNC109
        """The result of the server's function `name` for the argument `data`.

        TimeoutError when `timeout` seconds have passed.  Then, and when it is cancelled, the server
        cancels its function.  CallError with the function's exception.  ConnectionClosedError or
        ConnectionBrokenError when the connection ends before the answer: whether the function has
        run is then unknown.  What `dumps` returns must not change before the answer.
        """
        number = next(self._numbers)
        request = [_pack(_CALL, number, name), self._dumps(data)]
        async with asyncio.timeout(timeout):
            await self._room.acquire()
            answer = self._waiting[number] = asyncio.get_running_loop().create_future()
            try:
                await self.connection.send(request)
                if self._reader.done():
                    self._release(number)
                frame = await answer
            except asyncio.CancelledError:
                if number in self._waiting:  # the answer to this makes room for another call
                    with suppress(RDMAError):  # the connection has ended
                        told = self.connection.send_nowait(_pack(_CANCEL, number))
                        asyncio.gather(told, return_exceptions=True)  # its error is of no use
                raise
            except BaseException:  # nothing was sent
                self._release(number)
                raise
        if frame is None:
            error = ConnectionBrokenError if self._end else ConnectionClosedError
            raise error(f"the connection ended before {name} was answered") from self._end
        if frame.kind == _RESULT:
            return self._loads(frame.data)
        text = str(frame.data[:_MAX_TEXT], "utf-8", "replace")
        raise CallError(name, printable(frame.name), printable(text))

    def _release(self, number: int, frame: _Frame | None = None) -> None:
        if answer := self._waiting.pop(number, None):  # else the server answers a second time
            self._room.release()
            if not answer.done():
                answer.set_result(frame)

    async def _read(self) -> None:
        try:
            async for message in self.connection:
                frame = _unpack(message.data)
                if frame.kind not in (_RESULT, _ERROR):
                    raise ProtocolError(f"the server sent kind {frame.kind}")
                self._release(frame.number, frame)
                del message, frame  # which keep its memory
        except RDMAError as error:
            self._end = error
            self.connection.abort()
        finally:
            for number in list(self._waiting):
                self._release(number)

    async def close(self) -> None:
        """Closes the connection, which ends the calls under way."""
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
    dumps: Dumps = msgpack.packb,
    loads: Loads = msgpack.unpackb,
    max_calls: int = 256,
    **options: Unpack[ConnectOptions],
) -> Client:
    """Connects to a server of `start_server`; options and errors as of `aiordma.connect`."""
    given = complete("rpc.connect", options, CONNECT)
    max_calls = integer("max_calls", max_calls, 1)  # before there is a connection
    conn = await transport.connect(host, port, **given)
    return Client(conn, dumps=dumps, loads=loads, max_calls=max_calls)
