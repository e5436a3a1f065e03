"""Device and address lookup without a connection ID.

See rdma_get_devices(3) and rdma_getaddrinfo(3).
"""

from __future__ import annotations

from enum import IntFlag
from typing import NamedTuple

from aiordma._core.arguments import choice, instance
from aiordma._native import Library, ffi, to_c
from aiordma._native import handles as h
from aiordma.errors import AddressError, UnsupportedError, VerbsError
from aiordma.verbs import Context
from aiordma.verbs._device.enums import QPType

from .address import Address, from_sockaddr
from .parameters import PortSpace


def check_library(library: object) -> Library:
    """Return ``library`` if it is a Library; otherwise, raise TypeError."""
    return instance(
        "library", library, Library, "a Library, such as verbs.find_device(name).library"
    )


def get_devices(library: Library) -> list[Context]:
    """Return the devices opened by the connection manager.

    The contexts are borrowed (see :meth:`Context.borrow`). A connection ID's
    :attr:`ConnectionId.context` is one of the returned objects. In a child process after a fork,
    this function raises the same exceptions as :class:`EventChannel`.

    Raises:
        VerbsError: With ENODEV, if there are no devices.
    """
    check_library(library)
    library.enter_cm()
    count = ffi.new("int *")
    pointers = library.calls.rdma_get_devices(count)
    try:
        return [Context.borrow(library, pointers[index]) for index in range(count[0])]
    finally:
        library.calls.rdma_free_devices(pointers)


class AddressFlags(IntFlag):
    """Hints for :func:`getaddrinfo` (the ``RAI_*`` constants)."""

    PASSIVE = 1
    NUMERICHOST = 2
    NOROUTE = 4
    FAMILY = 8


_NO_FLAGS = AddressFlags(0)


class AddressInfo(NamedTuple):
    """A result of :func:`getaddrinfo` (``struct rdma_addrinfo``).

    Pass ``source`` to :meth:`ConnectionId.bind_addr`, and ``destination`` to
    :meth:`ConnectionId.resolve_addr`. If the PASSIVE flag was set, ``destination`` is None.
    """

    source: Address | None
    destination: Address | None
    port_space: PortSpace
    qp_type: QPType

    @classmethod
    def read(cls, info: h.rdma_addrinfo) -> AddressInfo:
        """Convert a ``struct rdma_addrinfo``."""
        return cls(
            from_sockaddr(info.ai_src_addr, info.ai_src_len),
            from_sockaddr(info.ai_dst_addr, info.ai_dst_len),
            PortSpace(info.ai_port_space),
            QPType(info.ai_qp_type),
        )


def getaddrinfo(
    library: Library,
    host: str | None,
    service: str | int | None = None,
    *,
    flags: AddressFlags = _NO_FLAGS,
    port_space: PortSpace = PortSpace.TCP,
) -> list[AddressInfo]:
    """Resolve a host name and a service name.

    The call blocks. In asyncio programs, use ``loop.getaddrinfo`` instead, or call this function in
    a thread. With the PASSIVE flag and no host, the result is the wildcard address.

    Raises:
        AddressError: If a name cannot be resolved.
    """
    if host is None and service is None:
        raise ValueError("getaddrinfo() needs a host, a service or both")
    flags = choice("flags", flags, AddressFlags)
    port_space = choice("port_space", port_space, PortSpace)
    check_library(library)
    if host is not None:
        instance("host", host, str, "a str such as '192.0.2.1' or 'server.example'")
    hints = ffi.new("struct rdma_addrinfo *")
    hints.ai_flags = flags
    hints.ai_port_space = port_space
    hints.ai_qp_type = QPType.UD if port_space.datagrams else QPType.RC
    result = ffi.new("struct rdma_addrinfo **")
    library.enter_cm()
    try:
        node = ffi.NULL if host is None else to_c("host", host)
        service_name = ffi.NULL if service is None else to_c("service", str(service))
    except ValueError as error:
        raise AddressError(str(error)) from None
    try:
        library.calls.rdma_getaddrinfo(node, service_name, hints, result)
    except VerbsError as error:
        if isinstance(error, UnsupportedError):
            raise
        query = " ".join([host or "", f"service {service}" if service else ""]).strip()
        raise AddressError(
            f"cannot resolve {query!r}: {error.strerror}", status=-(error.errno or 0)
        ) from error
    try:
        results, info = [], result[0]
        while info:
            results.append(AddressInfo.read(info))
            info = info.ai_next
        return results
    finally:
        library.calls.rdma_freeaddrinfo(result[0])
