"""Test keys that both sides must have, TLS for the bootstrap, and peers that have neither."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, closing, contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import trustme

from aiordma import AuthenticationError, Connection, Listener, Rights, cm, connect, listen, verbs
from aiordma._core import protocol
from aiordma._core.authentication import proof, transcript
from aiordma._core.frames import FrameKind
from aiordma._core.handshake_layout import (
    CHALLENGE_MAGIC,
    CHALLENGE_SIZE,
    ENDPOINT_SIZE,
    HELLO_SIZE,
    TICKET_SIZE,
    Hello,
)
from aiordma._core.protocol import MIN_RECEIVE
from aiordma._core.refusal import REFUSAL_SIZE, is_missing_key_refusal, unpack_refusal
from aiordma._transport import connect_cm
from aiordma._transport.auth import new_ticket
from aiordma._transport.connect_attempt import ConnectAttempt
from aiordma._transport.connect_tcp import MAGIC, READY, TICKET
from aiordma._transport.endpoint import RailEndpoint
from aiordma._transport.tcp_link import CONTROL, REFUSED
from aiordma.errors import (
    ConnectionManagerError,
    HandshakeBrokenError,
    ProtocolError,
    RejectedError,
    host_port,
)
from aiordma.transport import Via

from .connection_factory import (
    KEY,
    SMALL,
    ConnectionFactory,
    check_alive,
    ends,
    hello,
    when_limits_pass,
    yield_loop,
)
from .marks import by_cm, by_tcp, one_loop
from .raw_peer import (
    Piece,
    RawId,
    RawListener,
    RawPeer,
    Stranger,
    acknowledgement,
    control,
    frame,
    packed_control,
    parameters,
    raw_request,
    rendezvous,
    server_for_queue_pairs,
)

pytestmark = pytest.mark.any_device

OTHER = b"other sixteen and more bytes"


async def listening(factory: ConnectionFactory, auth: bytes | None) -> Listener:
    return await replace(factory, auth=auth).listen(replace(SMALL, handshake_timeout=1000))


async def dial(factory: ConnectionFactory, port: int, auth: bytes | None) -> Connection:
    return await replace(factory, auth=auth).connect(port)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(KEY, OTHER), (None, KEY), (KEY, None), (KEY[:-1], KEY)],
    ids=["another", "none", "too many", "shorter"],
)
async def test_connect_fails_when_auth_keys_differ(
    factory: ConnectionFactory, ours: bytes | None, theirs: bytes | None
) -> None:
    async with await listening(factory, theirs) as listener:
        error = await ends(dial(factory, listener.port, ours), AuthenticationError)
        assert isinstance(error, ConnectionRefusedError)
        # The next `accept` must return the new connection, not the rejected one.
        await replace(factory, auth=theirs).works(listener)


@one_loop
async def test_auth_key_shorter_than_16_bytes_raises_value_error(
    factory: ConnectionFactory,
) -> None:
    for make in (listening(factory, b"short"), dial(factory, 1, b"short")):
        error = await ends(make, ValueError)
        assert "16" in str(error)


# ---- peers that lie ------------------------------------------------------------------------------

AUTHENTICATES = replace(hello(SMALL), authenticates=True).pack()


def admitted(
    factory: ConnectionFactory, listener: Listener
) -> AbstractAsyncContextManager[RawPeer]:
    """Connect a peer that has a valid ticket but has not yet proved possession of the key."""
    return RawPeer.connect(factory, listener.port, hello_data=AUTHENTICATES, key=KEY)


def stranger(
    factory: ConnectionFactory, listener: Listener
) -> AbstractAsyncContextManager[Stranger]:
    """Connect a bootstrap client that sends a valid ticket but has no queue pair."""
    return Stranger.connect(factory, listener.port, hello_data=AUTHENTICATES, key=KEY)


HELLO = protocol.AuthHello(0, bytes(32))
PROOF = protocol.AuthProof(0, bytes(32))

UNAUTHENTICATED_MESSAGES = {
    "a message": [frame(FrameKind.DATA, b"let me in")],
    "an offer": [rendezvous(1, Piece(4096, 1 << 20, 1))],
    "a request": [control(protocol.RegionRequest(1, 4096, Rights.READ, 0))],
    "a connection": [
        control(protocol.ConnectRequest(1, 1, bytes(ENDPOINT_SIZE), bytes(HELLO_SIZE)))
    ],
    "a guess": [control(HELLO), control(PROOF)],
    "a proof of nothing": [control(PROOF)],
    "two hellos": [control(HELLO), control(HELLO)],
    "the other's part": [control(protocol.AuthAnswer(0, bytes(32), bytes(32)))],
    "the size of its receives": [control(protocol.ReceiveSize(0, 100, MIN_RECEIVE))],
    "the end of a message": [acknowledgement(1)],
    "what its data are": [control(protocol.ConnectData(0, b""))],
    "a ping": [control(protocol.Ping(1))],
}


@one_loop
@by_cm
@pytest.mark.parametrize("violation", UNAUTHENTICATED_MESSAGES)
async def test_peer_without_the_key_is_never_accepted(
    factory: ConnectionFactory, violation: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A ticket lets the peer start a handshake, but does not replace the key."""
    caplog.set_level(logging.INFO)
    async with factory.witness(), await listening(factory, KEY) as listener:
        async with admitted(factory, listener) as peer:
            peer.send(*UNAUTHENTICATED_MESSAGES[violation])
            while True:
                said = await peer.control()
                if isinstance(said, protocol.Goodbye):
                    break
                assert isinstance(said, protocol.AuthAnswer)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                raise AssertionError(f"{await listener.accept()!r} was delivered")
        await replace(factory, auth=KEY).works(listener)


@one_loop
@by_cm
async def test_peer_cannot_access_memory_before_its_proof(factory: ConnectionFactory) -> None:
    async with await listening(factory, KEY) as listener, admitted(factory, listener):
        (handshake,) = listener._acceptor._handshakes.values()
        assert isinstance(handshake.request, connect_cm.CMRequest)
        qp = handshake.request._attempt.endpoint.qp
        assert qp is not None
        assert qp.query().qp_access_flags == verbs.AccessFlags.NONE


@one_loop
@by_cm
@pytest.mark.parametrize("is_valid", [True, False], ids=["valid reply", "invalid reply"])
async def test_listener_cannot_access_memory_before_its_proof(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch, is_valid: bool
) -> None:
    rights: list[verbs.AccessFlags] = []
    connected_by_cm, parameters = ConnectAttempt.connected_by_cm, connect_cm.parameters

    def withhold(attempt: ConnectAttempt[RailEndpoint]) -> None:
        connected_by_cm(attempt)
        if attempt.handshake.client:
            assert attempt.endpoint.qp is not None
            rights.append(attempt.endpoint.qp.query().qp_access_flags)

    def reply(endpoint: RailEndpoint, hello: bytes, *peer: Hello) -> cm.ConnectionParameters:
        return parameters(endpoint, hello if is_valid or not peer else bytes(len(hello)), *peer)

    monkeypatch.setattr(ConnectAttempt, "connected_by_cm", withhold)
    monkeypatch.setattr(connect_cm, "parameters", reply)
    async with await listening(factory, KEY) as listener:
        connecting = asyncio.ensure_future(dial(factory, listener.port, KEY))
        if is_valid:
            async with await connecting:
                pass
        else:
            await ends(connecting, ProtocolError)
    assert rights == [verbs.AccessFlags.NONE]


@one_loop
@by_cm
async def test_listener_rejects_a_peer_that_ignores_its_hello(factory: ConnectionFactory) -> None:
    stream = replace(hello(SMALL), stream=True).pack()
    async with (
        await listening(factory, None) as listener,
        RawPeer.connect(factory, listener.port, hello_data=stream),
        await dial(factory, listener.port, None) as client,
        await listener.accept() as server,
    ):
        assert server.peer_address == client.local_address


@one_loop
@pytest.mark.parametrize("via", ["cm", "tcp"])
@pytest.mark.parametrize("said", ["a guess", "what another said"])
async def test_replayed_key_proof_is_rejected_on_another_connection(
    factory: ConnectionFactory, via: Via, said: str
) -> None:
    """The messages that authenticated a client on one connection prove nothing on another."""
    factory = replace(factory, via=via)
    async with await listening(factory, KEY) as listener:
        client, server = await replace(factory, auth=KEY).both(listener)
        async with client, server:
            handshake = client._handshake
            messages: list[protocol.Message] = [HELLO, PROOF]
            if said == "what another said":
                messages = [
                    protocol.AuthHello(0, handshake._nonce),
                    protocol.AuthProof(0, handshake._proof("client")),
                ]
            heard: list[protocol.Message] = []
            if via == "cm":
                async with admitted(factory, listener) as peer:
                    peer.send(*map(control, messages))
                    while len(heard) < 2:
                        heard.append(await peer.control())
            else:
                async with stranger(factory, listener) as other:
                    other.writer.write(b"".join(map(packed_control, messages)))
                    heard = await other.rest()
            answer, goodbye = heard
            assert isinstance(answer, protocol.AuthAnswer)
            assert isinstance(goodbye, protocol.Goodbye)
            assert goodbye.code == protocol.GoodbyeCode.NOT_AUTHENTICATED
            await check_alive(client, server)


@one_loop
@by_cm
async def test_data_sent_immediately_after_the_key_proof_is_received(
    factory: ConnectionFactory,
) -> None:
    """A fast peer may send data before the listener has processed its proof."""
    nonce = bytes(32)
    async with await listening(factory, KEY) as listener, admitted(factory, listener) as peer:
        peer.send(control(protocol.AuthHello(0, nonce)))
        answer = await peer.control()
        assert isinstance(answer, protocol.AuthAnswer)
        said = transcript(
            Hello.unpack(AUTHENTICATES), peer.theirs, peer.qp.qp_num, peer.qp.query().dest_qp_num
        )
        shown = proof(KEY, "client", nonce, answer.nonce, said)
        peer.send(control(protocol.AuthProof(0, shown)), frame(FrameKind.DATA, b"at once"))
        async with await listener.accept() as server:
            assert bytes(await server.recv()) == b"at once"


@one_loop
async def test_silent_handshake_times_out_without_blocking_other_clients(
    factory: ConnectionFactory,
) -> None:
    ask = RawPeer.connect if factory.via == "cm" else Stranger.connect
    async with (
        await replace(factory, auth=KEY).listen() as listener,
        ask(factory, listener.port, hello_data=AUTHENTICATES, key=KEY),
    ):
        await replace(factory, auth=KEY).works(listener)
        handshakes = listener._acceptor._handshakes
        while handshakes:
            await when_limits_pass(asyncio.wait(handshakes))
            await yield_loop(1)


# ---- tickets -------------------------------------------------------------------------------------


@contextmanager
def no_resources_created(listener: Listener) -> Iterator[None]:
    """Check that the listener allocates nothing.

    Every allocation is preceded by a call of `Acceptor.reserve_place`.
    """
    with mock.patch.object(listener._acceptor, "reserve_place") as reserve_place:
        yield
    reserve_place.assert_not_called()


async def send_ticket(factory: ConnectionFactory, listener: Listener, ticket: bytes) -> bytes:
    """Return the data with which the listener rejects a client that sends this ticket."""
    if factory.via == "cm":
        async with raw_request(factory, listener.port, AUTHENTICATES + ticket) as (_, event):
            assert event.type is cm.EventType.REJECTED
            return event.private_data
    async with Stranger.connect(factory, listener.port, hello_data=AUTHENTICATES) as peer:
        assert peer.answer.startswith(MAGIC + CHALLENGE_MAGIC)
        peer.writer.write(TICKET + ticket)
        answer = await peer.reader.read(len(REFUSED) + REFUSAL_SIZE)
        assert answer.startswith(REFUSED)
        return answer.removeprefix(REFUSED)


@one_loop
async def test_listener_allocates_no_resources_before_a_valid_ticket(
    factory: ConnectionFactory,
) -> None:
    async with await listening(factory, KEY) as listener:
        with no_resources_created(listener):
            told = await send_ticket(factory, listener, bytes(TICKET_SIZE))
            if factory.via == "cm":
                assert told.startswith(CHALLENGE_MAGIC)
                assert not listener._acceptor.handshakes
            else:
                text = "the peer's ticket does not match this listener's challenge"
                assert unpack_refusal(told) == text
            for key in (OTHER, None):
                await ends(dial(factory, listener.port, key), AuthenticationError)
        await replace(factory, auth=KEY).works(listener)


@one_loop
@by_cm
async def test_ticket_from_a_different_key_is_rejected_as_wrong_key(
    factory: ConnectionFactory,
) -> None:
    async with await listening(factory, KEY) as listener:
        challenge = (await send_ticket(factory, listener, b""))[:CHALLENGE_SIZE]
        with no_resources_created(listener):
            wrong = new_ticket(OTHER, challenge, AUTHENTICATES)
            assert is_missing_key_refusal(await send_ticket(factory, listener, wrong))


@one_loop
@by_cm
async def test_ticket_cannot_be_reused(factory: ConnectionFactory) -> None:
    async with await listening(factory, KEY) as listener:
        challenge = await send_ticket(factory, listener, b"")
        ticket = new_ticket(KEY, challenge[:CHALLENGE_SIZE], AUTHENTICATES)
        async with raw_request(factory, listener.port, AUTHENTICATES + ticket) as (_, event):
            assert event.type is cm.EventType.ESTABLISHED
            with no_resources_created(listener):
                told = await send_ticket(factory, listener, ticket)
        assert told == challenge


@one_loop
@by_cm
async def test_client_retries_with_a_new_ticket_after_rejection(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    tickets = iter([bytes(TICKET_SIZE)])
    monkeypatch.setattr(
        connect_cm, "new_ticket", lambda *asked: next(tickets, None) or new_ticket(*asked)
    )
    async with await listening(factory, KEY) as listener:
        await replace(factory, auth=KEY).works(listener)
        tickets = iter(3 * [bytes(TICKET_SIZE)])
        error = await ends(dial(factory, listener.port, KEY), ConnectionManagerError)
        assert "a ticket too many times" in str(error)
        assert list(tickets) == [bytes(TICKET_SIZE)]


@one_loop
@by_cm
async def test_client_rejects_a_challenge_that_contradicts_its_key(
    factory: ConnectionFactory,
) -> None:
    """The challenge may contradict whether the client has a key, or be missing although the client
    has one.
    """
    plain = hello(SMALL).pack()
    with closing(RawListener(factory)) as raw:
        for key, answer in ((KEY, plain), (None, AUTHENTICATES)):
            dialling = asyncio.create_task(ends(dial(factory, raw.port, key), AuthenticationError))
            event = await raw.request()
            event.id.reject(bytes.fromhex("41494f4301000100") + bytes(32) + answer)
            assert ("no key" in str(await dialling)) == (key is not None)
            event.id.close()
        asking = asyncio.create_task(ends(dial(factory, raw.port, KEY), ProtocolError))
        event = await raw.request()
        accepting = RawId(event.id)
        event.id.accept(parameters(AUTHENTICATES))
        assert "did not send a challenge" in str(await asking)
        accepting.close()


# ---- the proof on the socket of the TCP bootstrap ------------------------------------------------

INVALID_TICKETS = {
    "ready": READY,
    "a proof without a ticket": packed_control(HELLO) + packed_control(PROOF),
    "an offer again": MAGIC,
}


@one_loop
@by_tcp
@pytest.mark.parametrize("violation", INVALID_TICKETS)
async def test_invalid_ticket_is_refused(factory: ConnectionFactory, violation: str) -> None:
    async with await listening(factory, KEY) as listener:
        with no_resources_created(listener):
            async with Stranger.connect(factory, listener.port, hello_data=AUTHENTICATES) as peer:
                peer.writer.write(INVALID_TICKETS[violation])
                assert (await peer.reader.read()).startswith(REFUSED)


SOCKET_VIOLATIONS = {
    "ready": READY,
    "a connection": packed_control(
        protocol.ConnectRequest(1, 1, bytes(ENDPOINT_SIZE), bytes(HELLO_SIZE))
    ),
    "a proof of nothing": packed_control(PROOF),
    "two hellos": 2 * packed_control(HELLO),
    "the other's part": packed_control(protocol.AuthAnswer(0, bytes(32), bytes(32))),
    "no message": CONTROL + b"\1\0\0\0\xc1",
    "more than a message has": CONTROL + b"\xff\xff\xff\x7f",
}


@one_loop
@by_tcp
@pytest.mark.parametrize("violation", SOCKET_VIOLATIONS)
async def test_protocol_violation_on_the_bootstrap_socket_aborts_handshake(
    factory: ConnectionFactory, violation: str
) -> None:
    async with (
        factory.witness(),
        await listening(factory, KEY) as listener,
        stranger(factory, listener) as peer,
    ):
        peer.writer.write(SOCKET_VIOLATIONS[violation])
        heard = await peer.rest()
        assert all(isinstance(message, protocol.AuthAnswer) for message in heard)
        await replace(factory, auth=KEY).works(listener)


@one_loop
@by_tcp
async def test_first_frame_is_encrypted_after_key_proof_over_tcp(
    factory: ConnectionFactory,
) -> None:
    encrypted = replace(factory, auth=KEY, encrypt=True)
    async with encrypted.pair() as (client, server):
        ends = [conn._messages.outbox.sealing for conn in (client, server)]
        for ours, theirs in (ends, ends[::-1]):
            assert ours
            assert theirs
            sealed = ours.sealed(b"the first frame")
            assert b"first" not in sealed
            assert theirs.opened(sealed) == b"the first frame"
        client.abort()
        server.abort()


@one_loop
@by_tcp
@pytest.mark.parametrize("key", [None, KEY], ids=["without a key", "with a key"])
async def test_listener_connects_to_client_endpoint_only_after_key_proof(
    factory: ConnectionFactory, key: bytes | None
) -> None:
    """The device connects to the address in the endpoint when its queue pair is connected.

    A stranger must not be able to choose that address.
    """
    with server_for_queue_pairs(factory.host) as target:
        target.setblocking(False)
        async with (
            await listening(factory, key) as listener,
            Stranger.connect(
                factory,
                listener.port,
                hello_data=hello(SMALL).pack() if key is None else AUTHENTICATES,
                key=key,
                data_port=target.getsockname()[1],
            ) as peer,
        ):
            if key is None:
                reached, _ = await asyncio.get_running_loop().sock_accept(target)
                reached.close()
                return
            peer.writer.write(packed_control(HELLO) + packed_control(PROOF))
            await peer.rest()
            with pytest.raises(BlockingIOError):
                target.accept()


# ---- TLS -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@by_tcp
async def test_bootstrap_over_tls_requires_a_trusted_certificate(
    factory: ConnectionFactory, authority: trustme.CA
) -> None:
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(factory.host).configure_cert(serving)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    factory = replace(factory, auth=KEY)
    where: dict[str, Any] = {**factory.where, "config": SMALL}
    there: dict[str, Any] = {**factory.there, "config": SMALL}
    async with await listen(factory.host, 0, ssl=serving, **there) as listener:

        async def dialled(context: ssl.SSLContext | None) -> Connection:
            return await connect(factory.host, listener.port, ssl=context, **where)

        client, server = await asyncio.gather(dialled(trusting), listener.accept())
        async with client, server:
            await check_alive(client, server)
        error = await ends(dialled(ssl.create_default_context()), ProtocolError)
        assert isinstance(error.__cause__, ssl.SSLCertVerificationError)
        assert "pass ssl=" not in str(error)
        refused = await ends(dialled(None), RejectedError)
        assert str(refused) == (
            "[Errno 111] the listener uses TLS for the bootstrap, but the connecting side does "
            "not: "
            "pass ssl= on both sides or on neither: the peer's application rejected the connection"
        )
        client, server = await asyncio.gather(dialled(trusting), listener.accept())
        async with client, server:
            await check_alive(client, server)


@by_tcp
@pytest.mark.parametrize("auth", [None, KEY], ids=["no key", "key"])
async def test_tls_client_and_plain_listener_both_report_the_ssl_mismatch(
    factory: ConnectionFactory, auth: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "aiordma.acceptor")
    where: dict[str, Any] = {**factory.where, "config": SMALL, "auth": auth}
    there: dict[str, Any] = {**factory.there, "config": SMALL, "auth": auth}
    async with await listen(factory.host, 0, **there) as listener:
        context = ssl.create_default_context()
        connecting = connect(factory.host, listener.port, ssl=context, **where)
        error = await ends(connecting, HandshakeBrokenError)
        where_to = host_port(listener.address)
        assert re.fullmatch(
            rf"TLS handshake with {re.escape(where_to)} failed: .+; "
            r"pass ssl= on both sides or on neither",
            str(error),
        )
        logged = (
            "uses TLS for the bootstrap, but this side does not: pass ssl= on both sides or on "
            "neither"
        )
        assert logged in caplog.text


@by_tcp
async def test_client_without_ssl_suggests_ssl_after_a_tls_alert(
    factory: ConnectionFactory,
) -> None:
    """A TLS server of another kind does not know the bootstrap, and answers with an alert."""

    async def alert(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes.fromhex("15 03 01 00 02 02 46 00"))
        writer.close()

    async with await asyncio.start_server(alert, factory.host, 0) as server:
        port = server.sockets[0].getsockname()[1]
        error = await ends(connect(factory.host, port, **factory.where), ProtocolError)
    assert str(error) == (
        f"{host_port((factory.host, port))} uses TLS for the bootstrap, but this side does not: "
        "pass ssl= on both sides or on neither"
    )


@one_loop
@by_tcp
async def test_ssl_is_rejected_for_non_tcp_bootstraps(factory: ConnectionFactory) -> None:
    context = ssl.create_default_context()
    wrong: Any = "a certificate"
    for make, kind, text in (
        (connect(factory.host, 1, via="cm", ssl=context), ValueError, "tcp"),
        (listen(factory.host, 0, via="cm", ssl=context), ValueError, "tcp"),
        (connect(factory.host, 1, via="tcp", ssl=wrong), TypeError, "SSLContext"),
    ):
        assert text in str(await ends(make, kind))
