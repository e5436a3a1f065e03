"""Test ports: state and limits, the GID table and the choice from it, and P_Keys."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import pytest

from aiordma import verbs
from aiordma._native import lib
from aiordma.errors import VerbsError
from aiordma.verbs import GID, GIDEntry, GIDType

if TYPE_CHECKING:
    pass


def test_query_port_returns_valid_attributes(context: verbs.Context) -> None:
    port = context.query_port(1)
    assert port.port_num == 1
    assert port.state is verbs.PortState.ACTIVE
    assert port.link_layer is verbs.LinkLayer.ETHERNET
    assert verbs.MTU.MTU_256 <= port.active_mtu <= port.max_mtu
    assert port.gid_tbl_len >= 1
    assert port.max_msg_sz >= 1 << 20
    assert port.gigabits is None or port.gigabits > 0


@pytest.mark.parametrize("port_num", [0, 9])
def test_query_port_rejects_unknown_port(context: verbs.Context, port_num: int) -> None:
    with pytest.raises(VerbsError, match=f"port {port_num} of {context.name}") as caught:
        context.query_port(port_num)
    assert caught.value.verb == "ibv_query_port"
    assert caught.value.errno == errno.EINVAL


def test_gid_table_entries_match_query_gid(context: verbs.Context) -> None:
    table = context.query_gid_table()
    assert table
    for entry in table:
        assert entry.port_num == 1
        assert not entry.gid.is_zero
        assert entry.gid_type in (verbs.GIDType.ROCE_V1, verbs.GIDType.ROCE_V2)
        assert context.query_gid(entry.gid_index, entry.port_num) == entry
        assert context.find_gid(entry.gid.ip).gid == entry.gid
    assert len({entry.gid_index for entry in table}) == len(table)


def test_gid_lookups_reject_unknown_addresses_ports_and_indices(context: verbs.Context) -> None:
    with pytest.raises(ValueError, match=r"192\.0\.2\.77"):
        context.find_gid("192.0.2.77")
    with pytest.raises(ValueError, match="port 7"):
        context.choose_gid(port_num=7)
    beyond = context.query_port().gid_tbl_len
    with pytest.raises(VerbsError, match=f"_ibv_query_gid_ex: .*GID index {beyond} of port 1"):
        context.query_gid(beyond)


def test_query_port_falls_back_to_the_legacy_call(
    context: verbs.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call in the context is newer than the exported one."""
    port = context.query_port()

    class Older:
        def __getattr__(self, name: str) -> Any:
            return getattr(lib, name)

        def aiordma_query_port(self, *arguments: object) -> int:
            return errno.EOPNOTSUPP

    monkeypatch.setattr("aiordma.verbs._device.context.lib", Older())
    assert context.query_port() == port._replace(port_cap_flags2=0)


# --- choosing a GID ----------------------------------------------------------------------------


def entry(index: int, ip: str, gid_type: GIDType = GIDType.ROCE_V2, port: int = 1) -> GIDEntry:
    return GIDEntry(GID.from_ip(ip), index, port, gid_type, "eth0")


LINK_LOCAL = entry(0, "fe80::2")
ROCE_V1 = entry(1, "10.9.9.1", GIDType.ROCE_V1)
IPV4 = entry(2, "10.9.9.1")
IPV6 = entry(3, "fd09:9::1")
LOOPBACK = entry(4, "127.0.0.1")


def with_table(
    context: verbs.Context, monkeypatch: pytest.MonkeyPatch, *table: GIDEntry
) -> verbs.Context:
    monkeypatch.setattr(context, "query_gid_table", lambda: list(table))
    return context


def test_choose_gid_prefers_routable_addresses(
    context: verbs.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_table(context, monkeypatch, LINK_LOCAL, ROCE_V1, LOOPBACK, IPV4, IPV6)
    assert context.choose_gid() == IPV4
    assert context.choose_gid(to=GID.from_ip("10.9.9.2")) == IPV4
    assert context.choose_gid(to=GID.from_ip("fd09:9::2")) == IPV6
    with_table(context, monkeypatch, LINK_LOCAL)
    assert context.choose_gid() == LINK_LOCAL
    assert context.explain_gid(LINK_LOCAL).endswith("; no better GID is available")


@pytest.mark.parametrize(
    ("chosen", "to", "problem"),
    [
        (LINK_LOCAL, None, "can reach only peers on the same link"),
        (LINK_LOCAL, "fd09:9::2", "can reach only peers on the same link"),
        (LINK_LOCAL, "fe80::7", ""),
        (LOOPBACK, None, "can reach only peers on the same host"),
        (LOOPBACK, "127.0.0.1", ""),
        (ROCE_V1, None, "uses RoCE v1"),
        (IPV4, "fd09:9::2", "is an IPv4 address, which cannot reach fd09:9::2"),
        (IPV6, "10.9.9.2", "is an IPv6 address, which cannot reach ::ffff:10.9.9.2"),
        (IPV4, "10.9.9.2", ""),
        (IPV6, None, ""),
        (entry(5, "::"), None, "is empty"),
        (entry(6, "fe80::1", GIDType.IB), None, ""),
    ],
)
def test_explain_gid_describes_the_problem_and_suggests_another_gid(
    context: verbs.Context,
    monkeypatch: pytest.MonkeyPatch,
    chosen: GIDEntry,
    to: str | None,
    problem: str,
) -> None:
    with_table(context, monkeypatch, LINK_LOCAL, ROCE_V1, LOOPBACK, IPV4, IPV6)
    text = context.explain_gid(chosen, GID.from_ip(to) if to else None)
    if not problem:
        assert text == ""
        return
    assert text.startswith(f"GID index {chosen.gid_index} ({chosen.gid}, ")
    assert f"of {context.name} {problem}" in text
    better = IPV6 if to and ":" in to else IPV4
    assert text.endswith(f"; use {better} instead")


# --- P_Keys ------------------------------------------------------------------------------------


def test_pkey_table_contains_the_default_pkey(context: verbs.Context) -> None:
    table = context.query_pkey_table()
    assert table[0] == 0xFFFF
    assert context.find_pkey(0xFFFF) == 0
    assert context.find_pkey(0x7FFF) == 0  # full membership of the default partition
    with pytest.raises(VerbsError, match="ibv_query_pkey"):
        context.query_pkey(1 << 15)


def test_find_pkey_returns_the_index_or_lists_known_pkeys(
    context: verbs.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {0: 0x7FFF, 3: 0x8001, 5: 0x0001}
    monkeypatch.setattr(context, "query_pkey_table", lambda port_num=1: table)
    assert context.find_pkey(0x8001) == 3
    assert context.find_pkey(0x0001) == 5
    with pytest.raises(ValueError, match="no P_Key 0x0002; its P_Keys are: 0x7fff, 0x8001, 0x0001"):
        context.find_pkey(0x0002)


def test_query_gid_table_reuses_unchanged_entries(
    context: verbs.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = context.query_gid_table()
    assert all(new is old for new, old in zip(context.query_gid_table(), table, strict=True))
    calls = context.library.calls
    query = calls._ibv_query_gid_table

    def changed(*arguments: Any) -> int:
        count: int = query(*arguments)
        arguments[1][0].gid.raw[15] ^= 1
        return count

    monkeypatch.setattr(calls, "_ibv_query_gid_table", changed)
    first = context.query_gid_table()[0]
    assert first.gid.raw[15] == table[0].gid.raw[15] ^ 1
    assert first.gid.raw[:15] == table[0].gid.raw[:15]
    monkeypatch.undo()
    assert context.query_gid_table() == table


def test_query_gid_table_grows_its_buffer_with_the_table(
    context: verbs.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded device's table grows with the addresses of its host."""
    before = context.query_gid_table()
    ask, calls = context.ask_port, context.library.calls
    query, capacities = calls._ibv_query_gid_table, []

    def grown(port_num: int) -> Any:
        port = ask(port_num)
        port.gid_tbl_len += 3
        return port

    def noted(*arguments: Any) -> int:
        capacities.append(arguments[2])
        count: int = query(*arguments)
        return count

    monkeypatch.setattr(calls, "_ibv_query_gid_table", noted)
    assert context.query_gid_table() == before
    monkeypatch.setattr(context, "ask_port", grown)
    assert context.query_gid_table() == before
    ports = context.query_device().phys_port_cnt
    assert capacities[1] == capacities[0] + 3 * ports
