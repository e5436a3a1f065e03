"""`reconnect` and a server that dies at any moment: the client comes back, and repeats nothing."""

from __future__ import annotations

import asyncio
import errno
import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiordma import Config, RDMAError, reconnect
from aiordma.errors import (
    AddressError,
    AuthenticationError,
    ConnectionBrokenError,
    ConnectionClosedError,
    ConnectionManagerError,
    DeviceNotFoundError,
    HandshakeBrokenError,
    ProtocolError,
    RejectedError,
    RouteError,
    UnreachableError,
    UnsupportedError,
    VerbsError,
)
from aiordma.reconnecting import is_temporary
from aiordma.verbs import QPState, QueuePair
from aiordma.verbs._qp.qp_attributes import QPChanges
from tests.conftest import every_combination

from .connection_factory import ConnectionFactory
from .marks import by_tcp, one_loop
from .restarting import KEY

ROOT = Path(__file__).parents[2]
CLIENTS = 4
CONFIG = Config(close_timeout=0.2, connect_timeout=30, eager_size=1024, max_eager_size=1024)


@pytest.mark.parametrize(
    ("error", "temporary"),
    [
        (RejectedError(reason=8), True),
        (AddressError("no such host"), True),
        (RouteError("no route"), True),
        (UnreachableError("no answer"), True),
        (ConnectionManagerError("removed", event="RDMA_CM_EVENT_DEVICE_REMOVAL"), True),
        (HandshakeBrokenError("after 3 bytes"), True),
        (ConnectionBrokenError(), True),
        (ConnectionClosedError(by_peer=True), True),
        (ConnectionResetError(), True),
        (ConnectionManagerError("through another device than the one that was named"), False),
        (AuthenticationError("another key"), False),
        (ProtocolError("not aiordma"), False),
        (DeviceNotFoundError("mlx5_9"), False),
        (UnsupportedError("RC"), False),
        (ValueError("port 70000"), False),
        (TypeError("a port as a string"), False),
        (MemoryError(), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_errors_that_a_restart_can_cause_are_temporary(error: Exception, temporary: bool) -> None:
    assert is_temporary(error) is temporary


@by_tcp  # librdmacm brings up its queue pairs itself
@one_loop
@pytest.mark.parametrize("dies", ["the peer", "the device"])
async def test_a_queue_pair_that_ends_while_it_is_brought_up(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    """A device that is connected to the peer's process sees it die: the next step is refused."""
    bring_up = QueuePair._bring_up
    count = itertools.count()

    def interrupted(self: QueuePair, changes: QPChanges) -> None:
        bring_up(self, changes)
        if next(count) == 0:
            return  # the listener's
        self.modify(qp_state=QPState.ERR)
        if dies == "the device":
            raise VerbsError(errno.EIO, "the device has failed")
        self.modify(cur_qp_state=QPState.RTR, qp_state=QPState.RTS)

    async with await factory.listen() as listener:
        monkeypatch.setattr(QueuePair, "_bring_up", interrupted)
        with pytest.raises(RDMAError) as caught:
            await factory.connect(listener.port)
    if dies == "the peer":
        assert type(caught.value) is HandshakeBrokenError
        assert "ended in the handshake" in str(caught.value)
    else:
        assert type(caught.value) is VerbsError
    assert is_temporary(caught.value) is (dies == "the peer")


class Restarting:
    """`tests.transport.restarting`, with its log."""

    def __init__(self, factory: ConnectionFactory, kills: int, log: Path) -> None:
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.transport.restarting", factory.device,
             factory.via, factory.host, str(kills), "7", str(log)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip

    async def number(self) -> int:
        """The next number that it prints."""
        assert self._process.stdout is not None
        return int(await asyncio.to_thread(self._process.stdout.readline))

    def executed(self) -> Counter[bytes]:
        return Counter(self._log.read_bytes().split())

    def end(self) -> None:
        self._process.communicate(timeout=60)


@pytest.mark.time_limit(900)
@pytest.mark.timeout(1000)
async def test_restarts_under_load(
    factory: ConnectionFactory, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Every client comes back each time; what it sent once is executed at most once."""
    kills = 200 if every_combination(pytestconfig) else 30
    server = Restarting(factory, kills, tmp_path / "log")
    confirmed: set[bytes] = set()
    last_is_up = asyncio.Event()
    try:
        port = await server.number()

        async def client(name: int) -> int:
            numbers: Iterator[int] = itertools.count()
            connections = 0
            async for conn in reconnect(
                factory.host,
                port,
                first_delay=0.01,
                longest_delay=0.1,
                config=CONFIG,
                auth=KEY,
                **factory.where,
            ):
                connections += 1
                try:
                    while True:
                        last = last_is_up.is_set()
                        data = b"%d.%d" % (name, next(numbers))  # never the same twice
                        await conn.send(data)
                        with await conn.recv() as answer:
                            assert answer == data
                        confirmed.add(data)
                        if last:
                            return connections
                except (ConnectionError, RDMAError):
                    continue
            raise AssertionError("reconnect ended without an error")

        clients = [asyncio.create_task(client(name)) for name in range(CLIENTS)]
        hits = asyncio.create_task(server.number())
        await asyncio.wait([hits, *clients], return_when=asyncio.FIRST_COMPLETED)
        for task in clients:
            if task.done():
                task.result()
        assert hits.result() >= kills // 3, "no test of handshakes"
        last_is_up.set()
        for connections in await asyncio.gather(*clients):
            assert connections > 1
    finally:
        server.end()
    executed = server.executed()
    assert max(executed.values()) == 1
    assert confirmed <= executed.keys()
