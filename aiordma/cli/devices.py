"""Descriptions of RDMA devices for `aiordma devinfo` and `aiordma doctor`."""

from __future__ import annotations

from dataclasses import dataclass

import aiordma
from aiordma import verbs


@dataclass(frozen=True, slots=True)
class PortInfo:
    """A device port with its GID and P_Key tables.

    ``pkeys`` contains a pair of index and P_Key for each entry that is not empty. ``chosen`` is the
    GID that aiordma uses by default.
    """

    attributes: verbs.PortAttributes
    gids: tuple[verbs.GIDEntry, ...] = ()
    pkeys: tuple[tuple[int, int], ...] = ()
    chosen: verbs.GIDEntry | None = None

    @property
    def is_active(self) -> bool:
        return self.attributes.state is verbs.PortState.ACTIVE

    @property
    def usable_gids(self) -> list[verbs.GIDEntry]:
        """The GIDs that other machines can use to reach the port."""
        return [entry for entry in self.gids if not entry.problem()]


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device and its attributes.

    ``problem`` is the error message if the device could not be queried, or an empty string
    otherwise.
    """

    name: str
    ports: tuple[PortInfo, ...] = ()
    problem: str = ""
    num_comp_vectors: int = 0
    extended: verbs.ExtendedDeviceAttributes | None = None

    @classmethod
    def ask(cls, device: verbs.Device) -> DeviceInfo:
        """Query a device, and return its attributes.

        If a query fails, the result contains only the device's name and the error message.
        """
        try:
            with device.open() as context:
                extended = context.query_device_ex()
                numbers = range(1, extended.orig_attr.phys_port_cnt + 1)
                ports = tuple(ask_port(context, number) for number in numbers)
                vectors = context.num_comp_vectors
        except aiordma.RDMAError as error:
            return cls(device.name, problem=str(error))
        return cls(device.name, ports, "", vectors, extended)


def ask_port(context: verbs.Context, number: int) -> PortInfo:
    """Query a port's attributes, its GIDs and P_Keys, and the GID that is used by default."""
    gids = tuple(entry for entry in context.query_gid_table() if entry.port_num == number)
    return PortInfo(
        context.query_port(number),
        gids,
        tuple(context.query_pkey_table(number).items()),
        context.choose_gid(number) if gids else None,
    )
