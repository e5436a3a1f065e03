"""The tables of `aiordma devinfo`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from aiordma import verbs

from .json_values import guid_text, json_value

if TYPE_CHECKING:
    from .devinfo import DeviceInfo, PortInfo

STATES = {verbs.PortState.ACTIVE: "green", verbs.PortState.DOWN: "red"}


def table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """A table whose last column is cut on a narrow terminal: the others are never cut."""
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        made.add_column(
            column,
            justify="right" if column in numbers else "left",
            no_wrap=column != columns[-1],
            overflow="fold",
        )
    return made


def show_device(console: Console, info: DeviceInfo, verbose: bool) -> None:
    device = info.device
    console.print(
        f"[bold]{escape(device.name)}[/] ({device.library.name} library), "
        f"{device.node_type.name}, GUID {guid_text(device.guid)}",
        highlight=False,
    )
    if info.problem:
        console.print(f"{escape(info.problem)}\n", style="red", highlight=False)
        return
    console.print(ports_table(info.ports))
    if gids := gids_table(info.ports):
        console.print(gids)
    if verbose:
        for name, value in (
            ("device", info.extended),
            *((f"port {port.attributes.port_num}", port.attributes) for port in info.ports),
        ):
            rows = table(f"{name}: attribute", "value")
            for attribute, text in flat(json_value(value)):
                rows.add_row(attribute, text)
            console.print(rows)


def ports_table(ports: list[PortInfo]) -> Table:
    made = table("port", "state", "link", "MTU", "speed", "LID", "P_Keys", numbers=("port", "LID"))
    for port in ports:
        it = port.attributes
        state = (
            it.state.name if it.state not in STATES else f"[{STATES[it.state]}]{it.state.name}[/]"
        )
        made.add_row(
            str(it.port_num),
            state,
            link_text(it.link_layer),
            f"{it.active_mtu.bytes} of {it.max_mtu.bytes}",
            "unknown" if it.gigabits is None else f"{it.lanes} x {it.lane_gigabits:g} Gb/s",
            str(it.lid),
            ", ".join(f"{pkey:#06x}" for pkey in port.pkeys.values()),
        )
    return made


def link_text(layer: verbs.LinkLayer) -> str:
    """The link layer; unspecified means InfiniBand: ibv_query_port(3)."""
    return "Ethernet" if layer is verbs.LinkLayer.ETHERNET else "InfiniBand"


def gids_table(ports: list[PortInfo]) -> Table | None:
    made = table("port", "index", "GID", "type", "interface", "", numbers=("port", "index"))
    for port in ports:
        for entry in port.gids:
            made.add_row(
                str(entry.port_num),
                str(entry.gid_index),
                str(entry.gid),
                entry.gid_type.name.replace("ROCE_V", "RoCE v"),
                escape(entry.ndev),
                "[green]is taken by default[/]" if entry == port.chosen else entry.problem(),
            )
    return made if made.row_count else None


def flat(value: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and texts of a JSON value; the basic attributes have no prefix."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from flat(inner, prefix if name == "orig_attr" else f"{prefix}{name}.")
    elif isinstance(value, list):
        yield prefix[:-1], ", ".join(value) or "none"
    else:
        yield prefix[:-1], f"{value:,}" if isinstance(value, int) else str(value)
