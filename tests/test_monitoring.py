"""Tests of `snapshot` and of connection hooks."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import aiordma
from aiordma import Config, Connection, ConnectionChange, Rights, testing
from aiordma._transport import observation
from aiordma.errors import RejectedError
from aiordma.monitoring import Snapshot, snapshot
from aiordma.transport import Statistics

KEY = b"sixteen bytes or more"


@pytest.fixture
def changes() -> Iterator[list[ConnectionChange]]:
    seen: list[ConnectionChange] = []
    aiordma.add_connection_hook(seen.append)
    yield seen
    aiordma.remove_connection_hook(seen.append)


def kinds(changes: list[ConnectionChange]) -> list[tuple[str, bool]]:
    return [(change.kind, change.accepted) for change in changes]


def growth(before: Snapshot, after: Snapshot) -> dict[str, int]:
    return {
        name: after["traffic"][name] - before["traffic"][name]  # type: ignore[literal-required]
        for name in before["traffic"]
    }


async def load(client: Connection, server: Connection) -> None:
    """Send five small messages, receive a large one, and access the server's memory six times."""
    for _ in range(5):
        await client.send(bytes(100))
        (await server.recv()).release()
    received = asyncio.create_task(client.recv())
    await server.send(bytes(1 << 20))
    (await received).release()
    with server.alloc(64) as memory:
        rights = Rights.READ | Rights.WRITE | Rights.ATOMIC
        with await server.send_region(memory, access=rights):
            remote = await client.recv_region()
            for _ in range(3):
                await client.read(remote, bytearray(64))
            for _ in range(2):
                await client.write(bytes(64), remote)
            await client.fetch_and_add(remote[0:8], 1)


LOAD = {
    "messages_sent": 6,
    "messages_received": 6,
    "bytes_sent": 500 + (1 << 20),
    "bytes_received": 500 + (1 << 20),
    "reads": 3,
    "writes": 2,
    "atomics": 1,
    "bytes_read": 192,
    "bytes_written": 128,
    "peer_bytes_read": 192,
    "peer_bytes_written": 128,
}


@pytest.mark.any_device
async def test_snapshot_traffic_matches_connection_statistics(device_name: str) -> None:
    before = snapshot()
    async with testing.connected_pair(device=device_name) as (client, server):
        await load(client, server)
        during = snapshot()
        by_side = {state["accepted"]: state for state in during["connections"]}
        assert by_side[False]["traffic"] == vars_of(client)
        assert by_side[True]["traffic"] == vars_of(server)
        assert growth(before, during) == LOAD
    assert growth(before, snapshot()) == LOAD  # closed connections still count
    del client, server
    assert growth(before, snapshot()) == LOAD  # finalized connections still count


def vars_of(connection: Connection) -> dict[str, int]:
    counts = connection.statistics()
    return {name: getattr(counts, name) for name in LOAD}


@pytest.mark.any_device
async def test_snapshot_describes_connections_and_listeners(device_name: str, host: str) -> None:
    async with await aiordma.listen(host, device=device_name) as listener:
        client = await aiordma.connect(host, listener.port, device=device_name)
        async with client, await listener.accept() as server:
            await server.send(b"unread")
            buffer = client.alloc(1000)
            share = client.share(buffer, access=Rights.READ)
            borrowed = await server.request_region(4096)
            taken = snapshot()
            assert json.loads(json.dumps(taken)) == taken
            (mine,) = [state for state in taken["connections"] if not state["accepted"]]
            (other,) = [state for state in taken["connections"] if state["accepted"]]
            assert mine["state"] == other["state"] == "OPEN"
            assert mine["local"] == other["peer"]
            assert mine["peer"] == other["local"] == f"{host}:{listener.port}"
            assert mine["wire"] == client.wire is not None
            assert mine["qp_num"] == client.queue_pair.qp_num
            assert mine["messages_unread"] == 1
            assert mine["shared_regions"] == 2
            assert mine["lent_bytes"] == 4096
            assert other["remote_regions"] == 1
            (device,) = [each for each in taken["devices"] if each["connections"] == 2]
            assert device["name"] == device_name
            assert device["pool"] == client.pool_statistics()._asdict()
            assert device["open"]["QueuePair"] == 2
            (listening,) = taken["listeners"]
            assert listening["addresses"] == [f"{host}:{listener.port}"]
            await server.hand_over(borrowed)
            share.revoke()
            buffer.release()
    after = snapshot()
    assert (after["connections"], after["listeners"]) == ([], [])


@pytest.mark.any_device
@pytest.mark.parametrize("what", ["credits", "send_queue", "memory"])
async def test_snapshot_counts_waiting_operations(device_name: str, what: str) -> None:
    """A peer that does not receive gives no credits, and a full send queue delays requests."""

    def waiting() -> int:
        taken = snapshot()
        if what == "memory":
            return sum(each["pool"]["waiting"] for each in taken["devices"])
        states: list[Any] = list(taken["connections"])
        return max(int(state[f"waiting_for_{what}"]) for state in states)

    def waits() -> tuple[int, float]:
        found = snapshot()["waits"][what.replace("_", " ")]
        return found["count"], found["seconds"]

    config = Config(pool_limit=64 << 20)
    before = waits()
    tasks: list[asyncio.Task[Any]]
    async with testing.connected_pair(device=device_name, config=config) as (client, server):
        assert waiting() == 0
        if what == "credits":
            tasks = [asyncio.create_task(client.send(bytes(20_000))) for _ in range(1000)]
            while not waiting():  # noqa: ASYNC110 - nothing tells of the last credit
                await asyncio.sleep(0)
        elif what == "send_queue":
            remote = await client.request_region(8)
            tasks = [asyncio.create_task(client.write(bytes(8), remote)) for _ in range(1000)]
            await asyncio.sleep(0)  # start the tasks
        else:
            held = client.alloc(30 << 20)
            tasks = [asyncio.create_task(client.lease(30 << 20))]
            await asyncio.sleep(0)
        assert 0 < waiting() < 1000
        count, seconds = waits()
        assert count == before[0] + 1
        assert waits()[1] > seconds > before[1]  # includes waits that have not ended
        for _ in tasks if what == "credits" else ():
            (await server.recv()).release()
        if what == "memory":
            held.release()
        for done in await asyncio.gather(*tasks):
            if done is not None:
                done.release()
        assert waiting() == 0
        over = waits()
        assert over == waits()


@pytest.mark.any_device
async def test_snapshot_latencies_form_a_histogram(device_name: str) -> None:
    """Every 17th request is measured. The counts of the histogram are cumulative."""
    before = snapshot()["latencies"]
    async with testing.connected_pair(device=device_name) as (client, _):
        remote = await client.request_region(8)
        for _ in range(3 * 17):
            await client.write(bytes(8), remote)
    after = snapshot()["latencies"]["write"]
    counts = list(after["up_to"].values())
    assert counts == sorted(counts)
    assert 2 <= counts[-1] - before["write"]["up_to"]["+Inf"] <= 4
    bounds = [float(bound) for bound in after["up_to"]]
    assert bounds == sorted(bounds)
    assert 0 < after["seconds"] - before["write"]["seconds"] <= 4 * 100


@pytest.mark.any_device
async def test_snapshot_can_be_taken_in_another_thread(device_name: str) -> None:
    async with testing.connected_pair(device=device_name) as (client, server):
        await load(client, server)
        # `join` blocks the loop while the snapshot is taken.
        taken: list[Snapshot] = []
        thread = threading.Thread(target=lambda: taken.append(snapshot()))
        thread.start()
        thread.join()
        assert [state["wire"] for state in taken[0]["connections"]] == [None, None]
        await asyncio.sleep(0)  # let the loop look up the wire
        later = await asyncio.to_thread(snapshot)
        assert [state["wire"] for state in later["connections"]] == [client.wire, server.wire]
        assert later["traffic"] == taken[0]["traffic"]


@pytest.mark.any_device
async def test_snapshot_can_be_taken_while_connections_open_and_close(device_name: str) -> None:
    """The numbers change while another thread reads them."""
    over = threading.Event()
    taken: list[int] = []

    def take() -> None:
        while not over.is_set():
            taken.append(len(snapshot()["connections"]))

    thread = asyncio.create_task(asyncio.to_thread(take))
    try:
        for _ in range(20):
            async with testing.connected_pair(device=device_name) as (client, server):
                await load(client, server)
    finally:
        over.set()
        await thread
    assert set(taken) <= {0, 1, 2}


FORKS = """
import asyncio, os, sys
import aiordma
from aiordma import testing

async def main():
    async with testing.connected_pair(device=sys.argv[1]) as (client, server):
        await client.send(b"counted by the parent")
        if not (child := os.fork()):
            taken = aiordma.snapshot()
            assert not any(taken["traffic"].values()), taken
            assert not any(it["count"] for it in taken["waits"].values()), taken
            assert not any(it["seconds"] for it in taken["latencies"].values()), taken
            assert taken["connections"] == taken["devices"] == taken["listeners"] == [], taken
            assert not any(taken["connection_events"].values()), taken
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert aiordma.snapshot()["traffic"]["messages_sent"] == 1

asyncio.run(main())
"""


@pytest.mark.any_device
def test_forked_child_starts_with_zero_counters(device_name: str) -> None:
    # Ignore the warning of Python 3.12 that a process with threads forks.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKS, device_name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.any_device
async def test_hooks_are_called_when_connections_begin_and_end(
    device_name: str, changes: list[ConnectionChange]
) -> None:
    before = snapshot()["connection_events"]
    async with testing.connected_pair(device=device_name) as (client, server):
        assert sorted(kinds(changes)) == [("begin", False), ("begin", True)]
        assert {change.connection for change in changes} == {client, server}
        assert all(change.error is None for change in changes)
        changes.clear()
        await client.close()
        await server.wait_closed()
        assert sorted(kinds(changes)) == [("end", False), ("end", True)]
        assert all(type(change.error).__name__ == "ConnectionClosedError" for change in changes)
    after = snapshot()["connection_events"]
    assert (after["begun"] - before["begun"], after["ended"] - before["ended"]) == (2, 2)
    assert after["broken"] == before["broken"]


@pytest.mark.needs("faults")
async def test_broken_connection_is_reported_and_counted(
    device_name: str, changes: list[ConnectionChange]
) -> None:
    before = snapshot()
    async with testing.connected_pair(device=device_name) as (client, server):
        changes.clear()
        with testing.faults(cut="@1", device=device_name):
            await asyncio.gather(client.send(b"x"), return_exceptions=True)
            await server.wait_closed()
            await client.wait_closed()
        assert ("failure", False) in kinds(changes)
        assert len(changes) == 2
    after = snapshot()
    broken = after["connection_events"]["broken"] - before["connection_events"]["broken"]
    assert broken == sum(change.kind == "failure" for change in changes)
    assert sum(after["errors"].values()) - sum(before["errors"].values()) == broken


@pytest.mark.any_device
async def test_failed_connect_is_reported_to_hooks(
    device_name: str, host: str, changes: list[ConnectionChange]
) -> None:
    async with await aiordma.listen(host, device=device_name) as listener:
        port = listener.port
    with pytest.raises(RejectedError) as raised:
        await aiordma.connect(host, port, device=device_name)
    (change,) = changes
    assert (change.kind, change.accepted, change.connection) == ("failure", False, None)
    assert change.peer == f"{host}:{port}"
    assert change.error is raised.value
    with pytest.raises(ValueError, match="port of source must be an int from 0 to 65535"):
        await aiordma.connect(host, port, device=device_name, source=("", -1))
    assert len(changes) == 1  # an invalid argument is not a connection failure


@pytest.mark.any_device
async def test_authentication_failure_is_reported_on_both_sides(
    device_name: str, host: str, changes: list[ConnectionChange]
) -> None:
    before = snapshot()["errors"].get("AuthenticationError", 0)
    async with await aiordma.listen(host, device=device_name, auth=KEY) as listener:
        refused = asyncio.Event()

        def note(change: ConnectionChange) -> None:
            if change.accepted:
                refused.set()

        aiordma.add_connection_hook(note)
        with pytest.raises(ConnectionError):
            await aiordma.connect(host, listener.port, device=device_name, auth=KEY + b"not")
        await refused.wait()
        aiordma.remove_connection_hook(note)
    assert sorted(kinds(changes)) == [("failure", False), ("failure", True)]
    assert snapshot()["errors"]["AuthenticationError"] > before


@pytest.mark.any_device
async def test_rejection_by_max_connections_is_reported_on_both_sides(
    device_name: str, host: str, changes: list[ConnectionChange]
) -> None:
    one = Config(max_connections=1)
    async with (
        await aiordma.listen(host, device=device_name, config=one) as listener,
        await aiordma.connect(host, listener.port, device=device_name),
        await listener.accept(),
    ):
        changes.clear()
        with pytest.raises(RejectedError):
            await aiordma.connect(host, listener.port, device=device_name)
        assert sorted(kinds(changes)) == [("failure", False), ("failure", True)]


@pytest.mark.any_device
@pytest.mark.parametrize(
    "error", [KeyError("a mistake"), GeneratorExit(), asyncio.CancelledError()]
)
async def test_failing_hook_is_logged_and_later_hooks_are_called(
    device_name: str,
    changes: list[ConnectionChange],
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
) -> None:
    def fail(change: ConnectionChange) -> None:
        raise error

    aiordma.add_connection_hook(fail)
    aiordma.add_connection_hook(changes.append)  # called after `fail`
    try:
        with caplog.at_level(logging.ERROR, "aiordma.connection"):
            async with testing.connected_pair(device=device_name) as (client, server):
                await client.send(b"as usual")
                assert bytes(await server.recv()) == b"as usual"
    finally:
        aiordma.remove_connection_hook(fail)
        aiordma.remove_connection_hook(changes.append)
    assert len(changes) == 8
    assert len(caplog.records) == 4
    assert all("connection hook" in record.message for record in caplog.records)
    with pytest.raises(ValueError, match="not a connection hook"):
        aiordma.remove_connection_hook(fail)


async def open_connection_and_listener(device_name: str, host: str) -> list[object]:
    """Return a listener and both ends of a connection. They stay open until the loop ends."""
    listener = await aiordma.listen(host, device=device_name)
    client = await aiordma.connect(host, listener.port, device=device_name)
    return [listener, client, await listener.accept()]


@pytest.mark.any_device
def test_asyncio_run_calls_hooks_for_unclosed_connections(device_name: str, host: str) -> None:
    """The hooks run in the loop's thread while the loop still runs."""
    called: list[tuple[str, int, int]] = []

    def note(change: ConnectionChange) -> None:
        loop = asyncio.get_running_loop()
        called.append((change.kind, threading.get_ident(), id(loop)))

    left: list[object] = []

    async def main() -> None:
        left.extend(await open_connection_and_listener(device_name, host))

    aiordma.add_connection_hook(note)
    try:
        with ThreadPoolExecutor(1) as executor:
            thread = executor.submit(threading.get_ident).result()
            with pytest.warns(ResourceWarning, match="was not closed"):
                executor.submit(asyncio.run, main()).result()
    finally:
        aiordma.remove_connection_hook(note)
    assert [kind for kind, *_ in called] == ["begin", "begin", "end", "end"]
    assert {by for _, by, _ in called} == {thread}
    assert len({loop for *_, loop in called}) == 1


@pytest.mark.any_device
def test_loop_close_calls_hooks_for_unclosed_connections(
    device_name: str, host: str, changes: list[ConnectionChange]
) -> None:
    """The program does not use `asyncio.run`."""
    loop = asyncio.new_event_loop()
    left = loop.run_until_complete(open_connection_and_listener(device_name, host))
    assert sorted(kinds(changes)) == [("begin", False), ("begin", True)]
    changes.clear()
    with pytest.warns(ResourceWarning, match="was not closed"):
        loop.close()
    left.clear()
    assert sorted(kinds(changes)) == [("end", False), ("end", True)]
    assert {str(change.error) for change in changes} == {"its event loop has been closed"}


def test_counting_connection_events_does_not_block_on_a_held_lock() -> None:
    """The thread that holds the lock may be running a destructor that waits for this thread."""
    before = observation.counts()
    statistics = Statistics(messages_sent=5)
    with observation._adding:
        for _ in range(2 * observation.MAX_FINALIZED):
            observation.connection_failed(None, OSError(), accepted=True)
        observation.register(statistics)
        observation.connection_finalized(statistics)
        during = observation.counts()
    assert during.traffic["messages_sent"] == before.traffic["messages_sent"] + 5
    assert during.errors["OSError"] == before.errors["OSError"] + 2 * observation.MAX_FINALIZED
    assert observation.counts() == during
    assert not observation._finalized


def test_unaggregated_connection_events_stay_bounded() -> None:
    """For example, a rail may break again and again."""
    for _ in range(3 * observation.MAX_FINALIZED):
        observation.connection_failed(None, OSError(), accepted=True)
        assert len(observation._counted) <= 2 * observation.MAX_FINALIZED
