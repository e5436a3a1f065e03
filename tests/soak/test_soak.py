"""Tests of the soak: it detects a wrong byte, a leak, and an unplanned break."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from aiordma import (
    AuthenticationError,
    Connection,
    ConnectionBrokenError,
    ConnectionClosedError,
    start_server,
)
from aiordma.errors import RemoteAccessError
from conftest import EMBEDDED

from . import stranger
from .kept import PER_LOCAL_PEER, Kept
from .pattern import Patterns, Wrong, write_patterns
from .plan import KEY, SERVER, Plan
from .session import as_planned

TWO = {kind: 2 * count for kind, count in PER_LOCAL_PEER.items()}


@pytest.fixture(scope="module")
def patterns(tmp_path_factory: pytest.TempPathFactory) -> Patterns:
    path = tmp_path_factory.mktemp("soak") / "patterns"
    write_patterns(path, 7)
    return Patterns(path)


def test_a_wrong_byte_is_seen(patterns: Patterns) -> None:
    size = (1 << 20) + 3
    data = bytearray(patterns.of(5, size))
    patterns.check("message", 5, memoryview(data))
    patterns.forget_copies()
    patterns.check("message", 5, memoryview(data))
    for place in (0, size // 2, size - 1):
        data[place] ^= 1
        with pytest.raises(Wrong, match=f"message of {size} bytes differs at byte {place}$"):
            patterns.check("message", 5, memoryview(data))
        data[place] ^= 1
    with pytest.raises(Wrong):
        patterns.check("message", 6, memoryview(data))


async def test_a_stranger_that_gets_in_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another key it is turned away; a listener that lets it in is reported."""
    options = {"name": "stranger", "device": EMBEDDED, "host": "127.0.0.1", "seed": 1}
    attacker = stranger.Stranger(options, lambda what: None)
    chance = random.Random(1)

    async def serve(conn: Connection) -> None:
        async for message in conn:
            message.release()

    async with (
        await start_server(serve, "127.0.0.1", via="tcp", auth=KEY) as by_tcp,
        await start_server(serve, "127.0.0.1", via="cm", auth=KEY) as by_cm,
    ):
        await attacker.meet({"": {"ports": {"tcp small": by_tcp.port, "cm small": by_cm.port}}})
        for _ in range(4):
            with pytest.raises(AuthenticationError):
                await attacker._other_key(chance)
        assert attacker._tally.wrong == []
        monkeypatch.setattr(stranger, "WRONG_KEY", KEY)
        with pytest.raises(RemoteAccessError):
            await attacker._other_key(chance)
        assert "admitted" in attacker._tally.wrong[0]


def test_what_is_kept_is_seen() -> None:
    alone = Kept(Counter({"socket:[#]": 1}), 1, {}, 3)
    assert alone.growth(alone) == []
    assert alone.growth(replace(alone, leases=5)) == ["blocks of the pool: 3 before, 5 now"]
    met = [replace(alone, files=alone.files + Counter(some)) for some in (PER_LOCAL_PEER, TWO)]
    assert alone.growth(met[0]) == []
    assert "anon_inode:[pidfd]: 0 before, 1 now" in alone.growth(met[1])
    assert met[0].growth(replace(met[0], files=met[0].files + Counter(["socket:[#]"]))) != []


@pytest.mark.parametrize(
    ("error", "ending", "strict", "allowed"),
    [
        (ConnectionBrokenError("gone"), "client closes", True, False),
        (ConnectionBrokenError("gone"), "client closes", False, True),
        (ConnectionClosedError(), "client leaves", True, True),
        (Wrong("a byte"), "client leaves", False, False),
        (ExceptionGroup("", [ConnectionBrokenError(""), Wrong("")]), "client leaves", False, False),
        (ExceptionGroup("", [ConnectionBrokenError("")]), "client leaves", True, True),
        (TimeoutError(), "client leaves", False, False),
    ],
)
def test_what_may_happen(error: Exception, ending: str, strict: bool, allowed: bool) -> None:
    plan = Plan(0, "default", strict, "messages", ending, 1000, 3)
    assert as_planned(error, plan, SERVER) is allowed
