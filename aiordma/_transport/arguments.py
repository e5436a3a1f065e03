"""Checks for arguments of a wrong type, with errors that describe the correct type.

They are for programs that are not checked by a type checker.
"""

from __future__ import annotations

from ssl import PROTOCOL_TLS_CLIENT, PROTOCOL_TLS_SERVER, SSLContext
from typing import TypeVar

from .._core.arguments import host_name, instance, integer, refusal
from .._core.fields import MAX_RAILS
from ..config import Config
from ..errors import AddressError
from ..mr_pool import LocalMemory
from ..verbs._device.device import ALL, SYSTEM

T = TypeVar("T")


def check_host(host: object, name: str = "host") -> None:
    """Check a host name or address without resolving it.

    Raises:
        TypeError: If `host` is not a str.
        AddressError: If the name is invalid, or the resolver would truncate it.
    """
    try:
        host_name(name, host, "a str such as '192.0.2.1' or 'server.example'")
    except ValueError as error:
        raise AddressError(str(error)) from None


def device_names(names: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """Check the names of several devices and return them. Raises TypeError or ValueError."""
    for name in names:
        instance("device", name, str, "a list of device names, such as ['mlx5_0', 'mlx5_1']")
        if not name:
            raise ValueError(f"device contains an empty name: {list(names)}")
        if name in (SYSTEM, ALL):
            raise ValueError(f"device={name!r} cannot be combined with other devices")
    if not names:
        raise ValueError("device is an empty list; use None for the default device")
    if len(set(names)) < len(names):
        raise ValueError(f"device contains a duplicate name: {', '.join(names)}")
    if len(names) > MAX_RAILS:
        raise ValueError(
            f"too many devices: {len(names)} (a connection can use at most {MAX_RAILS})"
        )
    return tuple(names)


def port_number(port: object) -> int:
    return integer("port", port, 0, 0xFFFF)


def check_peer(host: object, port: object) -> int:
    """Check the address of a peer without resolving it, and return the port.

    Raises:
        TypeError: If the host is not a str, or the port is not an int.
        ValueError: If the port is out of range.
        AddressError: If the host is empty or invalid.
    """
    check_host(host)
    if not host:
        raise AddressError("host must be the name or address of the peer, not ''")
    return integer("port", port, 1, 0xFFFF)


def check_source(source: object) -> tuple[str, int] | None:
    """Check the local address of a connection, and return it with the port as an int."""
    match source:
        case None:
            return None
        case (str(host), port):
            check_host(host, "the host of source")
            return host, integer("the port of source", port, 0, 0xFFFF)
        case _:
            wanted = "a local (host, port) such as ('192.0.2.1', 0)"
            raise TypeError(refusal("source", wanted, source))


def check_context(context: SSLContext, *, client: bool) -> None:
    """Raise ValueError if the TLS context is for the opposite role, client or server."""
    if client and context.protocol == PROTOCOL_TLS_SERVER:
        raise ValueError(
            "ssl is a server context, but this side is a client; create a client context with "
            "ssl.create_default_context()"
        )
    if not client and context.protocol == PROTOCOL_TLS_CLIENT:
        raise ValueError(
            "ssl is a client context, but this side is a server; create a server context with "
            "ssl.create_default_context(ssl.Purpose.CLIENT_AUTH) and load a certificate"
        )


def check_config(config: object) -> None:
    hint = "write aiordma.Config(**config)" if isinstance(config, dict) else ""
    wanted = "an aiordma.Config, such as Config(max_message=1 << 20)"
    instance("config", config, Config, wanted, hint)


# The connection manager derives these values from the route, and its API cannot set them.
UNSUPPORTED_BY_CM = {
    "path_mtu": "the route gives it",
    "gid_index": "pass a source address as source=",
    "pkey": "the network interface of the address gives it",
    "hop_limit": "the route gives it",
    "service_level": "the route gives it",
}


def check_options(via: str, config: Config) -> None:
    """Check that the connection method `via` supports all options set in `config`.

    Raises:
        TypeError: If `config` is not a Config.
        ValueError: If an option is not supported.
    """
    check_config(config)
    if via != "cm":
        return
    for name, instead in UNSUPPORTED_BY_CM.items():
        if getattr(config, name) is not None:
            raise ValueError(
                f'Config.{name} is not supported with via="cm": {instead}; use via="tcp"'
            )


def check_remote_memory(memory: object, wanted: type[T]) -> T:
    """Return `memory` if it refers to the peer's memory, and raise TypeError otherwise."""
    if isinstance(memory, wanted):
        return memory
    what = "local memory" if isinstance(memory, LocalMemory) else type(memory).__name__
    raise TypeError(
        f"the peer's memory must be a RemoteRegion (recv_region, request_region, open_region) or "
        f"a slice of one, not {what}" + (f": {memory!r}" if isinstance(memory, LocalMemory) else "")
    )
