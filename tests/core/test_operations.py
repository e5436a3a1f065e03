"""Operation slots: ids, the life of a slot, what completions are accepted."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from aiordma._core.operations import (
    MAX_SLOTS,
    OperationKind,
    OperationSlot,
    OperationState,
    OperationTable,
    kind_of,
)
from aiordma.errors import InternalError, LimitError

READ, SEND = OperationKind.READ, OperationKind.SEND


class Thing:
    """Something that can be watched with a weak reference."""


def test_wr_id_tells_kind_and_fits_64_bits() -> None:
    table = OperationTable(4)
    for kind in OperationKind:
        slot = table.post(kind)
        assert 0 < slot.wr_id < 1 << 64
        assert kind_of(slot.wr_id) is kind
        assert slot.kind is kind
    assert kind_of(0xFF << 24) is None


def test_texts_of_kinds() -> None:
    assert OperationKind.FETCH_AND_ADD.text == "fetch and add"


def test_life_of_an_awaited_operation() -> None:
    table = OperationTable(1)
    waiter, memory, owner = object(), object(), object()
    slot = table.post(READ, waiter, memory, owner)
    assert (slot.state, len(table)) == (OperationState.AWAITED, 1)
    assert table.find(slot.wr_id) is slot
    assert table.complete(slot.wr_id) is slot
    assert slot.state is OperationState.DONE
    assert (slot.waiter, slot.memory, slot.owner) == (waiter, memory, owner)
    assert len(table) == 1
    table.release(slot)
    assert (slot.state, len(table)) == (OperationState.FREE, 0)
    assert (slot.waiter, slot.memory, slot.owner) == (None, None, None)


def test_waiting_later() -> None:
    table = OperationTable(1)
    slot = table.post(SEND)
    assert slot.state is OperationState.POSTED
    waiter = object()
    assert table.wait(slot.wr_id, waiter)
    assert (slot.state, slot.waiter) == (OperationState.AWAITED, waiter)
    with pytest.raises(InternalError):
        table.wait(slot.wr_id, object())
    wr_id = slot.wr_id
    table.complete(wr_id)
    assert not table.wait(wr_id, waiter)
    table.release(slot)
    assert not table.wait(wr_id, waiter)


def test_abandoning_keeps_slot_and_memory_until_the_completion() -> None:
    table = OperationTable(1, limit=1)
    memory, waiter = Thing(), Thing()
    memory_alive, waiter_alive = weakref.ref(memory), weakref.ref(waiter)
    slot = table.post(READ, waiter, memory)
    del memory, waiter
    assert table.abandon(slot.wr_id)
    assert table.abandon(slot.wr_id)
    gc.collect()
    assert slot.state is OperationState.ABANDONED
    assert waiter_alive() is None
    assert memory_alive() is not None
    with pytest.raises(LimitError):
        table.post(READ)
    with pytest.raises(InternalError):
        table.wait(slot.wr_id, object())
    assert table.complete(slot.wr_id) is slot
    table.release(slot)
    gc.collect()
    assert memory_alive() is None


def test_abandoning_what_is_over_changes_nothing() -> None:
    table = OperationTable(1)
    old = table.post(READ, "first").wr_id
    slot = table.complete(old)
    assert slot is not None
    assert not table.abandon(old)
    table.release(slot)
    again = table.post(READ, "second")
    assert again is slot
    assert not table.abandon(old)
    assert (again.state, again.waiter) == (OperationState.AWAITED, "second")


def test_a_completion_counts_once() -> None:
    table = OperationTable(1)
    wr_id = table.post(READ).wr_id
    slot = table.complete(wr_id)
    assert slot is not None
    assert table.complete(wr_id) is None
    assert "is done" in table.explain(wr_id)
    table.release(slot)
    assert table.complete(wr_id) is None
    assert "stale; slot 0 is free now" in table.explain(wr_id)
    table.post(SEND)
    assert table.complete(wr_id) is None
    assert table.explain(wr_id) == f"wr_id {wr_id:#x} (read) is stale; slot 0 is of a send now"
    assert table.statistics().stray_completions == 3


@pytest.mark.parametrize("wr_id", [0xFF << 24, 5, 1 << 32 | 2, 1 << 64, -1, (1 << 64) - 1])
def test_ids_that_were_never_given_out(wr_id: int) -> None:
    table = OperationTable(2)
    assert table.complete(wr_id) is None
    assert table.find(wr_id) is None
    assert "was never given out" in table.explain(wr_id)


def test_an_id_of_the_future_was_never_given_out() -> None:
    table = OperationTable(1)
    wr_id = table.post(READ).wr_id
    assert "slot 0 is of a read" in table.explain(wr_id + (1 << 32))
    assert table.explain(wr_id) == f"wr_id {wr_id:#x} (read) is posted"
    table.withdraw(next(table.outstanding()))
    following = (wr_id >> 32) + 1 << 32  # what the slot's next receive will have
    assert table.explain(following) == f"wr_id {following:#x} was never given out; slot 0 is free"
    assert table.post(OperationKind.RECV).wr_id == following


def test_another_kind_is_another_operation() -> None:
    table = OperationTable(1)
    wr_id = table.post(READ).wr_id
    assert table.complete(wr_id ^ (READ ^ SEND) << 24) is None
    assert table.complete(wr_id) is not None


def test_generations_wrap_around() -> None:
    table = OperationTable(1)
    slot = table.post(READ)
    table.withdraw(slot)
    slot._base = ((1 << 32) - 1) << 32
    last = table.post(READ).wr_id
    assert last >> 32 == (1 << 32) - 1
    table.withdraw(slot)
    assert 0 <= table.post(READ).wr_id < 1 << 32
    assert table.complete(last) is None


def test_withdrawing_a_failed_post() -> None:
    table = OperationTable(1)
    slot = table.post(READ, memory=object())
    wr_id = slot.wr_id
    table.withdraw(slot)
    assert (slot.state, slot.memory, len(table)) == (OperationState.FREE, None, 0)
    assert table.complete(wr_id) is None
    with pytest.raises(InternalError):
        table.withdraw(slot)
    done = table.post(READ)
    table.complete(done.wr_id)
    with pytest.raises(InternalError):
        table.withdraw(done)


def test_releasing_what_is_not_done() -> None:
    table = OperationTable(1)
    slot = table.post(READ)
    with pytest.raises(InternalError):
        table.release(slot)
    table.complete(slot.wr_id)
    table.release(slot)
    with pytest.raises(InternalError):
        table.release(slot)


def test_grows_up_to_the_limit() -> None:
    table = OperationTable(2, limit=5)
    slots = [table.post(READ) for _ in range(5)]
    assert sorted(slot.index for slot in slots) == [0, 1, 2, 3, 4]
    with pytest.raises(LimitError, match="all 5 operation slots") as caught:
        table.post(READ)
    assert (caught.value.amount, caught.value.limit) == (6, 5)
    table.withdraw(slots[3])
    assert table.post(SEND).index == 3


@pytest.mark.parametrize(("slots", "limit"), [(0, 1), (2, 1), (1, MAX_SLOTS + 1)])
def test_sizes_out_of_bounds(slots: int, limit: int) -> None:
    with pytest.raises(ValueError, match="must hold"):
        OperationTable(slots, limit=limit)


def test_the_slot_that_was_free_last_is_used_first() -> None:
    table = OperationTable(8)
    first = table.post(READ)
    table.withdraw(first)
    assert table.post(READ) is first


def test_representation() -> None:
    table = OperationTable(1)
    slot = table.post(READ)
    assert repr(slot) == f"<OperationSlot 0 read, wr_id {slot.wr_id:#x}, posted>"
    table.withdraw(slot)
    assert repr(slot) == "<OperationSlot 0 free>"


class OperationMachine(RuleBasedStateMachine):
    """Random lives, against a dictionary of what is outstanding."""

    live = Bundle("live")
    over = Bundle("over")

    def __init__(self) -> None:
        super().__init__()
        self.table = OperationTable(2, limit=6)
        self.model: dict[int, tuple[OperationState, object]] = {}
        self.stray = 0

    @rule(target=live, kind=st.sampled_from(OperationKind), awaited=st.booleans())
    def post(self, kind: OperationKind, awaited: bool) -> object:
        waiter = Thing() if awaited else None
        if len(self.model) == 6:
            with pytest.raises(LimitError):
                self.table.post(kind, waiter)
            return multiple()
        wr_id = self.table.post(kind, waiter).wr_id
        assert wr_id not in self.model
        self.model[wr_id] = (
            OperationState.AWAITED if awaited else OperationState.POSTED,
            waiter,
        )
        return wr_id

    @rule(wr_id=live)
    def wait(self, wr_id: int) -> None:
        if self.model[wr_id][0] is OperationState.POSTED:
            waiter = Thing()
            assert self.table.wait(wr_id, waiter)
            self.model[wr_id] = (OperationState.AWAITED, waiter)
        else:
            with pytest.raises(InternalError):
                self.table.wait(wr_id, Thing())

    @rule(wr_id=live)
    def abandon(self, wr_id: int) -> None:
        assert self.table.abandon(wr_id)
        self.model[wr_id] = (OperationState.ABANDONED, None)

    @rule(target=over, wr_id=consumes(live))
    def complete(self, wr_id: int) -> int:
        slot = self.table.complete(wr_id)
        assert isinstance(slot, OperationSlot)
        assert slot.waiter is self.model.pop(wr_id)[1]
        self.table.release(slot)
        return wr_id

    @rule(target=over, wr_id=consumes(live))
    def withdraw(self, wr_id: int) -> int:
        slot = self.table.find(wr_id)
        assert slot is not None
        self.table.withdraw(slot)
        del self.model[wr_id]
        return wr_id

    @rule(wr_id=over)
    def speak_of_one_that_is_over(self, wr_id: int) -> None:
        assert self.table.find(wr_id) is None
        assert not self.table.abandon(wr_id)
        assert not self.table.wait(wr_id, Thing())
        assert self.table.complete(wr_id) is None
        assert "stale" in self.table.explain(wr_id)
        self.stray += 1

    @invariant()
    def table_is_the_model(self) -> None:
        outstanding = {slot.wr_id: (slot.state, slot.waiter) for slot in self.table.outstanding()}
        assert outstanding == self.model
        assert len(self.table) == len(self.model)
        counts = self.table.statistics()
        states = [state for state, _ in self.model.values()]
        assert counts.posted == states.count(OperationState.POSTED)
        assert counts.awaited == states.count(OperationState.AWAITED)
        assert counts.abandoned == states.count(OperationState.ABANDONED)
        assert counts.done == 0
        assert counts.free == counts.slots - len(self.model)
        assert counts.stray_completions == self.stray


OperationMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestOperationMachine = OperationMachine.TestCase
