"""Finding and opening devices, and what they say of themselves."""

from __future__ import annotations

import errno

import pytest

from aiordma import verbs
from aiordma.errors import BufferStateError, DeviceNotFoundError, VerbsError


def test_the_device_asked_for_is_listed(device: verbs.Device) -> None:
    assert device in verbs.devices()
    assert [found.name for found in verbs.devices()].count(device.name) == 1
    assert device.name in repr(device)
    assert device.library in verbs.libraries()


def test_the_embedded_device_is_always_there() -> None:
    assert verbs.devices()[-1].name == "embedded0"
    assert verbs.find_device("embedded0").library.name == "embedded"
    assert verbs.libraries()[-1].name == "embedded"


def test_default_is_a_device_that_works() -> None:
    with verbs.open_device() as context:
        assert context.query_port().state is verbs.PortState.ACTIVE


def test_unknown_name_lists_the_names(device: verbs.Device) -> None:
    with pytest.raises(DeviceNotFoundError, match="'nobody'") as caught:
        verbs.open_device("nobody")
    assert device.name in caught.value.known
    assert device.name in str(caught.value)
    assert isinstance(caught.value, OSError)


def test_a_device_that_has_gone(device: verbs.Device) -> None:
    gone = verbs.Device("gone0", device.library, device.node_type, device.transport_type, 0)
    with pytest.raises(DeviceNotFoundError, match="gone0"):
        gone.open()


def test_open_twice_gives_two_contexts(device: verbs.Device) -> None:
    with device.open() as first, device.open() as second:
        assert first is not second
        assert first.name == second.name == device.name
        assert device.name in repr(first)
        first.close()
        second.query_port()


def test_device_attributes(context: verbs.Context) -> None:
    attributes = context.query_device()
    assert attributes is context.query_device()
    assert attributes.phys_port_cnt >= 1
    assert attributes.max_qp_wr >= 256
    assert attributes.max_cqe >= 4096
    assert attributes.max_sge >= 1
    assert attributes.max_qp_rd_atom >= 1
    assert attributes.max_qp_init_rd_atom >= 1
    assert attributes.max_mr >= 1024
    assert attributes.max_mr_size >= 1 << 30
    assert attributes.atomic_cap is not verbs.AtomicCapability.NONE
    assert context.num_comp_vectors >= 1


def test_port_attributes(context: verbs.Context) -> None:
    port = context.query_port(1)
    assert port.port_num == 1
    assert port.state is verbs.PortState.ACTIVE
    assert port.link_layer is verbs.LinkLayer.ETHERNET
    assert verbs.MTU.MTU_256 <= port.active_mtu <= port.max_mtu
    assert port.gid_tbl_len >= 1
    assert port.max_msg_sz >= 1 << 20
    assert port.gigabits is None or port.gigabits > 0


@pytest.mark.parametrize("port_num", [0, 9])
def test_a_port_that_is_not_there(context: verbs.Context, port_num: int) -> None:
    with pytest.raises(VerbsError, match=f"port {port_num} of {context.name}") as caught:
        context.query_port(port_num)
    assert caught.value.verb == "ibv_query_port"
    assert caught.value.errno == errno.EINVAL


def test_gid_table(context: verbs.Context) -> None:
    table = context.query_gid_table()
    assert table
    for entry in table:
        assert entry.port_num == 1
        assert not entry.gid.is_zero
        assert entry.gid_type in (verbs.GIDType.ROCE_V1, verbs.GIDType.ROCE_V2)
        assert context.query_gid(entry.gid_index, entry.port_num) == entry
        assert context.find_gid(entry.gid.ip).gid == entry.gid
    assert len({entry.gid_index for entry in table}) == len(table)


def test_chosen_gid_can_be_reached_best(context: verbs.Context) -> None:
    chosen = context.choose_gid()
    assert chosen.gid_type is verbs.GIDType.ROCE_V2
    assert not chosen.gid.ip.is_link_local
    assert chosen in context.query_gid_table()


def test_a_gid_that_is_not_there(context: verbs.Context) -> None:
    with pytest.raises(ValueError, match=r"192\.0\.2\.77"):
        context.find_gid("192.0.2.77")
    with pytest.raises(ValueError, match="port 7"):
        context.choose_gid(port_num=7)
    beyond = context.query_port().gid_tbl_len
    with pytest.raises(VerbsError, match=f"_ibv_query_gid_ex: .*GID index {beyond} of port 1"):
        context.query_gid(beyond)


def test_default_pkey(context: verbs.Context) -> None:
    assert context.query_pkey(0) == 0xFFFF


def test_a_pkey_that_is_not_there(context: verbs.Context) -> None:
    with pytest.raises(VerbsError, match="ibv_query_pkey"):
        context.query_pkey(1 << 15)


def test_closed_context_says_so(device: verbs.Device) -> None:
    context = device.open()
    context.close()
    context.close()
    assert context.closed
    assert repr(context) == f"<Context {device.name} closed>"
    with pytest.raises(BufferStateError, match=f"Context {device.name} is closed"):
        context.query_port()
    with pytest.raises(BufferStateError), context:
        pass
