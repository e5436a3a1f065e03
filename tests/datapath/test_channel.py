"""Test that the channel handles a peer's frames as the model does."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiordma._core import protocol
from aiordma._core.frames import HEADER_SIZE, FrameKind
from aiordma._datapath.frames import Credits
from aiordma.errors import ProtocolError
from tests.model.frames import unpack_bundle, unpack_header, unpack_rendezvous
from tests.model.test_frames import entries, packed_bundle

from .bare_channel import BareChannel, Room, Wire, frame, wire

__all__ = ["wire"]

Received = tuple[bytes, int | None]
HERE = Room(data_receives=4, control_receives=4, max_message=1 << 20)
THERE = Room(data_receives=3, control_receives=5)


def specified(content: bytes) -> tuple[list[Received], list[protocol.Message], int, str | None]:
    """Return the expected messages, control messages, rendezvous count and error for a frame."""
    try:
        return (*taken(content), None)
    except ProtocolError as error:
        return [], [], 0, str(error)


def taken(content: bytes) -> tuple[list[Received], list[protocol.Message], int]:
    of_rails = FrameKind.RNDV_KEYS, FrameKind.WRITTEN
    if len(content) >= HEADER_SIZE and content[0] & 0x7F in of_rails:
        raise ProtocolError(f"the peer sent a frame of unknown kind {content[0]:#04x}")
    kind, control, data, imm = unpack_header(content)
    Credits(
        HERE.data_receives, HERE.control_receives, THERE.data_receives, THERE.control_receives
    ).received(kind, control, data)
    behind = content[HEADER_SIZE:]
    if kind is FrameKind.DATA:
        return [(behind, imm)], [], 0
    if kind is FrameKind.BUNDLE:
        found = list(unpack_bundle(memoryview(content)))
        return [(content[start : start + length], imm) for start, length, imm in found], [], 0
    if kind is FrameKind.RNDV_RTS:
        unpack_rendezvous(behind, HERE.max_message)
        return [], [], 1
    if kind is FrameKind.RNDV_ACK:
        if len(behind) != 8:
            raise ProtocolError(
                f"the peer sent an acknowledgement of invalid size: {len(content)} bytes"
            )
        raise ProtocolError("the peer acknowledged a message that was not offered")
    if kind is FrameKind.CONTROL:
        message = protocol.decode(behind)
        return [], [] if isinstance(message, protocol.ReceiveSize) else [message], 0
    return [], [], 0


u32 = st.integers(0, (1 << 32) - 1)
u64 = st.integers(0, (1 << 64) - 1)
pieces = st.lists(st.tuples(u64 | st.just(4096), u64 | st.integers(1, 5000), u32), max_size=4)


def request(request_id: int, several: list[tuple[int, int, int]]) -> bytes:
    head = request_id.to_bytes(4, "little") + len(several).to_bytes(4, "little")
    return head + b"".join(
        address.to_bytes(8, "little") + length.to_bytes(8, "little") + rkey.to_bytes(8, "little")
        for address, length, rkey in several
    )


returned = st.integers(0, 3)
frames = st.one_of(
    st.binary(max_size=64),
    st.builds(
        lambda kind, behind, control, data: frame(kind, behind, control=control, data=data),
        st.sampled_from(FrameKind) | st.integers(0, 255),
        st.binary(max_size=64),
        returned,
        returned,
    ),
    st.builds(lambda behind, imm: frame(FrameKind.DATA, behind, imm=imm), st.binary(), u32),
    entries.map(lambda several: frame(FrameKind.BUNDLE, packed_bundle(*several[:6]))),
    st.builds(request, u32, pieces).map(lambda behind: frame(FrameKind.RNDV_RTS, behind)),
    st.builds(protocol.Ping, u32).map(lambda ping: frame(FrameKind.CONTROL, protocol.encode(ping))),
).filter(lambda content: len(content) <= HERE.eager_size)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=frames, place=st.integers(0, 400), value=st.integers(0, 255))
def test_channel_and_reference_model_handle_frames_identically(
    wire: Wire, content: bytes, place: int, value: int
) -> None:
    changed = bytearray(content)
    if place < len(changed):
        changed[place] = value
    for some in (content, bytes(changed)):
        bare = BareChannel(wire, HERE, THERE)
        wire.peer_sends(some)
        messages, controls, rendezvous, error = specified(some)
        assert list(map(str, bare.owner.errors)) == ([] if error is None else [error])
        assert bare.channel.figures()["unread"] == rendezvous
        assert [(bytes(each), each.imm) for each in bare.received()] == messages
        assert bare.owner.controls == controls
        bare.close()
        assert not wire.driver.reported
