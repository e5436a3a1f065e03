"""Test the device of a program that names none: a card, or else software with a warning."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma import transport, verbs
from aiordma.errors import DeviceNotFoundError, LibraryNotFoundError, VerbsError
from aiordma.transport import choose_devices, connect, listen, warn_of_software
from aiordma.verbs import PortState
from aiordma.verbs._device import device as module

EMBEDDED = verbs.find_device("embedded0")
ACTIVE, DOWN, INIT = PortState.ACTIVE, PortState.DOWN, PortState.INIT
DENIED = VerbsError(errno.EACCES, "ibv_open_device")

Machine = dict[str, dict[int, PortState] | VerbsError]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Provide a simulated machine as a dict of port states, keyed by device name.

    If the value is an error instead, querying the device's port states raises it. The simulated
    machine has the RDMA library installed.
    """
    cards: Machine = {}

    def port_states(device: verbs.Device) -> dict[int, PortState]:
        states = cards[device.name]
        if isinstance(states, VerbsError):
            raise states
        return states

    monkeypatch.delenv("AIORDMA_DEVICE", raising=False)
    monkeypatch.setattr(module, "missing_library", lambda: None)
    monkeypatch.setattr(
        module, "_system_devices", lambda: [replace(EMBEDDED, name=name) for name in cards]
    )
    monkeypatch.setattr(module, "_port_states", port_states)
    warn_of_software.cache_clear()
    yield cards
    warn_of_software.cache_clear()


@pytest.mark.parametrize(
    ("cards", "chosen"),
    [
        ({"mlx5_0": {1: ACTIVE}, "mlx5_1": {1: ACTIVE}}, "mlx5_0"),
        ({"mlx5_0": {1: DOWN}, "mlx5_1": {1: DOWN, 2: ACTIVE}}, "mlx5_1"),
        ({"mlx5_0": DENIED, "mlx5_1": {1: ACTIVE}}, "mlx5_1"),
    ],
)
@pytest.mark.parametrize("name", [None, "system"])
def test_find_device_prefers_a_card_with_an_active_port(
    machine: Machine,
    cards: Machine,
    chosen: str,
    name: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine.update(cards)
    with caplog.at_level(logging.INFO, "aiordma"):
        assert verbs.find_device(name).name == chosen
    assert not caplog.records


@pytest.mark.parametrize(
    ("cards", "why"),
    [
        ({}, "the system has no RDMA device"),
        (
            {"mlx5_0": {1: DOWN}, "mlx5_1": {1: INIT, 2: DOWN}},
            "mlx5_0: port 1 is DOWN; mlx5_1: port 1 is INIT; mlx5_1: port 2 is DOWN",
        ),
    ],
)
async def test_software_fallback_warns_once_when_no_card_is_usable(
    machine: Machine,
    cards: Machine,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A program that names the embedded device gets no warning."""
    machine.update(cards)
    assert verbs.choose_device() == (EMBEDDED, why, True)
    assert verbs.find_device() == EMBEDDED
    choose_devices("embedded0")
    assert not caplog.records
    monkeypatch.setattr(transport, "CHOICE_LIFETIME", 0)
    for _ in range(3):
        assert choose_devices(None) == ((EMBEDDED,), None)
    (record,) = caplog.records
    assert record.name == "aiordma"
    assert record.levelno == logging.WARNING
    for part in (why, "software", "AIORDMA_DEVICE=embedded0", "AIORDMA_DEVICE=system"):
        assert part in record.getMessage()
    with pytest.raises(DeviceNotFoundError) as caught:
        verbs.find_device("system")
    assert why in str(caught.value)
    assert "an active port" in str(caught.value)
    assert "run `aiordma doctor` for details" in str(caught.value)


def test_aiordma_device_variable_selects_the_default_device(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like `connect`, the verbs use this device unless they are asked for a certain one."""
    machine |= {"mlx5_0": {1: ACTIVE}, "mlx5_1": {1: DOWN}}
    monkeypatch.setenv("AIORDMA_DEVICE", "embedded0")
    assert verbs.find_device() == verbs.choose_device().device == EMBEDDED
    with verbs.open_device() as context:
        assert context.name == EMBEDDED.name
    assert verbs.find_device("mlx5_1").name == "mlx5_1"
    assert verbs.find_device("system").name == "mlx5_0"
    assert verbs.find_device(guid=EMBEDDED.guid).name == "mlx5_0"  # mlx5_0 has this GUID too
    monkeypatch.setenv("AIORDMA_DEVICE", "")
    assert verbs.find_device().name == "mlx5_0"
    monkeypatch.setenv("AIORDMA_DEVICE", "mlx5_9")
    with pytest.raises(DeviceNotFoundError, match="; AIORDMA_DEVICE is 'mlx5_9'"):
        verbs.open_device()


@pytest.mark.parametrize(
    ("symbol", "why"),
    [(None, "libibverbs.so.1 is not installed"), ("ibv_x", "libibverbs.so.1 is too old")],
)
async def test_software_fallback_warning_states_why_libibverbs_is_unusable(
    machine: Machine,
    symbol: str | None,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The warning is a single line. `aiordma doctor` shows the linker's message and the package."""
    missing = LibraryNotFoundError("libibverbs.so.1", symbol=symbol, detail="cannot open")
    monkeypatch.setattr(module, "missing_library", lambda: missing)
    assert verbs.choose_device().reason == why
    choose_devices(None)
    (record,) = caplog.records
    assert len(record.getMessage()) < 200
    assert record.getMessage().count("libibverbs") == 1
    with pytest.raises(DeviceNotFoundError, match="cannot open"):
        verbs.find_device("system")


async def test_listen_falls_back_to_software_unless_system_is_requested(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine["mlx5_0"] = {1: DOWN}
    monkeypatch.setenv("AIORDMA_DEVICE", "system")
    with pytest.raises(DeviceNotFoundError, match="port 1 is DOWN; AIORDMA_DEVICE is 'sy"):
        await listen("127.0.0.1")
    machine["mlx5_1"] = DENIED  # not a reason to choose software
    for name in (None, "system"):
        with pytest.raises(VerbsError, match="Permission denied"):
            verbs.find_device(name)
    del machine["mlx5_1"]
    monkeypatch.delenv("AIORDMA_DEVICE")
    async with await listen("127.0.0.1") as listener, await listen("127.0.0.1"):
        assert listener.device == "embedded0"
    (record,) = caplog.records
    assert "mlx5_0: port 1 is DOWN" in record.getMessage()


async def test_listen_accepts_system_as_device_name(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection manager chooses the device by the route, as it does without a name."""
    machine["embedded0"] = {1: ACTIVE}
    async with await listen("127.0.0.1", device="system") as listener:
        assert listener.device == "embedded0"


# ---- several devices -----------------------------------------------------------------------------


async def test_choose_devices_preserves_the_list_order(machine: Machine) -> None:
    machine |= {"mlx5_0": {1: ACTIVE}, "mlx5_1": {1: DOWN}}
    devices, only = choose_devices(["mlx5_1", "mlx5_0"])
    assert tuple(device.name for device in devices) == only == ("mlx5_1", "mlx5_0")
    assert choose_devices(("mlx5_0",)) == choose_devices("mlx5_0")


@pytest.mark.parametrize(
    ("named", "error", "text"),
    [
        ([], ValueError, "an empty list"),
        (["mlx5_0", "mlx5_0"], ValueError, "a duplicate name: mlx5_0, mlx5_0"),
        (["mlx5_0", "all"], ValueError, "'all' cannot be combined with other"),
        (["system"], ValueError, "'system' cannot be combined with other"),
        (
            [f"mlx5_{number}" for number in range(9)],
            ValueError,
            r"too many devices: 9 \(a connection can use at most 8\)",
        ),
        (["mlx5_0", "other"], ValueError, "must not mix"),
        (["mlx5_0", b"mlx5_1"], TypeError, "a list of device names, such as"),
        ({"mlx5_0"}, TypeError, "the name of a device"),
        (["mlx5_0", "mlx5_9"], DeviceNotFoundError, "mlx5_9"),
        (["", "mlx5_0"], ValueError, "an empty name"),
        ("embedded1", DeviceNotFoundError, "devices: mlx5_0.*AIORDMA_EMBEDDED_DEVICES"),
        ("mlx5_0,mlx5_9", DeviceNotFoundError, "mlx5_9"),
    ],
)
async def test_connect_rejects_invalid_device_lists(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, named: Any, error: type[Exception], text: str
) -> None:
    machine |= {"mlx5_0": {1: ACTIVE}}
    find = verbs.find_device

    def found(name: str) -> verbs.Device:
        library: Any = SimpleNamespace(name="another")
        return replace(EMBEDDED, name=name, library=library) if name == "other" else find(name)

    monkeypatch.setattr(verbs, "find_device", found)
    with pytest.raises(error, match=text):
        await connect("127.0.0.1", 1, device=named)


@pytest.mark.parametrize(
    ("nodes", "order"),
    [({0}, ["mlx5_1", "mlx5_3"]), ({1}, ["mlx5_3", "mlx5_1"]), (set(), ["mlx5_1", "mlx5_3"])],
)
async def test_choose_devices_with_all_sorts_active_cards_by_numa_distance(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, nodes: set[int], order: list[str]
) -> None:
    machine |= {
        "mlx5_0": {1: DOWN},
        "mlx5_1": {1: DOWN, 2: ACTIVE},
        "mlx5_2": DENIED,
        "mlx5_3": {1: ACTIVE},
    }
    node_of = {"mlx5_1": 0, "mlx5_3": 1}
    node = property(lambda device: node_of.get(device.name))
    monkeypatch.setattr(module.Device, "numa_node", node)
    monkeypatch.setattr(module, "_numa_nodes", lambda: nodes)
    devices, only = choose_devices("all")
    assert [device.name for device in devices] == order
    assert only == tuple(order)


async def test_choose_devices_with_all_respects_the_selected_device_kind(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Software devices are included only if they are asked for, or with a warning."""
    machine |= {"mlx5_0": {1: ACTIVE}, "embedded0": {1: ACTIVE}}
    monkeypatch.setattr(transport, "CHOICE_LIFETIME", 0)
    monkeypatch.setenv("AIORDMA_DEVICE", "embedded0")
    assert EMBEDDED in choose_devices("all")[0]
    monkeypatch.delenv("AIORDMA_DEVICE")
    machine["embedded0"] = machine["mlx5_0"] = {1: DOWN}
    with pytest.raises(DeviceNotFoundError, match=r"an active port; .*embedded0: no port is"):
        choose_devices("all")
    (record,) = caplog.records
    assert "software" in record.getMessage()


def test_numa_nodes_match_the_process_cpu_affinity() -> None:
    nodes = Path("/sys/devices/system/node")
    assert module._numa_nodes() == {
        int(node.name.removeprefix("node"))
        for node in nodes.glob("node[0-9]*")
        if any((node / f"cpu{cpu}").exists() for cpu in os.sched_getaffinity(0))
    }
