"""Test the time limits for rails whose peer does not respond.

The tests replace the loop's timers and decide when they fire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from aiordma import ConnectionBrokenError
from aiordma._core.protocol import RailAnswer, RailCause, RailDown, RailOffer, RailReady
from aiordma._transport import rails
from aiordma._transport.rails import Rails, RailSlot, RailState
from tests.transport.connection_factory import (
    SMALL,
    ConnectionFactory,
    check_alive,
    ends,
    pattern,
    yield_loop,
)
from tests.transport.raw_peer import endpoint_at

from .joining import HOST, Later, further, joined, lose, shown, until_rails
from .test_hostile import ENDPOINT, asked, victim
from .test_striped_operations import CUT, MB, second, sharing

BY_CLIENT, BY_LISTENER = SMALL.connect_timeout, SMALL.handshake_timeout


@pytest.fixture(autouse=True)
def later(monkeypatch: pytest.MonkeyPatch) -> Iterator[Later]:
    it = Later()
    monkeypatch.setattr(Rails, "call_later", property(lambda _: it, lambda *_: None), raising=False)
    monkeypatch.setattr(
        rails, "RailSlot", lambda device, offer, _: RailSlot(device, offer, Later())
    )
    yield it
    assert not it.waiting


async def test_rail_offer_times_out_without_a_response(
    factory: ConnectionFactory, later: Later, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue pair is released.

    An answer that arrives later finds no offer, and the peer then releases its queue pair, too.
    """
    lose(monkeypatch, RailAnswer)
    async with joined(factory.via) as conns:
        while len(conns[1].rails) == 1:
            await yield_loop(1)
        here, there = map(further, conns)
        assert here.state is RailState.OFFERED
        answer = RailAnswer(here.offer_id, 1, endpoint_at(HOST))
        assert there.step_timer is not None
        there.step_timer.cancel()
        later.fire()
        assert (here.queue, here.endpoint) == (None, None)
        assert "responded to the offer" in str(conns[0].rails[1].error)
        assert f"{BY_CLIENT:g} seconds (Config.connect_timeout)" in str(conns[0].rails[1].error)
        assert not later.waiting
        await check_alive(*conns)
        conns[0]._owner.control(answer)
        await until_rails(conns, ["lead", "down"])
        await yield_loop(2)
        assert there.queue is None


async def test_rail_times_out_without_rail_ready_and_accepts_late_messages(
    factory: ConnectionFactory, later: Later
) -> None:
    """A peer that stops responding must not hold a queue pair.

    Its late messages are valid because they may have crossed the RailDown.
    """
    async with victim(factory, config=replace(SMALL, max_rails=4)) as (conn, peer):
        for number in range(1, 4):
            answer = await asked(peer, RailOffer(number, number, ENDPOINT))
            assert isinstance(answer, RailAnswer)
        assert later.asked == [BY_LISTENER] * 3
        later.fire()
        assert conn._rails is not None
        for rail in conn._rails.rails[1:]:
            assert (rail.queue, rail.endpoint) == (None, None)
            assert "shown that this rail works" in str(rail.error)
            assert "handshake_timeout" in str(rail.error)
            assert await peer.control() == RailDown(RailCause.SILENCE, rail.number)
            peer.give_back()
        later.fire()  # none of them has written by these rails
        assert not conn.closed
        peer.send_control(RailReady(0, 1))  # they have crossed
        for number in range(1, 4):
            peer.send_control(RailDown(0, number))
        while any(rail.state is not RailState.DOWN for rail in conn._rails.rails[1:]):
            await yield_loop(1)


async def test_rail_ready_received_by_a_busy_loop_prevents_the_timeout(
    factory: ConnectionFactory, later: Later
) -> None:
    async with victim(factory) as (conn, peer):
        assert isinstance(await asked(peer, RailOffer(1, 1, ENDPOINT)), RailAnswer)
        polls = conn._endpoint.driver.poll

        def poll() -> bool:
            conn._owner.control(RailReady(0, 1))
            return polls()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(conn._endpoint.driver, "poll", poll)
            later.fire()
        assert further(conn).state is RailState.UP
        assert not later.waiting


async def test_connecting_rail_closes_when_the_lead_breaks(
    factory: ConnectionFactory, later: Later, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer has not learned that the rail works, so both rails end with the lead.

    The fixture checks that no timer outlives the connection.
    """
    lose(monkeypatch, RailReady)
    async with joined(factory.via) as conns:
        await until_rails(conns[:1])
        assert shown(conns[1])[1] == ("embedded1", "connecting")
        assert later.waiting
        conns[0].abort()
        await ends(conns[1].recv(), ConnectionBrokenError)
    assert [rail.state for rail in conns[1].rails] == ["down", "down"]


async def test_connection_breaks_when_peer_never_confirms_stopping_a_rail(
    later: Later, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer has a time limit to confirm that it has stopped a broken rail.

    Passing it ends the connection only if a write is outstanding on that rail.
    """
    async with sharing(8 * MB) as (client, server, _, remote):
        lose(monkeypatch, RailDown)
        second(server).rail_broke(CUT)
        await until_rails([server], ["lead", "down"])
        assert later.asked[-1] == SMALL.keep_alive_timeout
        later.fire()
        await check_alive(client, server)
        writing = asyncio.ensure_future(client.write(pattern(8 * MB), remote))
        while not second(client).outstanding:
            await yield_loop(1)
        second(client).rail_broke(CUT)
        await yield_loop(20)
        assert not writing.done()
        later.fire()
        error = await ends(writing, ConnectionBrokenError)
        assert "stopped this rail within 30 seconds (Config.keep_alive_timeout)" in str(error)
        assert client.closed
        await ends(server.recv(), ConnectionBrokenError)
