"""Socket-like connections: `connect`, `listen` and `start_server`.

Example::

    async with await aiordma.listen("::", 7471) as listener:
        async for conn in listener: ...

    async with await aiordma.connect(host, port) as conn:
        await conn.send(b"hello")

All functions accept the options `device` and `via`.

`device` selects the RDMA device (`aiordma.verbs.devices()` lists the names):

- None selects the device named by the environment variable AIORDMA_DEVICE. If the variable is not
  set, None selects a system device with an active port, or the embedded device if no such system
  device exists. In the last case, the logger "aiordma" logs a warning.
- "system" is like None, but never selects the embedded device.
- A list of names creates one queue pair per device. "all" creates one on every active device. See
  `Connection.rails`.

`via` selects the connection method. "cm" uses the RDMA connection manager. "tcp" exchanges the
endpoints over a TCP socket (TCP bootstrap). Both sides must use the same method. Cards can only
connect to cards, and embedded devices only to embedded devices.
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
from ._core.arguments import I32_MAX, callback, integer, refusal, seconds, signature_error
from ._core.async_only import AsyncContext, AsyncIteration
from ._core.fields import MAX_RAILS
from ._core.region import RegionToken, Rights
from ._core.snapshot_types import ListenerState
from ._datapath.message import Message
from ._datapath.results import Received, ReceivedMemory
from ._datapath.session import MessageClaim
from ._event_loop import shutdown
from ._event_loop.affinity import LoopAffinity
from ._event_loop.loop_settings import configure_loop
from ._event_loop.wait_queue import WaitQueue
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
from ._options import Via as Via  # noqa: PLC0414 - public name
from ._transport import connect_cm, connect_tcp, observation
from ._transport.acceptor import Acceptor
from ._transport.arguments import (
    check_config,
    check_context,
    check_host,
    check_options,
    check_peer,
    check_source,
    device_names,
    port_number,
)
from ._transport.auth import NO_SECURITY, Security
from ._transport.batch import Batch
from ._transport.connect_attempt import Target, no_reply_error, send_request_data
from ._transport.connect_oob import PendingConnection
from ._transport.connection import Connection
from ._transport.inspection import ConnectionRequest, OnRequest, check_data
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
    "MessageClaim",
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
    "configure_loop",
    "connect",
    "listen",
    "prepare_connection",
    "start_server",
]

logger: logging.Logger = logging.getLogger("aiordma.transport")

# How long a loop caches the selected devices, in seconds. Finding the default device takes longer
# than all other steps of connecting together, because it opens the system's devices.
CHOICE_LIFETIME = 1.0

_choices: weakref.WeakKeyDictionary[
    asyncio.AbstractEventLoop,
    dict[str | tuple[str, ...] | None, tuple[float, tuple[verbs.Device, ...]]],
] = weakref.WeakKeyDictionary()
"""For each loop, the time at which a choice expires and its devices, by the selected names."""


@cache  # warn once per reason
def warn_of_software(why: str) -> None:
    logging.getLogger("aiordma").warning(
        "using the embedded device, which is software: %s; set AIORDMA_DEVICE=embedded0 to accept "
        "this, or AIORDMA_DEVICE=system to require a card; run `aiordma doctor`",
        why,
    )


def choose_devices(named: Devices) -> tuple[tuple[verbs.Device, ...], tuple[str, ...] | None]:
    """Return the selected devices, and the names of the only devices that a connection may use.

    The names are None if no device was selected, or if the selection is "system". A connection may
    then use any device.
    """
    name = _name_or_names(named)
    # Finding devices is slow, so the loop keeps its choice for CHOICE_LIFETIME seconds.
    loop = asyncio.get_running_loop()
    choices = _choices.setdefault(loop, {})
    now = loop.time()
    expires_at, devices = choices.get(name, (now, ()))
    if not devices or now >= expires_at:
        devices = find_devices(name)
        choices[name] = now + CHOICE_LIFETIME, devices
    any_will_do = name in (None, SYSTEM)
    return devices, None if any_will_do else tuple(device.name for device in devices)


def _name_or_names(named: Devices) -> str | tuple[str, ...] | None:
    """Return the device name or names in `named` or AIORDMA_DEVICE, which may be a list."""
    if not isinstance(named, list | tuple):
        text = names_or_variable(named)
        if "," not in (text or ""):
            return text
        named = [name.strip() for name in str(text).split(",")]
    return device_names(named)


def find_devices(named: Devices) -> tuple[verbs.Device, ...]:
    """Return the devices selected by `named` or AIORDMA_DEVICE, or else the default device."""
    name = _name_or_names(named)
    if isinstance(name, tuple):
        devices = tuple(map(verbs.find_device, name))
        if len({device.library.name for device in devices}) > 1:
            raise ValueError(f"device must not mix system devices and embedded devices: {devices}")
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
    """Resolve `host` to numeric addresses, in the resolver's order.

    The caller must already have validated `host` and `port`. `family` and `flags` are passed to
    `socket.getaddrinfo`. If `passive` is true, the addresses are suitable for listening.
    """
    flags |= socket.AI_PASSIVE if passive else 0
    kind = socket.SOCK_STREAM
    try:
        try:
            # A numeric host requires no lookup, so the call does not block and needs no thread.
            numeric_only = flags | socket.AI_NUMERICHOST
            infos = socket.getaddrinfo(host, port, family, kind, flags=numeric_only)
        except socket.gaierror:
            loop = asyncio.get_running_loop()
            infos = await loop.getaddrinfo(host, port, family=family, type=kind, flags=flags)
    except socket.gaierror as error:
        raise AddressError(f"cannot resolve host {host!r}: {error.strerror}") from error
    return [numeric(info[4]) for info in infos]


async def resolve_source(address: Address, source: Address | None) -> Address | None:
    """Return the numeric local address to connect from. An empty host means any local address."""
    if source is None:
        return None
    family, any_address = (
        (socket.AF_INET6, "::") if ":" in address[0] else (socket.AF_INET, "0.0.0.0")
    )
    return (await resolve(source[0] or any_address, source[1], family=family))[0]


def numeric(name: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]) -> Address:
    """Return the (host, port) pair of a socket address.

    The host of a link-local address includes its interface, as in `fe80::1%2`.
    """
    host, port, *rest = name
    scope = rest[1] if rest else 0
    return f"{host}%{scope}" if scope else str(host), int(port)


@shows(ConnectOptions, CONNECT)
async def connect(host: str, port: int, **options: Unpack[ConnectOptions]) -> Connection:
    """Connect to a listener.

    If the host name has several addresses, they are tried in the resolver's order.

    Args:
        host: The peer's host name or numeric address. The address must belong to one of the peer's
            RDMA devices.
        port: The listener's port.
        device: A device name, a list of names, a comma-separated string of names, or "all". None
            selects the default device. With several devices, the first usable device becomes the
            lead. If the listener accepts several rails, aiordma also opens a queue pair on each of
            the other devices (`Connection.rails`).
        via: The connection method, "cm" or "tcp". It must be the same on both sides.
        source: The local (host, port) to connect from.
        config: The settings for this side.
        auth: A pre-shared key of at least 16 random bytes. Before any other data is sent, each side
            proves that it knows the key. The key itself is never sent.
        encrypt: True encrypts all messages. Both sides must set both `encrypt` and `auth`. An
            observer sees only the number, timing and lengths of messages. If a message is modified
            in transit, the connection ends. Memory operations cannot be encrypted, so aiordma
            refuses them. To allow unencrypted memory operations, pass "messages" on both sides.
            Encryption requires the extra `aiordma[encrypt]`.
        ssl: A TLS context for the TCP bootstrap (`via="tcp"` only). The listener's certificate must
            be valid for `host`. Without TLS, an attacker who can read the bootstrap traffic can
            connect in place of this side. TLS does not encrypt RDMA traffic.
        data: Up to 64 bytes for the listener's `on_request` function.

    Returns:
        The open connection.

    Raises:
        RejectedError: If there is no listener, or if the listener refuses the connection.
            `by_application` is True if `on_request` refused the connection.
        UnreachableError: If the host does not respond within `Config.connect_timeout`.
        AddressError: If `host` cannot be resolved, or an address cannot be used.
        RouteError: If there is no route to the peer.
        AuthenticationError: If the two sides have different keys or different values of `encrypt`.
        ProtocolError: If the peer is not aiordma.
        DeviceNotFoundError: If a device does not exist.
        LimitError: If `data` is longer than 64 bytes.
        ValueError: If an option is invalid. `device` must not be an empty list, contain duplicate
            names, or mix cards and embedded devices.
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
    """Connect to a listener with the given security requirements.

    Args:
        options: The complete connection options.
        security: The security requirements for this side.
        host: The host, as for `connect`.
        port: The port, as for `connect`.
        data: Data for the listening application.
        family: The address family for the resolver.
        flags: The flags for the resolver.
        all_errors: Whether to raise an ExceptionGroup with the errors for all addresses if every
            attempt fails, as `loop.create_connection(all_errors=True)` does.
    """
    via, source, config = options["via"], options["source"], options["config"]
    port = check_peer(host, port)
    source = check_source(source)
    check_options(via, config)
    data = check_data(data)
    devices, allowed_devices = choose_devices(options["device"])
    target = Target(devices, allowed_devices, (host, port), source, config, security)
    resolve_host = partial(resolve, host, port, family=family, flags=flags)
    errors: list[Exception] = []
    try:
        connection = await _connect(target, via, resolve_host, data, errors)
    except (RDMAError, OSError) as error:
        observation.connection_failed(host_port((host, port)), error, accepted=False)
        if all_errors:
            raise ExceptionGroup("create_connection failed", errors or [error]) from None
        raise
    finally:
        errors.clear()  # break reference cycles through the tracebacks
    connection._begin(accepted=False)
    return connection


async def _connect(
    target: Target,
    via: Via,
    resolve_host: Callable[[], Awaitable[list[Address]]],
    data: bytes,
    errors: list[Exception],
) -> Connection:
    """Connect to the first working address of the host, and add failures to `errors`."""
    connect = connect_tcp.connect if via == "tcp" else connect_cm.connect
    try:
        async with asyncio.timeout(target.config.connect_timeout):
            for address in await resolve_host():
                try:
                    attempt = replace(
                        target, address=address, source=await resolve_source(address, target.source)
                    )
                    return await send_request_data(await connect(attempt), data)
                except OSError as error:
                    errors.append(error)
            raise errors[-1]
    except TimeoutError as error:
        errors.append(no_reply_error(target.address, via, target.config.connect_timeout))
        raise errors[-1] from error


@shows(EndpointOptions, ENDPOINT)
async def prepare_connection(
    *, address: str | None = None, **options: Unpack[EndpointOptions]
) -> PendingConnection:
    """Prepare one side of a connection whose endpoints you exchange yourself.

    See `PendingConnection` for the steps.

    Args:
        address: The local IP address at which the peer can reach this side. None selects the
            device's best address.
        device: The device or devices, as for `connect`.
        config: The settings for this side.
        auth: The pre-shared key, as for `connect`.
        encrypt: Whether to encrypt messages, as for `connect`.

    Returns:
        The pending connection. Send its `endpoint` to the peer.
    """
    given = complete("prepare_connection", options, ENDPOINT)
    config, security = given["config"], Security(given["auth"], encrypt=given["encrypt"])
    check_config(config)
    if address is not None:
        check_host(address, "address")
    devices, _ = choose_devices(given["device"])
    local_address = (await resolve(address, 0))[0] if address is not None else None
    return PendingConnection(devices, local_address, config, security)


def check_security(
    options: Options, ssl: SSLContext | None, hostname: str | None, *, stream: bool = False
) -> Security:
    """Return the security settings of a connection or listener after checking its options.

    `hostname` is the host that a client connects to, or None for a listener. `stream` says whether
    the connection carries a byte stream (aiordma.streams).
    """
    via, auth, encrypt = options["via"], options["auth"], options["encrypt"]
    if via not in ("cm", "tcp"):
        raise ValueError(f'via must be "cm" or "tcp", not {via!r}')
    if ssl is not None and via != "tcp":
        raise ValueError('ssl= requires via="tcp"')
    if auth is None and not encrypt and ssl is None and not stream:
        return NO_SECURITY
    security = Security(auth, ssl, hostname, encrypt, stream)
    if ssl is not None:
        check_context(ssl, client=hostname is not None)
    return security


class Listening:
    """The addresses of a listener or server."""

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The listening addresses. All of them have the same port."""
        raise NotImplementedError

    @property
    def address(self) -> Address:
        """The first of `addresses`.

        If you requested port 0, `address` contains the port that the system assigned.
        """
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
    """A listener for connections. Created by `listen`.

    Accept connections with `await listener.accept()` or `async for conn in listener`. New
    connections are queued until you accept them. If more than `backlog` connections are queued, the
    listener discards queued connections that have already ended. `close` closes all queued
    connections.

    `device` is the name of the listener's device, or of the first device if there are several.
    """

    def __init__(self, device: str, backlog: int) -> None:
        self.device = device
        self._backlog = backlog
        self._prune_above = backlog  # length of `_ready` above which ended connections are removed
        self._affinity = LoopAffinity()
        self._loop_shutdown = shutdown.for_running_loop()
        self._ports: Sequence[Port] = ()
        self._acceptor: Acceptor  # set by `_start`
        self._failure: Exception | None = None
        self._ready: deque[Connection] = deque()
        self._waiters = WaitQueue()
        self._closed = False
        self._was_stopped = False  # whether `stop` was called, but not yet `close`

    def __repr__(self) -> str:
        state = "closed" if self._closed else "listening"
        where = ", ".join(map(host_port, self.addresses)) or "no address yet"
        return f"<Listener on {self.device} at {where}, {state}>"

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The addresses on which the listener accepts connections. All have the same port."""
        return tuple(port.address for port in self._ports)

    def _figures(self) -> ListenerState:
        """Return this listener's entry for `aiordma.snapshot`. Any thread may call this method."""
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
        self._loop_shutdown.remove(self)
        self._end_without_loop()
        self._waiters.wake_all()

    def _fail(self, error: Exception) -> None:
        """Stop listening after the device has failed, so that the device can be opened again."""
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
            # Drop closed connections so that the queue cannot grow without bound. Peers can connect
            # and disconnect any number of times, and `Config.max_connections` limits only open
            # connections.
            waiting = [connection for connection in self._ready if not connection.closed]
            self._ready.clear()
            self._ready.extend(waiting)
            self._prune_above = max(self._backlog, 2 * len(self._ready))
        self._waiters.wake()

    async def accept(self) -> Connection:
        """Wait for the next connection and return it.

        Cancelling the wait does not lose a connection.

        Raises:
            ConnectionClosedError: If the listener has been closed.
            DeviceEventError: If all of the listener's devices have failed. The listener is then
                unusable, so create a new listener.
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
        """Iterate over new connections until the listener is closed.

        Raises:
            DeviceEventError: If all of the listener's devices have failed.
        """
        while True:
            try:
                connection = await self.accept()
            except ConnectionClosedError:
                return
            yield connection

    def stop(self) -> None:
        """Stop listening immediately. The port can be reused as soon as this method returns.

        You can still accept queued connections. `close` closes the remaining queued connections.
        """
        if self._affinity.is_after_fork:
            return
        self._affinity.check(self)
        if not self._closed:
            self._stop()
            self._was_stopped = True

    async def close(self) -> None:
        """Stop listening, and close all connections that have not been accepted.

        Accepted connections stay open. Closing a listener again has no effect.
        """
        is_fully_closed = self._closed and self._failure is None and not self._was_stopped
        if self._affinity.is_after_fork or is_fully_closed:
            return
        self._affinity.check(self)
        if not self._closed:
            self._stop()
        self._was_stopped = False
        await self._acceptor.close()
        unaccepted = list(self._ready)
        self._ready.clear()
        for connection in unaccepted:
            connection.abort()
        for connection in unaccepted:
            await connection.wait_closed()

    async def _end_with_loop(self) -> None:
        await self.close()

    def _end_without_loop(self) -> None:
        self._closed = True
        self._acceptor.closed = True
        for port in self._ports:
            port.release()

    def _drop(self) -> None:
        """Close the listener after it has been garbage-collected, unless it is already closed."""
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
    """Return a function that delivers connections to the listener without keeping it alive."""
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
    """Listen for connections.

    If a host name has several addresses, the listener uses every address that belongs to this
    machine. All addresses have the same port (`Listener.addresses`). `Config.max_connections` and
    `Config.max_handshakes` limit the number of connections and concurrent handshakes.

    Args:
        host: The host name or numeric address to listen on. "" and "::" mean all addresses.
        port: The port. 0 selects a free port (`Listener.port`).
        device: The device or devices, as for `connect`. If a connection adds another queue pair,
            the listener prefers a device that the connection is not using yet.
        via: The connection method, "cm" or "tcp". It must be the same on both sides.
        backlog: The maximum number of requests waiting in the connection manager (`via="cm"`). If
            more than `backlog` connections are waiting for `accept`, the listener discards waiting
            connections that have already ended.
        config: The settings for this side.
        auth: The pre-shared key, as for `connect`.
        encrypt: Whether to encrypt messages, as for `connect`.
        ssl: A server's TLS context, with a certificate, for the TCP bootstrap (`via="tcp"` only).
        on_request: A function or coroutine function that decides whether to accept a
            `ConnectionRequest`. The listener calls the function after the peer has proved that it
            knows the key. The function returns None to accept the connection, or a str with the
            reason to refuse the connection. The peer's RejectedError contains the reason. The
            decision must be made within `Config.handshake_timeout`.

    Returns:
        The listener.

    Raises:
        AddressError: If the host cannot be resolved, or the address cannot be used.
        OSError: If the system refuses the address. `errno` is the reason, for example EADDRINUSE.
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
    """Listen on one or more hosts with the given security requirements.

    `family` and `flags` are passed to the resolver.
    """
    via, config = options["via"], options["config"]
    check_options(via, config)
    if on_request is not None:
        callback("on_request", on_request, "a ConnectionRequest", awaited=True)
    port, backlog = port_number(port), integer("backlog", options["backlog"], 0, I32_MAX)
    hosts = host if isinstance(host, list) else [host]
    for each in hosts:
        check_host(each)
    devices, allowed_names = choose_devices(options["device"])
    addresses: list[Address] = []
    for each in hosts:
        any_address = "0.0.0.0" if family == socket.AF_INET else "::"
        addresses += await resolve(
            each or any_address, port, passive=True, family=family, flags=flags
        )
    if not addresses:
        raise ValueError("host must not be an empty sequence")
    # Create the listener after the last await. Its constructor stores the loop's LoopShutdown,
    # which another task may end during an await by closing the loop's last open object.
    listener = Listener(devices[0].name, backlog)
    acceptor = Acceptor(
        config,
        security,
        devices,
        deliver_to(listener),
        shutdown.weak_method(listener._fail),
        on_request,
    )

    def listen_on(address: Address) -> Port:
        if via == "tcp":
            return connect_tcp.TCPListener(address, acceptor)
        return connect_cm.CMListener(allowed_names, address, backlog, acceptor)

    listener._start(open_ports(listen_on, addresses), acceptor)
    return listener


Handler = Callable[[Connection], Awaitable[None]]


def check_handler(handler: Handler) -> None:
    """Raise TypeError unless `handler` is a coroutine function that accepts one argument.

    Bound methods and wrapped coroutine functions are also valid. For compiled callables such as
    Cython functions, only the signature is checked, because the return type is unknown.
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
                f"the handler {handler!r} is not a coroutine function: write `async def "
                "handler(conn)`, and use functools.partial to pass more arguments"
            )
        elif isinstance(method := type(function).__call__, FunctionType):
            function = method
        else:
            break
    hint = "; for a reader and a writer, use aiordma.streams.start_stream_server"
    check_signature(handler, 1, "one argument, the connection", hint)


def check_signature(
    handler: Callable[..., object], count: int, arguments: str, hint: str = ""
) -> None:
    """Raise TypeError if `handler` cannot be called with `count` positional arguments."""
    if not callable(handler):
        raise TypeError(refusal("the handler", f"a function of {arguments}", handler))
    if why := signature_error(handler, [None] * count):
        raise TypeError(f"the handler {handler!r} must accept {arguments}: {why}{hint}")


class Server(Listening, AsyncContext):
    """A server that runs a handler for each connection. Created by `start_server`."""

    def __init__(self, listener: Listener, handler: Handler) -> None:
        self._listener = listener
        self._handler = handler
        self._tasks: dict[asyncio.Task[None], Connection] = {}
        self._handling: set[asyncio.Task[None]] = set()  # tasks whose handlers have not ended
        self._closing = False
        self._affinity = LoopAffinity()
        self._loop_shutdown = shutdown.for_running_loop()
        # Like asyncio's servers, keep serving even if the program drops its reference.
        self._loop_shutdown.add(self, keep=True)
        self._accepting = self._affinity.loop.create_task(self._accept())

    def __repr__(self) -> str:
        return f"<Server of {self._listener!r}, {len(self._tasks)} connections>"

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The addresses on which the server accepts connections. All have the same port."""
        return self._listener.addresses

    @property
    def device(self) -> str:
        """The name of the device on which the server is listening."""
        return self._listener.device

    @property
    def connections(self) -> int:
        """The number of handlers currently running."""
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
        self._handling.discard(task)  # needed if the task was cancelled before it began

    async def _serve(self, connection: Connection) -> None:
        """Run the handler, then close the connection with a goodbye that says how it ended."""
        goodbye: protocol.Goodbye | None = protocol.GOODBYE
        try:
            await self._handler(connection)
            if self._closing:
                goodbye = protocol.GOING_AWAY
        except ConnectionError as error:
            logger.info("%r: the handler ended with %s", connection, error)
            goodbye = protocol.failure_goodbye(error)
        except shutdown.EXITS as error:
            connection._close_at_exit(error)
            goodbye = None
            raise
        except BaseException as error:
            cut_off = self._closing and isinstance(error, asyncio.CancelledError)
            goodbye = protocol.CUT_OFF if cut_off else protocol.failure_goodbye(error)
            if isinstance(error, shutdown.UNWINDING):
                raise
            # As in asyncio.start_server, report the handler's failure and keep serving.
            self._affinity.loop.call_exception_handler(
                {"message": f"handler of {connection!r} failed", "exception": error}
            )
        finally:
            # Pass the loop explicitly, because this may run after the loop has been closed, when no
            # loop is running.
            current = asyncio.current_task(self._affinity.loop)
            self._handling.discard(cast("asyncio.Task[None]", current))
            if goodbye is not None:
                await connection._close(goodbye)

    async def serve_forever(self) -> None:
        """Serve until the task is cancelled or another task closes the server.

        Cancelling the task closes the server without a grace period. If another task closes the
        server, this method waits until the server has finished closing.

        Raises:
            DeviceEventError: If all of the server's devices have failed. The server is then
                unusable, so start a new server.
            RuntimeError: If the server is already closed.
        """
        self._affinity.check(self)
        if self._closing:
            raise RuntimeError(f"{self!r} is closed; start another server")
        try:
            await asyncio.shield(self._accepting)
            if self._tasks:  # another task called `close` with a grace period
                await asyncio.wait(self._tasks)
        finally:
            await self.close()

    async def close(self, grace: float = 0.0) -> None:
        """Stop accepting connections, and end all handlers.

        Handlers may run for up to `grace` more seconds before they are cancelled. If a handler is
        cancelled, its peer gets ConnectionBrokenError.

        If a handler iterates over its connection with `async for`, the iteration ends once the
        handler has consumed all received messages. An idle handler of this kind therefore returns
        normally instead of being cancelled, even if `grace` is 0. The handler's peer gets
        ConnectionClosedError (`by_peer`). A handler waiting in `recv` keeps waiting, because it may
        be in the middle of a request.

        The call returns once all connections are closed. Until then, another call can shorten the
        grace period. For example, `close()` ends the grace period immediately.

        Args:
            grace: The maximum time to wait for handlers, in seconds. `math.inf` means no limit.
        """
        if self._affinity.is_after_fork:
            return
        self._affinity.check(self)
        grace = seconds("grace", grace, allow_infinity=True)
        self._closing = True
        await self._listener.close()
        await asyncio.gather(self._accepting, return_exceptions=True)  # cancelled if the loop ends
        self._loop_shutdown.remove(self)
        for connection in self._tasks.values():
            connection._messages.end_iteration()
        await asyncio.sleep(0)  # let idle handlers return
        if grace > 0 and self._handling:
            await asyncio.wait(self._handling, timeout=grace)
        for task in self._handling:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _end_with_loop(self) -> None:
        await self.close()

    def _end_without_loop(self) -> None:
        """Do nothing, because the listener and the connections are closed separately."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


@shows(ListenOptions, LISTEN)
async def start_server(
    handler: Handler, host: str = "", port: int = 0, **options: Unpack[ListenOptions]
) -> Server:
    """Start a server that runs `handler(conn)` as a task for each connection.

    A connection is closed when its handler returns. If the handler raises an exception, the peer
    gets a ConnectionBrokenError that contains the exception's type but not its text. A
    ConnectionError is only logged, because it usually means that the peer has gone away. Any other
    exception is passed to the event loop's exception handler.

    Args:
        handler: A coroutine function that accepts the connection as its only argument. It may also
            be a bound method, a `functools.partial`, a decorated function, or an object with an
            asynchronous `__call__`.
        host: The address to listen on, as for `listen`.
        port: The port, as for `listen`.
        **options: The remaining keyword arguments of `listen`.

    Returns:
        The running server.

    Raises:
        TypeError: If `handler` is not a coroutine function that accepts one argument.
    """
    check_handler(handler)
    given = complete("start_server", options, LISTEN)
    return Server(await listen(host, port, **given), handler)
