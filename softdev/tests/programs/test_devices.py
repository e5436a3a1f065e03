"""Tests of the programs that show devices: ibv_devices(1) and ibv_devinfo(1)."""

from __future__ import annotations

import re

import pytest

from aiordma import verbs

from .conftest import run_program


@pytest.fixture(scope="module")
def embedded() -> verbs.Device:
    return verbs.find_device("embedded0")


def fields(text: str) -> dict[str, str]:
    """Return the last value of each field in the output of ibv_devinfo."""
    return dict(re.findall(r"^\s*(\w+):\s+(.+?)\s*$", text, re.MULTILINE))


def test_ibv_devices_lists_the_embedded_device(embedded: verbs.Device) -> None:
    rows = [line.split() for line in run_program("ibv_devices").expect().splitlines()]
    assert rows[2:] == [["embedded0", f"{embedded.guid:016x}"]]


def test_ibv_devinfo_lists_the_embedded_device() -> None:
    assert run_program("ibv_devinfo", "-l").expect().split() == ["1", "HCA", "found:", "embedded0"]


def test_ibv_devinfo_reports_an_unknown_device() -> None:
    done = run_program("ibv_devinfo", "-d", "nothing0")
    assert done.expect(255) == ""
    assert done.errors == "IB device 'nothing0' wasn't found\n"


def test_ibv_devinfo_reports_the_same_attributes_as_aiordma(embedded: verbs.Device) -> None:
    reported = fields(run_program("ibv_devinfo", "-v").expect())
    with embedded.open() as context:
        device, port = context.query_device(), context.query_port()
        gids = [(entry.gid_index, entry.gid) for entry in context.query_gid_table()]
    guid = f"{device.node_guid:016x}"
    assert reported["hca_id"] == "embedded0"
    assert reported["node_guid"] == ":".join(guid[at : at + 4] for at in range(0, 16, 4))
    for name in (
        "max_qp", "max_qp_wr", "max_sge", "max_cq", "max_cqe", "max_mr", "max_pd", "max_ah",
        "max_mw", "max_srq", "max_srq_wr", "max_srq_sge", "max_mcast_grp", "max_qp_rd_atom",
        "max_pkeys", "phys_port_cnt", "local_ca_ack_delay",
    ):  # fmt: skip
        # ibv_devinfo omits some limits that are 0.
        assert int(reported.get(name, 0)) == getattr(device, name), name
    assert int(reported["max_mr_size"], 16) == device.max_mr_size
    assert reported["state"] == f"PORT_{port.state.name} ({int(port.state)})"
    assert reported["active_mtu"].startswith(f"{port.active_mtu.bytes} ")
    assert reported["link_layer"] == "Ethernet"
    assert int(reported["gid_tbl_len"]) == port.gid_tbl_len
    assert int(reported["max_msg_sz"], 16) == port.max_msg_sz
    assert reported["phys_state"] == "LINK_UP (5)"
    assert len(gids) == port.gid_tbl_len


def test_ibv_devinfo_lists_each_gid_as_roce_v2(embedded: verbs.Device) -> None:
    text = run_program("ibv_devinfo", "-v").expect()
    reported = re.findall(r"GID\[\s*(\d+)\]:\s+(\S+), RoCE v2$", text, re.MULTILINE)
    with embedded.open() as context:
        assert reported == [
            (str(entry.gid_index), str(entry.gid)) for entry in context.query_gid_table()
        ]
