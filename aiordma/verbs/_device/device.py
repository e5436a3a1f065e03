"""The devices of every library that is there, the embedded one included."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from aiordma._core.arguments import instance, integer
from aiordma._native import Library, copy_of, embedded, ffi, system, to_c
from aiordma._native import handles as h
from aiordma.errors import DeviceNotFoundError, LibraryNotFoundError, UnsupportedError, VerbsError

from .address import GID, IPAddress
from .attributes import guid_from_network
from .context import Context
from .enums import ForkStatus, NodeType, PortState, TransportType
from .fault_injection import FaultCounts

SYSTEM = "system"
"""The name that stands for every device but the embedded one."""

ALL = "all"
"""The name that stands for every device of one library that has an active port."""

VARIABLE = "AIORDMA_DEVICE"
"""The environment variable with the name of the device for programs that name none."""


def names_or_variable(name: str | None) -> str | None:
    """The name, else what the environment has: several with commas, or "all"; None for neither."""
    if name is not None:
        instance("device", name, str, "the name of a device, as 'mlx5_0' (aiordma devinfo)")
    return name or os.environ.get(VARIABLE) or None


def name_or_variable(name: str | None) -> str | None:
    """Of one device: the first of several that the environment has; None for the default one."""
    if name:
        return names_or_variable(name)
    first = (names_or_variable(name) or "").partition(",")[0]
    return None if first == ALL else first or None


def _by_variable(name: str | None) -> str:
    """For an error about that name: that the environment has it."""
    value = os.environ.get(VARIABLE, "")
    return f"; {VARIABLE} is {value!r}" if name in value.split(",") and name else ""


def only_device(name: str | None) -> str | None:
    """The name of the one device that is allowed; None where any of its library will do."""
    return None if name == SYSTEM else name


def libraries() -> list[Library]:
    """The libraries of this machine: the system's if it is installed, then the embedded one."""
    return [embedded()] if missing_library() else [system(), embedded()]


def missing_library() -> LibraryNotFoundError | None:
    """Why the system's library is not one of :func:`libraries`; None when it is."""
    try:
        system()
    except LibraryNotFoundError as error:
        return error
    return None


def fork_status(library: Library) -> ForkStatus | None:
    """Whether memory registered with this library survives a fork of the process.

    None when the library is too old to tell (rdma-core before version 36).
    """
    try:
        return ForkStatus(library.calls.ibv_is_fork_initialized())
    except UnsupportedError:
        return None


@dataclass(frozen=True, slots=True)
class Device:
    """A device by name. It holds nothing open: the name is looked up again by :meth:`open`."""

    name: str
    library: Library
    node_type: NodeType = field(compare=False)
    transport_type: TransportType = field(compare=False)
    guid: int = field(compare=False)
    sysfs_path: str = field(compare=False, default="")

    def open(self) -> Context:
        """Open it. Close the context, or use it in ``with``.

        Raises DeviceNotFoundError when the device has gone, VerbsError when it cannot be opened
        (EACCES: no permission for /dev/infiniband/uverbs*, or for the file of AIORDMA_TRACE).
        """
        calls = self.library.calls
        with _device_list(self.library) as pointers:
            names = [_name(self.library, pointer) for pointer in pointers]
            if self.name not in names:
                raise DeviceNotFoundError(self.name, names)
            try:
                pointer = calls.ibv_open_device(pointers[names.index(self.name)])
            except VerbsError as error:
                raise self.library.open_failure(error) from None
        return Context(self.library, pointer, self.name)

    def set_faults(self, plan: str | None) -> None:
        """Inject faults into this process from now on, by this plan; None stops it.

        For tests; :func:`aiordma.testing.faults` is the easier way. The plan is a text like
        "seed=7,loss=0.01,delay=2ms" (docs/testing.md lists its parts); counting begins anew. It is
        about all embedded devices unless it names one, and takes the place of any other plan.
        Raises ValueError, which names the part that is wrong, and UnsupportedError for any device
        but the embedded one.
        """
        self._check_faults()
        error = ffi.new("char[]", 256)
        text = ffi.NULL if plan is None else to_c("the plan of faults", plan)
        if self.library.table.device.set_faults(text, error, len(error)):
            raise ValueError(f"plan of faults: {ffi.string(error).decode(errors='replace')}")

    def fault_counts(self) -> FaultCounts:
        """Counts of the faults that were injected since the process began.

        Raises UnsupportedError for any device but the embedded one.
        """
        return copy_of(self._read_fault_counts(), FaultCounts)

    def _fault_chances(self) -> int:
        """Return the number of events that a fault with a probability might have struck."""
        return int(self._read_fault_counts().chances)

    def _read_fault_counts(self) -> h.aiordma_fault_counts:
        self._check_faults()
        found = ffi.new("struct aiordma_fault_counts *")
        self.library.table.device.fault_counts(found)
        return found

    def _check_faults(self) -> None:
        if not self.library.offers("set_faults"):
            raise UnsupportedError("fault injection", device=self.name)

    @property
    def numa_node(self) -> int | None:
        """The NUMA node that the device is near to; None when it has none or does not say."""
        if not self.sysfs_path:
            return None
        try:
            with open(os.path.join(self.sysfs_path, "device", "numa_node")) as file:
                node = int(file.read())
        except (OSError, ValueError):  # a device that is no piece of hardware has no such file
            return None
        return node if node >= 0 else None

    def __repr__(self) -> str:
        return f"<Device {self.name} ({self.library.name}) guid {self.guid:#018x}>"


@contextmanager
def _device_list(library: Library) -> Iterator[list[h.ibv_device]]:
    """The pointers of a device list, valid inside the ``with``."""
    count = ffi.new("int *")
    try:
        array = library.calls.ibv_get_device_list(count)
    except UnsupportedError:  # ENOSYS: the kernel has no RDMA at all (ibv_get_device_list(3))
        yield []
        return
    try:
        yield [array[index] for index in range(count[0])]
    finally:
        library.calls.ibv_free_device_list(array)


def _name(library: Library, pointer: h.ibv_device) -> str:
    return ffi.string(library.calls.ibv_get_device_name(pointer)).decode(errors="replace")


def devices() -> list[Device]:
    """The devices of every library present, those of the system first. Opens none of them."""
    return [*_system_devices(), *_embedded_devices()]


def _system_devices() -> list[Device]:
    return [] if missing_library() else _devices(system())


def _devices(library: Library) -> list[Device]:
    with _device_list(library) as pointers:
        return [
            Device(
                name=_name(library, pointer),
                library=library,
                node_type=NodeType(pointer.node_type),
                transport_type=TransportType(pointer.transport_type),
                guid=guid_from_network(library.calls.ibv_get_device_guid(pointer)),
                sysfs_path=ffi.string(pointer.ibdev_path).decode(errors="replace"),
            )
            for pointer in pointers
        ]


@cache
def _embedded_devices() -> list[Device]:
    """Asked once: embedded devices neither come nor go."""
    return _devices(embedded())


def find_device(
    name: str | None = None, *, ip: str | IPAddress | None = None, guid: int | None = None
) -> Device:
    """The device of that name, with that local IP address, with that GUID; or the default one.

    Given several of them, all must fit; those of the system come first. Given none, the name in
    the environment variable AIORDMA_DEVICE, else the first one of the system with an active port,
    or else the first embedded one, which is software. The name "system" is as none, but never the
    embedded one. Raises DeviceNotFoundError, which lists what there is.
    """
    if ip is None and guid is None and (name := name_or_variable(name)) in (None, SYSTEM):
        return choose_device(name).device
    if guid is not None:
        guid = integer("guid", guid)
    found = devices()
    gids: dict[str, str] = {}
    for device in found:
        if name not in (None, device.name) or guid not in (None, device.guid):
            continue
        if ip is None or _has_address(device, GID.from_ip(ip), gids):
            return device
    wanted = [f"the address {ip}"] if ip is not None else []
    wanted += [f"the GUID {guid:#018x}"] if guid is not None else []
    known = [device.name for device in found]
    if not wanted:
        hint = ", ".join(known) + _by_variable(name)
        if name == ALL or "," in str(name):
            hint += "; several are for connect and listen: device=[...] or 'all'"
        elif str(name).startswith("embedded"):
            number = "the environment variable AIORDMA_EMBEDDED_DEVICES, 1 to 4"
            hint += f"; how many there are says {number}"
        raise DeviceNotFoundError(str(name), known, detail=hint)
    there = gids if ip is not None else {it.name: f"GUID {it.guid:#018x}" for it in found}
    raise DeviceNotFoundError(
        name or "",
        known,
        wanted=" and ".join(wanted),
        detail="; ".join(f"{name}: {text}" for name, text in there.items()),
    )


def _has_address(device: Device, gid: GID, gids: dict[str, str]) -> bool:
    """True if the device has that GID; its addresses, or the error, go into ``gids``."""
    try:
        with device.open() as context:
            table = [entry.gid for entry in context.query_gid_table()]
    except VerbsError as error:  # such as no permission: another device may be meant
        gids[device.name] = str(error)
        return False
    gids[device.name] = ", ".join(dict.fromkeys(str(entry.ip) for entry in table)) or "no address"
    return gid in table


class Choice(NamedTuple):
    """A device, and why it was chosen."""

    device: Device
    reason: str
    is_fallback: bool = False
    """Whether this is the embedded device because no other one can be used."""


def choose_device(name: str | None = None) -> Choice:
    """As :func:`find_device` with a name or none, and with the reason.

    VerbsError when a device of the system cannot be opened, and no other one has an active port.
    """
    name = name_or_variable(name)
    if name is not None and name != SYSTEM:
        return Choice(find_device(name), "it was named")
    unusable: list[str] = []
    failure: VerbsError | None = None
    for device in _system_devices():
        try:
            states = _port_states(device)
        except VerbsError as error:  # such as no permission: not a reason to use another kind
            failure = failure or error
            continue
        if PortState.ACTIVE in states.values():
            return Choice(device, "it is the first device of the system with an active port")
        unusable += [
            f"{device.name}: port {port} is {state.name}" for port, state in states.items()
        ]
    if failure is not None:
        raise failure
    missing = missing_library()
    why = "; ".join(unusable) or "the system has no RDMA device"
    if missing is not None:  # `aiordma doctor` shows the whole error, with the package
        why = f"{missing.library} is {'too old' if missing.symbol else 'not installed'}"
    if name == SYSTEM:
        detail = (missing and missing.strerror) or why
        detail += f"{_by_variable(name)}; `aiordma doctor` says more"
        raise DeviceNotFoundError("", wanted="an active port", detail=detail)
    return Choice(_embedded_devices()[0], why, is_fallback=True)


def active_devices(like: Device) -> list[Device]:
    """The cards with an active port, or the embedded devices, as is the one that is given.

    Those on a NUMA node of the CPUs that this process may use come first. Those that cannot be
    opened are left out; DeviceNotFoundError when none is left.
    """
    found, active, unusable = _embedded_devices(), [], []
    if like not in found:
        found = _system_devices()
    for device in found:
        try:
            if PortState.ACTIVE in _port_states(device).values():
                active.append(device)
            else:
                unusable.append(f"{device.name}: no port is active")
        except VerbsError as error:
            unusable.append(f"{device.name}: {error}")
    if not active:
        names = [device.name for device in found]
        detail = "; ".join(unusable)
        raise DeviceNotFoundError("", names, wanted="an active port", detail=detail)
    nodes = _numa_nodes()
    return sorted(active, key=lambda device: device.numa_node not in nodes)


def _numa_nodes() -> set[int]:
    """Those of the CPUs that this process may use; empty where the kernel does not say."""
    links = (
        entry.name.removeprefix("node")
        for cpu in os.sched_getaffinity(0)
        for entry in Path(f"/sys/devices/system/cpu/cpu{cpu}").glob("node[0-9]*")
    )
    return set(map(int, links))


def _port_states(device: Device) -> dict[int, PortState]:
    with device.open() as context:
        ports = range(1, context.query_device().phys_port_cnt + 1)
        return {port: context.query_port(port).state for port in ports}


def open_device(
    name: str | None = None, *, ip: str | IPAddress | None = None, guid: int | None = None
) -> Context:
    """Open the device that :func:`find_device` finds."""
    return find_device(name, ip=ip, guid=guid).open()
