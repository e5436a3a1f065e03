"""Test handshakes whose two sides are joined in memory, without devices, sockets or a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import pytest

from aiordma import AuthenticationError, ProtocolError
from aiordma._core import protocol
from aiordma._core.handshake_layout import CHALLENGE_SIZE, HELLO_SIZE, Endpoint, Hello
from aiordma._transport.auth import Security
from aiordma._transport.connect_tcp import MAGICS
from aiordma._transport.encryption import KeyExchange, new_sealing
from aiordma._transport.handshake import (
    PROOF,
    STEPS,
    Action,
    Direction,
    Handshake,
    Message,
    Method,
    Step,
)
from aiordma.errors import InternalError

from .raw_peer import packed_control

KEY = b"0123456789abcdef"
OTHER_KEY = b"fedcba9876543210"
QP_NUM = slice(24, 28)  # the bytes of an endpoint that contain the queue pair number

Payload = bytes | protocol.Message
Sent = tuple[bool, Message, Payload]  # whether the client sent it, the message and its contents
Network = Callable[[Sent], list[Sent]]  # the messages that arrive instead of the one sent

METHODS = sorted({method for method, _ in STEPS})
ALL = pytest.mark.parametrize(("method", "key"), STEPS, ids=str)
ALL_MESSAGES = [
    (method, key, number)
    for (method, key), sides in STEPS.items()
    for number in range(sum(s.direction is Direction.SEND for side in sides for s in side))
]
EACH_MESSAGE = pytest.mark.parametrize(("method", "key", "number"), ALL_MESSAGES, ids=str)


def hello_of(security: Security, limit: int = 16) -> Hello:
    return Hello(
        eager_size=4096,
        data_receives=64,
        control_receives=16,
        max_message=1 << 20,
        lend_quota=1 << 21,
        max_rd_atomic=limit,
        max_dest_rd_atomic=limit,
        authenticates=security.auth is not None,
        encrypts=bool(security.encrypt),
        memory_in_clear=security.memory_in_clear,
        stream=security.stream,
        inspects=security.inspects,
    )


def endpoint(number: int) -> Endpoint:
    return Endpoint(
        gid=bytes(15) + bytes([number]),
        qp_num=number,
        psn=number + 100,
        lid=0,
        mtu=3,
        max_rd_atomic=16,
        max_dest_rd_atomic=16,
    )


def numbered(*numbers: int) -> Callable[[int], bytes]:
    """Return a source of known "random" bytes."""
    remaining = iter(numbers)
    return lambda count: bytes([next(remaining)]) * count


@dataclass
class Side:
    """One side, which performs its actions and collects the messages for the other side."""

    method: Method
    handshake: Handshake
    security: Security
    arrived: deque[Sent] = field(default_factory=deque)
    actions: list[tuple[Action, bool]] = field(default_factory=list)
    """The actions performed, and whether the peer had access to memory after each one."""

    def perform(self, action: Action) -> None:
        handshake, number = self.handshake, 1 if self.handshake.client else 2
        if action is Action.CREATE:
            hello = hello_of(self.security)
            offer = hello.pack() if self.method == "cm" else endpoint(number).pack() + hello.pack()
            handshake.created(hello, offer, number)
            if self.security.encrypt:
                memory_in_clear = self.security.memory_in_clear
                handshake.exchange = KeyExchange(new_sealing(memory_in_clear=memory_in_clear))
        elif action is Action.COMPARE:
            handshake.compare()
        else:
            if action is Action.CONNECT and self.method == "cm":
                handshake.peer_qp_num = 3 - number
            if action is Action.INSPECT and handshake.client:
                handshake.request_data = b"data"
            handshake.done(action)
        self.actions.append((action, self.handshake.peer_authenticated))

    def receive(self, kind: Message, payload: Payload) -> None:
        if isinstance(payload, bytes):
            self.handshake.receive(kind, payload)
        else:
            self.handshake.receive_control(payload)

    def receive_next(self) -> None:
        """Receive the first message that has arrived.

        A side cannot distinguish two messages that begin with the same magic, and takes each of
        them for the one that it expects.
        """
        _, kind, payload = self.arrived.popleft()
        step = self.handshake.next_step
        if isinstance(step.kind, Message) and kind in MAGICS:
            kind = step.kind if MAGICS.get(step.kind) == MAGICS[kind] else kind
        self.receive(kind, payload)

    def continue_until_receive(self) -> Iterator[Sent]:
        """Perform the steps until the next one is a message to receive. Yield the messages."""
        while not self.finished:
            step = self.handshake.next_step
            if isinstance(step.kind, Action):
                self.perform(step.kind)
            elif step.direction is Direction.SEND:
                yield self.handshake.client, step.kind, self.handshake.send()
            else:
                return

    @property
    def finished(self) -> bool:
        return self.handshake.next_step.kind is Action.END


class Pair:
    """Both sides of a handshake."""

    def __init__(
        self,
        method: Method,
        client: Security,
        server: Security | None = None,
        network: Network = lambda sent: [sent],
    ) -> None:
        server = server or client
        self.network = network
        self.sent: list[Sent] = []
        ticket, tag = ([2], [1]) if method == "tcp" else ([], [])
        here = Handshake(method, client, client=True, random=numbered(*ticket, 3))
        there = Handshake(
            method, server, client=False, hello=hello_of(server, 0), random=numbered(*tag, 4)
        )
        self.client, self.server = Side(method, here, client), Side(method, there, server)

    def run(self) -> Pair:
        """Run until neither side can continue."""
        progress = True
        while progress:
            progress = False
            for side in (self.client, self.server):
                for sent in side.continue_until_receive():
                    progress = True
                    self.sent.append(sent)
                    for arriving in self.network(sent):
                        (self.server if sent[0] else self.client).arrived.append(arriving)
                if side.arrived and not side.finished:
                    side.receive_next()
                    progress = True
        return self

    @property
    def finished(self) -> bool:
        return self.client.finished and self.server.finished


def security_of(key: bool) -> Security:
    return Security(KEY) if key else Security()


def changed(number: int, change: Callable[[Sent], list[Sent]]) -> Network:
    """Return a network that changes only the message with this number."""
    count = iter(range(1000))
    return lambda sent: change(sent) if next(count) == number else [sent]


def fails(pair: Pair, kind: type[Exception] = ProtocolError, match: str | None = None) -> None:
    with pytest.raises(kind, match=match):
        pair.run()
    assert not pair.finished


# ---- the table -----------------------------------------------------------------------------------


@ALL
def test_both_sides_finish_with_the_same_messages(method: Method, key: bool) -> None:
    pair = Pair(method, security_of(key)).run()
    assert pair.finished
    assert not pair.client.arrived
    assert not pair.server.arrived
    assert pair.client.handshake.peer == pair.server.handshake.peer == hello_of(security_of(key))
    assert pair.client.handshake.peer_authenticated
    assert pair.server.handshake.peer_authenticated


@ALL
def test_each_side_compares_hellos_once_the_peer_has_its_own(method: Method, key: bool) -> None:
    """Otherwise, the peer could not find out why the handshake has failed."""
    hellos = {Message.OFFER, Message.CHALLENGE, Message.REPLY}
    for side in STEPS[method, key]:
        compared = side.index(Step(Direction.NONE, Action.COMPARE))
        exchanged = {s.direction for s in side[:compared] if s.kind in hellos}
        assert exchanged == {Direction.SEND, Direction.RECEIVE}
        assert [s.kind for s in side].count(Action.COMPARE) == 1


@pytest.mark.parametrize("key", [False, True])
def test_server_creates_nothing_before_the_ticket(key: bool) -> None:
    _, server = STEPS["tcp", key]
    created = server.index(Step(Direction.NONE, Action.CREATE))
    assert (Step(Direction.RECEIVE, Message.TICKET) in server[:created]) == key


@ALL
def test_peer_has_no_access_to_memory_before_its_proof(method: Method, key: bool) -> None:
    pair = Pair(method, security_of(key)).run()
    for side, steps in zip((pair.client, pair.server), STEPS[method, key], strict=True):
        actions = dict(side.actions)
        assert actions[Action.CREATE] != key
        assert actions[Action.CONNECT] or (key and method != "tcp")
        assert any(step.kind in PROOF for step in steps) == key
        assert actions.get(Action.GRANT) == (True if key and method != "tcp" else None)


# The messages of the first release with tickets, from the same "random" bytes.
RECORDED = {
    False: [
        "61696f72646d610141494f4502010203000000000000000000000000000000010100000065000000"
        "000000000000101041494f5202001010001000004000100000001000000000000000200000000000",
        "61696f72646d610141494f4502010203000000000000000000000000000000020200000066000000"
        "000000000000101041494f5202001010001000004000100000001000000000000000200000000000",
        "7265616479000001",
    ],
    True: [
        "61696f72646d610141494f4502010203000000000000000000000000000000010100000065000000"
        "000000000000101041494f5202401010001000004000100000001000000000000000200000000000",
        "61696f72646d610141494f4301000000010101010101010101010101010101010101010101010101"
        "010101010101010141494f5202400000001000004000100000001000000000000000200000000000",
        "7469636b65740001010101010202020220d0168bef94cd9d5ecd35011cee3c3d",
        "6374726c2a00000095cda17d010b0091c42003030303030303030303030303030303030303030303"
        "03030303030303030303",
        "61696f72646d610141494f4502010203000000000000000000000000000000020200000066000000"
        "000000000000101041494f5202401010001000004000100000001000000000000000200000000000",
        "6374726c4c00000095cda17d010c0092c42004040404040404040404040404040404040404040404"
        "04040404040404040404c420987fa80fe0f6c0c56d29cb521341f8bffa6941fb6b4296ce78ed87cf"
        "51c5d240",
        "6374726c2a00000095cda17d010d0091c4205096b4e81a3b8aaae3ac524ca24f92f79b68e4eb0b6f"
        "e54b5280eea19e2e4ea9",
        "7265616479000001",
        "7265616479000001",
    ],
}


@pytest.mark.parametrize("key", [False, True])
def test_messages_over_tcp_are_those_of_earlier_releases(key: bool) -> None:
    pair = Pair("tcp", security_of(key)).run()
    packed = [
        MAGICS[kind] + payload if isinstance(payload, bytes) else packed_control(payload)
        for _, kind, payload in pair.sent
    ]
    assert [data.hex() for data in packed] == RECORDED[key]


@ALL
def test_steps_in_another_order_are_internal_errors(method: Method, key: bool) -> None:
    pair = Pair(method, security_of(key))
    for side in (pair.client, pair.server):
        with pytest.raises(InternalError):
            side.handshake.done(Action.CONNECT)
        with pytest.raises(InternalError):
            side.handshake.send()


# ---- messages that are lost, repeated, invalid or early ------------------------------------------


@EACH_MESSAGE
def test_lost_message_never_completes_a_handshake(method: Method, key: bool, number: int) -> None:
    pair = Pair(method, security_of(key), network=changed(number, lambda _: []))
    with suppress(ProtocolError):
        pair.run()
    assert not pair.finished


@EACH_MESSAGE
def test_repeated_message_is_rejected(method: Method, key: bool, number: int) -> None:
    pair = Pair(method, security_of(key), network=changed(number, lambda sent: [sent, sent]))
    with suppress(ProtocolError):
        pair.run()
        sender, *_ = pair.sent[number]
        assert len((pair.server if sender else pair.client).arrived) == 1  # after the last step
        fails_to_receive(pair.server if sender else pair.client, pair.sent[number])


@EACH_MESSAGE
def test_message_other_than_the_next_is_rejected(method: Method, key: bool, number: int) -> None:
    """Whatever arrives instead is rejected, and does not change the state."""
    whole = Pair(method, security_of(key)).run().sent
    for other in whole:
        _, expected, _ = whole[number]
        if other[1] is expected:
            continue
        pair = Pair(method, security_of(key), network=changed(number, lambda _: []))
        with suppress(ProtocolError):
            pair.run()
        receiver = pair.server if whole[number][0] else pair.client
        if receiver.handshake.next_step == Step(Direction.RECEIVE, expected):
            trusted = receiver.handshake.peer_authenticated
            fails_to_receive(receiver, other)
            assert receiver.handshake.next_step == Step(Direction.RECEIVE, expected)
            assert receiver.handshake.peer_authenticated == trusted


def fails_to_receive(side: Side, sent: Sent) -> None:
    with pytest.raises(ProtocolError, match="unexpected"):
        side.receive(*sent[1:])


@pytest.mark.parametrize("message", [protocol.Ping(1), protocol.ReadyToUse(0)])
def test_other_control_message_is_rejected(message: protocol.Message) -> None:
    """The message arrives instead of the client's AUTH_HELLO."""
    replaced = changed(3, lambda sent: [(sent[0], sent[1], message)])
    fails(Pair("tcp", Security(KEY), network=replaced), match="unexpected")


@EACH_MESSAGE
def test_truncated_message_is_rejected(method: Method, key: bool, number: int) -> None:
    sent = Pair(method, security_of(key)).run().sent[number]
    contents = sent[2] if isinstance(sent[2], bytes) else protocol.encode(sent[2])

    def cut(size: int) -> Callable[[Sent], list[Sent]]:
        def change(sent: Sent) -> list[Sent]:
            cut = contents[:size]
            return [(*sent[:2], cut if isinstance(sent[2], bytes) else protocol.decode(cut))]

        return change

    for size in range(len(contents)):
        network = changed(number, cut(size))
        fails(Pair(method, security_of(key), network=network))


# ---- the key -------------------------------------------------------------------------------------


def flipped(payload: Any, at: int) -> Any:
    """Return the message with one bit of the byte at this offset changed."""
    if isinstance(payload, bytes):
        return payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]
    first, *fields = payload
    data = flipped(b"".join(fields), at)
    ends = [0, *accumulate(len(each) for each in fields)]
    return type(payload)(first, *(data[start:end] for start, end in pairwise(ends)))


def flip(at: int, sent: Sent) -> list[Sent]:
    return [(*sent[:2], flipped(sent[2], at))]


def size_of(payload: Any) -> int:
    return len(payload) if isinstance(payload, bytes) else sum(map(len, payload[1:]))


@pytest.mark.parametrize(("method", "key", "number"), [it for it in ALL_MESSAGES if it[1]], ids=str)
def test_any_change_to_an_authenticated_field_ends_the_handshake(
    method: Method, key: bool, number: int
) -> None:
    """A ticket covers the whole offer. The proofs cover the hellos and queue pair numbers."""
    _, kind, payload = Pair(method, security_of(key)).run().sent[number]
    covered = [*range(size_of(payload))]
    if kind is Message.CHALLENGE:
        covered = covered[:CHALLENGE_SIZE]
    elif kind is Message.REPLY or (kind is Message.OFFER and method != "tcp"):
        hello = covered[-HELLO_SIZE:]
        covered = hello if method == "cm" else covered[QP_NUM] + hello
    for at in covered:
        network = changed(number, partial(flip, at))
        pair = Pair(method, security_of(key), network=network)
        with pytest.raises((AuthenticationError, ProtocolError)):
            pair.run()
        victim = pair.server if pair.sent[number][0] else pair.client
        assert not victim.handshake.peer_authenticated


def test_ticket_with_another_key_is_rejected_before_the_server_creates_anything() -> None:
    pair = Pair("tcp", Security(OTHER_KEY), Security(KEY))
    fails(pair, AuthenticationError, "does not have the key")
    assert Action.CREATE not in dict(pair.server.actions)


@pytest.mark.parametrize("number", [5, 6], ids=["the server's proof", "the client's proof"])
def test_proof_with_another_key_is_rejected(number: int) -> None:
    """A ticket alone, which could have been copied, is not enough."""

    def with_another_key(sent: Sent) -> list[Sent]:
        side = pair.client if sent[0] else pair.server
        original, side.handshake._security = side.handshake._security, Security(OTHER_KEY)
        wrong = side.handshake._proof("client" if sent[0] else "server")
        side.handshake._security = original
        assert isinstance(sent[2], protocol.AuthAnswer | protocol.AuthProof)
        assert sent[2].proof != wrong
        return [(*sent[:2], sent[2]._replace(proof=wrong))]

    pair = Pair("tcp", Security(KEY), network=changed(number, with_another_key))
    fails(pair, AuthenticationError, "does not have the key")
    victim = pair.client if number == 5 else pair.server
    assert not victim.handshake.peer_authenticated
    assert Action.CONNECT not in dict(victim.actions)


def test_reflected_proof_is_rejected() -> None:
    """A peer without the key could return the client's own nonce, and have it answer itself."""
    pair = Pair("tcp", Security(KEY)).run()
    (answer,) = (sent[2] for sent in pair.sent if sent[1] is Message.AUTH_ANSWER)
    assert isinstance(answer, protocol.AuthAnswer)
    proof = protocol.AuthProof(0, answer.proof)
    network = changed(6, lambda sent: [(*sent[:2], proof)])
    fails(Pair("tcp", Security(KEY), network=network), AuthenticationError)


@ALL
def test_goodbye_reports_that_the_keys_differ(method: Method, key: bool) -> None:
    if key:
        side = Pair(method, security_of(key)).client
        with pytest.raises(AuthenticationError, match="different key"):
            side.receive(Message.AUTH_ANSWER, protocol.Goodbye(0, 1, "no"))


@pytest.mark.parametrize("public", ["of another pair", "zero"])
@pytest.mark.parametrize("method", METHODS)
def test_replaced_public_key_is_rejected(method: Method, public: str) -> None:
    """A man in the middle would share a secret with each side.

    The proofs authenticate the public keys.
    """
    nonce = KeyExchange(new_sealing(memory_in_clear=False)).public
    if public == "zero":
        nonce = bytes(32)

    def replaced(sent: Sent) -> list[Sent]:
        if isinstance(sent[2], protocol.AuthHello):
            return [(*sent[:2], sent[2]._replace(nonce=nonce))]
        return [sent]

    encrypts = Security(KEY, encrypt=True)
    assert Pair(method, encrypts).run().finished
    pair = Pair(method, encrypts, network=replaced)
    fails(pair, AuthenticationError, "public key" if public == "zero" else "does not have the key")
    assert not pair.client.handshake.peer_authenticated
    assert not pair.server.handshake.peer_authenticated


# ---- the inspection ------------------------------------------------------------------------------


@ALL
def test_inspection_is_the_last_step(method: Method, key: bool) -> None:
    server = replace(security_of(key), inspects=True)
    pair = Pair(method, security_of(key), server).run()
    if method == "oob":  # its sides are no listeners
        return
    assert pair.finished
    for side in (pair.client, pair.server):
        assert side.actions[-1] == (Action.INSPECT, True)
        assert side.handshake.request_data == b"data"
    assert [kind for _, kind, _ in pair.sent[-2:]] == [
        Message.CONNECT_DATA,
        Message.CONNECT_ACCEPTED,
    ]


# ---- requirements that differ --------------------------------------------------------------------

DIFFERENCES = {
    "key": (Security(KEY), Security(), AuthenticationError),
    "encrypt": (Security(KEY, encrypt=True), Security(KEY), AuthenticationError),
    "memory": (Security(KEY, encrypt=True), Security(KEY, encrypt="messages"), AuthenticationError),
    "stream": (Security(stream=True), Security(), ProtocolError),
    "stream with a key": (Security(KEY, stream=True), Security(KEY), ProtocolError),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
@pytest.mark.parametrize("swap", [False, True], ids=["client", "server"])
@pytest.mark.parametrize("method", METHODS)
def test_both_sides_report_requirements_that_differ(
    method: Method, difference: str, swap: bool
) -> None:
    client, server, kind = DIFFERENCES[difference]
    pair = Pair(method, server, client) if swap else Pair(method, client, server)
    with pytest.raises(kind, match="the same"):
        pair.run()
    first = pair.client if is_comparing(pair.client) else pair.server
    second = pair.server if first is pair.client else pair.client
    with pytest.raises(kind, match="the same"):
        finish(second)


def is_comparing(side: Side) -> bool:
    return side.handshake.next_step == Step(Direction.NONE, Action.COMPARE)


def finish(side: Side) -> None:
    """Let a side continue with the messages that have arrived."""
    while any(side.continue_until_receive()) or side.arrived:
        side.receive_next()
