"""Test that crowds of peers that prove nothing keep no honest peer out, whatever they have sent."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from aiordma import AuthenticationError, Config, Connection, Listener, connect, verbs
from aiordma._datapath.memory import Clock
from aiordma._event_loop.driver import RequestDriver
from aiordma._event_loop.time_share import BURST, SHARE, TimeShare
from aiordma._transport import admission_control, connect_cm
from aiordma._transport.acceptor import Acceptor, ConnectionLimitError, packed_refusal
from aiordma._transport.connect_tcp import MAGIC
from aiordma.errors import RejectedError

from .connection_factory import KEY, SMALL, ConnectionFactory, check_alive, ends, hello, yield_loop
from .marks import by_cm, one_loop

pytestmark = pytest.mark.any_device


# The number of silent peers that share one address, and the number of those with separate
# addresses.
CROWD = 1000


@asynccontextmanager
async def crowd(
    factory: ConnectionFactory, port: int, data: bytes, one: int = CROWD, many: int = CROWD
) -> AsyncIterator[None]:
    """Keep a crowd of peers connected that send `data` and then remain silent."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-m", "tests.transport.silent_crowd",
        factory.host, str(port), str(one), str(many), data.hex(),
        cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.stdin.close()
        await process.wait()


def offer(*, with_key: bool) -> bytes:
    """Return the complete first message of a TCP bootstrap client."""
    endpoint = verbs.Endpoint(
        gid=verbs.GID.from_ip("127.0.0.1").raw, qp_num=77, psn=1, lid=1, mtu=3
    )
    return MAGIC + endpoint.pack() + replace(hello(), authenticates=with_key).pack()


def request(*, with_key: bool) -> bytes:
    """Return a REQ for the embedded device's connection manager (softdev/src/cm/cm_mad.c)."""
    mad = bytearray(256)
    fields = {0: b"\1\7\2\3", 17: b"\x10", 36: b"\1\6", 43: b"\6", 58: b"\x4d", 59: b"\1"}
    fields |= {63: b"\1", 70: b"\1", 71: b"\6", 74: b"\7", 165: b"\x60"}
    fields |= {200: replace(hello(), authenticates=with_key).pack()}
    for place, value in fields.items():
        mad[place : place + len(value)] = value
    return bytes(mad)


def first_bytes(factory: ConnectionFactory, *, with_key: bool) -> bytes:
    return (offer if factory.via == "tcp" else request)(with_key=with_key)


async def listening(
    factory: ConnectionFactory, key: bytes | None, config: Config = SMALL
) -> Listener:
    return await replace(factory, auth=key).listen(config)


async def dial(
    factory: ConnectionFactory, port: int, key: bytes | None, source: str | None = None
) -> Connection:
    where = {**replace(factory, auth=key).where, "source": (source, 0) if source else None}
    return await connect(factory.host, port, config=replace(SMALL, in_band=False), **where)


@pytest.mark.parametrize("kind", ["nothing", "a part", "all of the first message"])
@pytest.mark.parametrize("key", [None, KEY], ids=["without a key", "with a key"])
@one_loop
async def test_client_connects_despite_thousands_of_incomplete_handshakes(
    factory: ConnectionFactory, kind: str, key: bytes | None
) -> None:
    """Handshakes have no time limit here, so only the admission rule makes room.

    Without a key, a complete first message of a stranger costs the time of a handshake. Peers on
    the strangers' network then wait for that time, so the client connects from another network.
    """
    whole = first_bytes(factory, with_key=key is not None)
    data = {"nothing": b"", "a part": whole[:6]}.get(kind, whole)
    source = "127.99.0.1" if data == whole and key is None else None
    config = replace(SMALL, max_handshakes=256)
    async with (
        await listening(factory, key, config) as listener,
        crowd(factory, listener.port, data),
    ):
        for _ in range(10):
            client = await dial(factory, listener.port, key, source)
            server = await listener.accept()
            async with client, server:
                await check_alive(client, server)


@by_cm
@one_loop
@pytest.mark.parametrize("step", ["refusal", "challenge", "handshake"])
async def test_handshakes_do_not_starve_established_connections(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Each fruitless handshake takes half of the time that may be used at once.

    Later ones wait until the share has earned more time, however often an open connection is
    served. The same holds for requests that are refused before a handshake or answered with a
    challenge.
    """
    now = 1000.0
    clock = Clock(lambda: now)
    begun = asyncio.Queue[None]()

    def check_ticket_or_challenge(self: connect_cm.CMRequest, acceptor: Acceptor) -> NoReturn:
        nonlocal now
        begun.put_nowait(None)
        now += BURST / 2
        raise ConnectionLimitError("this takes long")

    async def handshake(self: connect_cm.CMRequest, acceptor: Acceptor) -> Connection:
        check_ticket_or_challenge(self, acceptor)

    def challenge(self: connect_cm.CMRequest, acceptor: Acceptor) -> bool:
        try:
            check_ticket_or_challenge(self, acceptor)
        except ConnectionLimitError as error:
            self._reject(packed_refusal(error))
        self._id.close()
        return False

    steps = {
        "refusal": ("check_ticket_or_challenge", check_ticket_or_challenge),
        "challenge": ("check_ticket_or_challenge", challenge),
        "handshake": ("handshake", handshake),
    }

    async with await listening(factory, None) as listener:
        client = await dial(factory, listener.port, None)
        server = await listener.accept()
        events = RequestDriver.for_library(verbs.find_device(factory.device).library)
        monkeypatch.setattr(events, "share", TimeShare(clock))
        monkeypatch.setattr(connect_cm.CMRequest, *steps[step])
        async with client, server:
            turned_away = [
                asyncio.create_task(ends(dial(factory, listener.port, None), RejectedError))
                for _ in range(10)
            ]
            for served in (3, 4, 5):
                while begun.qsize() < served:
                    await check_alive(client, server)
                for _ in range(50):
                    await check_alive(client, server)
                assert begun.qsize() == served
                now += BURST / 2 * SHARE
            now += 3600
            while begun.qsize() < 10:
                await check_alive(client, server)
                now += 3600
            for task in turned_away:
                await task
        events.release()


@one_loop
async def test_unauthenticated_peers_do_not_count_towards_max_connections(
    factory: ConnectionFactory,
) -> None:
    """Peers without the key do not count as connections and do not even reach a handshake.

    No peer, honest or not, is turned away to make room for them.
    """
    config = replace(SMALL, max_connections=2, max_connections_per_host=2)
    async with (
        await listening(factory, KEY, config) as listener,
        crowd(factory, listener.port, first_bytes(factory, with_key=True), 5, 0),
    ):
        client = await dial(factory, listener.port, KEY)
        server = await listener.accept()
        async with client, server:
            await check_alive(client, server)
        assert not listener._acceptor.handshakes


# ---- peers that try keys -------------------------------------------------------------------------

WRONG = b"another of sixteen or more bytes"
ELSEWHERE = "127.0.0.9"


@one_loop
async def test_failed_handshakes_are_limited_per_host(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other hosts stay unaffected.

    The rate is so low that the host's limit does not recover during the test.
    """
    monkeypatch.setattr(admission_control, "HOST_BURST", 3)
    monkeypatch.setattr(admission_control, "HOST_RATE", 1e-6)
    async with await listening(factory, KEY) as listener:
        await connect_from_another_host(factory, listener)
        for _ in range(3):
            await fail_handshake(factory, listener)
        for key in (WRONG, KEY, None):
            error = await ends(dial(factory, listener.port, key), RejectedError)
            assert "too many handshakes have used a wrong key" in str(error)
        await connect_from_another_host(factory, listener)
    said = [text for text in caplog.messages if "for a while: too many" in text]
    assert len(said) == 1
    assert said[0].startswith(f"rejecting handshakes from {factory.host} ")


async def fail_handshake(
    factory: ConnectionFactory, listener: Listener, source: str | None = None
) -> None:
    """Try to connect with a wrong key, and wait until the listener has noticed the failure."""
    await ends(dial(factory, listener.port, WRONG, source), AuthenticationError)
    while listener._acceptor._handshakes:
        await yield_loop(1)


async def connect_from_another_host(factory: ConnectionFactory, listener: Listener) -> None:
    client = await dial(factory, listener.port, KEY, ELSEWHERE)
    async with client, await listener.accept() as server:
        await check_alive(client, server)


@one_loop
async def test_successful_key_proof_resets_the_failure_count_of_the_host(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program with a wrong key must not shut out the other programs on its host."""
    monkeypatch.setattr(admission_control, "HOST_BURST", 3)
    monkeypatch.setattr(admission_control, "HOST_RATE", 1e-6)
    async with await listening(factory, KEY) as listener:
        for _ in range(3):
            for _ in range(2):
                await fail_handshake(factory, listener)
            client = await dial(factory, listener.port, KEY)
            async with client, await listener.accept() as server:
                await check_alive(client, server)


@one_loop
async def test_silent_peers_do_not_count_as_failed_handshakes(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Silent peers try no key, so they do not keep out others of their host."""
    monkeypatch.setattr(admission_control, "HOST_BURST", 1)
    monkeypatch.setattr(admission_control, "HOST_RATE", 1e-6)
    caplog.set_level("INFO", "aiordma.acceptor")
    late = 5 if factory.via == "tcp" else 0  # the connection manager ignores partial requests
    async with await listening(factory, KEY) as listener:
        listener._acceptor.config = replace(SMALL, handshake_timeout=0.1)  # for handshakes only
        async with (
            crowd(factory, listener.port, first_bytes(factory, with_key=True), 5, 0),
            crowd(factory, listener.port, first_bytes(factory, with_key=True)[:20], 5, 0),
        ):
            text = "failed: TimeoutError('the handshake took longer than Config.handshake_timeout,"
            while sum(text in message for message in caplog.messages) < late:
                await yield_loop(1)
        listener._acceptor.config = SMALL  # honest peers get the normal timeout
        client = await dial(factory, listener.port, KEY)
        async with client, await listener.accept() as server:
            await check_alive(client, server)
