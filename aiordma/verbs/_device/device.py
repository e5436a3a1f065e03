"""The devices of all available libraries, including the embedded software device."""

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
from .environment import check_environment
from .fault_injection import FaultCounts

SYSTEM = "system"
"""The name for all devices except the embedded ones."""

ALL = "all"
"""The name for all of a library's devices that have an active port."""

VARIABLE = "AIORDMA_DEVICE"
"""The environment variable that specifies the default device."""


def names_or_variable(name: str | None) -> str | None:
    """Return ``name``, or the value of AIORDMA_DEVICE if no name is given.

    The value may be a comma-separated list of names, or "all". Returns None if the variable is not
    set either.
    """
    if name is not None:
        instance(
            "device", name, str, "the name of a device, such as 'mlx5_0' (see `aiordma devinfo`)"
        )
    return name or os.environ.get(VARIABLE) or None


def name_or_variable(name: str | None) -> str | None:
    """Return ``name``, or the first name in AIORDMA_DEVICE if no name is given.

    Returns None for the default device.
    """
    if name:
        return names_or_variable(name)
    first = (names_or_variable(name) or "").partition(",")[0]
    return None if first == ALL else first or None


def _variable_hint(name: str | None) -> str:
    """Return a hint for error messages if AIORDMA_DEVICE contains ``name``, otherwise ""."""
    value = os.environ.get(VARIABLE, "")
    return f"; {VARIABLE} is {value!r}" if name in value.split(",") and name else ""


def specific_device_name(name: str | None) -> str | None:
    """Return ``name``, or None for "system", which does not name a particular device."""
    return None if name == SYSTEM else name


def libraries() -> list[Library]:
    """Return the available libraries: the system's library, if installed, and the embedded one."""
    return [embedded()] if missing_library() else [system(), embedded()]


def missing_library() -> LibraryNotFoundError | None:
    """Return the error raised when loading the system's library, or None if it is available."""
    try:
        system()
    except LibraryNotFoundError as error:
        return error
    return None


def fork_status(library: Library) -> ForkStatus | None:
    """Return whether a process can safely fork after registering memory with this library.

    Returns:
        The status, or None if the library is too old to report it (rdma-core before version 36).
    """
    try:
        return ForkStatus(library.calls.ibv_is_fork_initialized())
    except UnsupportedError:
        return None


@dataclass(frozen=True, slots=True)
class Device:
    """A device that can be opened.

    A device is identified by its name, which :meth:`open` looks up again.
    """

    name: str
    library: Library
    node_type: NodeType = field(compare=False)
    transport_type: TransportType = field(compare=False)
    guid: int = field(compare=False)
    sysfs_path: str = field(compare=False, default="")

    def open(self) -> Context:
        """Open the device. Close the context after use, or use it in a ``with`` statement.

        Raises:
            DeviceNotFoundError: If the device no longer exists.
            VerbsError: If the device cannot be opened. EACCES means that this process is not
                allowed to access /dev/infiniband/uverbs*, or the trace file specified by
                AIORDMA_TRACE.
        """
        check_environment()
        calls = self.library.calls
        with _device_list(self.library) as pointers:
            names = [_device_name(self.library, pointer) for pointer in pointers]
            if self.name not in names:
                raise DeviceNotFoundError(self.name, names)
            try:
                pointer = calls.ibv_open_device(pointers[names.index(self.name)])
            except VerbsError as error:
                raise self.library.open_failure(error) from None
        return Context(self.library, pointer, self.name)

    def set_faults(self, plan: str | None) -> None:
        """Inject faults into this process for testing. None stops the injection.

        :func:`aiordma.testing.faults` is easier to use. A new plan replaces the previous plan and
        resets its counters. A plan applies to all embedded devices unless it names one device.

        Args:
            plan: The fault plan, for example "seed=7,loss=0.01,delay=2ms". See docs/testing.md.

        Raises:
            ValueError: If part of the plan is invalid. The message names that part.
            UnsupportedError: If this is not an embedded device.
        """
        self._require_fault_injection()
        error = ffi.new("char[]", 256)
        text = ffi.NULL if plan is None else to_c("the fault plan", plan)
        if self.library.table.device.set_faults(text, error, len(error)):
            raise ValueError(f"invalid fault plan: {ffi.string(error).decode(errors='replace')}")

    def fault_counts(self) -> FaultCounts:
        """Return the number of faults injected since the process started.

        Raises:
            UnsupportedError: If this is not an embedded device.
        """
        return copy_of(self._read_fault_counts(), FaultCounts)

    def _fault_chances(self) -> int:
        """Return how many times the fault plan could have injected a random fault."""
        return int(self._read_fault_counts().chances)

    def _read_fault_counts(self) -> h.aiordma_fault_counts:
        self._require_fault_injection()
        counts = ffi.new("struct aiordma_fault_counts *")
        self.library.table.device.fault_counts(counts)
        return counts

    def _require_fault_injection(self) -> None:
        if not self.library.offers("set_faults"):
            raise UnsupportedError("fault injection", device=self.name)

    @property
    def numa_node(self) -> int | None:
        """The device's NUMA node, or None if the kernel does not report one."""
        if not self.sysfs_path:
            return None
        try:
            with open(os.path.join(self.sysfs_path, "device", "numa_node")) as file:
                node = int(file.read())
        except (OSError, ValueError):  # software devices do not have this file
            return None
        return node if node >= 0 else None

    def __repr__(self) -> str:
        return f"<Device {self.name} ({self.library.name}) guid {self.guid:#018x}>"


@contextmanager
def _device_list(library: Library) -> Iterator[list[h.ibv_device]]:
    """Provide a library's list of device pointers, which are only valid in the ``with`` block."""
    count = ffi.new("int *")
    try:
        array = library.calls.ibv_get_device_list(count)
    except UnsupportedError:  # ENOSYS: the kernel lacks RDMA support (ibv_get_device_list(3))
        yield []
        return
    try:
        yield [array[index] for index in range(count[0])]
    finally:
        library.calls.ibv_free_device_list(array)


def _device_name(library: Library, pointer: h.ibv_device) -> str:
    return ffi.string(library.calls.ibv_get_device_name(pointer)).decode(errors="replace")


def devices() -> list[Device]:
    """Return the devices of all libraries without opening them. System devices come first."""
    return [*_system_devices(), *_embedded_devices()]


def _system_devices() -> list[Device]:
    return [] if missing_library() else _list_devices(system())


def _list_devices(library: Library) -> list[Device]:
    with _device_list(library) as pointers:
        return [
            Device(
                name=_device_name(library, pointer),
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
    """Return the embedded devices. The list is cached, because it never changes in a process."""
    return _list_devices(embedded())


def find_device(
    name: str | None = None, *, ip: str | IPAddress | None = None, guid: int | None = None
) -> Device:
    """Return the device with the given name, local IP address or GUID, or the default device.

    With several arguments, the device must match all of them. The default device is the one named
    by the environment variable AIORDMA_DEVICE. If the variable is not set, the default is the first
    system device with an active port. If there is no such device, it is the first embedded device,
    which is implemented in software. The name "system" restricts the choice of a default to system
    devices.

    Raises:
        DeviceNotFoundError: If no device matches. The message lists the available devices.
    """
    if ip is None and guid is None and (name := name_or_variable(name)) in (None, SYSTEM):
        return choose_device(name).device
    if guid is not None:
        guid = integer("guid", guid)
    found = devices()
    addresses: dict[str, str] = {}  # for the error message
    for device in found:
        if name not in (None, device.name) or guid not in (None, device.guid):
            continue
        if ip is None or _has_address(device, GID.from_ip(ip), addresses):
            return device
    wanted = [f"the address {ip}"] if ip is not None else []
    wanted += [f"the GUID {guid:#018x}"] if guid is not None else []
    names = [device.name for device in found]
    if not wanted:
        hint = ", ".join(names) + _variable_hint(name)
        if name == ALL or "," in str(name):
            hint += "; only connect() and listen() accept several devices (device=[...] or 'all')"
        elif str(name).startswith("embedded"):
            hint += "; set AIORDMA_EMBEDDED_DEVICES (1 to 4) to have more embedded devices"
        raise DeviceNotFoundError(str(name), names, detail=hint)
    details = addresses
    if ip is None:
        details = {device.name: f"GUID {device.guid:#018x}" for device in found}
    raise DeviceNotFoundError(
        name or "",
        names,
        wanted=" and ".join(wanted),
        detail="; ".join(f"{name}: {text}" for name, text in details.items()),
    )


def _has_address(device: Device, gid: GID, addresses: dict[str, str]) -> bool:
    """Return whether a device has this GID.

    Add an entry for the device to ``addresses``: its addresses, or the reason why they are unknown.
    """
    try:
        with device.open() as context:
            table = [entry.gid for entry in context.query_gid_table()]
    except VerbsError as error:  # for example EACCES; another device may match
        addresses[device.name] = str(error)
        return False
    addresses[device.name] = (
        ", ".join(dict.fromkeys(str(entry.ip) for entry in table)) or "no address"
    )
    return gid in table


class Choice(NamedTuple):
    """A device and the reason it was chosen."""

    device: Device
    reason: str
    is_fallback: bool = False
    """Whether the embedded device was chosen only because no other device is usable."""


def choose_device(name: str | None = None) -> Choice:
    """Return the device :func:`find_device` would return for a name, and why it was chosen.

    Raises:
        VerbsError: If a system device cannot be opened and no other system device has an active
            port.
    """
    name = name_or_variable(name)
    if name is not None and name != SYSTEM:
        return Choice(find_device(name), "it was selected by name")
    unusable: list[str] = []
    open_error: VerbsError | None = None
    for device in _system_devices():
        try:
            states = _port_states(device)
        except VerbsError as error:  # for example EACCES, which must not cause a fallback
            open_error = open_error or error
            continue
        if PortState.ACTIVE in states.values():
            return Choice(device, "it is the first system device with an active port")
        unusable += [
            f"{device.name}: port {port} is {state.name}" for port, state in states.items()
        ]
    if open_error is not None:
        raise open_error
    library_error = missing_library()
    reason = "; ".join(unusable) or "the system has no RDMA device"
    if library_error is not None:  # `aiordma doctor` shows the full error
        reason = (
            f"{library_error.library} is {'too old' if library_error.symbol else 'not installed'}"
        )
    if name == SYSTEM:
        detail = (library_error and library_error.strerror) or reason
        detail += f"{_variable_hint(name)}; run `aiordma doctor` for details"
        raise DeviceNotFoundError("", wanted="an active port", detail=detail)
    return Choice(_embedded_devices()[0], reason, is_fallback=True)


def active_devices(like: Device) -> list[Device]:
    """Return all devices with an active port that are of the same kind as ``like``.

    The two kinds are system devices and embedded devices. Devices on the NUMA nodes of this
    process's CPUs come first. Devices that cannot be opened are omitted.

    Raises:
        DeviceNotFoundError: If no device has an active port.
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
    """Return the NUMA nodes of this process's CPUs, or an empty set if the kernel reports none."""
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
    """Find a device like :func:`find_device`, and open it."""
    return find_device(name, ip=ip, guid=guid).open()
