"""Test that reads survive when the owner's lead breaks while their responses are in flight."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from aiordma import Connection, Rights, connect
from aiordma._native import lib
from aiordma._transport import failover
from aiordma._transport.failover import Failover, FailoverEvent, FailoverState
from aiordma._transport.rails import Rail
from aiordma.verbs import EventType
from tests.processes import ROOT
from tests.transport.connection_factory import pattern, yield_loop
from tests.transport.marks import one_loop

from .joining import HOST, TWO, until_rails
from .stopping_reader import CONFIG

SIZE = 4 << 20


@contextmanager
def stopping_reader() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.transport.rails.stopping_reader", HOST],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def answer_while_stopped(conn: Connection, reader: subprocess.Popen[str]) -> None:
    """Let the device answer the READs of a stopped reader on the lead rail.

    The port is down until the reader has stopped. This function blocks the loop, so the loop
    handles the port events, which break the rail, only after it returns.
    """
    queue_pair, device = conn._queue.qp, TWO[0].encode()
    assert lib.aiordma_embedded_raise_on(device, EventType.PORT_ERR) == 0
    expected = queue_pair.query().rq_psn
    assert reader.stdin is not None
    reader.stdin.write("read\n")
    reader.stdin.flush()
    _, status = os.waitpid(reader.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert lib.aiordma_embedded_raise_on(device, EventType.PORT_ACTIVE) == 0
    while queue_pair.query().rq_psn == expected:
        conn._queue.driver.poll()


def hold_resume(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Hold back and return the calls that make a rail the lead and announce it to the peer."""
    held: list[Callable[[], None]] = []
    chosen = FailoverState.BROKEN, FailoverEvent.CHOSEN
    moved, resume = failover.TRANSITIONS[chosen]
    assert resume is not None

    def hold(machine: Failover, rail: Rail) -> None:
        held.append(partial(resume, machine, rail))

    transitions = {**failover.TRANSITIONS, chosen: (moved, hold)}
    monkeypatch.setattr(failover, "TRANSITIONS", transitions)
    return held


@pytest.mark.skipif(
    os.environ.get("AIORDMA_EMBEDDED_LINKS", "shared") != "shared",
    reason="other links carry the data of a response, which cannot be withdrawn",
)
@one_loop
async def test_message_is_delivered_after_lead_responses_are_withdrawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner's queue pair fails, and its keys end, before the reader processes the responses.

    The reader learns about the new lead only after that.
    """
    with stopping_reader() as reader:
        port = int(await asyncio.to_thread(next_line, reader))
        async with await connect(HOST, port, device=TWO, via="tcp", config=CONFIG) as conn:
            await until_rails([conn])
            with conn.alloc(SIZE) as buffer:
                buffer.view[:] = pattern(SIZE)
                with await conn.send_region(buffer, access=Rights.READ):
                    assert await asyncio.to_thread(next_line, reader) == "ready"
                    answer_while_stopped(conn, reader)
                    held = hold_resume(monkeypatch)
                    while not held:
                        await yield_loop(1)
                    reader.send_signal(signal.SIGCONT)
                    assert await asyncio.to_thread(next_line, reader) == "disconnected"
                    for resume in held:
                        resume()
                    with await conn.recv() as message:
                        assert message == pattern(SIZE)
                    assert conn.device == TWO[1]
