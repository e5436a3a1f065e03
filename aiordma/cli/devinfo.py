"""`aiordma devinfo`: list the RDMA devices from all libraries, with their ports and addresses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import IntEnum, IntFlag

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import aiordma
from aiordma import verbs

from .devices import DeviceInfo, PortInfo
from .tables import table

STATES = {verbs.PortState.ACTIVE: "green", verbs.PortState.DOWN: "red"}


@click.command()
@click.option("-v", "--verbose", is_flag=True, help="Show all attributes of devices and ports.")
@click.option("--json", "as_json", is_flag=True, help="Print all attributes as JSON.")
@click.argument("device", required=False)
def devinfo(device: str | None, verbose: bool, as_json: bool) -> None:
    """Show the RDMA devices of this machine, or only DEVICE.

    The list contains the devices of the system and the embedded device. For each device, it shows
    the ports with their state, link, MTU and speed. For each port, it shows the GIDs with their
    index, type, address and network interface.

    The exit status is 1 if DEVICE does not exist, or if a device cannot be queried.
    """
    try:
        devices = [verbs.find_device(device)] if device else verbs.devices()
    except aiordma.RDMAError as error:
        raise click.ClickException(str(error)) from error
    missing = verbs.missing_library()
    found = [(each, DeviceInfo.ask(each)) for each in devices]
    if as_json:
        everything = {
            "system_library_problem": None if missing is None else str(missing),
            "devices": [device_to_plain(each, info) for each, info in found],
        }
        click.echo(json.dumps(everything, indent=2))
    else:
        console = Console()
        if missing is not None:
            warning = f"No system devices: {escape(str(missing))}\n"
            console.print(warning, style="yellow", highlight=False)
        elif not device and all(each.library.name == "embedded" for each in devices):
            console.print("The system has no RDMA device. Run aiordma doctor to see why.\n")
        for each, info in found:
            show_device(console, each, info, verbose)
    if any(info.problem for _, info in found):
        raise SystemExit(1)


# ---- JSON ---------------------------------------------------------------------------------------


def device_to_plain(device: verbs.Device, info: DeviceInfo) -> dict[str, object]:
    """Return a device's attributes in the form of the --json output."""
    result: dict[str, object] = {
        "name": device.name,
        "library": device.library.name,
        "node_type": json_value(device.node_type),
        "transport_type": json_value(device.transport_type),
        "guid": guid_text(device.guid),
        "numa_node": device.numa_node,
        "problem": info.problem or None,
    }
    if info.extended is not None:
        extended = json_value(info.extended)
        assert isinstance(extended, dict)
        result["num_comp_vectors"] = info.num_comp_vectors
        result["attributes"] = extended.pop("orig_attr")
        result["extended_attributes"] = extended
        result["ports"] = [port_to_plain(port) for port in info.ports]
    return result


def port_to_plain(port: PortInfo) -> dict[str, object]:
    """Return a port's attributes, GIDs and P_Keys in the form of the --json output."""
    attributes = json_value(port.attributes)
    assert isinstance(attributes, dict)
    return {
        **attributes,
        "gigabits": port.attributes.gigabits,
        "gids": [
            {
                "index": entry.gid_index,
                "gid": str(entry.gid),
                "ip": str(entry.gid.ip) if entry.gid_type is not verbs.GIDType.IB else None,
                "type": entry.gid_type.name,
                "interface": entry.ndev or None,
                "problem": entry.problem() or None,
                "chosen": entry == port.chosen,
            }
            for entry in port.gids
        ],
        "pkeys": {str(index): f"{pkey:#06x}" for index, pkey in port.pkeys},
    }


def guid_text(guid: int) -> str:
    """Format a GUID the way ibv_devinfo(1) does, for example as 0200:00ff:feec:db70."""
    digits = f"{guid:016x}"
    return ":".join(digits[at : at + 4] for at in range(0, 16, 4))


def flag_names(flags: IntFlag) -> list[str]:
    """Return the names of the bits set in `flags`.

    Unnamed bits are combined into a single hexadecimal number.
    """
    known = list(flags)
    rest = int(flags) & ~sum(int(flag) for flag in known)
    return [str(flag.name) for flag in known] + ([f"{rest:#x}"] if rest else [])


def json_value(value: object) -> object:
    """Convert a value to a type that JSON supports.

    Enumeration members and flags become names, MTUs become byte counts, and GUIDs become text.
    """
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {
            name: guid_text(found) if name.endswith("_guid") else json_value(found)
            for name, found in value._asdict().items()
        }
    if isinstance(value, IntFlag):
        return flag_names(value)
    if isinstance(value, verbs.MTU):
        return value.bytes
    if isinstance(value, IntEnum):
        return value.name
    if isinstance(value, frozenset):
        return sorted(str(json_value(each)) for each in value)
    return value


# ---- tables -------------------------------------------------------------------------------------


def show_device(console: Console, device: verbs.Device, info: DeviceInfo, verbose: bool) -> None:
    """Print a device's ports and GIDs, and with `verbose`, all of its attributes."""
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


def ports_table(ports: tuple[PortInfo, ...]) -> Table:
    made = table("port", "state", "link", "MTU", "speed", "LID", "P_Keys", numbers=("port", "LID"))
    for port in ports:
        it = port.attributes
        colour = STATES.get(it.state, "default")
        made.add_row(
            str(it.port_num),
            f"[{colour}]{it.state.name}[/]",
            # An unspecified link layer means InfiniBand (ibv_query_port(3)).
            "Ethernet" if it.link_layer is verbs.LinkLayer.ETHERNET else "InfiniBand",
            f"{it.active_mtu.bytes} of {it.max_mtu.bytes}",
            "unknown" if it.gigabits is None else f"{it.lanes} x {it.lane_gigabits:g} Gb/s",
            str(it.lid),
            ", ".join(f"{pkey:#06x}" for _, pkey in port.pkeys),
        )
    return made


def gids_table(ports: tuple[PortInfo, ...]) -> Table | None:
    made = table("port", "index", "GID", "type", "interface", "", numbers=("port", "index"))
    for port in ports:
        for entry in port.gids:
            made.add_row(
                str(entry.port_num),
                str(entry.gid_index),
                str(entry.gid),
                entry.gid_type.name.replace("ROCE_V", "RoCE v"),
                escape(entry.ndev),
                "[green]default[/]" if entry == port.chosen else entry.problem(),
            )
    return made if made.row_count else None


def flat(value: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the text of each leaf in a nested JSON value.

    Dotted names omit the component ``orig_attr``.
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from flat(inner, prefix if name == "orig_attr" else f"{prefix}{name}.")
    elif isinstance(value, list):
        yield prefix[:-1], ", ".join(value) or "none"
    else:
        yield prefix[:-1], f"{value:,}" if isinstance(value, int) else str(value)
