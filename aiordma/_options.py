"""The options for connecting and listening. Each type and default is defined only once.

A function takes them as `**options: Unpack[...]`, which type checkers understand. `complete` adds
the defaults, and `shows` lists them individually in the function's signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from ssl import SSLContext
from typing import Any, Literal, TypedDict, TypeVar, cast, get_type_hints

from ._transport.inspection import OnRequest
from .cm.address import Address
from .config import DEFAULT, Config, Encrypt

F = TypeVar("F", bound=Callable[..., Any])
O = TypeVar("O", bound=Mapping[str, object])  # noqa: E741 - options

Via = Literal["cm", "tcp"]
Devices = str | list[str] | tuple[str, ...] | None
TLS = SSLContext | bool | None


class EndpointOptions(TypedDict, total=False):
    device: Devices
    config: Config
    auth: bytes | None
    encrypt: Encrypt


class Options(EndpointOptions, total=False):
    via: Via


class ClientOptions(Options, total=False):
    source: Address | None


class ServerOptions(Options, total=False):
    backlog: int


class ConnectOptions(ClientOptions, total=False):
    ssl: SSLContext | None
    data: bytes


class ListenOptions(ServerOptions, total=False):
    ssl: SSLContext | None
    on_request: OnRequest | None


class StreamOptions(ClientOptions, total=False):
    ssl: TLS
    server_hostname: str | None


class StreamServerOptions(ServerOptions, total=False):
    ssl: TLS
    start_serving: bool


ENDPOINT: EndpointOptions = {"device": None, "config": DEFAULT, "auth": None, "encrypt": False}
CLIENT: ClientOptions = {"device": None, "via": "cm", "source": None, **ENDPOINT}
SERVER: ServerOptions = {"device": None, "via": "cm", "backlog": 128, **ENDPOINT}
CONNECT: ConnectOptions = {**CLIENT, "ssl": None, "data": b""}
LISTEN: ListenOptions = {**SERVER, "ssl": None, "on_request": None}
STREAM: StreamOptions = {**CLIENT, "ssl": None, "server_hostname": None}
STREAM_SERVER: StreamServerOptions = {**SERVER, "ssl": None, "start_serving": True}


def complete(call: str, options: O, defaults: O) -> O:
    """Return the options with defaults filled in.

    Raises:
        TypeError: If the function does not accept an option. The message suggests the Config
            setting with that name, if any.
    """
    for name in options:
        if name not in defaults:
            # Only functions that listen accept `backlog`. All others connect.
            time_limit = "handshake_timeout" if "backlog" in defaults else "connect_timeout"
            setting = time_limit if name == "timeout" else name
            known = setting in Config.__dataclass_fields__
            instead = f"pass config=aiordma.Config({setting}=...) instead"
            hint = instead if known else f"the options are {', '.join(defaults)}"
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}; {hint}")
    return cast(O, {**defaults, **options})


def shows(types: type, defaults: Mapping[str, object]) -> Callable[[F], F]:
    """Return a decorator that makes `help` list each of a function's `**options`."""
    assert types.__annotations__.keys() <= defaults.keys(), "an option without a default"
    hints = get_type_hints(types)
    shown = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, annotation=hints[name], default=value
        )
        for name, value in defaults.items()
    ]

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        *own, _ = signature.parameters.values()  # the last parameter is `**options`
        function.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
        return function

    return decorate
