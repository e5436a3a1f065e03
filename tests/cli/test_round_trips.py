"""Tests of sending, comparing and counting messages on a fake connection."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiordma
from aiordma.cli import round_trips
from aiordma.cli.round_trips import LEAST, MOST, WARM_UP, Plan, Result, measure, plans

Change = Callable[[bytes, int], tuple[bytes, int | None]]


class FakeMessage(bytes):
    """A message that a fake connection has received."""

    imm: int | None
    released = False

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.released = True


class FakeConnection:
    """A connection that passes each message through `change` and echoes the result."""

    def __init__(self, change: Change = lambda data, imm: (data, imm)) -> None:
        self._change = change
        self.echoed: list[FakeMessage] = []

    async def send(self, data: bytes, *, imm: int) -> None:
        back, back_imm = self._change(data, imm)
        self.echoed.append(FakeMessage(back))
        self.echoed[-1].imm = back_imm

    async def recv(self) -> FakeMessage:
        return self.echoed[-1]

    @property
    def connection(self) -> aiordma.Connection:
        return cast(aiordma.Connection, self)


async def test_every_message_is_echoed_compared_and_released() -> None:
    fake = FakeConnection()
    result = await measure(fake.connection, Plan(100), count=5, time_limit=5)
    assert (result.mismatch, len(result.times), result.payload) == ("", 5, 500)
    assert len(fake.echoed) == WARM_UP + 5
    assert all(message.released and len(message) == 100 for message in fake.echoed)
    assert len(set(fake.echoed)) > 1


async def test_measure_sends_between_minimum_and_maximum_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeConnection()
    monkeypatch.setattr(round_trips, "SECONDS", 60.0)
    result = await measure(fake.connection, Plan(8), count=None, time_limit=5)
    assert len(result.times) == MOST
    monkeypatch.setattr(round_trips, "SECONDS", 0.0)
    result = await measure(fake.connection, Plan(8), count=None, time_limit=5)
    assert len(result.times) == LEAST


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data, imm: (b"", imm), "message 0: 0 bytes instead of 20"),
        (lambda data, imm: (bytes(19) + b"\1", imm), "message 0: byte 19 is 0x01 instead of 0x00"),
        (lambda data, imm: (data, 7), "message 0: immediate data 7 instead of 0"),
        (lambda data, imm: (data, None), "message 0: immediate data None instead of 0"),
    ],
)
async def test_measure_reports_the_first_mismatch(change: Change, text: str) -> None:
    fake = FakeConnection(change)
    result = await measure(fake.connection, Plan(20, bytes(20)), count=3, time_limit=5)
    assert result.mismatch.startswith(text)
    assert len(result.times) == 3


# ---- contents -----------------------------------------------------------------------------------


def test_plans_use_random_data_without_a_file() -> None:
    assert plans([1, 64], None) == [Plan(1), Plan(64)]


def test_plans_split_the_file_or_send_it_whole() -> None:
    file = bytes(100)
    assert plans([0, 1, 64, 100, 1000], file) == [Plan(1, file), Plan(64, file), Plan(100, file)]
    assert [plan.whole_file for plan in plans([1, 64], file)] == [False, False, True]


@given(st.binary(min_size=1, max_size=50), st.integers(1, 60))
def test_plan_messages_cycle_through_the_file(file: bytes, size: int) -> None:
    number = -(-len(file) // size)
    pieces = list(islice(Plan(size, file).messages(), 2 * number))
    assert b"".join(pieces) == 2 * file
    assert all(len(piece) <= size for piece in pieces)


@given(st.integers(0, 5000))
def test_random_messages_have_the_requested_size(size: int) -> None:
    assert [len(data) for data in islice(Plan(size).messages(), 3)] == [size] * 3


# ---- numbers ------------------------------------------------------------------------------------


def test_throughput_includes_both_directions() -> None:
    assert Result(10, times=[1.0, 3.0], payload=20).throughput == 10.0
