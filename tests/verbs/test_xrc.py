"""Test extended reliable connections: domains, and requests that name a shared receive queue."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from tempfile import TemporaryFile

import pytest

from aiordma import verbs
from aiordma.errors import UnsupportedError, VerbsError
from aiordma.verbs import AccessFlags, DeviceCapability, QPType, SendOps, WCOpcode
from conftest import ALL_REMOTE, End

pytestmark = pytest.mark.needs("XRC")

BUILDERS = SendOps.SEND_WITH_IMM | SendOps.RDMA_WRITE | SendOps.RDMA_READ | SendOps.SEND


@dataclass
class Ends:
    """An XRC connection from a requester to a target with a shared receive queue."""

    source: End
    target: End
    srq: verbs.SharedReceiveQueue


Connect = Callable[[], Ends]


@pytest.fixture(params=[SendOps.NONE, BUILDERS], ids=["classic", "builders"])
def connect(
    context: verbs.Context, pd: verbs.ProtectionDomain, request: pytest.FixtureRequest
) -> Iterator[Connect]:
    """Provide a factory, so that a device without XRC fails the test and not its setup."""

    def make() -> Ends:
        enter = stack.enter_context
        cqs = [enter(context.create_cq(64)) for _ in range(2)]
        mrs = [enter(pd.reg_mr(4096, AccessFlags.LOCAL_WRITE | ALL_REMOTE)) for _ in range(2)]
        xrcd = enter(context.open_xrcd())
        srq = enter(pd.create_srq(16, xrcd=xrcd, cq=cqs[1]))
        source = enter(pd.create_qp(cqs[0], qp_type=QPType.XRC_SEND, send_ops=request.param))
        target = enter(xrcd.create_qp())
        here, there = source.endpoint(), target.endpoint()
        source.connect(here, there)
        target.connect(there, here, access=ALL_REMOTE)
        return Ends(End(source, cqs[0], mrs[0]), End(target, cqs[1], mrs[1]), srq)

    with ExitStack() as stack:
        yield make


def test_xrc_message_arrives_at_the_addressed_srq(connect: Connect) -> None:
    ends = connect()
    source, target = ends.source, ends.target
    source.mr.buf[:5] = b"hello"
    ends.srq.post_recv_one(7, target.mr.addr, 64, target.mr.lkey)
    with source.qp.batch() as batch:
        batch.send(
            [verbs.ScatterGatherElement(source.mr.addr, 5, source.mr.lkey)],
            wr_id=1,
            imm=9,
            remote_srqn=ends.srq.srq_num,
        )
    assert source.completion().wr_id == 1
    arrived = target.completion()
    assert (arrived.wr_id, arrived.qp_num, arrived.byte_len) == (7, target.qp.qp_num, 5)
    assert (arrived.opcode, arrived.imm_data) == (WCOpcode.RECV, 9)
    assert bytes(target.mr.buf[:5]) == b"hello"


def test_xrc_queue_pairs_reject_operations_of_the_opposite_side(connect: Connect) -> None:
    ends = connect()
    target = ends.target.qp
    assert (target.capabilities.max_send_wr, target.capabilities.max_recv_wr) == (0, 0)
    for attribute in ("pd", "send_cq", "recv_cq"):
        with pytest.raises(ValueError, match="XRC_RECV queue pair"):
            getattr(target, attribute)
    with pytest.raises(VerbsError):
        ends.source.qp.post_recv_one(1, 0, 0, 0)


def test_xrc_srq_reserves_completion_entries(
    context: verbs.Context, pd: verbs.ProtectionDomain
) -> None:
    with (
        context.open_xrcd() as xrcd,
        context.create_cq(4) as cq,
        pd.create_srq(100, xrcd=xrcd, cq=cq),
    ):
        assert cq.cqe >= 100


def test_exclusive_open_xrcd_fails_while_the_domain_is_open(
    context: verbs.Context, device: verbs.Device
) -> None:
    with TemporaryFile() as file, device.open() as other:
        with context.open_xrcd(file.fileno(), exclusive=True), other.open_xrcd(file.fileno()):
            with pytest.raises(VerbsError) as caught:
                context.open_xrcd(file.fileno(), exclusive=True)
            assert caught.value.errno == errno.EINVAL
        context.open_xrcd(file.fileno(), exclusive=True).close()


def test_closing_an_xrc_domain_closes_its_queue_pairs_and_srqs(
    context: verbs.Context, pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue
) -> None:
    xrcd = context.open_xrcd()
    target, srq = xrcd.create_qp(), pd.create_srq(1, xrcd=xrcd, cq=cq)
    xrcd.close()
    assert target.closed
    assert srq.closed


def test_pd_create_qp_rejects_xrc_recv(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue
) -> None:
    with pytest.raises(ValueError, match=r"use XRCDomain\.create_qp"):
        pd.create_qp(cq, qp_type=QPType.XRC_RECV)
    with pd.create_qp(cq, qp_type=QPType.XRC_SEND):  # fails on devices without XRC
        pass


def test_xrc_calls_raise_unsupported_error_without_device_support(
    context: verbs.Context,
    pd: verbs.ProtectionDomain,
    cq: verbs.CompletionQueue,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = context.query_device()
    lacking = there._replace(device_cap_flags=there.device_cap_flags & ~DeviceCapability.XRC)
    monkeypatch.setattr(context, "query_device", lambda: lacking)
    for make in (context.open_xrcd, lambda: pd.create_qp(cq, qp_type=QPType.XRC_SEND)):
        with pytest.raises(UnsupportedError, match=r"extended reliable connections \(XRC\)") as c:
            make()
        assert c.value.device == context.name
    monkeypatch.undo()
    context.open_xrcd().close()  # fails on devices without XRC
