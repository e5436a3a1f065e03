"""Tests of long operations over several rails, in proportion to the speed of each."""

from __future__ import annotations

import random
from collections import deque
from heapq import heappop, heappush
from typing import Any

import pytest

from aiordma._datapath.stripes import Lane, Striped, Stripes, select_lanes

KB, MB = 1 << 10, 1 << 20


class Rail:
    """A rail of the model, which moves one chunk at a time."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        """Bytes per second, or 0 while stopped."""
        self.chunks: deque[Chunk] = deque()
        self.moved = 0
        self.broken = False


class Operation(Striped):
    """An operation that records the ranges moved."""

    def __new__(cls, size: int, *_: object) -> Operation:
        return super().__new__(cls, size)

    def __init__(self, size: int, net: Net) -> None:
        self.net = net
        self.moved: list[tuple[int, int]] = []
        self.pieces = 1 << 40
        """The size of each piece of memory in bytes. No request crosses its end."""
        self.open_to: dict[Rail, int] = {}
        """The number of bytes that a rail has keys for, if not all."""

    def _movable_bytes(self, lane: Lane, start: int) -> int:
        if lane.rail.broken:
            return 0
        end = min(self.size, (start // self.pieces + 1) * self.pieces)
        return max(0, min(end, self.open_to.get(lane.rail, end)) - start)

    def _post(self, lane: Lane, start: int, length: int) -> None:
        self.net.posted(Chunk(self, lane, start, length))

    @property
    def is_done(self) -> bool:
        end = 0
        for start, length in sorted(self.moved):
            assert start >= end  # no byte is moved twice
            if start > end:
                return False
            end += length
        return end == self.size


class Chunk:
    def __init__(self, operation: Operation, lane: Lane, start: int, length: int) -> None:
        self.operation, self.lane, self.start, self.length = operation, lane, start, length
        self.rail: Rail = lane.rail


class Net:
    """Simulates rails in virtual time."""

    def __init__(self, *rates: float) -> None:
        self.now = 0.0
        self.stripes = Stripes()
        self.rails = [Rail(rate) for rate in rates]
        self._events: list[tuple[float, int, Chunk]] = []
        self._count = 0
        for rail in self.rails:
            self.stripes.rail_up(rail)

    def begin(self, size: int, **named: Any) -> Operation:
        operation = Operation(size, self)
        operation.__dict__.update(named)
        self.stripes.begin(operation)
        return operation

    def posted(self, chunk: Chunk) -> None:
        assert not chunk.rail.broken
        assert len(chunk.rail.chunks) < 2
        chunk.rail.chunks.append(chunk)
        if len(chunk.rail.chunks) == 1:
            self._move(chunk)

    def _move(self, chunk: Chunk) -> None:
        if chunk.rail.rate:
            self._count += 1
            heappush(self._events, (self.now + chunk.length / chunk.rail.rate, self._count, chunk))

    def step(self) -> bool:
        """Complete the next chunk. Return False if nothing is moving."""
        while self._events:
            now, _, chunk = heappop(self._events)
            if chunk.rail.broken or not chunk.rail.rate:
                continue
            self.now = now
            rail = chunk.rail
            assert rail.chunks.popleft() is chunk
            rail.moved += chunk.length
            chunk.operation.moved.append((chunk.start, chunk.length))
            if rail.chunks:
                self._move(rail.chunks[0])
            self.stripes.finished(chunk.lane, chunk.length)
            return True
        return False

    def run(self) -> None:
        while self.step():
            pass

    def break_(self, rail: Rail) -> None:
        rail.broken = True
        self.stripes.rail_removed(rail)
        for chunk in rail.chunks:
            self.stripes.requeue_chunk(chunk.lane, chunk.operation, chunk.start, chunk.length)
        rail.chunks.clear()

    def takes(self, size: int) -> float:
        """Run one operation and return its duration in seconds."""
        before = self.now
        operation = self.begin(size)
        self.run()
        assert operation.is_done
        return self.now - before


@pytest.mark.parametrize(("size", "count"), [(1, 1), (512 * KB - 1, 1), (512 * KB, 3)])
def test_short_operations_use_only_the_lead_rail(size: int, count: int) -> None:
    assert select_lanes([1, 2, 3], size) == [1, 2, 3][:count]


def test_short_operation_uses_the_new_lead_after_a_change_of_the_lead() -> None:
    net = Net(MB, MB, MB)
    net.stripes.lead_changed(net.rails[2])
    operation = net.begin(KB)
    assert [len(rail.chunks) for rail in net.rails] == [0, 0, 1]
    net.run()
    assert operation.is_done


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [MB, 16 * MB, 64 * MB, 1000 * MB + 1])
def test_equally_fast_rails_get_equal_shares(count: int, size: int) -> None:
    """The tolerance is for the last chunk and for the first ones, whose lengths differ."""
    net = Net(*[MB] * count)
    assert net.takes(size) <= (1.04 * size / count + 256 * KB) / MB


@pytest.mark.parametrize("rates", [(1, 3), (3, 1), (4, 2, 1), (10, 1)])
def test_each_rail_gets_a_share_proportional_to_its_rate(rates: tuple[int, ...]) -> None:
    """Rates are not given but measured. After some operations, all rails finish together."""
    net = Net(*[rate * MB for rate in rates])
    for _ in range(20):
        net.takes(64 * MB)
    before = [rail.moved for rail in net.rails]
    seconds = sum(net.takes(64 * MB) for _ in range(10))
    assert seconds <= 1.15 * 640 / sum(rates)
    for rail, moved, rate in zip(net.rails, before, rates, strict=True):
        assert (rail.moved - moved) / (640 * MB) == pytest.approx(rate / sum(rates), rel=0.25)


def test_shares_adapt_when_a_rail_becomes_faster() -> None:
    net = Net(MB, MB)
    for _ in range(5):
        net.takes(64 * MB)
    net.rails[0].rate = 5 * MB
    for _ in range(5):
        net.takes(64 * MB)
    assert net.takes(64 * MB) <= 1.15 * 64 / 6


def test_stalled_rail_has_at_most_two_chunks_in_flight() -> None:
    net = Net(MB, MB)
    operation = net.begin(64 * MB)
    net.rails[1].rate = 0
    net.run()
    assert not operation.is_done
    assert len(net.rails[1].chunks) == 2
    left = sum(chunk.length for chunk in net.rails[1].chunks)
    assert left + sum(length for _, length in operation.moved) == 64 * MB
    net.break_(net.rails[1])
    net.run()
    assert operation.is_done


def test_added_rail_shares_an_operation_in_progress() -> None:
    net = Net(MB)
    operation = net.begin(64 * MB)
    net.step()
    net.rails.append(Rail(MB))
    net.stripes.rail_up(net.rails[1])
    net.run()
    assert operation.is_done
    assert net.rails[1].moved > 20 * MB


def test_chunks_do_not_cross_memory_or_key_boundaries() -> None:
    net = Net(MB, MB)
    lead, other = net.rails
    operation = net.begin(8 * MB, pieces=MB, open_to={other: 0})
    net.step()
    assert not other.chunks
    operation.open_to[other] = 5 * MB
    net.run()
    assert operation.is_done
    assert all(start // MB == (start + length - 1) // MB for start, length in operation.moved)
    assert 0 < other.moved < 5 * MB
    assert lead.moved + other.moved == 8 * MB


def test_no_chunks_are_issued_for_a_dropped_operation() -> None:
    net = Net(MB, MB)
    first, second = net.begin(64 * MB), net.begin(MB)
    net.stripes.drop(first)
    assert first.dropped
    net.run()
    assert second.is_done
    assert not net.stripes.operations
    assert len(first.moved) == 4


@pytest.mark.parametrize("seed", range(200))
def test_operations_complete_while_rails_join_stall_and_break(seed: int) -> None:
    """Rails are added, stall and break, but at least one always remains."""
    chance = random.Random(seed)
    net = Net(*[chance.uniform(0.1, 10) * MB for _ in range(chance.randint(1, 4))])
    operations = []
    for _ in range(60):
        match chance.randrange(8):
            case 0 | 1:
                size = chance.choice([1, 4096, 512 * KB, MB + 1, chance.randrange(1, 64 * MB)])
                operations.append(net.begin(size, pieces=chance.choice([1 << 40, MB, 3 * MB + 7])))
            case 2 if len(net.stripes.lanes) > 1:
                net.break_(chance.choice(net.stripes.lanes).rail)
            case 3 if len(net.stripes.lanes) > 1:
                chance.choice(net.stripes.lanes).rail.rate = 0
            case 4:
                net.stripes.rail_up(Rail(chance.uniform(0.1, 10) * MB))
            case _:
                net.step()
        assert all(lane.chunks_in_flight == len(lane.rail.chunks) for lane in net.stripes.lanes)
    net.stripes.rail_up(Rail(MB))
    for lane in net.stripes.lanes[:-1]:
        net.break_(lane.rail)
    net.run()
    assert all(operation.is_done for operation in operations)
    assert not net.stripes.operations
