"""`aiordma devinfo`: the devices of every library, their ports and addresses."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import click
from rich.console import Console
from rich.markup import escape

import aiordma
from aiordma import verbs

from .devinfo_tables import show_device
from .json_values import guid_text, json_value


@dataclass(frozen=True, slots=True)
class PortInfo:
    """A port with its tables. ``chosen`` is the GID that aiordma selects."""

    attributes: verbs.PortAttributes
    gids: list[verbs.GIDEntry]
    pkeys: dict[int, int]
    chosen: verbs.GIDEntry | None


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device; ``problem`` says why it could not be queried, and is empty if it could."""

    device: verbs.Device
    problem: str = ""
    num_comp_vectors: int = 0
    extended: verbs.ExtendedDeviceAttributes | None = None
    ports: list[PortInfo] = field(default_factory=list)

    @classmethod
    def ask(cls, device: verbs.Device) -> DeviceInfo:
        """Every attribute of the device; an attribute that it cannot report does not raise."""
        try:
            with device.open() as context:
                return cls(
                    device,
                    num_comp_vectors=context.num_comp_vectors,
                    extended=context.query_device_ex(),
                    ports=[
                        ask_port(context, number)
                        for number in range(1, context.query_device().phys_port_cnt + 1)
                    ],
                )
        except aiordma.RDMAError as error:
            return cls(device, problem=str(error))


def ask_port(context: verbs.Context, number: int) -> PortInfo:
    gids = [entry for entry in context.query_gid_table() if entry.port_num == number]
    return PortInfo(
        context.query_port(number),
        gids,
        context.query_pkey_table(number),
        context.choose_gid(number) if gids else None,
    )


@click.command()
@click.option("-v", "--verbose", is_flag=True, help="Show every attribute of the device and ports.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every attribute.")
@click.argument("device", required=False)
def devinfo(device: str | None, verbose: bool, as_json: bool) -> None:
    """Show the RDMA devices of this machine, or DEVICE alone.

    Those of the system's libraries and the embedded one, each with its ports (state, link, MTU,
    speed) and their GIDs (index, type, address, network interface). The exit status is 1 when
    there is no such device, or one of those shown could not be asked.
    """
    try:
        chosen = [verbs.find_device(device)] if device else verbs.devices()
    except aiordma.RDMAError as error:
        raise click.ClickException(str(error)) from error
    missing = verbs.missing_library()
    found = [DeviceInfo.ask(each) for each in chosen]
    if as_json:
        click.echo(to_json(missing, found))
    else:
        console = Console()
        if missing is not None:
            told = f"No devices of the system: {escape(str(missing))}\n"
            console.print(told, style="yellow", highlight=False)
        elif not device and all(info.device.library.name == "embedded" for info in found):
            console.print("The system has no RDMA device; aiordma doctor says more.\n")
        for info in found:
            show_device(console, info, verbose)
    if any(info.problem for info in found):
        raise SystemExit(1)


def to_json(missing: Exception | None, found: list[DeviceInfo]) -> str:
    """Enumerations by name, flags as lists of names, MTUs and sizes in bytes, GUIDs in hex."""
    return json.dumps(
        {
            "system_library_problem": None if missing is None else str(missing),
            "devices": [device_to_plain(info) for info in found],
        },
        indent=2,
    )


def device_to_plain(info: DeviceInfo) -> dict[str, object]:
    device = info.device
    told: dict[str, object] = {
        "name": device.name,
        "library": device.library.name,
        "node_type": json_value(device.node_type),
        "transport_type": json_value(device.transport_type),
        "guid": guid_text(device.guid),
        "numa_node": device.numa_node,
        "problem": info.problem or None,
    }
    if info.extended is not None:
        beyond = json_value(info.extended)
        assert isinstance(beyond, dict)
        told["num_comp_vectors"] = info.num_comp_vectors
        told["attributes"] = beyond.pop("orig_attr")
        told["extended_attributes"] = beyond
        told["ports"] = [port_to_plain(port) for port in info.ports]
    return told


def port_to_plain(port: PortInfo) -> dict[str, object]:
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
        "pkeys": {str(index): f"{pkey:#06x}" for index, pkey in port.pkeys.items()},
    }
