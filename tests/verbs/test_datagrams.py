"""Test unreliable datagrams: address handles, Q_Keys, the header in front of the data, the route
back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from aiordma import verbs
from aiordma.errors import BufferStateError
from aiordma.verbs import (
    GID,
    GRH,
    GRH_SIZE,
    AddressVector,
    Destination,
    Endpoint,
    QPCapabilities,
    QPState,
    QPType,
    SendFlags,
    SendOps,
    WCFlags,
    WCOpcode,
    WROpcode,
    send_ops_of,
)
from conftest import End

if TYPE_CHECKING:
    from conftest import ConnectedPair

pytestmark = pytest.mark.needs("UD")
SIGNALED = int(SendFlags.SIGNALED)
ROOM = 2048  # offset of each side's receives


@dataclasses.dataclass
class Peer(End):
    """A datagram queue pair in RTS with its endpoint."""

    endpoint: Endpoint

    def receive(self, wr_id: int, length: int = 1024) -> None:
        self.qp.post_recv_one(wr_id, self.mr.addr + ROOM, length, self.mr.lkey)

    def send(self, length: int, to: Destination, wr_id: int = 0) -> None:
        with self.qp.batch() as batch:
            batch.send([self.sge(0, length)], to=to, wr_id=wr_id)

    @property
    def header(self) -> memoryview:
        return self.mr.buf[ROOM : ROOM + GRH_SIZE]

    def payload(self, wc: verbs.WorkCompletion) -> bytes:
        return bytes(self.mr.buf[ROOM + GRH_SIZE : ROOM + wc.byte_len])


@pytest.fixture(params=[False, True], ids=["classic", "builders"])
def send_ops(request: pytest.FixtureRequest) -> SendOps:
    return send_ops_of(QPType.UD) if request.param else SendOps.NONE


@pytest.fixture
def peers(
    context: verbs.Context, pd: verbs.ProtectionDomain, send_ops: SendOps
) -> Iterator[tuple[Peer, Peer]]:
    """Provide two datagram queue pairs that have not exchanged endpoints."""
    with ExitStack() as stack:

        def make() -> Peer:
            cq = stack.enter_context(context.create_cq(64))
            qp = stack.enter_context(
                pd.create_qp(
                    cq,
                    capabilities=QPCapabilities(max_send_sge=2, max_inline_data=64),
                    qp_type=QPType.UD,
                    send_ops=send_ops,
                )
            )
            mr = stack.enter_context(pd.reg_mr(1 << 14))
            endpoint = qp.endpoint()
            qp.start(endpoint)
            return Peer(qp, cq, mr, endpoint)

        yield make(), make()


@pytest.fixture
def way(peers: tuple[Peer, Peer]) -> Iterator[Destination]:
    """Provide the destination for datagrams from the first peer to the second."""
    one, two = peers
    destination = one.qp.destination(one.endpoint, Endpoint.unpack(two.endpoint.pack()))
    with destination.ah:
        yield destination


def test_start_uses_the_endpoint_qkey_and_psn(peers: tuple[Peer, Peer]) -> None:
    one, two = peers
    there = one.qp.query()
    assert there.qp_state is QPState.RTS
    assert there.qkey == one.endpoint.qkey
    assert there.sq_psn == one.endpoint.psn
    assert 0 <= one.endpoint.qkey < 1 << 31  # the highest bit marks a privileged Q_Key
    assert one.endpoint.qkey != two.endpoint.qkey
    assert one.endpoint.qp_type is QPType.UD
    assert one.endpoint.max_rd_atomic == one.endpoint.max_dest_rd_atomic == 0
    assert one.qp.endpoint(qkey=0x1234).qkey == 0x1234


def test_received_datagram_starts_with_a_grh(peers: tuple[Peer, Peer], way: Destination) -> None:
    one, two = peers
    one.mr.buf[:5] = b"hello"
    two.receive(7)
    one.send(5, way, wr_id=8)
    assert (one.completion().wr_id, way.remote_qpn) == (8, two.qp.qp_num)
    received = two.completion()
    assert (received.wr_id, received.opcode) == (7, WCOpcode.RECV)
    assert received.byte_len == GRH_SIZE + 5
    assert received.src_qp == one.qp.qp_num
    assert received.wc_flags & WCFlags.GRH
    assert two.payload(received) == b"hello"
    header = GRH.parse(two.header)
    assert header.sgid.raw == one.endpoint.gid
    assert header.dgid.raw == two.endpoint.gid
    assert header.version == (4 if header.sgid.ip.version == 4 else 6)
    assert header.hop_limit > 1


def test_datagram_carries_immediate_and_gathered_inline_data(
    peers: tuple[Peer, Peer], way: Destination
) -> None:
    one, two = peers
    one.mr.buf[:8] = b"abcdefgh"
    two.receive(1)
    with one.qp.batch() as batch:
        batch.send([one.sge(5, 3), one.sge(0, 2)], to=way, imm=0x12345678, inline=True)
    one.mr.buf[:8] = bytes(8)
    received = two.completion()
    assert received.imm_data == 0x12345678
    assert two.payload(received) == b"fghab"
    assert one.completion().ok


def test_create_ah_from_wc_returns_a_handle_to_the_sender(
    peers: tuple[Peer, Peer], way: Destination, pd: verbs.ProtectionDomain
) -> None:
    one, two = peers
    two.receive(1)
    one.receive(2)
    one.send(4, way)
    asked = two.completion()
    two.mr.buf[:6] = b"answer"
    with pd.create_ah_from_wc(asked, two.header) as back:
        assert back.vector.dgid is not None
        assert back.vector.dgid.raw == one.endpoint.gid
        assert "to " in repr(back)
        two.send(6, Destination(back, asked.src_qp, one.endpoint.qkey))
        assert one.completion().opcode is WCOpcode.SEND
        answered = one.completion()
        assert (answered.wr_id, one.payload(answered)) == (2, b"answer")
        assert two.completion().ok


def test_create_ah_stores_and_validates_the_address_vector(pd: verbs.ProtectionDomain) -> None:
    gid = pd.context.choose_gid()
    vector = AddressVector(
        dgid=gid.gid,
        sgid_index=gid.gid_index,
        hop_limit=7,
        traffic_class=0x20,
        flow_label=0x12345,
        sl=1,
    )
    with pd.create_ah(vector) as ah:
        assert ah.vector is vector
    with pytest.raises(BufferStateError, match="AddressHandle is closed"):
        _ = ah.pointer
    with pytest.raises(ValueError, match="hop_limit"):
        pd.create_ah(vector._replace(hop_limit=256))


def test_post_send_rejects_closed_address_handle(
    peers: tuple[Peer, Peer], way: Destination
) -> None:
    one, _ = peers
    way.ah.close()
    with pytest.raises(BufferStateError, match="AddressHandle is closed"):
        one.qp.post_send([verbs.SendWorkRequest(1, WROpcode.SEND, ah=way.ah)])
    assert one.qp.free_send_slots == one.qp.capabilities.max_send_wr


def test_datagram_methods_reject_wrong_qp_types_and_endpoints(
    peers: tuple[Peer, Peer], pd: verbs.ProtectionDomain, connected_pair: ConnectedPair
) -> None:
    one, two = peers
    with pytest.raises(ValueError, match="not UD; use start"):
        one.qp.connect(one.endpoint, two.endpoint)
    reliable, _ = connected_pair()
    with pytest.raises(ValueError, match="start\\(\\) requires a UD queue pair, not RC"):
        reliable.qp.start(reliable.qp.endpoint())
    with pytest.raises(ValueError, match="the peer's queue pair must be of type UD, not RC"):
        one.qp.destination(one.endpoint, reliable.qp.endpoint())
    with pytest.raises(ValueError, match="local must be the endpoint of"):
        one.qp.destination(two.endpoint, two.endpoint)
    elsewhere = dataclasses.replace(one.endpoint, gid=GID.from_ip("192.0.2.9").raw)
    with pytest.raises(ValueError, match=r"no longer has the GID ::ffff:192\.0\.2\.9"):
        one.qp.destination(elsewhere, two.endpoint)
