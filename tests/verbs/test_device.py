"""Test finding and opening devices, and their attributes."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Never

import pytest

from aiordma import verbs
from aiordma.errors import (
    BufferStateError,
    DeviceNotFoundError,
    LibraryNotFoundError,
    UnsupportedError,
    VerbsError,
)
from aiordma.verbs._device import device as device_module


def test_devices_lists_the_requested_device_once(device: verbs.Device) -> None:
    assert device in verbs.devices()
    assert [found.name for found in verbs.devices()].count(device.name) == 1
    assert device.name in repr(device)
    assert device.library in verbs.libraries()


def test_embedded_device_is_always_available() -> None:
    assert verbs.devices()[-1].name == "embedded0"
    assert verbs.find_device("embedded0").library.name == "embedded"
    assert verbs.libraries()[-1].name == "embedded"
    with verbs.open_device() as context:
        assert context.query_port().state is verbs.PortState.ACTIVE


def test_open_device_error_lists_known_devices(device: verbs.Device) -> None:
    with pytest.raises(DeviceNotFoundError, match="'rdma9'") as caught:
        verbs.open_device("rdma9")
    assert device.name in caught.value.known
    assert device.name in str(caught.value)
    assert isinstance(caught.value, OSError)
    gone = replace(device, name="gone0")
    with pytest.raises(DeviceNotFoundError, match="gone0"):
        gone.open()


def test_find_device_by_ip_returns_the_device_with_that_address(
    device: verbs.Device, context: verbs.Context
) -> None:
    for entry in context.query_gid_table():
        found = verbs.find_device(device.name, ip=entry.gid.ip)
        assert found == device
    with verbs.open_device(ip=str(context.choose_gid().gid.ip)) as opened:
        assert opened.choose_gid().gid == context.choose_gid().gid


def test_find_device_by_ip_error_lists_addresses_and_open_failures(
    device: verbs.Device, context: verbs.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DeviceNotFoundError) as caught:
        verbs.find_device(ip="192.0.2.77")
    assert device.name in caught.value.known
    text = str(caught.value)
    assert "no device with the address 192.0.2.77; available devices: " in text
    assert f"{device.name}: " in text
    assert str(context.choose_gid().gid.ip) in text

    def refuse(self: verbs.Device) -> verbs.Context:
        raise VerbsError(errno.EACCES, "ibv_open_device")

    monkeypatch.setattr(verbs.Device, "open", refuse)
    with pytest.raises(DeviceNotFoundError, match=f"{device.name}: .*Permission denied"):
        verbs.find_device(ip="192.0.2.77")


def test_find_device_by_guid_returns_match_or_lists_guids(device: verbs.Device) -> None:
    assert verbs.find_device(guid=device.guid) == device
    assert verbs.find_device(device.name, guid=device.guid) == device
    with pytest.raises(DeviceNotFoundError) as caught:
        verbs.find_device(guid=0x0002C90300001234)
    assert "no device with the GUID 0x0002c90300001234" in str(caught.value)
    assert f"{device.name}: GUID {device.guid:#018x}" in str(caught.value)
    with pytest.raises(DeviceNotFoundError, match="no device 'rdma9' with the GUID"):
        verbs.find_device("rdma9", guid=device.guid)


def test_numa_node_is_read_from_sysfs(device: verbs.Device, tmp_path: Path) -> None:
    assert device.numa_node is None  # software is near to no memory in particular
    if device.library.name == "system":
        assert Path(device.sysfs_path).name == device.name
    card = replace(device, sysfs_path=str(tmp_path))
    (tmp_path / "device").mkdir()
    file = tmp_path / "device" / "numa_node"
    for text, node in (("1\n", 1), ("0\n", 0), ("-1\n", None), ("?\n", None)):
        file.write_text(text)
        assert card.numa_node == node


def test_closed_context_raises_buffer_state_error(device: verbs.Device) -> None:
    context = device.open()
    context.close()
    context.close()
    assert context.closed
    assert repr(context) == f"<Context {device.name} closed>"
    with pytest.raises(BufferStateError, match=f"Context {device.name} is closed"):
        context.query_port()
    with pytest.raises(BufferStateError), context:
        pass


def test_only_embedded_device_is_available_without_libibverbs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = LibraryNotFoundError("libibverbs.so.1", detail="no such file")

    def missing() -> Never:
        raise error

    monkeypatch.setattr(device_module, "system", missing)
    assert device_module.missing_library() is error
    assert [library.name for library in verbs.libraries()] == ["embedded"]
    assert [device.name for device in verbs.devices()] == ["embedded0"]


def test_fork_status_is_none_when_the_library_cannot_report_it(
    device: verbs.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded device accesses memory as any thread does.

    For other devices, Linux copies pinned pages at fork since 5.12.
    """
    assert verbs.fork_status(device.library) is verbs.ForkStatus.UNNEEDED

    def too_old() -> Never:
        raise UnsupportedError("ibv_is_fork_initialized")

    monkeypatch.setattr(device.library.calls, "ibv_is_fork_initialized", too_old)
    assert verbs.fork_status(device.library) is None
