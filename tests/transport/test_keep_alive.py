"""Test that silent peers are found, and that a program can connect again."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

from aiordma import Connection, ConnectionBrokenError, reconnect
from aiordma._transport.keep_alive import Probe
from aiordma.errors import RejectedError
from conftest import EMBEDDED

from .connection_factory import (
    SMALL,
    ConnectionFactory,
    at_rest,
    check_alive,
    closed_port,
    ends,
    yield_loop,
)
from .marks import by_cm, by_tcp, one_loop
from .test_other_processes import Child


@one_loop
async def test_keep_alive_detects_a_stopped_peer_process(factory: ConnectionFactory) -> None:
    """Nothing is sent and nothing breaks, so only a probe can find the stopped peer.

    The embedded device stops with its process. A device outside the process keeps responding, so
    the connection stays up until the process continues.
    """
    often = 0.05 * factory.slow
    async with Child.connected(factory, "echo", keep_alive=often, keep_alive_timeout=1000) as child:
        conn = child.conn
        await conn.send(b"x")
        assert bytes(await conn.recv()) == b"x"
        receiving = asyncio.create_task(conn.recv())
        child.signal(signal.SIGSTOP)
        if factory.device == EMBEDDED:
            asked = conn._keep_alive
            assert asked
            asked._timeout = 0.5  # responses may have been slow before the stop
            asked._timer.cancel()
            asked._check()
            error = await ends(receiving, ConnectionBrokenError)
            assert "keep_alive" in str(error.__cause__ or error)
        else:
            await wait_for_probe_responses(conn, 3)
            child.signal(signal.SIGCONT)
            await conn.send(b"still there")
            assert bytes(await receiving) == b"still there"


@one_loop
async def test_keep_alive_detects_a_stopped_peer_process_during_a_send(
    factory: ConnectionFactory,
) -> None:
    """The peer's machine acknowledges the data, so only the probe finds the stopped process."""
    async with Child.connected(factory, "echo", keep_alive=1000, keep_alive_timeout=1000) as child:
        conn = child.conn
        await conn.send(b"x")
        assert bytes(await conn.recv()) == b"x"
        child.signal(signal.SIGSTOP)
        stopped = os.WSTOPPED | os.WNOWAIT
        await asyncio.to_thread(os.waitid, os.P_PID, child.pid, stopped)
        sending = asyncio.create_task(conn.send(bytes(1 << 20)))
        await yield_loop(5)
        if factory.device == EMBEDDED:
            asked = conn._keep_alive
            assert asked
            asked._interval = asked._timeout = 0.5  # probe again soon if a response was late
            asked._timer.cancel()
            asked._seen_completions = conn._queue.completions
            asked._check()
            assert not sending.done()
            error = await ends(sending, ConnectionBrokenError)
            assert "keep_alive" in str(error.__cause__ or error)
        else:
            child.signal(signal.SIGCONT)
            await sending
            (await conn.recv()).release()


async def wait_for_probe_responses(conn: Connection, count: int) -> None:
    """Wait until the peer's device has answered this many probes."""
    queue = conn._queue
    before = queue.completions
    while queue.completions < before + count:  # noqa: ASYNC110 - that time passes is tested
        await asyncio.sleep(0.01)


@one_loop
async def test_keep_alive_does_not_break_an_idle_connection(factory: ConnectionFactory) -> None:
    config = replace(SMALL, keep_alive=0.01, keep_alive_timeout=1000)
    async with factory.pair(config, server=SMALL) as (client, server):
        await wait_for_probe_responses(client, 5)
        await check_alive(client, server)


@one_loop
@by_tcp
async def test_keep_alive_sends_no_probe_during_traffic(factory: ConnectionFactory) -> None:
    """The test itself triggers the keep-alive checks, so it does not depend on timing."""
    config = replace(SMALL, keep_alive=1000)
    async with factory.pair(config, server=SMALL) as (client, server):
        keep_alive = client._keep_alive
        assert keep_alive

        def it_is_time() -> bool:
            """Run a keep-alive check, and return whether it sends a probe."""
            keep_alive._timer.cancel()
            keep_alive._check()
            return any(isinstance(work, Probe) for work in client._queue.outstanding_work())

        for _ in range(3):
            await check_alive(client, server)
            assert not it_is_time()
        await at_rest(client, server)
        it_is_time()  # completions since the last check may count once more
        assert it_is_time()


# ---- connecting again ----------------------------------------------------------------------------


@one_loop
@by_cm
async def test_reconnect_raises_after_the_given_number_of_attempts(
    factory: ConnectionFactory,
) -> None:

    async def all_of_them(port: int) -> None:
        async for _ in reconnect(
            factory.host, port, first_delay=0.001, attempts=3, **factory.where
        ):
            raise AssertionError("there is no listener")

    with closed_port(factory.host) as port:
        await ends(all_of_them(port), RejectedError)
