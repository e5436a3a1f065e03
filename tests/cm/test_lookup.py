"""Tests of looking up devices and names without an id."""

from __future__ import annotations

import socket

import pytest

from aiordma import cm, verbs
from aiordma.cm import AddressFlags, PortSpace
from aiordma.errors import AddressError
from aiordma.verbs import QPType


def test_get_devices_includes_the_context_of_a_bound_id(
    device: verbs.Device, events: cm.EventChannel, host: str
) -> None:
    found = cm.get_devices(device.library)
    assert device.name in [context.name for context in found]
    with events.create_id() as id:
        id.bind_addr((host, 0))
        assert id.context in cm.get_devices(device.library)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_getaddrinfo_resolves_numeric_hosts(device: verbs.Device, host: str) -> None:
    flags = AddressFlags.NUMERICHOST | AddressFlags.NOROUTE
    for service in (7471, "7471"):
        found = cm.getaddrinfo(device.library, host, service, flags=flags)
        assert [info.destination for info in found] == [(host, 7471)]
        assert found[0].port_space is PortSpace.TCP
        assert found[0].qp_type is QPType.RC


def test_getaddrinfo_resolves_host_names(device: verbs.Device) -> None:
    wanted = {(entry[4][0], 0) for entry in socket.getaddrinfo("localhost", 1)}
    found = cm.getaddrinfo(device.library, "localhost", flags=AddressFlags.NOROUTE)
    assert found
    assert {info.destination for info in found} <= wanted


def test_getaddrinfo_passive_returns_source_addresses(device: verbs.Device, host: str) -> None:
    flags = AddressFlags.PASSIVE
    (info, *_) = cm.getaddrinfo(device.library, host, 7471, flags=flags, port_space=PortSpace.UDP)
    assert (info.source, info.destination) == ((host, 7471), None)
    assert (info.port_space, info.qp_type) == (PortSpace.UDP, QPType.UD)
    (info, *_) = cm.getaddrinfo(device.library, None, "7471", flags=flags)
    assert info.source in {("0.0.0.0", 7471), ("::", 7471)}


def test_getaddrinfo_raises_address_error_for_unknown_names(device: verbs.Device) -> None:
    with pytest.raises(AddressError, match=r"cannot resolve 'no\.such\.host\.invalid service 7'"):
        cm.getaddrinfo(device.library, "no.such.host.invalid", 7)
    with pytest.raises(AddressError):
        cm.getaddrinfo(device.library, "localhost", flags=AddressFlags.NUMERICHOST)
    with pytest.raises(AddressError, match="cannot be encoded"):
        cm.getaddrinfo(device.library, "\ud800", 7)
    with pytest.raises(ValueError, match="needs a host, a service or both"):
        cm.getaddrinfo(device.library, None)
