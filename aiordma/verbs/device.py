"""The devices of every library that is there, the embedded one included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiordma._native import Library, embedded, ffi, system
from aiordma.errors import DeviceNotFoundError, LibraryNotFoundError, UnsupportedError

from .attributes import guid_from_network
from .context import Context
from .enums import NodeType, PortState, TransportType

if TYPE_CHECKING:
    from aiordma._native import handles as h


def libraries() -> list[Library]:
    """The libraries of this machine: the system's if it is installed, then the embedded one."""
    try:
        return [system(), embedded()]
    except LibraryNotFoundError:
        return [embedded()]


@dataclass(frozen=True, slots=True)
class Device:
    """A device by name. It holds nothing open: the name is looked up again by :meth:`open`."""

    name: str
    library: Library
    node_type: NodeType = field(compare=False)
    transport_type: TransportType = field(compare=False)
    guid: int = field(compare=False)

    def open(self) -> Context:
        """Open it. Close the context, or use it in ``with``.

        Raises DeviceNotFoundError when the device has gone, VerbsError when it cannot be opened
        (EACCES: no permission for /dev/infiniband/uverbs*).
        """
        calls = self.library.calls
        with _device_list(self.library) as pointers:
            names = [_name(self.library, pointer) for pointer in pointers]
            if self.name not in names:
                raise DeviceNotFoundError(self.name, names)
            pointer = calls.ibv_open_device(pointers[names.index(self.name)])
        return Context(self.library, pointer, self.name)

    def __repr__(self) -> str:
        return f"<Device {self.name} ({self.library.name}) guid {self.guid:#018x}>"


@contextmanager
def _device_list(library: Library) -> Iterator[list[h.DevicePointer]]:
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


def _name(library: Library, pointer: h.DevicePointer) -> str:
    return ffi.string(library.calls.ibv_get_device_name(pointer)).decode(errors="replace")


def devices() -> list[Device]:
    """The devices of every library present, those of the system first. Opens none of them."""
    found = []
    for library in libraries():
        with _device_list(library) as pointers:
            found += [
                Device(
                    name=_name(library, pointer),
                    library=library,
                    node_type=NodeType(pointer.node_type),
                    transport_type=TransportType(pointer.transport_type),
                    guid=guid_from_network(library.calls.ibv_get_device_guid(pointer)),
                )
                for pointer in pointers
            ]
    return found


def find_device(name: str | None = None) -> Device:
    """The device of that name; with None the first one of the system with an active port.

    Without such a device, None gives the embedded one. Raises DeviceNotFoundError, which lists
    the names there are, for a name that is not among them.
    """
    found = devices()
    if name is None:
        return next((device for device in found if _is_default(device)), found[-1])
    for device in found:
        if device.name == name:
            return device
    raise DeviceNotFoundError(name, [device.name for device in found])


def _is_default(device: Device) -> bool:
    if device.library is embedded():
        return True
    with device.open() as context:
        ports = range(1, context.query_device().phys_port_cnt + 1)
        return any(context.query_port(port).state is PortState.ACTIVE for port in ports)


def open_device(name: str | None = None) -> Context:
    """Open the device that :func:`find_device` finds."""
    return find_device(name).open()
