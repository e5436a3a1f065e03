"""Clients and servers that break the rules.

Clients forge tokens, guess generations and send invalid arguments. Servers send invalid replies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from aiordma_kv import Client
from aiordma_kv.arena import LOCK_SECONDS, MAX_RESERVATIONS
from aiordma_kv.server import ClientSession

import aiordma
from aiordma import RegionToken, Rights, rpc
from conftest import HOST, PAGE, Served, raw_client, serve, wait_connected

AUTH = b"0123456789abcdef0123456789abcdef"

Forge = Callable[[RegionToken], RegionToken]


def forged(token: RegionToken, **changes: Any) -> RegionToken:
    """Return a token that the client's library does not connect with the revoked one."""
    return replace(token, region_id=token.region_id + 1000, **changes)


async def reserve(client: rpc.Client, key: bytes, size: int = PAGE) -> tuple[int, RegionToken]:
    """Reserve one block. Returns its generation and the token for its extent."""
    reply = await client.call("reserve", [[key, size]])
    [[_, _, generation]], [token] = reply["places"], reply["tokens"]
    return generation, RegionToken.unpack(token)


async def put(client: rpc.Client, key: bytes) -> int:
    generation, token = await reserve(client, key)
    region = client.connection.open_region(token)
    await client.connection.write(bytes([key[0]]) * PAGE, region[:PAGE])
    assert await client.call("commit", [generation]) == [True]
    return generation


async def check_write_fails(client: rpc.Client, token: RegionToken, served: Served) -> None:
    """Check that a write with this token ends the connection without changing the memory."""
    before = bytes(served.store.memory)
    region = client.connection.open_region(token)
    with pytest.raises((aiordma.ConnectionBrokenError, aiordma.RDMAError)):
        await client.connection.write(b"\xff" * 8, region[:8])
    assert bytes(served.store.memory) == before
    async with Client([served.name]) as other:
        assert await other.put([b"other"], [b"x"]) == [True]


def before_extent(token: RegionToken) -> RegionToken:
    return forged(token, address=token.address - PAGE)


def after_extent(token: RegionToken) -> RegionToken:
    return forged(token, address=token.address + PAGE)


def longer_extent(token: RegionToken) -> RegionToken:
    return forged(token, address=token.address + PAGE - 4, length=PAGE)


@pytest.mark.parametrize("forge", [before_extent, after_extent, longer_extent])
async def test_writes_outside_the_reservation_fail(stack: AsyncExitStack, forge: Forge) -> None:
    served = await serve(stack)
    client = await raw_client(stack, served)
    await put(client, b"a")
    _, token = await reserve(client, b"b")
    await check_write_fails(client, forge(token), served)


async def test_writes_after_the_commit_fail(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    client = await raw_client(stack, served)
    generation, token = await reserve(client, b"a")
    assert await client.call("commit", [generation]) == [True]
    await check_write_fails(client, forged(token), served)


async def test_shares_cover_exactly_the_reserved_extents(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    client = await raw_client(stack, served)
    for key in (b"0", b"1", b"2"):
        await put(client, key)
    await client.call("delete", [b"1"])
    reply = await client.call("reserve", [[b"a", 1], [b"b", PAGE + 1], [b"c", PAGE]])
    assert [place[:2] for place in reply["places"]] == [[0, 0], [1, 0], [1, 2 * PAGE]]
    first, second = map(RegionToken.unpack, reply["tokens"])
    start = RegionToken.unpack(await client.call("open")).address
    assert (first.address - start, first.length, first.access) == (PAGE, PAGE, Rights.WRITE)
    assert (second.address - start, second.length) == (3 * PAGE, 3 * PAGE)


@pytest.mark.parametrize("number", [0, 1])
async def test_commit_ends_the_writing_to_all_of_its_blocks(
    stack: AsyncExitStack, number: int
) -> None:
    served = await serve(stack)
    client = await raw_client(stack, served)
    for key in (b"0", b"1", b"2"):
        await put(client, key)
    await client.call("delete", [b"1"])
    reply = await client.call("reserve", [[b"a", PAGE], [b"b", PAGE]])
    [[*_, first], [*_, second]], tokens = reply["places"], reply["tokens"]
    assert len(tokens) == 2
    assert await client.call("commit", [first, second]) == [True, True]
    await check_write_fails(client, forged(RegionToken.unpack(tokens[number])), served)


async def test_block_reserved_during_the_commit_is_not_ended(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await serve(stack)
    client = await raw_client(stack, served)
    generation, _ = await reserve(client, b"a")
    ready, proceed = aiordma.Share.ready, asyncio.Event()

    async def wait(share: aiordma.Share) -> None:
        await proceed.wait()
        await ready(share)

    monkeypatch.setattr(aiordma.Share, "ready", wait)
    generations = [generation, generation + 1]
    call = asyncio.create_task(client.call("commit", generations))
    await asyncio.sleep(0)
    guessed, token = await reserve(client, b"b")
    assert guessed == generation + 1
    proceed.set()
    assert await call == [True, False]
    assert await client.call("commit", [guessed]) == [True]
    await check_write_fails(client, forged(token), served)


async def test_commit_of_one_block_ends_writing_to_its_neighbours(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    client = await raw_client(stack, served)
    reply = await client.call("reserve", [[b"a", PAGE], [b"b", PAGE]])
    [token] = reply["tokens"]
    [[*place, first], [*next_place, second]] = reply["places"]
    assert (place, next_place) == ([0, 0], [0, PAGE])
    assert RegionToken.unpack(token).length == 2 * PAGE
    assert await client.call("commit", [first]) == [True]
    assert await client.call("commit", [second]) == [True]
    await check_write_fails(client, forged(RegionToken.unpack(token)), served)


async def test_write_that_is_in_progress_ends_before_the_commit(stack: AsyncExitStack) -> None:
    served = await serve(stack, pages=1024)
    client = await raw_client(stack, served)
    size = 1 << 20
    generation, token = await reserve(client, b"a", size)
    region = client.connection.open_region(token)
    committing = asyncio.create_task(client.call("commit", [generation]))
    data = [bytes([number]) * size for number in range(20)]
    writing = asyncio.gather(
        *(client.connection.write(each, region[:size]) for each in data), return_exceptions=True
    )
    await asyncio.wait([committing])
    committed = bytes(served.store.memory)
    await writing
    assert bytes(served.store.memory) == committed
    committing.exception()


async def test_access_is_ready_before_commit_revokes_it(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    ready, revoke = aiordma.Share.ready, aiordma.Share.revoke

    async def record_ready(share: aiordma.Share) -> None:
        await ready(share)
        events.append("ready")

    def record_revoke(share: aiordma.Share) -> None:
        events.append("revoke")
        revoke(share)

    monkeypatch.setattr(aiordma.Share, "ready", record_ready)
    monkeypatch.setattr(aiordma.Share, "revoke", record_revoke)
    served = await serve(stack)
    client = await raw_client(stack, served)
    await put(client, b"a")
    assert events == ["ready", "revoke"]


async def test_arena_cannot_be_written_with_the_token_for_reading(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    client = await raw_client(stack, served)
    token = RegionToken.unpack(await client.call("open"))
    assert token.access == Rights.READ
    assert await client.call("open") == token.pack()
    await check_write_fails(client, forged(token, access=Rights.READ | Rights.WRITE), served)


async def test_tokens_of_other_clients_do_not_work(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    client, other = [await raw_client(stack, served) for _ in range(2)]
    _, token = await reserve(other, b"a")
    own = RegionToken.unpack(await client.call("open"))
    await check_write_fails(client, replace(token, region_id=own.region_id + 1000), served)


async def test_reservations_and_locks_of_others_cannot_be_used(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    client, other = [await raw_client(stack, served) for _ in range(2)]
    generation, _ = await reserve(other, b"a")
    stored = await put(other, b"b")
    await other.call("locate", [b"b"])
    assert await client.call("commit", [generation]) == [False]
    assert await client.call("unlock", [stored]) == [False]
    assert await other.call("commit", [generation + 1]) == [False]
    assert await other.call("commit", [generation]) == [True]
    assert await other.call("unlock", [stored]) == [True]


async def test_blocks_are_committed_once(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    client = await raw_client(stack, served)
    generation, _ = await reserve(client, b"a")
    generations = [generation]
    commits = await asyncio.gather(*(client.call("commit", generations) for _ in range(3)))
    assert sorted(commits) == [[False], [False], [True]]
    generation, _ = await reserve(client, b"b")
    assert await client.call("commit", [generation] * 2) == [True, False]


async def test_commit_during_a_reserve_call_gives_no_access(stack: AsyncExitStack) -> None:
    served = await serve(stack, pages=4)
    slow, client = [await raw_client(stack, served) for _ in range(2)]
    for key in (b"a", b"b"):
        await put(slow, key)
    await slow.call("locate", [b"a", b"b"])
    await put(client, b"c")
    await client.call("locate", [b"c"])
    served.clock.now += LOCK_SECONDS - 1
    await client.call("locate", [b"c"])
    served.clock.now += 1
    # There is one free page. The second block has to wait for the slow client.
    generation = served.store.arena._next_generation
    reserving = asyncio.gather(
        client.call("reserve", [[b"d", PAGE], [b"e", PAGE]]), return_exceptions=True
    )
    commit = client.call("commit", [generation])
    [is_committed], [reply] = await asyncio.gather(commit, reserving)
    assert not is_committed
    assert None not in reply["places"]
    assert served.store.arena.stats()["reserved_bytes"] == 2 * PAGE
    assert await client.call("contains", [b"d", b"e"]) == [False, False]


async def test_reserve_and_locate_refuse_more_than_half_of_the_arena_to_one_client(
    stack: AsyncExitStack,
) -> None:
    served = await serve(stack, pages=8)
    client, other = [await raw_client(stack, served) for _ in range(2)]
    wanted = [[b"%d" % number, PAGE] for number in range(8)]
    assert (await client.call("reserve", wanted))["places"].count(None) == 4
    wanted = [[b"other %d" % number, PAGE] for number in range(8)]
    assert (await other.call("reserve", wanted))["places"].count(None) == 4


async def test_reserve_refuses_more_than_max_reservations_to_one_client(
    stack: AsyncExitStack,
) -> None:
    served = await serve(stack, pages=4 * MAX_RESERVATIONS)
    client = await raw_client(stack, served)
    wanted = [[b"%d" % number, 1] for number in range(MAX_RESERVATIONS + 1)]
    reply = await client.call("reserve", wanted)
    assert [place is None for place in reply["places"]] == [False] * MAX_RESERVATIONS + [True]
    assert len(reply["tokens"]) == 1


async def test_locate_refuses_more_than_max_locks_to_one_client(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiordma_kv.arena.MAX_LOCKS", 2)
    served = await serve(stack)
    client = await raw_client(stack, served)
    keys = [b"a", b"b", b"c"]
    for key in keys:
        await put(client, key)
    places = await client.call("locate", keys)
    assert [place is None for place in places] == [False, False, True]
    assert await client.call("unlock", [places[0][2]]) == [True]
    assert await client.call("locate", [b"c"]) != [None]


async def test_reservations_of_slow_clients_expire(stack: AsyncExitStack) -> None:
    served = await serve(stack, pages=4)
    slow, client = [await raw_client(stack, served) for _ in range(2)]
    await reserve(slow, b"b")
    _, token = await reserve(slow, b"a")
    served.clock.now += LOCK_SECONDS
    wanted = [[b"%d" % number, PAGE] for number in range(2)]
    await client.call("reserve", wanted)
    assert (await client.call("reserve", [[b"a", PAGE]]))["places"] == [None]  # half
    third = await raw_client(stack, served)
    reply = await third.call("reserve", [[b"c", PAGE], [b"d", PAGE], [b"a", 1]])
    assert reply["places"].count(None) == 1
    await slow.connection.wait_closed()
    with pytest.raises(aiordma.RDMAError):
        slow.connection.open_region(token)


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        ("locate", None),
        ("locate", b"key"),
        ("locate", ["key"]),
        ("locate", [b""]),
        ("locate", [b"x" * 257]),
        ("locate", [b"x"] * 4097),
        ("contains", {b"a": 1}),
        ("delete", [None]),
        ("reserve", [b"key"]),
        ("reserve", [[b"key"]]),
        ("reserve", [[b"key", 1, 2]]),
        ("reserve", [[b"key", 0]]),
        ("reserve", [[b"key", -1]]),
        ("reserve", [[b"key", 1 << 63]]),
        ("reserve", [[b"key", 1.5]]),
        ("reserve", [[b"key", True]]),
        ("reserve", [[b"key", 1]] * 4097),
        ("commit", 1),
        ("commit", [None]),
        ("commit", [0]),
        ("commit", [1] * 4097),
        ("unlock", [True]),
    ],
)
async def test_invalid_arguments_are_rejected(
    stack: AsyncExitStack, function: str, argument: object
) -> None:
    served = await serve(stack)
    client = await raw_client(stack, served)
    with pytest.raises(rpc.CallError) as caught:
        await client.call(function, argument)
    assert caught.value.kind == "ValueError"
    stats = await client.call("stats")
    assert (stats["free_bytes"], stats["hits"], stats["misses"]) == (served.store.arena.size, 0, 0)


async def test_invalid_reserve_call_reserves_nothing(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    client = await raw_client(stack, served)
    with pytest.raises(rpc.CallError):
        await client.call("reserve", [[b"a", 1], [b"b", 0]])
    assert served.store.arena.stats()["reserved_bytes"] == 0


@pytest.mark.parametrize("function", ["store", "load"])
async def test_data_does_not_travel_in_messages_without_encryption(
    stack: AsyncExitStack, function: str
) -> None:
    served = await serve(stack)
    client = await raw_client(stack, served)
    with pytest.raises(rpc.CallError, match="no such function"):
        await client.call(function, [])


async def test_protocol_errors_are_logged_in_one_line(
    stack: AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serve(stack)
    async with await aiordma.connect(HOST, served.server.port) as conn:
        await conn.send(b"no call")
        await conn.wait_closed()
    records = [it for it in caplog.records if it.levelname in ("WARNING", "ERROR")]
    [record] = [it for it in records if "Executing <" not in it.getMessage()]
    assert record.exc_info is None
    assert "not a valid aiordma.rpc message" in record.getMessage()


async def test_long_messages_end_only_their_connection(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    client = await raw_client(stack, served)
    with pytest.raises(aiordma.RDMAError):
        await client.call("contains", [bytes(4 << 20)])
    async with Client([served.name]) as other:
        assert await other.put([b"other"], [b"x"]) == [True]


async def test_blocks_larger_than_the_arena_have_no_room(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    client = await raw_client(stack, served)
    reply = await client.call("reserve", [[b"key", 1 << 62]])
    assert reply == {"places": [None], "tokens": []}


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        ("store", [[b"key", b"data"]]),
        ("store", [b"key", b""]),
        ("store", [b"key", "text"]),
        ("store", ["key", b"data"]),
        ("store", [b"key"]),
        ("store", None),
        ("load", b"key"),
        ("load", [1]),
        ("load", 0),
    ],
)
async def test_invalid_arguments_are_rejected_with_encryption(
    stack: AsyncExitStack, function: str, argument: object
) -> None:
    served = await serve(stack, auth=AUTH, encrypt=True)
    client = await raw_client(stack, served, auth=AUTH, encrypt=True)
    with pytest.raises(rpc.CallError) as caught:
        await client.call(function, argument)
    assert caught.value.kind == "ValueError"
    assert served.store.arena.stats()["free_bytes"] == served.store.arena.size


@pytest.mark.parametrize(("encrypt", "limit"), [(False, 16), (True, 4)])
async def test_calls_in_progress_of_one_client_are_limited(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch, encrypt: bool, limit: int
) -> None:
    proceed = asyncio.Event()

    async def wait(self: ClientSession, _: object) -> list[bool]:
        await proceed.wait()
        return []

    monkeypatch.setattr(ClientSession, "contains", wait)
    served = await serve(stack, auth=AUTH, encrypt=encrypt)
    client = await raw_client(stack, served, auth=AUTH, encrypt=encrypt)
    calls = [asyncio.create_task(client.call("contains", [])) for _ in range(limit + 1)]
    done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    [error] = [call.exception() for call in done]
    assert isinstance(error, rpc.CallError)
    assert error.kind == "TooManyCalls"
    proceed.set()
    assert [await call for call in waiting] == [[]] * limit


# Servers that send invalid replies

PLACE = [0, PAGE, 1]  # of the first block
ONE_RESULT: list[object] = [None, 5, "x", {}, [], [1], ["x"], [[True]], [True, True], True]
REPLIES: dict[str, list[object]] = {
    "locate": [
        *(reply for reply in ONE_RESULT if reply != [None]),
        [PLACE, PLACE],
        [PLACE[:2]],
        [[*PLACE, 1]],
        ["abc"],
        [["a", "b", "c"]],
        [["a", PAGE, 1]],
        [[0, PAGE, "a"]],
        [[0, PAGE, -1]],
        [[0, PAGE, 2]],
        [[0.0, PAGE, 1]],
        [[-PAGE, PAGE, 1]],
        [[PAGE, PAGE, 1]],
        [[1 << 62, PAGE, 1]],
        [[0, PAGE + 1, 1]],
        [[0, 1 << 62, 1]],
        [[0, None, 1]],
    ],
    "reserve": [
        *ONE_RESULT,
        {"places": [[0, 0, 1]]},
        {"places": [], "tokens": []},
        {"places": 5, "tokens": []},
        {"places": [[0, 0, 1]], "tokens": 5},
        {"places": [[0, 0, 1]], "tokens": []},
        {"places": [[0, 0, 1]], "tokens": [5]},
        {"places": [[0, 0, 1]], "tokens": [b"x" * 40]},
        {"places": [[-1, 0, 1]], "tokens": []},
        {"places": [["a", 0, 1]], "tokens": []},
        {"places": [[0, 0]], "tokens": []},
        {"places": [None, [0, 0, 1]], "tokens": []},
        {"places": [True, True], "tokens": []},
        {"places": ["x"], "tokens": []},
        {"places": [1], "tokens": []},
    ],
    "commit": ONE_RESULT,
    "contains": ONE_RESULT,
    "delete": ONE_RESULT,
    "unlock": ONE_RESULT,
    "store": [None, 5, "x", [True], b"x"],
    "load": [5, "x" * PAGE, [0] * PAGE, b"", b"x" * (PAGE + 1), [], {}, True],
    "stats": [None, 5, "x", [1], {}, *({"size": it} for it in (-1, 1.5, True, None, 1 << 63))],
}


class InvalidReplies:
    """Replaces the results of some functions in all sessions of the server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
        self.results: dict[str, object] = {}
        original = getattr(ClientSession, function)

        async def replaced(session: ClientSession, argument: object) -> object:
            if function in self.results:
                return self.results[function]
            return await original(session, argument)

        monkeypatch.setattr(ClientSession, function, replaced)


@pytest.mark.parametrize(
    ("function", "reply"), [(name, reply) for name, replies in REPLIES.items() for reply in replies]
)
async def test_invalid_replies_are_misses(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch, function: str, reply: object
) -> None:
    monkeypatch.setattr("aiordma_kv.client.FIRST_DELAY", 0.001)
    invalid = InvalidReplies(monkeypatch, function)
    encrypt = function in ("store", "load")
    served = await serve(stack, auth=AUTH, encrypt=encrypt)
    memory = bytearray(b"\xee" * 3 * PAGE)
    client = await stack.enter_async_context(
        Client([served.name], memory=memory, auth=AUTH, encrypt=encrypt)
    )
    keys, target = [b"a"], memoryview(memory)[PAGE : PAGE + PAGE]
    is_writing = function in ("reserve", "commit", "store")
    if not is_writing:
        assert await client.put(keys, [b"x" * PAGE]) == [True]
    if function in ("unlock", "load"):
        assert await client.locate(keys) == [True]
    invalid.results[function] = reply
    if is_writing:
        assert await client.put(keys, [b"x" * PAGE]) == [False]
    elif function == "stats":
        assert await client.stats() == {served.name: None}
    elif function in ("locate", "load"):
        await client.locate(keys)
        assert await client.get(keys, [target]) == [False]
    else:
        assert await getattr(client, function)(keys) == [False]
    assert memory[:PAGE] == memory[2 * PAGE :] == b"\xee" * PAGE
    invalid.results.clear()
    await wait_connected(client)
    assert await client.put([b"new"], [b"x"]) == [True]


@pytest.mark.parametrize(("count", "expected"), [(1, [True]), (2, [False])])
async def test_client_accepts_at_most_one_token_for_each_block(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch, count: int, expected: list[bool]
) -> None:
    async def reserve(session: ClientSession, _: object) -> dict[str, Any]:
        return {"places": [True], "tokens": [await session.open(None)] * count}

    monkeypatch.setattr(ClientSession, "reserve", reserve)
    served = await serve(stack)
    client = await stack.enter_async_context(Client([served.name]))
    assert await client.put([b"key"], [b"x"]) == expected


async def test_failed_call_waits_until_the_connection_is_closed(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    invalid = InvalidReplies(monkeypatch, "contains")
    served = await serve(stack)
    client = await stack.enter_async_context(Client([served.name]))
    conn = client._sessions[served.name].conn
    wait_closed, is_closed = aiordma.Connection.wait_closed, asyncio.Event()

    async def wait(conn: aiordma.Connection) -> None:
        await is_closed.wait()
        await wait_closed(conn)

    monkeypatch.setattr(aiordma.Connection, "wait_closed", wait)
    invalid.results["contains"] = None
    call = asyncio.create_task(client.contains([b"key"]))
    await wait_closed(conn)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not call.done()
    is_closed.set()
    assert await call == [False]


@pytest.mark.parametrize("reply", [5, "x", [], b"", b"x" * 40])
async def test_client_rejects_servers_with_an_invalid_token(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch, reply: object
) -> None:
    invalid = InvalidReplies(monkeypatch, "open")
    served = await serve(stack)
    client = await stack.enter_async_context(Client([served.name]))
    session = client._sessions[served.name]
    invalid.results["open"] = reply
    with pytest.raises((aiordma.ProtocolError, TypeError, ValueError)):
        await Client([served.name]).__aenter__()
    session.conn.abort()
    await served.end_sessions()
    assert await client.put([b"key"], [b"x"]) == [False]
    invalid.results.clear()
    await wait_connected(client)
    assert await client.put([b"key"], [b"x"]) == [True]
