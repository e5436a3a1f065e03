"""Tests that `aiordma devinfo` shows what aiordma.verbs reports."""

from __future__ import annotations

import io
import json
from enum import IntFlag

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from aiordma import verbs
from aiordma.cli.app import app
from aiordma.cli.devices import DeviceInfo
from aiordma.cli.devinfo import flag_names, flat, guid_text, json_value, show_device
from aiordma.errors import LibraryNotFoundError


def devinfo(*words: str) -> Result:
    return CliRunner().invoke(app, ["devinfo", *words])


def shown(device: verbs.Device, verbose: bool = False) -> str:
    """Return the device information as plain text of at most 80 columns."""
    console = Console(file=io.StringIO(), width=80)
    show_device(console, device, DeviceInfo.ask(device), verbose)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(text: str, *words: str) -> list[str]:
    """Return the words of the only line that begins with `words`."""
    lines = [line.split() for line in text.splitlines()]
    (found,) = [line for line in lines if line[: len(words)] == list(words)]
    return found


# ---- JSON ---------------------------------------------------------------------------------------


def test_devinfo_json_contains_the_queried_attributes(
    device: verbs.Device, context: verbs.Context
) -> None:
    done = devinfo(device.name, "--json")
    assert done.exit_code == 0
    (reported,) = json.loads(done.output)["devices"]
    attributes, extended = context.query_device(), context.query_device_ex()
    assert (reported["name"], reported["library"]) == (device.name, device.library.name)
    assert (reported["guid"], reported["problem"]) == (guid_text(device.guid), None)
    assert reported["num_comp_vectors"] == context.num_comp_vectors
    assert reported["attributes"]["max_qp"] == attributes.max_qp
    assert reported["attributes"]["node_guid"] == guid_text(attributes.node_guid)
    assert "RC_RNR_NAK_GEN" in reported["attributes"]["device_cap_flags"]
    assert reported["extended_attributes"]["hca_core_clock"] == extended.hca_core_clock
    assert reported["extended_attributes"]["odp_caps"]["rc"] == flag_names(extended.odp_caps.rc)
    assert len(reported["ports"]) == attributes.phys_port_cnt
    (reported_port,), port = reported["ports"], context.query_port()
    assert (reported_port["state"], reported_port["link_layer"]) == ("ACTIVE", "ETHERNET")
    assert (reported_port["active_mtu"], reported_port["max_mtu"]) == (
        port.active_mtu.bytes,
        port.max_mtu.bytes,
    )
    assert (reported_port["max_msg_sz"], reported_port["gigabits"]) == (
        port.max_msg_sz,
        port.gigabits,
    )
    assert reported_port["pkeys"] == {"0": "0xffff"}
    table, chosen = context.query_gid_table(), context.choose_gid()
    assert reported_port["gids"] == [
        {
            "index": entry.gid_index,
            "gid": str(entry.gid),
            "ip": str(entry.gid.ip),
            "type": "ROCE_V2",
            "interface": entry.ndev,
            "problem": entry.problem() or None,
            "chosen": entry == chosen,
        }
        for entry in table
    ]
    assert sum(gid["chosen"] for gid in reported_port["gids"]) == 1


def test_devinfo_json_lists_every_device() -> None:
    reported = json.loads(devinfo("--json").output)
    assert [each["name"] for each in reported["devices"]] == [it.name for it in verbs.devices()]
    missing = verbs.missing_library()
    assert reported["system_library_problem"] == (None if missing is None else str(missing))


# ---- tables -------------------------------------------------------------------------------------


def test_devinfo_tables_show_the_queried_ports_and_gids(
    device: verbs.Device, context: verbs.Context
) -> None:
    text = shown(device)
    port = context.query_port()
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith(f"{device.name} ({device.library.name} library), ")
    assert guid_text(device.guid) in text
    found = row(text, "1", "ACTIVE")
    assert found[2:6] == ["Ethernet", str(port.active_mtu.bytes), "of", str(port.max_mtu.bytes)]
    for entry in context.query_gid_table():
        found = row(text, "1", str(entry.gid_index))
        assert found[2:6] == [str(entry.gid), "RoCE", "v2", entry.ndev]
    chosen = context.choose_gid()
    assert "default" in row(text, "1", str(chosen.gid_index))
    assert "max_qp" not in text


def test_devinfo_verbose_lists_every_attribute(
    device: verbs.Device, context: verbs.Context
) -> None:
    text = shown(device, verbose=True)
    assert row(text, "max_qp_wr") == ["max_qp_wr", f"{context.query_device().max_qp_wr:,}"]
    assert row(text, "state") == ["state", "ACTIVE"]
    assert devinfo("-v", device.name).output.count("attribute") == 2


def test_devinfo_prints_unknown_for_an_undefined_link_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verbs.PortAttributes, "lane_gigabits", None)
    assert "unknown" in row(shown(verbs.find_device("embedded0")), "1", "ACTIVE")


# ---- what is missing ----------------------------------------------------------------------------


def test_devinfo_lists_available_devices_when_the_name_is_unknown() -> None:
    done = devinfo("nothing0")
    assert done.exit_code == 1
    assert "device 'nothing0' not found; available devices: " in done.output
    assert "embedded0" in done.output


def test_devinfo_lists_embedded_device_when_system_library_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = LibraryNotFoundError("libibverbs.so.1")
    monkeypatch.setattr(verbs, "missing_library", lambda: error)
    monkeypatch.setattr(verbs, "devices", lambda: [verbs.find_device("embedded0")])
    done = devinfo()
    assert done.exit_code == 0
    text = " ".join(done.output.split())
    assert f"No system devices: {error}" in text
    assert "embedded0 (embedded library)" in text
    assert json.loads(devinfo("--json").output)["system_library_problem"] == str(error)


def test_devinfo_reports_devices_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    present = verbs.find_device("embedded0")
    missing_device = verbs.Device(
        "gone0", present.library, present.node_type, present.transport_type, guid=1
    )
    monkeypatch.setattr(verbs, "devices", lambda: [missing_device, present])
    done = devinfo()
    assert done.exit_code == 1
    assert "device 'gone0' not found" in done.output
    assert " default" in done.output
    first, second = json.loads(devinfo("--json").output)["devices"]
    assert "device 'gone0' not found" in first["problem"]
    assert "ports" not in first
    assert second["ports"]


# ---- texts --------------------------------------------------------------------------------------


def test_json_value_converts_enumerations_and_flags() -> None:
    assert guid_text(0x020000FFFEECDB70) == "0200:00ff:feec:db70"
    assert json_value(verbs.MTU.MTU_1024) == 1024
    assert json_value(verbs.PortState(4)) == "ACTIVE"
    assert json_value(verbs.PortState(77)) == "UNKNOWN_77"
    flags: IntFlag = verbs.DeviceCapability.XRC | verbs.DeviceCapability.SRQ_RESIZE | 1 << 40
    assert sorted(flag_names(flags)) == ["0x10000000000", "SRQ_RESIZE", "XRC"]
    assert flag_names(verbs.DeviceCapability(0)) == []
    assert json_value(frozenset({verbs.QPType.UD, verbs.QPType.RC})) == ["RC", "UD"]


def test_flat_joins_nested_keys_with_dots() -> None:
    reported = {"orig_attr": {"a": 1000}, "caps": {"b": ["X", "Y"], "c": []}, "d": None}
    assert list(flat(reported)) == [
        ("a", "1,000"), ("caps.b", "X, Y"), ("caps.c", "none"), ("d", "None"),
    ]  # fmt: skip
