"""Test creating queue pairs with every option, and the reasons why a device refuses."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import pytest

from aiordma import verbs
from aiordma._native import ffi
from aiordma.errors import UnsupportedError, VerbsError
from aiordma.verbs import (
    QPCapabilities,
    QPCreateFlags,
    QPState,
    QPType,
    RateLimit,
    SendOps,
    send_ops_of,
)
from aiordma.verbs._qp.qp_creation import QPOptions

if TYPE_CHECKING:
    pass


@pytest.mark.parametrize(
    "qp_type",
    [QPType.RC, QPType.UC, pytest.param(QPType.UD, marks=pytest.mark.needs("UD"))],
    ids=lambda qp_type: qp_type.name,
)
@pytest.mark.parametrize("built", [False, True], ids=["classic", "builders"])
def test_create_qp_grants_at_least_the_requested_capabilities(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue, qp_type: QPType, built: bool
) -> None:
    asked = QPCapabilities(20, 30, 3, 2, 64)
    send_ops = send_ops_of(qp_type) if built else SendOps.NONE
    with pd.create_qp(
        cq, capabilities=asked, qp_type=qp_type, sq_sig_all=True, send_ops=send_ops
    ) as qp:
        for name, granted, wanted in zip(asked._fields, qp.capabilities, asked, strict=True):
            assert granted >= wanted, name
        assert (qp.qp_type, qp.state, qp.sq_sig_all) == (qp_type, QPState.RESET, True)
        assert qp.send_ops == send_ops
        assert qp.pd is pd
        assert qp.srq is None
        assert qp.send_cq is qp.recv_cq is cq
        assert f"{qp.qp_num:#x} {qp_type.name} RESET" in repr(qp)
        assert qp.free_send_slots == qp.capabilities.max_send_wr


@pytest.mark.parametrize("name", ["max_send_sge", "max_recv_sge", "max_send_wr", "max_recv_wr"])
def test_create_qp_error_reports_the_exceeded_limit(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue, name: str
) -> None:
    attributes = pd.context.query_device()
    limit = attributes.max_sge if "sge" in name else attributes.max_qp_wr
    asked = QPCapabilities()._replace(**{name: limit + 1})
    with pytest.raises(VerbsError, match=f"{name} must be at most {limit}") as caught:
        pd.create_qp(cq, capabilities=asked)
    assert caught.value.errno in (errno.EINVAL, errno.ENOMEM)


OPTIONS: list[dict[str, Any]] = [
    {"create_flags": QPCreateFlags.BLOCK_SELF_MCAST_LB},
    {"create_flags": QPCreateFlags.PCI_WRITE_END_PADDING},
    {"source_qpn": 5},
    {"max_tso_header": 64},
    {"send_ops": SendOps.TSO},
]


@pytest.mark.parametrize("options", OPTIONS, ids="".join)
def test_create_qp_error_reports_the_unsupported_option(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue, options: dict[str, Any]
) -> None:
    (name,) = options
    message = rf"{pd.context.name}.* does not support RC queue pairs with {name}="
    with pytest.raises(UnsupportedError, match=message) as caught:
        pd.create_qp(cq, **options)
    assert caught.value.verb == "ibv_create_qp_ex"


def test_qp_options_are_written_to_the_init_attributes() -> None:
    attr = ffi.new("struct ibv_qp_init_attr_ex *")
    QPOptions(
        send_ops=SendOps.SEND,
        create_flags=QPCreateFlags.CVLAN_STRIPPING,
        source_qpn=0x123,
        max_tso_header=99,
    ).write(attr)
    assert attr.comp_mask == 1 << 2 | 1 << 3 | 1 << 6
    assert attr.create_flags == QPCreateFlags.CVLAN_STRIPPING | QPCreateFlags.SOURCE_QPN
    assert (attr.source_qpn, attr.max_tso_header, attr.send_ops_flags) == (0x123, 99, SendOps.SEND)
    assert not QPOptions()
    assert QPOptions(source_qpn=0)


def test_create_qp_rejects_numbers_out_of_range(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue
) -> None:
    with pytest.raises(
        ValueError, match=r"capabilities.max_send_wr must be an int from 0 to \d+, not -1"
    ):
        pd.create_qp(cq, capabilities=QPCapabilities(max_send_wr=-1))
    with pytest.raises(ValueError, match="max_tso_header=65536"):
        pd.create_qp(cq, max_tso_header=1 << 16)


@pytest.mark.needs("RAW_PACKET")
def test_raw_packet_queue_pair_reaches_rts(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue
) -> None:
    """No device of the test machines has this type, so the test ends in UnsupportedError there."""
    with pd.create_qp(cq, qp_type=QPType.RAW_PACKET) as qp:
        qp.to_init()
        qp.to_rtr()
        qp.to_rts()


def test_modify_rate_limit_rejects_negative_rates(qp: verbs.QueuePair) -> None:
    with pytest.raises(ValueError, match=r"RateLimit\.rate_limit must be"):
        qp.modify_rate_limit(RateLimit(-1))
