"""The server and its clients on the embedded device."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiordma_kv import Client, ThreadClient, allocate, cli, metrics
from aiordma_kv import server as server_module
from aiordma_kv.arena import LOCK_SECONDS, memory_length, trailer_offset
from aiordma_kv.client import _weight
from aiordma_kv.common import max_calls, parse_address, read_key
from click.testing import CliRunner

import aiordma
from conftest import DEVICE, HOST, PAGE, Process, raw_client, serve, wait_connected

KEY = b"0123456789abcdef0123456789abcdef"

StartProcess = Callable[..., Process]


def block(number: int, size: int = PAGE) -> bytes:
    return bytes([number % 251]) * size


def names(count: int) -> list[bytes]:
    return [b"key %d" % number for number in range(count)]


async def load(client: Client, keys: list[bytes], size: int = PAGE) -> list[bytes | None]:
    """Locate, get and unlock blocks. A miss is None."""
    targets = [bytearray(size) for _ in keys]
    await client.locate(keys)
    found = await client.get(keys, targets)
    await client.unlock(keys)
    return [bytes(target) if hit else None for hit, target in zip(found, targets, strict=True)]


async def test_get_returns_blocks_of_another_client(stack: AsyncExitStack) -> None:
    served = await serve(stack, pages=1024)
    writer = await stack.enter_async_context(Client([served.name]))
    reader = await stack.enter_async_context(Client([served.name]))
    sizes = [1, 31, 4096, 4097, 100_000, 1 << 20]
    keys = names(len(sizes))
    blocks = [os.urandom(size) for size in sizes]
    assert await writer.put(keys, blocks) == [True] * len(keys)
    assert await reader.locate([*keys, b"unknown"]) == [True] * len(keys) + [False]
    targets = [bytearray(size) for size in sizes]
    assert await reader.get(keys, targets) == [True] * len(keys)
    assert targets == blocks
    assert await reader.unlock(keys) == [True] * len(keys)
    assert await reader.unlock(keys) == [False] * len(keys)
    assert served.store.arena.stats()["locked_bytes"] == 0


def test_processes_exchange_blocks(start_process: StartProcess) -> None:
    server = start_process("--size", "16M")
    assert server.ready.startswith(f"serving 16 MiB on {DEVICE} at {HOST}:")
    program = f"""
import asyncio, aiordma_kv
async def main():
    async with aiordma_kv.Client([{server.name!r}]) as client:
        print(await client.put([b"a", b"b"], [b"x" * 100, b"y" * 1_000_000]))
asyncio.run(main())
"""
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert output.stdout == "[True, True]\n"
    with ThreadClient([server.name]) as client:
        keys, targets = [b"a", b"b", b"c"], [bytearray(100), bytearray(1_000_000), bytearray(1)]
        assert client.locate(keys).result() == [True, True, False]
        assert client.get(keys, targets).result() == [True, True, False]
        assert targets[:2] == [b"x" * 100, b"y" * 1_000_000]
        assert client.unlock(keys[:2]).result() == [True, True]


async def test_put_succeeds_for_stored_keys_and_keeps_the_block(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    client = await stack.enter_async_context(Client([served.name]))
    assert await client.put([b"key"], [block(1)]) == [True]
    assert await client.put([b"key", b"new"], [block(2), block(3)]) == [True, True]
    assert await load(client, [b"key", b"new"]) == [block(1), block(3)]


async def test_put_stores_the_first_block_of_a_repeated_key(stack: AsyncExitStack) -> None:
    served = await serve(stack, pages=64)
    client = await stack.enter_async_context(Client([served.name]))
    keys = [b"key", b"other", b"key"]
    assert await client.put(keys, [block(1), block(2), block(3)]) == [True, True, True]
    assert await load(client, [b"key", b"other"]) == [block(1), block(2)]


@pytest.mark.parametrize(("pages", "blocks"), [(1 << 16, 256), (64, 16)])
async def test_concurrent_puts_stay_within_the_limits_of_the_server(
    stack: AsyncExitStack, pages: int, blocks: int
) -> None:
    """The server limits the number of reserved blocks, and their size to half of the arena."""
    served = await serve(stack, pages=pages)
    client = await stack.enter_async_context(Client([served.name]))
    keys = names(8 * blocks)
    puts = [
        client.put(keys[start : start + blocks], [b"x"] * blocks)
        for start in range(0, 8 * blocks, blocks)
    ]
    assert await asyncio.gather(*puts) == [[True] * blocks] * 8


async def test_get_misses_blocks_that_are_not_located(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    client = await stack.enter_async_context(Client([served.name]))
    await client.put([b"key"], [block(1)])
    assert await client.get([b"key"], [bytearray(PAGE)]) == [False]


async def test_get_misses_blocks_of_another_size(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    client = await stack.enter_async_context(Client([served.name]))
    await client.put([b"key"], [block(1)])
    await client.locate([b"key"])
    assert await client.get([b"key"], [bytearray(PAGE + 1)]) == [False]
    assert await client.get([b"key"], [bytearray(PAGE)]) == [True]


async def test_get_misses_blocks_with_another_trailer(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    client = await stack.enter_async_context(Client([served.name]))
    await client.put([b"key"], [block(1)])
    await client.locate([b"key"])
    served.store.memory[trailer_offset(len(served.store.memory), 0)] ^= 1
    assert await client.get([b"key"], [bytearray(PAGE)]) == [False]


@pytest.mark.parametrize("reads", [False, True])
async def test_get_misses_after_the_lock_has_expired(stack: AsyncExitStack, reads: bool) -> None:
    served = await serve(stack)
    client = await stack.enter_async_context(Client([served.name]))
    await client.put([b"key"], [block(1)])
    await client.locate([b"key"])
    getting = asyncio.create_task(client.get([b"key"], [bytearray(PAGE)]))
    if reads:
        await asyncio.sleep(0)
    client._locks[b"key"][0].deadline = 0.0
    assert await getting == [False]


async def test_expired_locks_are_released(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    client = await stack.enter_async_context(Client([served.name]))
    await client.put(names(2), [block(0), block(1)])
    await client.locate(names(2))
    await client.locate([b"key 1"])
    assert client._expiry is not None
    assert client._expiry.when() == client._locks[b"key 0"][0].deadline
    for key in names(2):
        client._locks[key][0].deadline = 0.0
    client._unlock_expired()
    await asyncio.wait(client._operations)
    assert list(client._locks) == [b"key 1"]
    assert client._expiry.when() == client._locks[b"key 1"][0].deadline
    assert served.store.arena.stats()["locked_bytes"] == PAGE


async def test_deleted_blocks_stay_readable_while_locked(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    client = await stack.enter_async_context(Client([served.name]))
    await client.put([b"key"], [block(1)])
    await client.locate([b"key"])
    assert await client.delete([b"key", b"unknown"]) == [True, False]
    assert await client.contains([b"key"]) == [False]
    target = bytearray(PAGE)
    assert await client.get([b"key"], [target]) == [True]
    assert target == block(1)
    await client.unlock([b"key"])
    assert served.store.arena.stats()["free_bytes"] == served.store.arena.size


async def test_least_recently_used_blocks_are_evicted(stack: AsyncExitStack) -> None:
    served = await serve(stack, pages=4)
    client = await stack.enter_async_context(Client([served.name]))
    for number, key in enumerate(names(4)):
        assert await client.put([key], [block(number)]) == [True]
    await load(client, names(1))
    assert await client.put([b"new"], [block(9)]) == [True]
    assert await client.contains([*names(4), b"new"]) == [True, False, True, True, True]
    assert (await client.stats())[served.name]["evictions"] == 1  # type: ignore[index]


async def test_put_fails_while_every_block_is_locked(stack: AsyncExitStack) -> None:
    served = await serve(stack, pages=4)
    clients = [await stack.enter_async_context(Client([served.name])) for _ in range(2)]
    await clients[0].put(names(2), [block(0), block(1)])
    await clients[0].put(names(4), [block(number) for number in range(4)])
    assert await clients[0].locate(names(4)) == [True, True, False, False]  # at most half
    assert await clients[1].locate(names(4)[2:]) == [True, True]
    assert await clients[1].put([b"new"], [block(9)]) == [False]
    await clients[0].unlock(names(1))
    assert await clients[1].put([b"new"], [block(9)]) == [True]


async def test_put_takes_room_from_clients_whose_locks_have_expired(stack: AsyncExitStack) -> None:
    served = await serve(stack, pages=4)
    slow = await stack.enter_async_context(Client([served.name]))
    other = await stack.enter_async_context(Client([served.name]))
    await slow.put(names(2), [block(0), block(1)])
    await slow.put(names(4), [block(number) for number in range(4)])
    await slow.locate(names(2))
    served.clock.now += LOCK_SECONDS / 2
    await other.locate(names(4)[2:])
    served.clock.now += LOCK_SECONDS / 2
    assert await other.put([b"new"], [block(9)]) == [True]
    assert await slow.get(names(2), [bytearray(PAGE)] * 2) == [False, False]
    await wait_connected(slow)
    assert await load(slow, [b"new"]) == [block(9)]


async def test_put_rejects_more_blocks_than_fit(stack: AsyncExitStack) -> None:
    served = await serve(stack, pages=4)
    client = await stack.enter_async_context(Client([served.name]))
    assert await client.put(names(3), [block(0), bytes(3 * PAGE), block(2)]) == [True, False, True]


async def test_long_lists_of_keys_are_divided(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiordma_kv.session.MAX_BLOCKS", 2)
    monkeypatch.setattr("aiordma_kv.arena.MAX_RESERVATIONS", 2)
    served = await serve(stack, pages=64)
    client = await stack.enter_async_context(Client([served.name]))
    assert await client.put(names(5), [block(number) for number in range(5)]) == [True] * 5
    assert await client.contains(names(5000)) == [True] * 5 + [False] * 4995


@pytest.mark.parametrize("encrypt", [False, True])
async def test_calls_beyond_the_limit_of_the_server_wait(
    stack: AsyncExitStack, encrypt: bool
) -> None:
    served = await serve(stack, auth=KEY, encrypt=encrypt)
    client = await stack.enter_async_context(Client([served.name], auth=KEY, encrypt=encrypt))
    await client.put([b"key"], [b"x"])
    calls = [client.contains([b"key"]) for _ in range(3 * max_calls(encrypt))]
    assert await asyncio.gather(*calls) == [[True]] * len(calls)


async def test_statistics_count_blocks_and_bytes_of_each_host(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    async with Client([served.name]) as client:
        await client.put([b"key"], [bytes(1000)])
        await client.locate([b"key", b"unknown", b"unknown"])
        await client.locate([b"key"])
        stats = (await client.stats())[served.name]
    await served.end_sessions()
    assert stats is not None
    expected = {"hits": 2, "misses": 2, "located_bytes": 2000, "stored_bytes": 1000}
    assert stats["clients"] == served.store.stats()["clients"] == {HOST: expected}
    assert (stats["hits"], stats["misses"]) == (2, 2)


async def test_statistics_distinguish_a_limited_number_of_hosts(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiordma_kv.server.MAX_HOSTS", 2)
    store = (await serve(stack)).store
    for number in (1, 2, 3, 4, 1):
        conn: Any = SimpleNamespace(peer_address=(f"10.0.0.{number}", 1000))
        store.counters(conn)["hits"] += 1
    clients = store.stats()["clients"]
    assert {host: it["hits"] for host, it in clients.items()} == {
        "10.0.0.1": 2,
        "10.0.0.2": 1,
        "other": 2,
    }


async def test_client_killed_while_writing_frees_its_reservations(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    program = f"""
import asyncio, os, signal
from aiordma import rpc
async def main():
    async with await rpc.connect({HOST!r}, {served.server.port}) as client:
        await client.call("reserve", [[b"key", 5000]])
        print("reserved", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"reserved\n"
    client = await stack.enter_async_context(Client([served.name]))
    assert await client.put([b"key"], [block(1)]) == [False]
    killed = next(iter(served.store._sessions)).released
    process.kill()
    await process.wait()
    await killed
    assert served.store.arena.stats()["reserved_bytes"] == 0
    assert await client.put([b"key"], [block(1)]) == [True]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_lost_server_is_a_miss_within_the_timeout(
    stack: AsyncExitStack, start_process: StartProcess, number: signal.Signals
) -> None:
    server = start_process("--size", "64M")
    client = await stack.enter_async_context(Client([server.name], timeout=1.0))
    session = client._sessions[server.name]
    keys = names(16)
    await client.put(keys, [bytes(1 << 20)] * 16)
    await client.locate(keys)
    targets = [bytearray(1 << 20) for _ in keys]
    getting = asyncio.create_task(client.get(keys, targets))
    await asyncio.sleep(0)
    server.popen.send_signal(number)
    async with asyncio.timeout(5):
        await getting  # blocks that have arrived are hits
        assert await client.locate(keys) == [False] * 16
        assert await client.put([b"new"], [b"x"]) == [False]
    assert session.conn.closed
    server.end()
    start_process("--size", "16M", port=server.port)
    await wait_connected(client)
    assert await client.locate([b"key 0"]) == [False]
    assert await client.put([b"new"], [b"x"]) == [True]


async def test_idle_client_reconnects_to_a_restarted_server(start_process: StartProcess) -> None:
    server = start_process("--size", "16M")
    async with Client([server.name]) as client:
        session = client._sessions[server.name]
        server.popen.terminate()
        await session.conn.wait_closed()
        server.end()
        start_process("--size", "16M", port=server.port)
        await wait_connected(client)
        assert await client.put([b"new"], [b"x"]) == [True]


async def test_reserve_call_ends_its_own_session_if_its_locks_have_expired(
    stack: AsyncExitStack,
) -> None:
    served = await serve(stack, pages=4)
    async with Client([served.name]) as client:
        await client.put(names(2), [block(0), block(1)])
    calls = await raw_client(stack, served)
    await calls.call("locate", names(2))
    served.clock.now += LOCK_SECONDS
    with pytest.raises(aiordma.RDMAError):
        await calls.call("reserve", [[b"a", PAGE], [b"b", 2 * PAGE]])
    await served.end_sessions()
    assert served.store.arena.stats()["reserved_bytes"] == 0


async def test_reserve_call_evicts_a_limited_number_of_blocks(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_EVICTIONS", 4)
    served = await serve(stack, pages=16)
    client = await stack.enter_async_context(Client([served.name]))
    for key in names(16):
        assert await client.put([key], [b"x"]) == [True]
    calls = await raw_client(stack, served)
    wanted = [[b"a", 2 * PAGE], [b"b", 4 * PAGE], [b"c", 2 * PAGE]]
    evictions, found = [], None
    for _ in range(2):
        reply = await calls.call("reserve", wanted)
        found = [place is not None for place in reply["places"]]
        evictions.append(served.store.arena.evictions)
        wanted = [pair for pair, is_reserved in zip(wanted, found, strict=True) if not is_reserved]
    assert evictions == [4, 8]
    assert found == [True]


async def test_failure_to_share_reserved_blocks_frees_them(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await serve(stack)
    async with Client([served.name]) as other:
        await other.put(names(3), [block(number) for number in range(3)])
        await other.delete([b"key 1"])  # so that the next blocks form two runs
    await served.end_sessions()
    client = await raw_client(stack, served)
    share = aiordma.Connection.share
    results = [share]

    def fail_second(self: aiordma.Connection, *args: Any, **options: Any) -> aiordma.Share:
        return results.pop()(self, *args, **options)

    monkeypatch.setattr(aiordma.Connection, "share", fail_second)
    with pytest.raises(aiordma.RDMAError):
        await client.call("reserve", [[b"a", PAGE], [b"b", PAGE]])
    await served.end_sessions()
    assert served.store.arena.stats()["free_bytes"] == 14 * PAGE


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings of the client."""
    return [
        record.getMessage()
        for record in caplog.records
        if (record.name, record.levelname) == ("aiordma_kv.client", "WARNING")
    ]


async def test_failures_to_reconnect_are_logged_as_one_warning(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aiordma_kv.client.FIRST_DELAY", 0.001)
    caplog.set_level("INFO", "aiordma_kv.client")
    served = await serve(stack)
    lost = f"{HOST}:1"
    await stack.enter_async_context(Client([served.name, lost]))
    [warning] = warnings_in(caplog)
    assert warning.startswith(f"cannot connect to {lost}: ")
    await served.server.close()
    failure = f"cannot connect to {served.name}: "
    async with asyncio.timeout(30):
        while caplog.text.count(failure) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    _, warning = warnings_in(caplog)
    assert warning.startswith(failure)


async def test_connection_that_fails_is_logged_as_one_warning(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def reply(*_: object) -> None:
        pass

    monkeypatch.setattr(server_module.ClientSession, "contains", reply)
    served = await serve(stack)
    client = await stack.enter_async_context(Client([served.name]))
    assert await asyncio.gather(*(client.contains([b"key"]) for _ in range(5))) == [[False]] * 5
    [warning] = warnings_in(caplog)
    assert warning.startswith(f"closing the connection to {served.name}: ")


async def test_permanent_errors_of_later_attempts_are_logged_as_warnings(
    stack: AsyncExitStack, start_process: StartProcess, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    await stack.enter_async_context(Client([f"{HOST}:{port}"]))
    (tmp_path / "key").write_bytes(KEY)
    start_process("--size", "1M", "--auth-file", str(tmp_path / "key"), port=port)
    async with asyncio.timeout(30):
        while "requires a key" not in " ".join(warnings_in(caplog)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_error_of_the_first_connection_names_the_server_and_is_not_logged(
    stack: AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "aiordma_kv")
    served = await serve(stack, auth=KEY)
    with pytest.raises(aiordma.AuthenticationError) as caught:
        await Client([served.name], auth=KEY[::-1]).__aenter__()
    assert caught.value.__notes__ == [f"cannot connect to {served.name}"]
    assert [it for it in caplog.records if it.name.startswith("aiordma_kv")] == []


async def test_client_starts_without_its_server(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    await served.server.close()
    client = await stack.enter_async_context(Client([served.name]))
    assert client.connected == {served.name: False}
    assert await client.put([b"key"], [b"x"]) == [False]
    assert await client.stats() == {served.name: None}


async def test_client_reports_that_it_has_connected_after_a_failure(
    stack: AsyncExitStack, start_process: StartProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    client = await stack.enter_async_context(Client([f"{HOST}:{port}"]))
    start_process("--size", "1M", port=port)
    await wait_connected(client)
    assert warnings_in(caplog)[-1] == f"connected to {HOST}:{port}"


@pytest.mark.parametrize("other", ["127.0.0.1:7480", "[127.0.0.1]:7480"])
def test_client_rejects_duplicate_servers(other: str) -> None:
    with pytest.raises(ValueError, match="duplicate server in"):
        Client(["127.0.0.1:7480", other])


def test_client_rejects_a_string_instead_of_a_list_of_servers() -> None:
    with pytest.raises(TypeError, match="servers must be a list of HOST:PORT, not a string"):
        Client("127.0.0.1:7480")


async def test_client_starts_while_its_server_is_paused(start_process: StartProcess) -> None:
    server = start_process("--size", "1M")
    server.popen.send_signal(signal.SIGSTOP)
    async with Client([server.name], timeout=0.5) as client:
        assert client.connected == {server.name: False}
        server.popen.send_signal(signal.SIGCONT)
        await wait_connected(client)
        assert await client.put([b"key"], [b"x"]) == [True]


async def test_keys_move_to_another_server_when_theirs_is_lost(stack: AsyncExitStack) -> None:
    servers = [await serve(stack, pages=64) for _ in range(2)]
    client = await stack.enter_async_context(Client([server.name for server in servers]))
    keys = names(32)
    blocks = [block(number) for number in range(32)]
    assert await client.put(keys, blocks) == [True] * 32
    counts = [server.store.arena.stats()["blocks"] for server in servers]
    assert sum(counts) == 32
    assert min(counts) > 0
    assert await load(client, keys) == blocks
    await servers[0].server.close()
    found = await load(client, keys)
    assert found.count(None) == counts[0]
    assert client.connected == {servers[0].name: False, servers[1].name: True}
    assert await client.put(keys, blocks) == [True] * 32
    assert await load(client, keys) == blocks


async def test_delete_removes_blocks_from_all_servers(stack: AsyncExitStack) -> None:
    servers = [await serve(stack) for _ in range(2)]
    for server in servers:
        async with Client([server.name]) as client:
            await client.put([b"key"], [b"x"])
    async with Client([server.name for server in servers]) as client:
        assert await client.delete([b"unknown", b"key"]) == [False, True]
    assert [server.store.arena.stats()["blocks"] for server in servers] == [0, 0]


def test_losing_a_server_moves_only_its_keys() -> None:
    servers = [f"10.0.0.{number}:7480" for number in range(5)]

    def home(key: bytes, among: list[str]) -> str:
        return max(among, key=lambda name: _weight(name, key))

    homes = {key: home(key, servers) for key in names(1000)}
    counts = [list(homes.values()).count(server) for server in servers]
    assert min(counts) > 150
    assert all(home(key, servers[1:]) == it for key, it in homes.items() if it != servers[0])


@pytest.mark.parametrize("encrypt", [False, True])
async def test_clients_with_another_key_are_rejected(stack: AsyncExitStack, encrypt: bool) -> None:
    served = await serve(stack, auth=KEY, encrypt=encrypt)
    async with Client([served.name], auth=KEY, encrypt=encrypt) as client:
        assert await client.put([b"key"], [b"x"]) == [True]
    for auth in (b"x" * 32, None):
        if not (encrypt and auth is None):
            with pytest.raises(aiordma.AuthenticationError):
                await Client([served.name], auth=auth, encrypt=encrypt).__aenter__()


async def test_encrypted_blocks_travel_in_messages(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiordma_kv.session.MAX_ENCRYPTED_BLOCK", 3 * PAGE)
    served = await serve(stack, pages=64, auth=KEY, encrypt=True)
    client = await stack.enter_async_context(Client([served.name], auth=KEY, encrypt=True))
    keys, blocks = names(10), [block(number) for number in range(10)]
    assert await client.put([*keys, b"long"], [*blocks, bytes(4 * PAGE)]) == [True] * 10 + [False]
    assert await load(client, [*keys, b"unknown"]) == [*blocks, None]
    assert await client.delete(keys) == [True] * 10
    assert served.store.arena.stats()["free_bytes"] == served.store.arena.size


async def test_encrypted_get_returns_the_located_block_after_its_replacement(
    stack: AsyncExitStack,
) -> None:
    served = await serve(stack, auth=KEY, encrypt=True)
    client = await stack.enter_async_context(Client([served.name], auth=KEY, encrypt=True))
    await client.put([b"key"], [b"old"])
    await client.locate([b"key"])
    await client.delete([b"key"])
    await client.put([b"key"], [b"new"])
    target = bytearray(3)
    assert await client.get([b"key"], [target]) == [True]
    assert target == b"old"
    assert await client.unlock([b"key"]) == [True]
    assert await load(client, [b"key"], 3) == [b"new"]


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """The start and length at the server, and whether the memory is registered, of each transfer.

    Starts are relative to the first transfer.
    """
    recorded: list[tuple[int, int, bool]] = []
    first: list[int] = []

    def record(name: str, local: int) -> None:
        original = getattr(aiordma.Batch, name)

        def transfer(self: aiordma.Batch, *memory: Any) -> None:
            remote = memory[1 - local]
            first.append(remote.address)
            is_registered = isinstance(memory[local], aiordma.mr_pool.LocalSlice)
            recorded.append((remote.address - first[0], len(remote), is_registered))
            original(self, *memory)

        monkeypatch.setattr(aiordma.Batch, name, transfer)

    record("write", 0)
    record("read", 1)
    return recorded


@pytest.mark.parametrize(
    ("pages", "runs", "is_registered"),
    [
        ([0, 1, 2, 3], [4], True),
        ([0, 1, 4, 5], [2, 2], True),
        ([2, 1, 0, 3], [1, 1, 1, 1], True),
        ([0, 1, 2, 3], [1, 1, 1, 1], False),
    ],
)
async def test_blocks_that_are_adjacent_on_both_sides_are_transferred_together(
    stack: AsyncExitStack,
    transfers: list[tuple[int, int, bool]],
    pages: list[int],
    runs: list[int],
    is_registered: bool,
) -> None:
    served = await serve(stack, pages=64)
    memory = memoryview(bytearray(8 * PAGE))
    registered = memory if is_registered else None
    client = await stack.enter_async_context(Client([served.name], memory=registered))
    keys = names(4)
    views = [memory[page * PAGE : (page + 1) * PAGE] for page in pages]
    for number, view in enumerate(views):
        view[:] = block(number + 1)
    assert await client.put(keys, views) == [True] * 4
    starts = [sum(runs[:number]) for number in range(len(runs))]
    data = [
        (start * PAGE, run * PAGE, is_registered) for start, run in zip(starts, runs, strict=True)
    ]
    assert transfers == data
    transfers.clear()
    memory[:] = bytes(len(memory))
    assert await client.locate(keys) == [True] * 4
    assert await client.get(keys, views) == [True] * 4
    # Each run's trailers are read after its data.
    assert transfers[::2] == data
    trailers = [(64 * PAGE + 32 * start, 32 * run) for start, run in zip(starts, runs, strict=True)]
    assert [each[:2] for each in transfers[1::2]] == trailers
    assert views == [block(number + 1) for number in range(4)]
    assert sum(map(any, (memory[start : start + PAGE] for start in range(0, 8 * PAGE, PAGE)))) == 4


async def test_blocks_that_are_adjacent_only_locally_are_transferred_separately(
    stack: AsyncExitStack, transfers: list[tuple[int, int, bool]]
) -> None:
    served = await serve(stack, pages=64)
    memory = memoryview(bytearray(3 * PAGE))
    client = await stack.enter_async_context(Client([served.name], memory=memory))
    await client.put(names(3), [block(0)] * 3)
    await client.delete([b"key 1"])
    transfers.clear()
    views = [memory[start : start + PAGE] for start in range(0, 3 * PAGE, PAGE)]
    for number, view in enumerate(views):
        view[:] = block(number + 1)
    keys = [b"a", b"b", b"c"]  # in pages 1, 3 and 4 of the arena
    assert await client.put(keys, views) == [True] * 3
    assert [each[:2] for each in transfers] == [(PAGE, PAGE), (3 * PAGE, 2 * PAGE)]
    memory[:] = bytes(len(memory))
    await client.locate(keys)
    assert await client.get(keys, views) == [True] * 3
    assert views == [block(1), block(2), block(3)]


@pytest.mark.parametrize("start", [100, PAGE])
async def test_padding_between_blocks_is_not_transferred(
    stack: AsyncExitStack, transfers: list[tuple[int, int, bool]], start: int
) -> None:
    served = await serve(stack, pages=64)
    memory = memoryview(bytearray(3 * PAGE))
    client = await stack.enter_async_context(Client([served.name], memory=memory))
    views = [memory[:100], memory[start : start + PAGE + 1]]
    views[0][:], views[1][:] = block(1, 100), block(2, PAGE + 1)
    assert await client.put(names(2), views) == [True, True]
    assert [each[:2] for each in transfers] == [(0, 100), (PAGE, PAGE + 1)]
    memory[:] = bytes(len(memory))
    await client.locate(names(2))
    assert await client.get(names(2), views) == [True, True]
    assert views == [block(1, 100), block(2, PAGE + 1)]


async def test_get_misses_only_the_block_whose_trailer_is_wrong(stack: AsyncExitStack) -> None:
    served = await serve(stack, pages=64)
    memory = memoryview(bytearray(4 * PAGE))
    client = await stack.enter_async_context(Client([served.name], memory=memory))
    views = [memory[start : start + PAGE] for start in range(0, 4 * PAGE, PAGE)]
    await client.put(names(4), views)
    await client.locate(names(4))
    served.store.memory[trailer_offset(len(served.store.memory), 2 * PAGE)] ^= 1
    assert await client.get(names(4), views) == [True, True, False, True]


@pytest.mark.parametrize("spare", [0, 1, PAGE])
async def test_every_extent_of_the_arena_can_be_read(stack: AsyncExitStack, spare: int) -> None:
    served = await serve(stack, memory=bytearray(memory_length(4 * PAGE) + spare))
    assert served.store.arena.size == 4 * PAGE
    client = await stack.enter_async_context(Client([served.name]))
    for number, key in enumerate(names(4)):
        assert await client.put([key], [block(number)]) == [True]
    assert [await load(client, [key]) for key in names(4)] == [[block(n)] for n in range(4)]


async def test_memory_outside_the_registered_memory_is_transferred(
    stack: AsyncExitStack, transfers: list[tuple[int, int, bool]]
) -> None:
    served = await serve(stack, pages=64)
    memory = memoryview(bytearray(4 * PAGE))
    client = await stack.enter_async_context(Client([served.name], memory=memory[PAGE:-PAGE]))
    sources = [memory[page * PAGE : (page + 1) * PAGE] for page in range(4)]
    sources += [memory[start : start + PAGE] for start in (PAGE // 2, PAGE // 2 * 5)]  # at edges
    sources += [memoryview(block(9))]
    for number, source in enumerate(sources[:4]):
        source[:] = block(number + 1)
    expected = [bytes(source) for source in sources]
    assert await client.put(names(7), sources) == [True] * 7
    outside = (PAGE, False)
    assert [each[1:] for each in transfers] == [outside, (2 * PAGE, True), *[outside] * 4]
    assert await load(client, names(7)) == expected


async def test_registered_memory_is_registered_again_for_a_reopened_device(
    stack: AsyncExitStack, transfers: list[tuple[int, int, bool]]
) -> None:
    served = await serve(stack)
    memory = memoryview(bytearray(block(1)))
    client = await stack.enter_async_context(Client([served.name], memory=memory))
    conn = client._sessions[served.name].conn
    conn._lead_endpoint.driver._unregister()  # as after a fatal error of the device
    conn.abort()
    await conn.wait_closed()
    await asyncio.sleep(0)
    await wait_connected(client)
    assert client._sessions[served.name].conn.queue_pair.pd is not conn.queue_pair.pd
    assert await client.put([b"key"], [memory]) == [True]
    assert transfers == [(0, PAGE, True)]
    assert await load(client, [b"key"]) == [block(1)]


async def test_memory_is_registered_once(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await serve(stack)
    registered = []
    register = aiordma.Connection.register

    def count(self: aiordma.Connection, memory: Any) -> aiordma.Region:
        registered.append(memory)
        return register(self, memory)

    monkeypatch.setattr(aiordma.Connection, "register", count)
    memory = bytearray(PAGE)
    async with Client([served.name], memory=memory), Client([served.name]):
        assert registered == [served.store.memory, memory]
    await served.end_sessions()
    async with Client([served.name]) as client:  # even if the registration has ended
        assert await client.put([b"key"], [b"x"]) == [True]


async def test_cancelled_locate_releases_its_locks(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    client = await stack.enter_async_context(Client([served.name]))
    await client.put([b"key"], [block(1)])
    locating = asyncio.create_task(client.locate([b"key"]))
    await asyncio.sleep(0)
    locating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await locating
    await client.stats()  # the unlock was sent before
    assert served.store.stats()["hits"] == 1
    assert served.store.arena.stats()["locked_bytes"] == 0


async def test_cancelled_get_has_finished_reading(stack: AsyncExitStack) -> None:
    served = await serve(stack, pages=1024)
    client = await stack.enter_async_context(Client([served.name]))
    await client.put([b"key"], [block(7, 1 << 20)])
    await client.locate([b"key"])
    target = bytearray(1 << 20)
    getting = asyncio.create_task(client.get([b"key"], [target]))
    await asyncio.sleep(0)
    getting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await getting
    assert target == block(7, 1 << 20)


async def test_client_used_outside_async_with_raises_runtime_error(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    client = Client([served.name])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="use it in `async with`"):
            await client.put([b"key"], [b"x"])
        async with client:
            assert await client.put([b"key"], [b"x"]) == [True]


@pytest.mark.parametrize("memory", [b"read-only", bytearray(), memoryview(bytearray(8))[::2], "x"])
def test_client_rejects_invalid_memory(memory: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        Client(["host:1"], memory=memory)


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("inf"), float("nan")])
def test_client_rejects_invalid_timeouts(timeout: float) -> None:
    with pytest.raises(ValueError, match=f"invalid timeout {timeout}: expected a finite"):
        Client(["host:1"], timeout=timeout)


async def test_invalid_arguments_raise_exceptions(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    client = await stack.enter_async_context(Client([served.name]))
    with pytest.raises(ValueError, match="invalid key: expected 1 to 256 bytes"):
        await client.locate([b""])
    with pytest.raises(ValueError, match="got 1 keys but 0 buffers"):
        await client.put([b"key"], [])
    with pytest.raises(ValueError, match="invalid buffer"):
        await client.get([b"key"], [b"read-only"])


@pytest.mark.parametrize("name", ["host", "host:", ":1", "host:0", "host:65536", "host:x"])
def test_invalid_server_names_are_rejected(name: str) -> None:
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        parse_address(name)


def test_ipv6_server_names_have_brackets() -> None:
    assert parse_address("[::1]:7480") == ("::1", 7480)


def test_thread_client_rejects_calls_in_a_child_process(start_process: StartProcess) -> None:
    server = start_process("--size", "1M")
    with ThreadClient([server.name]) as client:
        pid = os.fork()
        if not pid:
            try:
                client.close()  # has no effect
                client.contains([b"key"])
            except RuntimeError as error:
                os._exit("parent process" in str(error))
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
        assert client.contains([b"key"]).result() == [False]


def test_thread_client_does_not_poll(start_process: StartProcess) -> None:
    async def configure(_: Client) -> None:
        aiordma.configure_loop(aiordma.LoopConfig(polling=0.001))

    server = start_process("--size", "1M")
    found = pytest.raises(RuntimeError, match=r"uses polling=0\.0, chosen by configure_loop")
    with ThreadClient([server.name]) as client, found:
        client.submit(configure).result()


def test_thread_client_finishes_its_calls_when_closed(start_process: StartProcess) -> None:
    server = start_process("--size", "16M")
    client = ThreadClient([server.name])
    assert client.connected == {server.name: True}
    future = client.put([b"key"], [bytes(1 << 20)])
    assert not future.cancel()
    client.close()
    assert future.result() == [True]
    client.close()
    with pytest.raises(RuntimeError, match="this client is closed"):
        client.stats()


def test_thread_client_can_be_closed_in_a_callback(start_process: StartProcess) -> None:
    server = start_process("--size", "1M")
    client = ThreadClient([server.name])
    errors: list[Exception | None] = []

    def close(_: Future[None]) -> None:
        try:
            client.close()
            errors.append(None)
        except Exception as error:
            errors.append(error)

    client.submit(lambda _: asyncio.sleep(0.1)).add_done_callback(close)
    client._thread.join()
    client.close()
    assert errors == [None]


def test_second_close_of_a_thread_client_waits_for_the_calls(start_process: StartProcess) -> None:
    server = start_process("--size", "1M")
    client = ThreadClient([server.name])
    proceed = threading.Event()
    future = client.submit(lambda _: asyncio.to_thread(proceed.wait))
    threads = [threading.Thread(target=client.close) for _ in range(2)]
    for thread in threads:
        thread.start()
    threads[1].join(0.1)
    assert threads[1].is_alive()
    proceed.set()
    for thread in threads:
        thread.join()
    assert future.result() is True


def test_thread_client_raises_an_error_if_it_cannot_create_an_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise OSError("no descriptors")

    monkeypatch.setattr("uvloop.new_event_loop", fail)
    with pytest.raises(OSError, match="no descriptors"):
        ThreadClient([f"{HOST}:1"])


def test_thread_client_raises_errors_of_the_first_connection(
    start_process: StartProcess, tmp_path: Path
) -> None:
    (tmp_path / "key").write_bytes(KEY)
    server = start_process("--size", "1M", "--auth-file", str(tmp_path / "key"), "--encrypt")
    with pytest.raises(aiordma.AuthenticationError):
        ThreadClient([server.name])
    with ThreadClient([server.name], auth=KEY, encrypt=True) as client:
        assert client.put([b"key"], [b"x"]).result() == [True]


def test_server_reports_rejected_clients_at_a_limited_rate(
    start_process: StartProcess, tmp_path: Path
) -> None:
    (tmp_path / "key").write_bytes(KEY)
    server = start_process("--size", "1M", "--auth-file", str(tmp_path / "key"))
    for key in (KEY[::-1], None, KEY[::-1]):
        with pytest.raises(aiordma.AuthenticationError):
            ThreadClient([server.name], auth=key)
    server.popen.terminate()
    [line] = server.popen.communicate(timeout=30)[0].splitlines()
    assert line.startswith(f"rejected {HOST}:")
    assert "does not have the key" in line


def test_server_exits_on_sigterm(start_process: StartProcess) -> None:
    server = start_process("--size", "1M")
    with ThreadClient([server.name]):
        server.popen.terminate()
        output, _ = server.popen.communicate(timeout=30)
    assert (server.popen.returncode, output) == (0, "")


def metrics_url(server: Process) -> str:
    """Return the URL of the metrics, which the server prints."""
    assert server.popen.stdout is not None
    return server.popen.stdout.readline().removeprefix("serving metrics at ").rstrip()


def read_metrics(url: str) -> list[str]:
    with urllib.request.urlopen(url, timeout=30) as reply:
        text: str = reply.read().decode()
    return text.splitlines()


def test_metrics_are_served_to_prometheus(start_process: StartProcess) -> None:
    server = start_process("--size", "1M", "--metrics", f"{HOST}:0")
    with ThreadClient([server.name]) as client:
        client.put([b"key"], [b"x" * 100]).result()
        client.locate([b"key", b"unknown"]).result()
        lines = read_metrics(metrics_url(server))
    server.popen.terminate()
    assert server.popen.communicate(timeout=30)[0] == ""
    assert "aiordma_kv_hits_total 1.0" in lines
    assert "aiordma_kv_stored_bytes 100.0" in lines
    assert f'aiordma_kv_client_misses_total{{client="{HOST}"}} 1.0' in lines


def test_metrics_are_served_over_ipv6(start_process: StartProcess) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("IPv6 is not available")
    server = start_process("--size", "1M", "--metrics", "[::1]:0")
    url = metrics_url(server)
    assert url.startswith("http://[::1]:")
    assert "aiordma_kv_blocks 0.0" in read_metrics(url)


def test_idle_connections_to_the_metrics_do_not_keep_clients_from_connecting(
    start_process: StartProcess,
) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limit[1]))  # the process inherits it
    try:
        server = start_process("--size", "1M", "--metrics", f"{HOST}:0")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    port = urlsplit(metrics_url(server)).port
    with ExitStack() as stack:
        for _ in range(300):
            idle = stack.enter_context(socket.socket())
            idle.setblocking(False)
            idle.connect_ex((HOST, port))
            time.sleep(0.005)  # so that the server can accept the connection
        with ThreadClient([server.name]) as client:
            assert client.put([b"key"], [b"x"]).result() == [True]


def test_idle_connection_to_the_metrics_ends_without_output(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert metrics._Handler.timeout == 5
    monkeypatch.setattr(metrics._Handler, "timeout", 0.01)
    server = metrics._Server((HOST, 0), metrics._Handler)
    with server, socket.create_connection((HOST, server.server_port)) as idle:
        server.handle_request()
        assert idle.recv(1) == b""
    assert capfd.readouterr() == ("", "")


def run_serve(*options: str) -> str:
    """Run the command `serve`, which must fail, and return its output."""
    result = CliRunner().invoke(cli.main, ["serve", HOST, "0", *options])
    assert result.exit_code in (1, 2)
    return result.output


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("0", "invalid size '0': expected 8K to 4194304T"),
        ("8191", "expected 8K to 4194304T"),
        ("999999999999999999T", "expected 8K to 4194304T"),
        ("-1", "expected a whole number such as 512M or 8G"),
        ("1X", "expected a whole number such as 512M or 8G"),
    ],
)
def test_invalid_sizes_are_rejected(size: str, message: str) -> None:
    assert message in run_serve("--size", size)


@pytest.mark.parametrize("size", ["8K", "8192", "8kib", "0008KB"])
def test_sizes_have_units(size: str) -> None:
    assert cli.parse_size(size) == 8192


def test_too_little_memory_is_an_error() -> None:
    assert "Cannot allocate memory" in run_serve("--size", "4194304T")


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EINVAL])
def test_allocate_ignores_only_kernels_that_cannot_populate_memory(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    class Memory(mmap.mmap):
        def madvise(self, option: int, *_: int) -> None:
            if option == server_module.MADV_POPULATE_WRITE:
                raise OSError(number, os.strerror(number))

    monkeypatch.setattr(mmap, "mmap", Memory)
    if number == errno.EINVAL:
        allocate(PAGE).close()
    else:
        with pytest.raises(OSError, match="Cannot allocate memory"):
            allocate(PAGE)


@pytest.fixture
def no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr(cli, "allocate", fail)


@pytest.mark.usefixtures("no_allocation")
def test_address_and_device_are_checked_before_memory_is_allocated(
    start_process: StartProcess,
) -> None:
    port = start_process("--size", "1M").port
    result = CliRunner().invoke(cli.main, ["serve", HOST, str(port)])
    assert (result.exit_code, "in use" in result.output.lower()) == (1, True)
    assert "unknown0" in run_serve("--device", "unknown0")


@pytest.mark.usefixtures("no_allocation")
def test_server_names_an_invalid_key_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"short")
    message = f"invalid key file {path}: expected at least 16 bytes, got 5"
    assert message in run_serve("--auth-file", str(path))
    path.unlink()
    with pytest.raises(FileNotFoundError, match=str(path)):
        read_key(path)


def test_version_is_that_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", {"aiordma-kv": "1.2.3"}.get)
    assert "version 1.2.3" in CliRunner().invoke(cli.main, ["--version"]).output


@pytest.mark.usefixtures("no_allocation")
def test_metrics_are_checked_before_memory_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "expected HOST:PORT" in run_serve("--metrics", "host:x")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "aiordma_kv.metrics")
    assert "pip install 'aiordma-kv[prometheus]'" in run_serve("--metrics", f"{HOST}:0")


def test_encrypt_requires_a_key() -> None:
    assert "--encrypt requires --auth-file" in run_serve("--encrypt")
