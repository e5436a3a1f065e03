"""The objects of the fast path: pins and leases, the common requests, and their stub."""

from __future__ import annotations

import ast
import asyncio
import gc
import weakref
from contextlib import closing
from pathlib import Path

import pytest

from aiordma._core.operations import OperationKind
from aiordma._native import (
    EARLIER,
    TRANSFER_SIZE,
    Arrivals,
    Inbox,
    Local,
    Pinned,
    Queue,
    Remote,
    Run,
    Table,
    Work,
    _fast,
)

STUB = Path(__file__).parents[2] / "aiordma" / "_native" / "_fast.pyi"
WRITE, READ = 2, 4
WRITES = OperationKind.WRITE


class Memory(Pinned):
    def __init__(self) -> None:
        self.retired = 0
        self.lease()

    def _retire(self) -> None:
        self.retired += 1


class Here(Local):
    def __init__(self, memory: Memory, length: int = 8) -> None:
        self.pinned = memory
        self.address = 4096
        self.length = length
        self.writable = True

    def _check(self) -> None:
        if self.gone:
            raise LookupError("gone")


class There(Remote):
    def __init__(self, user: object, allowed: int = WRITE | READ, length: int = 8) -> None:
        self.user = user
        self.usable = True
        self.allowed = allowed
        self.length = length
        self.address = 8192
        self.rkey = 7


def test_memory_retires_when_it_is_neither_leased_nor_pinned() -> None:
    memory = Memory()
    memory.pin()
    memory.release()
    assert memory.retired == 0
    memory.unpin()
    assert memory.retired == 1
    memory.lease()
    memory.pin()
    memory.unpin()
    assert memory.retired == 1
    memory.release()
    assert memory.retired == 2


def test_what_retiring_raises_reaches_who_let_go() -> None:
    class Failing(Pinned):
        def _retire(self) -> None:
            raise LookupError("no")

    memory = Failing()
    memory.pin()
    with pytest.raises(LookupError):
        memory.unpin()


def test_a_slice_pins_what_it_was_sliced_from() -> None:
    memory = Memory()
    whole, part, part_of_part = Here(memory), Local(), Local()
    part.root = whole
    part_of_part.root = part
    assert part_of_part.root is whole
    assert whole.root is whole
    part_of_part.pin()
    memory.release()
    assert memory.retired == 0
    whole.gone = True
    for one in (whole, part, part_of_part):
        with pytest.raises(LookupError):
            one.pin()
    part.unpin()
    assert memory.retired == 1


def test_memory_without_an_owner_cannot_be_pinned() -> None:
    class Loose(Local):
        def _check(self) -> None:
            pass

    with pytest.raises(TypeError, match="cannot be pinned"):
        Loose().pin()
    with pytest.raises(TypeError):
        Loose().unpin()
    with pytest.raises(TypeError):
        Loose().root = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        Remote().root = None  # type: ignore[assignment]


def test_a_run_takes_what_is_plain_and_allowed_alone() -> None:
    user = object()
    memory, run = Memory(), Run(user, WRITES)
    here = Here(memory)
    assert run.write(here, There(user))
    assert run.read(here, There(user))
    assert len(run) == 2
    assert run.lengths == [8, 8]
    for there in (There(object()), There(user, READ), There(user, length=9), b"there"):
        assert not run.write(here, there)
    assert not run.read(here, There(user, WRITE))
    assert not run.write(b"bytes", There(user))
    assert not run.write(Here(memory, 0), There(user, length=0))
    long = TRANSFER_SIZE + 1
    assert not run.write(Here(memory, long), There(user, length=long))
    part, unusable = Remote(), There(user)
    part.root, part.length, part.allowed = unusable, 8, WRITE
    assert run.write(here, part)
    unusable.usable = False
    assert not run.write(here, part)
    here.writable = False
    assert run.write(here, There(user))
    assert not run.read(here, There(user))
    here.gone = True
    assert not run.write(here, There(user))
    assert len(run) == 4
    with pytest.raises(TypeError):
        run.write(here)  # type: ignore[call-arg]


def test_a_run_holds_its_memory_until_it_lets_go() -> None:
    user = object()
    memory, run = Memory(), Run(user, WRITES)
    for _ in range(40):
        assert run.write(Here(memory), There(user))
    memory.release()
    first = run.part(1)
    assert (first.kind, first.entries, run.entries) == (WRITES, 1, 39)
    first.release()
    first.release()
    rest = run.part(39)
    run.release()
    assert memory.retired == 0
    del rest
    gc.collect()
    assert memory.retired == 1


def test_parts_that_there_are_not() -> None:
    user = object()
    run = Run(user, WRITES)
    run.write(Here(Memory()), There(user))
    for count in (2, 0):
        with pytest.raises(ValueError, match="requests of 1"):
            run.part(count)
    with pytest.raises(TypeError):
        Run.__init__(run, user, WRITES)
    run.release()


def test_a_failure_is_told_unless_the_waiter_has_gone() -> None:
    with closing(asyncio.new_event_loop()) as loop:
        for waiter in (loop.create_future(), None):
            Run(object(), WRITES, waiter).failed(LookupError("no"))
            if waiter is not None:
                assert isinstance(waiter.exception(), LookupError)
        cancelled: asyncio.Future[None] = loop.create_future()
        cancelled.cancel()
        Run(object(), WRITES, cancelled).failed(LookupError("no"))
        assert cancelled.cancelled()


def test_a_run_that_is_part_of_a_circle_is_collected() -> None:
    class User:
        run: Run

    memory, user = Memory(), User()
    user.run = Run(user, WRITES)
    user.run.put(0, memory, 0, 0, 0, 0, 0, 0)
    memory.release()
    del user
    gc.collect()
    assert memory.retired == 1


def test_a_table_that_is_part_of_a_circle_is_collected() -> None:
    queue = Queue()
    queue.table = Table()
    watched = weakref.ref(Watched(queue))
    assert len(queue.table) == 0
    del queue
    gc.collect()
    assert watched() is None


class Watched(Queue):
    def __init__(self, queue: Queue) -> None:
        self.table = queue.table
        self.circle = self


def test_what_cannot_be_posted() -> None:
    queue = Queue()
    with pytest.raises(TypeError, match="needs a table"):
        queue.post_work(Work(0, 0, 0, 0, 0))
    queue.table = Table()
    queue.capacity = queue.free = 4
    with pytest.raises(TypeError, match="a Work or a Run"):
        queue.post_work(object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 requests for 4 free"):  # there is no queue pair
        queue.post_work(Work(0, 0, 0, 0, 0))
    with pytest.raises(TypeError):
        queue.post_block(object(), 0)  # type: ignore[arg-type]
    assert queue.write(b"", b"") is None
    assert queue.under_way() == queue.clear_slots() == []
    with pytest.raises(ValueError, match="not 1 to 128"):
        queue.table.drain(0, 129, 0, False)
    for serve in (queue.table.serve, queue.table.look_again):
        queue.table.closed = False
        with pytest.raises(TypeError, match="a list"):
            serve(0, 1, (), print, 0)  # type: ignore[arg-type]
        with pytest.raises(OverflowError):
            serve(0, 1, [], print, -1)
        with pytest.raises(ValueError, match="not 1 to 128"):
            serve(0, 0, [], print, 0)
        queue.table.closed = True
        assert serve(0, 1, [], print, 0) is None
    assert not queue.table.later


def test_messages_of_what_is_no_inbox() -> None:
    for make in (
        lambda: Arrivals(object(), print),  # type: ignore[arg-type]
        lambda: Arrivals(Inbox()),  # type: ignore[call-arg]
        lambda: Arrivals(Inbox(), otherwise=print),  # type: ignore[call-arg]
        type(anext(Arrivals(Inbox(), print))),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError):
            make()


def test_numbers_that_do_not_fit() -> None:
    run = Run(object(), WRITES)
    with pytest.raises(TypeError):
        run.put(0, Here(Memory()), 0, 0, 0, 0, 0, 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        run.put(0, Memory(), "0", 0, 0, 0, 0, 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Work(0, "0", 0, 0, 0)  # type: ignore[arg-type]
    work = Work(1, 2, 3, 4, 5, 6, 7, 8)
    assert (work.kind, work.opcode, work.address, work.length) == (1, 2, 3, 4)
    assert (work.lkey, work.remote_address, work.rkey, work.imm) == (5, 6, 7, 8)


def test_constants_of_the_native_part() -> None:
    assert EARLIER == 1 << 31
    assert TRANSFER_SIZE == 8 << 20


def test_the_stub_names_what_is_there() -> None:
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ClassDef):
            if node.name == "Waiter":  # what is wanted, not what is there
                continue
            kind = getattr(_fast, node.name)
            written = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            written |= {
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            }
            there = {name for name in vars(kind) if not name.startswith("__")}
            assert {name for name in written if not name.startswith("__")} == there, node.name
        elif isinstance(node, ast.AnnAssign):
            assert isinstance(node.target, ast.Name)
            assert hasattr(_fast, node.target.id)
