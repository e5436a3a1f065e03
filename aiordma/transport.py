"""Connections like sockets: `connect`, `listen`, `start_server`::

    async with await aiordma.listen("::", 7471) as listener:
        async for conn in listener: ...

    async with await aiordma.connect(host, port) as conn:
        await conn.send(b"hello")

`device` names the RDMA device (`aiordma.verbs.devices()` lists them).  None takes the one in the
environment variable AIORDMA_DEVICE, else a system device with an active port, else the embedded
device, which the logger "aiordma" warns of; "system" is as None without the embedded one.  A list
of names is one queue pair on each of these devices, "all" one on each that is active
(`Connection.rails`).  `via` is how the two ends find each other: "cm", the RDMA connection manager,
or "tcp", an exchange of endpoints over a TCP socket (bootstrap).  Both ends need the same choice,
and devices that reach each other: a card speaks with cards, the embedded device with embedded ones.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from ssl import SSLContext
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Self, Unpack, cast

from . import verbs
from ._core import protocol
from ._core.arguments import I32_MAX, integer, misfit, refusal, seconds
from ._core.async_only import AsyncContext, AsyncIteration
from ._core.fields import MAX_RAILS
from ._core.region import RegionToken, Rights
from ._core.snapshot_types import ListenerState
from ._datapath.message import Message
from ._datapath.results import Received, ReceivedMemory
from ._loop import shutdown
from ._loop.affinity import LoopAffinity
from ._loop.wait_queue import WaitQueue
from ._options import (
    CONNECT,
    ENDPOINT,
    LISTEN,
    ClientOptions,
    ConnectOptions,
    Devices,
    EndpointOptions,
    ListenOptions,
    Options,
    ServerOptions,
    complete,
    shows,
)
from ._options import Via as Via  # noqa: PLC0414 - users name it
from ._transport import connect_cm, connect_tcp, observation
from ._transport.acceptor import Acceptor
from ._transport.arguments import (
    check_config,
    check_host,
    check_options,
    check_source,
    device_names,
    port_number,
)
from ._transport.auth import NO_SECURITY, Security
from ._transport.batch import Batch
from ._transport.connect_attempt import Target, unanswered
from ._transport.connect_oob import PendingConnection
from ._transport.connection import Connection
from ._transport.inspection import ConnectionRequest, OnRequest, check_data, introduce
from ._transport.listening import Port, open_ports
from ._transport.observation import Statistics
from ._transport.rail_status import RailStatus
from ._transport.remote_memory import RemoteRegion, RemoteSlice
from ._transport.shares import Share
from .cm.address import Address
from .config import Config
from .errors import AddressError, ConnectionClosedError, DeviceEventError, RDMAError, host_port
from .verbs._device.device import ALL, SYSTEM, active_devices, names_or_variable

__all__ = [
    "Address",
    "Batch",
    "Config",
    "Connection",
    "ConnectionRequest",
    "Listener",
    "Message",
    "PendingConnection",
    "RailStatus",
    "Received",
    "ReceivedMemory",
    "RegionToken",
    "RemoteRegion",
    "RemoteSlice",
    "Rights",
    "Server",
    "Share",
    "Statistics",
    "connect",
    "listen",
    "prepare_connection",
    "start_server",
]

logger: logging.Logger = logging.getLogger("aiordma.transport")

# Seconds for which a loop caches the choice of a device.  To ask for the
# default one opens the system's, which takes longer than all the rest of a connection.
CHOICE_LASTS = 1.0

_choices: weakref.WeakKeyDictionary[
    asyncio.AbstractEventLoop,
    dict[str | tuple[str, ...] | None, tuple[float, tuple[verbs.Device, ...]]],
] = weakref.WeakKeyDictionary()


@cache  # once for each reason
def warn_of_software(why: str) -> None:
    logging.getLogger("aiordma").warning(
        "using the embedded device, which is software: %s (AIORDMA_DEVICE=embedded0 makes it the "
        "choice, AIORDMA_DEVICE=system an error; `aiordma doctor` says more)",
        why,
    )


def choose_devices(named: Devices) -> tuple[tuple[verbs.Device, ...], tuple[str, ...] | None]:
    """The devices, and their names if connections may use no other ones."""
    name = _name_or_names(named)
    loop = asyncio.get_running_loop()
    choices = _choices.setdefault(loop, {})
    now = loop.time()
    until, devices = choices.get(name, (now, ()))
    if not devices or now >= until:
        devices = find_devices(name)
        choices[name] = now + CHOICE_LASTS, devices
    any_will_do = name in (None, SYSTEM)
    return devices, None if any_will_do else tuple(device.name for device in devices)


def _name_or_names(named: Devices) -> str | tuple[str, ...] | None:
    if not isinstance(named, list | tuple):
        text = names_or_variable(named)
        if "," not in (text or ""):
            return text
        named = [name.strip() for name in str(text).split(",")]
    return device_names(named)


def find_devices(named: Devices) -> tuple[verbs.Device, ...]:
    """The devices of that name, or those names; of AIORDMA_DEVICE, or the default one."""
    name = _name_or_names(named)
    if isinstance(name, tuple):
        devices = tuple(map(verbs.find_device, name))
        if len({device.library.name for device in devices}) > 1:
            raise ValueError(f"device names cards and software, which do not meet: {devices}")
        return devices
    choice = verbs.choose_device(None if name == ALL else name)
    if choice.is_fallback:
        warn_of_software(choice.reason)
    if name == ALL:
        return tuple(active_devices(choice.device)[:MAX_RAILS])
    return (choice.device,)


async def resolve(
    host: str, port: int, *, passive: bool = False, family: int = 0, flags: int = 0
) -> list[Address]:
    """Numeric addresses of a host, in the resolver's order; `family`, `flags` as getaddrinfo's."""
    check_host(host)
    port = port_number(port)  # the resolver would take it modulo 2^16
    flags |= socket.AI_PASSIVE if passive else 0
    kind = socket.SOCK_STREAM
    try:
        try:
            # A numeric host is not looked up anywhere: no thread is needed that may block.
            numeric_only = flags | socket.AI_NUMERICHOST
            infos = socket.getaddrinfo(host, port, family, kind, flags=numeric_only)
        except socket.gaierror:
            loop = asyncio.get_running_loop()
            infos = await loop.getaddrinfo(host, port, family=family, type=kind, flags=flags)
    except socket.gaierror as error:
        raise AddressError(f"{host!r} is not a known host: {error.strerror}") from error
    except UnicodeError as error:
        what = "a name has parts of 1 to 63 characters, with dots between"
        raise AddressError(f"{host!r} cannot be a host: {what}") from error
    return [numeric(info[4]) for info in infos]


async def source_to(address: Address, source: Address | None) -> Address | None:
    """The numeric local address to connect from; a host "" is any of the peer's family."""
    if source is None:
        return None
    family, every = (socket.AF_INET6, "::") if ":" in address[0] else (socket.AF_INET, "0.0.0.0")
    return (await resolve(source[0] or every, source[1], family=family))[0]


def numeric(name: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]) -> Address:
    """Host and port of a socket's name; a link-local host with its interface, as `fe80::1%2`."""
    host, port, *rest = name
    scope = rest[1] if rest else 0
    return f"{host}%{scope}" if scope else str(host), int(port)


@shows(ConnectOptions, CONNECT)
async def connect(host: str, port: int, **options: Unpack[ConnectOptions]) -> Connection:
    """Connects to a listener.  Names with several addresses are tried in the resolver's order.

    Raises RejectedError when there is no listener or it refuses, UnreachableError when
    the host does not answer within `Config.connect_timeout`, AddressError and RouteError when
    there is no route, ProtocolError when what answers is not aiordma, DeviceNotFoundError.
    `source` is a local (host, port) to connect from.

    `device` is a name, several in a list or with commas, or "all": of several devices one is the
    lead, and each of the others gets a queue pair once the connection is open (`Connection.rails`),
    if the listener can answer.  ValueError for names that are no list for a connection: none, one
    twice, cards beside software.

    `auth` is a key of at least 16 random bytes that the listener has too: each side proves that it
    has it, without sending it, before anything else is sent; AuthenticationError otherwise.
    `encrypt=True`, which both sides must give and which needs `auth` and the extra
    `aiordma[encrypt]`, encrypts all messages: nothing but their number, times and lengths is seen,
    and a change on the way ends the connection.  Operations on memory cannot be encrypted, so they
    are refused, unless `encrypt="messages"` on both sides allows them, in clear.

    `ssl` puts TLS on the TCP bootstrap (`via="tcp"` only), with `host` as the name to expect: a
    program that sees the bootstrap can connect in the peer's place.  It does not encrypt what then
    travels by RDMA.

    `data`, at most 64 bytes (LimitError), is for the application of the listener, if that inspects
    requests (`on_request` of `listen`); it may refuse with a reason: RejectedError, by_application.
    """
    given = complete("connect", options, CONNECT)
    security = check_security(given, given["ssl"], host)
    return await connect_with(given, security, host, port, data=given["data"])


async def connect_with(
    options: ClientOptions,
    security: Security,
    host: str,
    port: int,
    *,
    data: bytes = b"",
    family: int = 0,
    flags: int = 0,
    all_errors: bool = False,
) -> Connection:
    """As `connect`, with what the two sides demand of each other.

    `family` and `flags` are the resolver's.  `all_errors`: where no address can be connected to, an
    ExceptionGroup with the error of each, as of `loop.create_connection`.
    """
    via, source, config = options["via"], options["source"], options["config"]
    check_source(source)
    check_options(via, config)
    data = check_data(data)
    to = Target(*choose_devices(options["device"]), (host, port), source, config, security)
    find = partial(resolve, host, port, family=family, flags=flags)
    errors: list[Exception] = []
    try:
        connection = await _connect(to, via, find, data, errors)
    except (RDMAError, OSError) as error:
        observation.failed(host_port((host, port)), error, accepted=False)
        if all_errors:
            raise ExceptionGroup("create_connection failed", errors or [error]) from None
        raise
    finally:
        errors.clear()  # their frames have this one
    connection._begin(accepted=False)
    return connection


async def _connect(
    to: Target,
    via: Via,
    find: Callable[[], Awaitable[list[Address]]],
    data: bytes,
    errors: list[Exception],
) -> Connection:
    """To the first of the addresses that `find` returns and that lets it; else `errors` has all."""
    connect = connect_tcp.connect if via == "tcp" else connect_cm.connect
    try:
        async with asyncio.timeout(to.config.connect_timeout):
            for address in await find():
                try:
                    one = replace(to, address=address, source=await source_to(address, to.source))
                    return await introduce(await connect(one), data)
                except OSError as error:
                    errors.append(error)
            raise errors[-1]
    except TimeoutError as error:
        errors.append(unanswered(to.address, via, to.config.connect_timeout))
        raise errors[-1] from error


@shows(EndpointOptions, ENDPOINT)
async def prepare_connection(
    *, address: str | None = None, **options: Unpack[EndpointOptions]
) -> PendingConnection:
    """Half of a connection whose endpoints travel on a channel of the caller's own.

    `address` is the local IP address to be reached by; None takes the best that the device has.
    See `PendingConnection` for the steps.  `auth` and `encrypt` as for `connect`.
    """
    given = complete("prepare_connection", options, ENDPOINT)
    config, security = given["config"], Security(given["auth"], encrypt=given["encrypt"])
    check_config(config)
    devices, _ = choose_devices(given["device"])
    where = (await resolve(address, 0))[0] if address is not None else None
    return PendingConnection(devices, where, config, security)


def check_security(
    options: Options, ssl: SSLContext | None, hostname: str | None, *, stream: bool = False
) -> Security:
    via, auth, encrypt = options["via"], options["auth"], options["encrypt"]
    if via not in ("cm", "tcp"):
        raise ValueError(f'via is "cm" or "tcp", not {via!r}')
    if ssl is not None and via != "tcp":
        raise ValueError('ssl is for the TCP bootstrap: via="tcp"')
    if auth is None and not encrypt and ssl is None and not stream:
        return NO_SECURITY
    return Security(auth, ssl, hostname, encrypt, stream)


class Listening:
    """The addresses of a listener or server."""

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Every address where it listens, all with the same port."""
        raise NotImplementedError

    @property
    def address(self) -> Address:
        """The first of `addresses`; the port is the real one when 0 was asked for."""
        return self.addresses[0]

    @property
    def host(self) -> str:
        """The numeric host of `address`."""
        return self.address[0]

    @property
    def port(self) -> int:
        """The port of `address`."""
        return self.address[1]


class Listener(Listening, shutdown.EndsWhenDropped, AsyncContext, AsyncIteration):
    """Accepts connections: `await accept()`, or `async for conn in listener`.  Made by `listen`.

    `device` is the name of its device, or of the first of several.  Finished connections wait here
    until they are accepted; `close` closes those that were not.  Where more than `backlog` wait,
    those that have ended meanwhile are forgotten.
    """

    def __init__(self, device: str, backlog: int) -> None:
        self.device = device
        self._backlog = self._prune_above = backlog
        self._affinity = LoopAffinity()
        self._loop_shutdown = shutdown.of_running_loop()
        self._ports: Sequence[Port] = ()
        self._acceptor: Acceptor  # since it listens
        self._failure: Exception | None = None
        self._ready: deque[Connection] = deque()
        self._waiters = WaitQueue()
        self._closed = False
        self._was_stopped = False  # by `stop`: `close` has not been called

    def __repr__(self) -> str:
        state = "closed" if self._closed else "listening"
        where = ", ".join(map(host_port, self.addresses)) or "no address yet"
        return f"<Listener on {self.device} at {where}, {state}>"

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Every address where it listens, all with the same port."""
        return tuple(port.address for port in self._ports)

    def _figures(self) -> ListenerState:
        """Its part of `aiordma.snapshot`. Any thread may ask."""
        return {
            "device": self.device,
            "loop": id(self._affinity.loop),
            "addresses": [host_port(address) for address in self.addresses],
            "handshakes": self._acceptor.handshakes,
            "waiting": len(self._ready),
        }

    def _start(self, ports: Sequence[Port], acceptor: Acceptor) -> None:
        self._ports = ports
        self._acceptor = acceptor
        self._loop_shutdown.add(self)

    def _stop(self) -> None:
        """Listens no more."""
        self._loop_shutdown.remove(self)
        self._end_without_loop()
        self._waiters.wake_all()

    def _fail(self, error: Exception) -> None:
        """The device has failed: it is given back, so that it can be opened anew."""
        if not self._closed:
            logger.error("%r: %s", self, error)
            self._failure = error
            self._stop()
            self._acceptor.cancel()

    def _deliver(self, connection: Connection) -> None:
        if self._closed:
            connection.abort()
            return
        self._ready.append(connection)
        if len(self._ready) > self._prune_above:
            # A peer may connect and close without end; what is open has its own limit.
            waiting = [connection for connection in self._ready if not connection.closed]
            self._ready.clear()
            self._ready.extend(waiting)
            self._prune_above = max(self._backlog, 2 * len(self._ready))
        self._waiters.wake()

    async def accept(self) -> Connection:
        """The next connection.  Cancelling loses none.  ConnectionClosedError after `close`.

        DeviceEventError when the device has failed, or each of several: the listener has ended;
        listen again.
        """
        self._affinity.check(self)
        while not self._ready:
            if self._failure is not None:
                raise DeviceEventError(
                    "DEVICE_FATAL", device=self.device, element=repr(self)
                ) from self._failure
            if self._closed:
                raise ConnectionClosedError("the listener is closed")
            await self._waiters.wait()
        return self._ready.popleft()

    async def __aiter__(self) -> AsyncIterator[Connection]:
        """Connections until the listener is closed.  DeviceEventError as of `accept`."""
        while True:
            try:
                connection = await self.accept()
            except ConnectionClosedError:
                return
            yield connection

    def stop(self) -> None:
        """Listens no more, for code that cannot await: the port is free at once.

        Connections that wait here can still be accepted; `close` does the rest.
        """
        if self._affinity.is_after_fork:
            return
        self._affinity.check(self)
        if not self._closed:
            self._stop()
            self._was_stopped = True

    async def close(self) -> None:
        """Listens no more.  Connections that were accepted go on; a second call does nothing."""
        over = self._closed and self._failure is None and not self._was_stopped
        if self._affinity.is_after_fork or over:
            return
        self._affinity.check(self)
        if not self._closed:
            self._stop()
        self._was_stopped = False
        await self._acceptor.close()
        left = list(self._ready)
        self._ready.clear()
        for connection in left:
            connection.abort()
        for connection in left:
            await connection.wait_closed()

    async def _end_with_loop(self) -> None:
        await self.close()

    def _end_without_loop(self) -> None:
        self._closed = True
        self._acceptor.closed = True
        for port in self._ports:
            port.release()

    def _drop(self) -> None:
        """Closes what is left of a listener that was dropped, unless its loop was quicker."""
        if not self._closed:
            self._stop()
            self._acceptor.cancel()
            for connection in self._ready:
                connection.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def deliver_to(listener: Listener) -> Callable[[Connection], None]:
    """For the acceptor, which keeps no listener alive."""
    ref = weakref.ref(listener)

    def deliver(connection: Connection) -> None:
        found = ref()
        if found is None:
            connection.abort()
        else:
            found._deliver(connection)

    return deliver


@shows(ListenOptions, LISTEN)
async def listen(host: str = "", port: int = 0, **options: Unpack[ListenOptions]) -> Listener:
    """Listens on an address ("" or "::" for all of them) and port (0 picks one).

    A name with several addresses listens on each of them that this machine has, with one port
    number; `Listener.addresses` are those.

    `auth`, `encrypt` and `ssl` as for `connect`; `ssl` is a context for servers, with a
    certificate.  `device` as for `connect`: each further queue pair of a peer gets one on a device
    that its connection does not use yet, or else on one that it uses.  Raises AddressError or
    OSError (EADDRINUSE and others) when the address cannot be used.

    `backlog` is how many requests may wait in the connection manager (`via="cm"`); beyond as many
    finished connections that wait for `accept`, those that have ended meanwhile are forgotten.
    `Config.max_connections` and `max_handshakes` are the limits on peers.

    `on_request`, a function or coroutine function, is called with each `ConnectionRequest` once the
    peer has proved the key, before the connection is accepted.  It returns None to take it, or the
    reason of a refusal, a str, which the peer's `connect` raises.  The peer's handshake waits for
    it, within `Config.handshake_timeout`; `Connection.request_data` keeps what the peer gave.
    """
    given = complete("listen", options, LISTEN)
    security = check_security(given, given["ssl"], None)
    return await listen_with(given, security, host, port, on_request=given["on_request"])


async def listen_with(
    options: ServerOptions,
    security: Security,
    host: str | list[str],
    port: int,
    *,
    on_request: OnRequest | None = None,
    family: int = 0,
    flags: int = 0,
) -> Listener:
    """As `listen`, with what the two sides demand of each other; perhaps for several hosts.

    `family` and `flags` are the resolver's.
    """
    via, config = options["via"], options["config"]
    check_options(via, config)
    if on_request is not None and not callable(on_request):
        raise TypeError(refusal("on_request", "a function of a ConnectionRequest", on_request))
    port, backlog = port_number(port), integer("backlog", options["backlog"], 0, I32_MAX)
    hosts = host if isinstance(host, list) else [host]
    for each in hosts:
        check_host(each)
    devices, only = choose_devices(options["device"])
    addresses: list[Address] = []
    for each in hosts:
        every = "0.0.0.0" if family == socket.AF_INET else "::"
        addresses += await resolve(each or every, port, passive=True, family=family, flags=flags)
    if not addresses:
        raise ValueError("the server has no host to listen on: host is an empty sequence")
    listener = Listener(devices[0].name, backlog)  # after the await: the loop may end in it
    acceptor = Acceptor(
        config, security, devices, deliver_to(listener), shutdown.weakly(listener._fail), on_request
    )

    def listen_on(address: Address) -> Port:
        if via == "tcp":
            return connect_tcp.TCPListener(address, acceptor)
        return connect_cm.CMListener(only, address, backlog, acceptor)

    listener._start(open_ports(listen_on, addresses), acceptor)
    return listener


Handler = Callable[[Connection], Awaitable[None]]


def check_handler(handler: Handler) -> None:
    """TypeError unless it is a coroutine function of one argument, bound or wrapped in any way.

    Of what is not written in Python only its calls show what it returns.
    """
    function: object = handler
    while not inspect.iscoroutinefunction(function):
        if isinstance(function, partial):
            function = function.func
        elif isinstance(function, MethodType):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif isinstance(function, FunctionType | BuiltinFunctionType | type) or not callable(
            function
        ):
            raise TypeError(
                f"the handler {handler!r} is no coroutine function: write `async def "
                "handler(conn)`, and functools.partial(handler, ...) to give it more than that"
            )
        elif isinstance(method := type(function).__call__, FunctionType):
            function = method
        else:
            break
    hint = " (for a reader and a writer there is aiordma.streams.start_stream_server)"
    check_signature(handler, 1, "one argument, the connection", hint)


def check_signature(
    handler: Callable[..., object], count: int, arguments: str, hint: str = ""
) -> None:
    """TypeError for what cannot be called with so many arguments."""
    if not callable(handler):
        raise TypeError(refusal("the handler", f"a function of {arguments}", handler))
    if why := misfit(handler, [None] * count):
        raise TypeError(f"the handler {handler!r} is called with {arguments}: {why}{hint}")


class Server(Listening, AsyncContext):
    """A listener that runs a handler for every connection.  Made by `start_server`."""

    def __init__(self, listener: Listener, handler: Handler) -> None:
        self._listener = listener
        self._handler = handler
        self._tasks: dict[asyncio.Task[None], Connection] = {}
        self._handling: set[asyncio.Task[None]] = set()  # those whose handler has not ended
        self._closing = False
        self._affinity = LoopAffinity()
        self._loop_shutdown = shutdown.of_running_loop()
        # Like asyncio's servers, it serves until it is closed.
        self._loop_shutdown.add(self, keep=True)
        self._accepting = self._affinity.loop.create_task(self._accept())

    def __repr__(self) -> str:
        return f"<Server of {self._listener!r}, {len(self._tasks)} connections>"

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Every address where it listens, all with the same port."""
        return self._listener.addresses

    @property
    def device(self) -> str:
        """The name of the device that it listens on."""
        return self._listener.device

    @property
    def connections(self) -> int:
        """Handlers that are running."""
        return len(self._tasks)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        async for connection in self._listener:
            task = loop.create_task(self._serve(connection))
            self._tasks[task] = connection
            self._handling.add(task)
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        self._handling.discard(task)  # if it was cancelled before it had begun

    async def _serve(self, connection: Connection) -> None:
        goodbye: protocol.Goodbye | None = protocol.GOODBYE
        try:
            await self._handler(connection)
            if self._closing:
                goodbye = protocol.GOING_AWAY
        except ConnectionError as error:
            logger.info("%r: the handler ended with %s", connection, error)
            goodbye = protocol.failed(error)
        except shutdown.EXITS as error:
            connection._close_at_exit(error)
            goodbye = None
            raise
        except BaseException as error:
            cut_off = self._closing and isinstance(error, asyncio.CancelledError)
            goodbye = protocol.CUT_OFF if cut_off else protocol.failed(error)
            if isinstance(error, shutdown.UNWINDING):
                raise
            # As asyncio.start_server: one handler's failure is reported, the server goes on.
            self._affinity.loop.call_exception_handler(
                {"message": f"handler of {connection!r} failed", "exception": error}
            )
        finally:
            # Also where a loop has been closed with it, and none runs.
            current = asyncio.current_task(self._affinity.loop)
            self._handling.discard(cast("asyncio.Task[None]", current))
            if goodbye is not None:
                await connection._close(goodbye)

    async def serve_forever(self) -> None:
        """Serves until cancelled, or closed by another task: then until that has finished.

        Cancelled, it closes the server without `grace`.
        DeviceEventError when the device has failed: the server has ended; start another one.
        """
        self._affinity.check(self)
        try:
            await asyncio.shield(self._accepting)
            if self._tasks:  # `close` of another task gives the handlers time
                await asyncio.wait(self._tasks)
        finally:
            await self.close()

    async def close(self, grace: float = 0.0) -> None:
        """Accepts no more, gives handlers `grace` seconds to finish, then cancels those left.

        A handler's `async for` over its connection ends once the messages that have arrived are
        taken: an idle handler costs no time, also without `grace`, and its peer gets
        ConnectionClosedError (`by_peer`).  A `recv` goes on, since it may be in the middle of a
        request.  The peer of a handler that is cancelled gets ConnectionBrokenError.  Returns when
        the connections are closed.  A second call, while the first one waits, sets a time of its
        own: `close()` ends the grace.
        """
        if self._affinity.is_after_fork:
            return
        self._affinity.check(self)
        grace = seconds("grace", grace, endless=True)
        self._closing = True
        await self._listener.close()
        await asyncio.gather(self._accepting, return_exceptions=True)  # cancelled by the loop's end
        self._loop_shutdown.remove(self)
        for connection in self._tasks.values():
            connection._messages.end_iteration()
        await asyncio.sleep(0)  # handlers that have begun and are idle end now
        if grace > 0 and self._handling:
            await asyncio.wait(self._handling, timeout=grace)
        for task in self._handling:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _end_with_loop(self) -> None:
        await self.close()

    def _end_without_loop(self) -> None:
        """The listener and the connections end by themselves."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


@shows(ListenOptions, LISTEN)
async def start_server(
    handler: Handler, host: str = "", port: int = 0, **options: Unpack[ListenOptions]
) -> Server:
    """Listens, and runs `handler(conn)` as a task for every connection; otherwise as `listen`.

    The connection is closed when its handler returns.  When an exception leaves the handler, the
    peer gets ConnectionBrokenError with the exception's type, and not its text.  A ConnectionError
    is mostly the peer's own end: it is logged.  Any other exception goes to the loop's exception
    handler.

    TypeError unless `handler` is a coroutine function that takes the connection: also a bound
    method, a functools.partial, a decorated function, or an object whose `__call__` is one.
    """
    check_handler(handler)
    given = complete("start_server", options, LISTEN)
    return Server(await listen(host, port, **given), handler)
