"""Test the table of what each transport can do, against the manual page and on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiordma import verbs
from aiordma.errors import UnsupportedError
from aiordma.verbs import (
    QPCapabilities,
    QPType,
    SendFlags,
    SendOps,
    SendWorkRequest,
    WCOpcode,
    WROpcode,
)
from aiordma.verbs._qp.transport_rules import (
    FULL_CHECK_BITS,
    OPERATIONS,
    allowed_flags,
    send_ops_of,
    supports,
)

if TYPE_CHECKING:
    from conftest import ConnectedPair, Pair

SIGNALED = int(SendFlags.SIGNALED)

# The columns and rows of the table in ibv_post_send(3).
COLUMNS = (QPType.UD, QPType.UC, QPType.RC, QPType.XRC_SEND, QPType.RAW_PACKET)
TABLE = {
    WROpcode.SEND: "XXXXX",
    WROpcode.SEND_WITH_IMM: "XXXX ",
    WROpcode.RDMA_WRITE: " XXX ",
    WROpcode.RDMA_WRITE_WITH_IMM: " XXX ",
    WROpcode.RDMA_READ: "  XX ",
    WROpcode.ATOMIC_CMP_AND_SWP: "  XX ",
    WROpcode.ATOMIC_FETCH_AND_ADD: "  XX ",
    WROpcode.LOCAL_INV: " XXX ",
    WROpcode.BIND_MW: " XXX ",
    WROpcode.SEND_WITH_INV: " XXX ",
    WROpcode.TSO: "X   X",
}


@pytest.mark.parametrize("opcode", TABLE, ids=lambda opcode: opcode.name)
def test_operation_support_matches_the_manual_page(opcode: WROpcode) -> None:
    row = "".join("X" if supports(qp_type, opcode) else " " for qp_type in COLUMNS)
    assert row == TABLE[opcode]
    assert not supports(QPType.XRC_RECV, opcode)


def test_operation_tables_cover_every_opcode() -> None:
    assert set(OPERATIONS) == set(WROpcode) - {WROpcode.DRIVER1}
    assert set(TABLE) == set(OPERATIONS) - {WROpcode.FLUSH, WROpcode.ATOMIC_WRITE}


def test_allowed_send_flags_match_the_manual_page() -> None:
    for opcode in OPERATIONS:
        for qp_type in COLUMNS:
            flags = allowed_flags(qp_type, opcode)
            assert flags & SendFlags.SIGNALED
            assert bool(flags & SendFlags.FENCE) == (qp_type in (QPType.RC, QPType.XRC_SEND))
    assert not allowed_flags(QPType.RC, WROpcode.RDMA_READ) & (
        SendFlags.INLINE | SendFlags.SOLICITED
    )
    assert not allowed_flags(QPType.RC, WROpcode.RDMA_WRITE) & SendFlags.SOLICITED
    assert allowed_flags(QPType.RC, WROpcode.RDMA_WRITE_WITH_IMM) & SendFlags.SOLICITED


def test_simple_opcodes_skip_the_slow_check() -> None:
    fast = {
        opcode
        for opcode in WROpcode
        if not (SIGNALED | SendFlags.FENCE | 1 << 31) & FULL_CHECK_BITS[QPType.RC][opcode]
    }
    assert fast == {
        WROpcode.SEND,
        WROpcode.SEND_WITH_IMM,
        WROpcode.SEND_WITH_INV,
        WROpcode.RDMA_WRITE,
        WROpcode.RDMA_WRITE_WITH_IMM,
        WROpcode.RDMA_READ,
        WROpcode.LOCAL_INV,
    }


def test_send_ops_of_lists_operations_per_transport() -> None:
    assert send_ops_of(QPType.UD) == SendOps.SEND | SendOps.SEND_WITH_IMM
    assert send_ops_of(QPType.UC) == (
        SendOps.SEND | SendOps.SEND_WITH_IMM | SendOps.RDMA_WRITE | SendOps.RDMA_WRITE_WITH_IMM
    )
    assert send_ops_of(QPType.RC) == send_ops_of(QPType.UC) | (
        SendOps.RDMA_READ | SendOps.ATOMIC_CMP_AND_SWP | SendOps.ATOMIC_FETCH_AND_ADD
    )


# --- on the device: nothing of this reaches it -------------------------------------------------


@pytest.mark.parametrize(
    ("opcode", "flags"),
    [
        (WROpcode.RDMA_READ, SendFlags.INLINE),
        (WROpcode.RDMA_READ, SendFlags.SOLICITED),
        (WROpcode.RDMA_WRITE, SendFlags.SOLICITED),
        (WROpcode.ATOMIC_FETCH_AND_ADD, SendFlags.INLINE),
        (WROpcode.RDMA_WRITE, SendFlags.IP_CSUM),
    ],
)
def test_post_send_rejects_flags_invalid_for_the_operation(
    pair: Pair, opcode: WROpcode, flags: SendFlags
) -> None:
    one, two = pair
    with pytest.raises(ValueError, match=rf"{opcode.name} on a RC .*{flags.name}"):
        one.post(opcode, two, flags=flags)


def test_ip_checksum_flag_raises_unsupported_error(pair: Pair) -> None:
    with pytest.raises(UnsupportedError, match="IP checksums on a RC queue pair"):
        pair[0].qp.post_send_one(1, WROpcode.SEND, SendFlags.IP_CSUM, 0, 0, 0)


@pytest.mark.parametrize("opcode", [WROpcode.ATOMIC_CMP_AND_SWP, WROpcode.ATOMIC_FETCH_AND_ADD])
@pytest.mark.parametrize(
    ("offset", "length", "message"),
    [
        (4, 8, "must be a multiple of 8"),
        (0, 4, "requires exactly 8 bytes"),
        (0, 16, "requires exactly 8 bytes"),
        (0, 0, "requires exactly 8 bytes"),
    ],
)
def test_atomics_require_eight_bytes_at_an_aligned_address(
    pair: Pair, opcode: WROpcode, offset: int, length: int, message: str
) -> None:
    one, two = pair
    there = two.mr.addr + offset
    with pytest.raises(ValueError, match=message):
        one.qp.post_send_one(
            1, opcode, SIGNALED, one.mr.addr, length, one.mr.lkey, there, two.mr.rkey
        )
    assert one.qp.free_send_slots == one.qp.capabilities.max_send_wr


@pytest.mark.parametrize("opcode", [16, 1000])
def test_post_send_rejects_unknown_opcode(pair: Pair, opcode: int) -> None:
    one, _ = pair
    with pytest.raises(ValueError, match=f"unknown opcode {opcode}"):
        one.qp.post_send_one(1, opcode, 0, 0, 0, 0)


def test_atomic_write_is_rejected_without_the_send_ops_flag(pair: Pair) -> None:
    one, two = pair
    with pytest.raises(UnsupportedError, match="ATOMIC_WRITE on a queue pair created without"):
        one.qp.post_send_one(1, WROpcode.ATOMIC_WRITE, 0, one.mr.addr, 8, 0, two.mr.addr)


@pytest.mark.needs("ATOMIC_WRITE")
def test_atomic_write_changes_the_remote_memory(connected_pair: ConnectedPair) -> None:
    one, two = connected_pair(QPCapabilities(), send_ops=SendOps.ATOMIC_WRITE)
    one.mr.buf[:8] = b"at once!"
    one.post(WROpcode.ATOMIC_WRITE, two)
    assert one.completion().opcode is WCOpcode.ATOMIC_WRITE
    assert bytes(two.mr.buf[:8]) == b"at once!"


def test_post_send_rejects_operations_not_in_send_ops(connected_pair: ConnectedPair) -> None:
    one, two = connected_pair(QPCapabilities(), send_ops=SendOps.RDMA_WRITE)
    with pytest.raises(ValueError, match=r"cannot post SEND to .* created without SendOps\.SEND"):
        one.qp.post_send_one(1, WROpcode.SEND, SIGNALED, 0, 0, 0)
    one.post(WROpcode.RDMA_WRITE, two, wr_id=2)
    assert one.completion().wr_id == 2


def test_bind_mw_request_requires_bind_info(pair: Pair) -> None:
    with pytest.raises(ValueError, match="BIND_MW requires bind=BindInfo"):
        pair[0].qp.post_send([SendWorkRequest(1, WROpcode.BIND_MW)])


@pytest.mark.needs("UD")
def test_datagram_requires_a_destination(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue
) -> None:
    with pd.create_qp(cq, qp_type=QPType.UD) as qp:
        with pytest.raises(ValueError, match="a datagram needs a destination"):
            qp.post_send([SendWorkRequest(1, WROpcode.SEND)])
        with pytest.raises(ValueError, match=r"SEND on a UD .*FENCE"):
            qp.post_send_one(1, WROpcode.SEND, SendFlags.FENCE, 0, 0, 0)
