"""Options shared by several commands, and the types of their values."""

from __future__ import annotations

import asyncio
import importlib
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar, cast

import click

from aiordma import verbs
from aiordma.config import DEFAULT
from aiordma.transport import find_devices

from .tables import size_text

Via = Literal["cm", "tcp"]
LoopFactory = Callable[[], asyncio.AbstractEventLoop]
Command = TypeVar("Command", bound=Callable[..., Any])

UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
NO_MEMORY = "not enough memory for messages of this size; choose a smaller size"
MOST_BYTES = 1 << 62  # as for Config.max_message
SIZE = re.compile(r"([0-9]{1,30})\s*(?:([KMG])(?:i?B)?|B?)", re.IGNORECASE)
QP_NUM = re.compile(r"0x[0-9a-f]{1,6}|[0-9]{1,8}", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Parse a number of bytes, such as 64, 4KiB or 1M. K, M and G are powers of 1024."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"invalid size {text!r}: expected a number such as 64, 4KiB or 1M")
    size = int(match[1]) * UNITS[(match[2] or "").upper()]
    if size > MOST_BYTES:
        raise click.BadParameter(f"invalid size {text!r}: the maximum is {MOST_BYTES} bytes")
    return size


def parse_sizes(value: str | list[int]) -> list[int]:
    if not isinstance(value, str):
        return value
    return [parse_size(part) for part in value.split(",")]


def check_sizes(sizes: Iterable[int]) -> None:
    """Reject sizes that exceed the maximum message size.

    Commands call this function before opening a connection, so that invalid sizes fail early.
    """
    longest = DEFAULT.max_message
    for size in sizes:
        if size > longest:
            raise click.BadParameter(
                f"the message size must be at most {size_text(longest)}, not {size_text(size)}",
                param_hint="--sizes",
            )


def parse_qp_num(text: str) -> int:
    if QP_NUM.fullmatch(text) is None:
        raise click.BadParameter(
            f"invalid queue pair number {text!r}: expected a number such as 17 or 0x11"
        )
    return int(text, 16 if text[:2] in ("0x", "0X") else 10)


URL = re.compile(
    r"(?:[a-z][a-z0-9+.-]*://)?(?:\[(?P<ip>[^]]+)\]|(?P<name>[^]:/[]+))(?::(?P<port>[^:/]*))?(?:/.*)?",
    re.IGNORECASE,
)


def plain_host(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Reject a host with a scheme, brackets, a port or a path, and suggest a correction."""
    found = URL.fullmatch(value or "")
    if found is None:  # also if there is no value
        return value
    host = found["ip"] or found["name"]
    if value == host:
        return value
    instead = f"--host {host}" if isinstance(param, click.Option) else host
    if (found["port"] or "").isdecimal() and any(it.name == "port" for it in ctx.command.params):
        instead += f" --port {found['port']}"
    raise click.UsageError(
        f"{value!r} is not a plain host name or address; use {instead!r} instead", ctx
    )


class FiniteRange(click.FloatRange):
    """A range of floating-point numbers that excludes NaN and infinity."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class SizeType(click.ParamType[int]):
    name = "size"

    def convert(
        self, value: str | int, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        return parse_size(value) if isinstance(value, str) else value


def loop_factory(name: str) -> LoopFactory:
    if name == "asyncio":
        return asyncio.new_event_loop
    try:
        module = importlib.import_module("uvloop")
    except ModuleNotFoundError as error:
        raise click.UsageError("uvloop is not installed; run 'pip install uvloop'") from error
    return cast(LoopFactory, module.new_event_loop)


def transport_options(command: Command) -> Command:
    for option in (
        click.option("--loop", type=click.Choice(["asyncio", "uvloop"]), default="asyncio",
            show_default=True, help="Event loop to use."),
        click.option("--via", type=click.Choice(["cm", "tcp"]), default="cm", show_default=True,
            help="Connect with the RDMA connection manager (cm) or a TCP bootstrap (tcp)."),
        click.option("--device", metavar="NAME,...", envvar="AIORDMA_DEVICE", show_envvar=True,
            help="RDMA device, several separated by commas, or all [default: one with an active "
            "port, or the embedded device]."),
    ):  # fmt: skip
        command = option(command)
    return command


def connection_options(command: Command) -> Command:
    help_text = "Address to listen on [default: an address of the device]."
    return transport_options(
        click.option("--host", metavar="ADDRESS", help=help_text, callback=plain_host)(command)
    )


def chosen_devices(named: str | None) -> tuple[verbs.Device, str]:
    """Find the devices in the comma-separated list `named`.

    Returns the first device and a comma-separated string of all device names.
    """
    try:
        devices = find_devices(named)
    except ValueError as error:  # such as a device that is named twice
        raise click.UsageError(f"--device or AIORDMA_DEVICE: {error}") from None
    return devices[0], ",".join(device.name for device in devices)


def own_address(device: verbs.Device) -> str:
    """Return an address that programs on this machine can use to reach the device.

    Loopback addresses are preferred.
    """
    with device.open() as context:
        entries = [entry for entry in context.query_gid_table() if entry.gid.ip.is_loopback]
        entry = entries[0] if entries else context.choose_gid()
    if entry.gid_type is verbs.GIDType.IB:
        raise click.UsageError(
            f"the GIDs of the InfiniBand device {device.name} are not IP addresses; use --host to "
            "specify the address of its IPoIB interface"
        )
    ip = entry.gid.ip
    return f"{ip}%{entry.ndev}" if ip.version == 6 and ip.is_link_local else str(ip)
