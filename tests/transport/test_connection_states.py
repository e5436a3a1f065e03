"""Every transition of the table on a real connection, and every event that is ignored or refused.

The way to each state is the shortest one that the table has; every event is brought about as in a
program, by its user, its peer or the time limit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from aiordma import ConnectionBrokenError, ConnectionClosedError
from aiordma._core import authentication, protocol
from aiordma._core.connection_states import (
    IGNORED,
    TRANSITIONS,
    Cause,
    ConnectionState,
    LifecycleEvent,
)
from aiordma.errors import InternalError
from aiordma.transport import PendingConnection
from tests.session.pair import PairFactory

from .connection_factory import SMALL, limits_pass, yield_loop
from .inside import seem_busy
from .marks import on_pair

pytestmark = [on_pair, pytest.mark.any_device]

KEY = bytes(range(16))


class Case:
    """A connection and its peer; one work request of it seems to be under way until `complete`."""

    def __init__(self, first: PendingConnection, second: PendingConnection) -> None:
        self.first = first
        self.second = second
        self.conn = first._attempt.connection
        seem_busy(self.conn, 1)
        self.held = True
        self.tasks: list[asyncio.Task[object]] = []
        self.conn._sharing.tell = self._tell  # type: ignore[method-assign]

    async def _tell(self, message: protocol.Message) -> None:
        """A goodbye that the peer never acknowledges."""
        await asyncio.get_running_loop().create_future()

    def complete(self) -> None:
        seem_busy(self.conn, -self.held)
        self.held = False
        self.conn._messages.drained()  # which looks

    async def happens(self, event: LifecycleEvent) -> None:
        conn = self.conn
        match event:
            case LifecycleEvent.ESTABLISHED:
                await self.first.start()
            case LifecycleEvent.KEY_REQUIRED:
                self.tasks.append(asyncio.create_task(self.first.start()))
            case LifecycleEvent.PROVED:
                await self.second.start()
                await self.tasks[0]
            case LifecycleEvent.CLOSE:
                self.tasks.append(asyncio.create_task(conn.close()))
            case LifecycleEvent.DRAINED:
                self.complete()
            case LifecycleEvent.PEER_GOODBYE:
                if not self.held:  # the goodbye of this side is under way
                    seem_busy(conn, 1)
                    self.held = True
                conn._take_control(protocol.GOODBYE)
            case LifecycleEvent.FINISHED:
                limits_pass()
            case LifecycleEvent.BROKEN:
                conn._disconnected("the peer is gone")
            case LifecycleEvent.ABORTED:
                conn.abort()
            case LifecycleEvent.RELEASED:
                await conn.wait_closed()
        if event not in (LifecycleEvent.BROKEN, LifecycleEvent.ABORTED, LifecycleEvent.FINISHED):
            await yield_loop(3)


@asynccontextmanager
async def case(factory: PairFactory, key: bytes | None) -> AsyncIterator[Case]:
    factory = replace(factory, auth=key)
    first, second = factory.half(SMALL), factory.half(SMALL)
    first.accept(second.endpoint)
    second.accept(first.endpoint)
    connections = [pending_one._attempt.connection for pending_one in (first, second)]
    made = Case(first, second)
    try:
        yield made
    finally:
        made.complete()
        for task in made.tasks:
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)
        for pending_one, connection in zip((first, second), connections, strict=True):
            connection.abort()
            await pending_one.close()
            await connection.wait_closed()


def path_to(wanted: ConnectionState, first: LifecycleEvent) -> list[LifecycleEvent]:
    """The shortest way from CONNECTING to a state, by the table; it begins with `first`."""
    if wanted is ConnectionState.CONNECTING:
        return []
    begin = TRANSITIONS[ConnectionState.CONNECTING, first].next
    found = {begin: [first]}
    todo = deque([begin])
    while wanted not in found:
        state = todo.popleft()
        for (before, event), row in TRANSITIONS.items():
            if before is state and row.next not in found:
                found[row.next] = [*found[state], event]
                todo.append(row.next)
    return found[wanted]


def needs_key(state: ConnectionState, event: LifecycleEvent) -> bool:
    return state is ConnectionState.AUTHENTICATING or event is LifecycleEvent.KEY_REQUIRED


@asynccontextmanager
async def in_state(
    factory: PairFactory, state: ConnectionState, event: LifecycleEvent
) -> AsyncIterator[Case]:
    with_key = needs_key(state, event)
    first = LifecycleEvent.KEY_REQUIRED if with_key else LifecycleEvent.ESTABLISHED
    async with case(factory, KEY if with_key else None) as made:
        for step in path_to(state, first):
            await made.happens(step)
        assert made.conn._state is state
        yield made


def names(pair: object) -> str:
    assert isinstance(pair, tuple)
    return f"{pair[0].name}-{pair[1].name}"


@pytest.mark.parametrize("pair", TRANSITIONS, ids=names)
async def test_a_transition(
    factory: PairFactory, pair: tuple[ConnectionState, LifecycleEvent]
) -> None:
    state, event = pair
    row = TRANSITIONS[pair]
    async with in_state(factory, state, event) as made:
        conn = made.conn
        await made.happens(event)
        assert conn._state is row.next
        cause = conn._close_cause
        assert (cause is not None) == (row.next in (ConnectionState.ENDED, ConnectionState.CLOSED))
        match row.cause:
            case None:
                return
            case Cause.PEER:
                assert isinstance(cause, ConnectionClosedError)
                assert cause.by_peer
            case Cause.GIVEN if event is LifecycleEvent.BROKEN:
                assert isinstance(cause, ConnectionBrokenError)
            case _:
                assert isinstance(cause, ConnectionClosedError)
                assert not cause.by_peer
                assert ("aborted" in str(cause)) == (event is LifecycleEvent.ABORTED)
        await conn.wait_closed()
        assert conn._state is ConnectionState.CLOSED
        assert conn._close_cause is cause


@pytest.mark.parametrize("pair", sorted(IGNORED, key=names), ids=names)
async def test_an_event_that_is_ignored(
    factory: PairFactory, pair: tuple[ConnectionState, LifecycleEvent]
) -> None:
    state, event = pair
    async with in_state(factory, state, event) as made:
        conn = made.conn
        cause = conn._close_cause
        if event is LifecycleEvent.DRAINED:
            assert not conn._advance(event)
        else:
            await made.happens(event)
        if state is not ConnectionState.ENDED:  # that one ends by itself
            assert conn._state is state
        assert conn._close_cause is cause


@pytest.mark.parametrize("state", ConnectionState, ids=lambda state: state.name)
async def test_an_event_that_cannot_be(factory: PairFactory, state: ConnectionState) -> None:
    """It is reported as a bug, and changes nothing."""
    async with in_state(factory, state, LifecycleEvent.ABORTED) as made:
        for event in LifecycleEvent:
            if (state, event) not in TRANSITIONS and (state, event) not in IGNORED:
                with pytest.raises(InternalError, match=event.name):
                    made.conn._advance(event)
                assert made.conn._state is state


@pytest.mark.parametrize("client", [False, True])
async def test_it_breaks_while_it_sends_its_proof(factory: PairFactory, client: bool) -> None:
    async with case(factory, KEY) as made:
        made.first._client = client
        await made.happens(LifecycleEvent.KEY_REQUIRED)
        conn = made.conn
        proof = conn._handshake.proof
        assert proof is not None
        proof._send = lambda _: conn._disconnected("the peer is gone")
        nonce = bytes(32)
        if client:
            answer = authentication.proof(KEY, "server", proof._nonce, nonce, proof._transcript)
            conn._take_control(protocol.AuthAnswer(0, nonce, answer))
        else:
            conn._take_control(protocol.AuthHello(0, nonce))
        with pytest.raises(ConnectionBrokenError, match="is gone"):
            await made.tasks[0]
        assert conn._state in (ConnectionState.ENDED, ConnectionState.CLOSED)
