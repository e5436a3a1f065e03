"""Chains of one-sided work requests."""

from __future__ import annotations

import asyncio
import gc
from contextlib import closing

import pytest

from aiordma._core.operations import OperationKind
from aiordma._datapath.memory import Remote
from aiordma._datapath.one_sided import TRANSFER_SIZE, WRChain
from aiordma._datapath.work_queue import WorkRequest

from .test_memory import READ, WRITE, Here, Memory, There

WRITES = OperationKind.WRITE


def test_a_chain_takes_only_what_is_allowed_and_one_request() -> None:
    user = object()
    memory, chain = Memory(), WRChain(user, WRITES)
    here = Here(memory)
    assert chain.write(here, There(user))
    assert chain.read(here, There(user))
    assert len(chain) == 2
    assert chain.lengths == [8, 8]
    for there in (There(object()), There(user, READ), There(user, length=9), b"there"):
        assert not chain.write(here, there)
    assert not chain.read(here, There(user, WRITE))
    assert not chain.write(b"bytes", There(user))
    assert not chain.write(Here(memory, 0), There(user, length=0))
    long = TRANSFER_SIZE + 1
    assert not chain.write(Here(memory, long), There(user, length=long))
    part, unusable = Remote(), There(user)
    part._root, part.length, part._allowed = unusable, 8, WRITE
    assert chain.write(here, part)
    unusable._usable = False
    assert not chain.write(here, part)
    here.writable = False
    assert chain.write(here, There(user))
    assert not chain.read(here, There(user))
    here.gone = True
    assert not chain.write(here, There(user))
    assert len(chain) == 4
    with pytest.raises(TypeError):
        chain.write(here)  # type: ignore[call-arg]


def test_a_chain_holds_its_memory_until_its_release() -> None:
    user = object()
    memory, chain = Memory(), WRChain(user, WRITES)
    for _ in range(40):
        assert chain.write(Here(memory), There(user))
    memory.release()
    first = chain.part(1)
    assert (first.kind, first.entries, chain.entries) == (WRITES, 1, 39)
    first.release()
    first.release()
    rest = chain.part(39)
    chain.release()
    assert memory.retired == 0
    del rest
    gc.collect()
    assert memory.retired == 1


def test_parts_that_there_are_not() -> None:
    user = object()
    chain = WRChain(user, WRITES)
    chain.write(Here(Memory()), There(user))
    for count in (2, 0):
        with pytest.raises(ValueError, match="requests of 1"):
            chain.part(count)
    chain.release()


def test_a_failure_completes_a_waiter_that_is_not_done() -> None:
    with closing(asyncio.new_event_loop()) as loop:
        for waiter in (loop.create_future(), None):
            WRChain(object(), WRITES, waiter).failed(LookupError("no"))
            if waiter is not None:
                assert isinstance(waiter.exception(), LookupError)
        cancelled: asyncio.Future[None] = loop.create_future()
        cancelled.cancel()
        WRChain(object(), WRITES, cancelled).failed(LookupError("no"))
        assert cancelled.cancelled()


def test_a_chain_that_is_part_of_a_circle_is_collected() -> None:
    class User:
        chain: WRChain

    memory, user = Memory(), User()
    user.chain = WRChain(user, WRITES)
    user.chain.put(0, memory, 0, 0, 0, Remote(), 0, 0)
    memory.release()
    del user
    gc.collect()
    assert memory.retired == 1


def test_numbers_that_do_not_fit() -> None:
    chain = WRChain(object(), WRITES)
    with pytest.raises(TypeError):
        chain.put(0, Here(Memory()), 0, 0, 0, Remote(), 0, 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        chain.put(0, Memory(), "0", 0, 0, Remote(), 0, 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        WorkRequest(0, "0", 0, 0, 0)  # type: ignore[arg-type]
    work = WorkRequest(1, 2, 3, 4, 5, 6, 7, 8)
    assert (work.kind, work.opcode, work.address, work.length) == (1, 2, 3, 4)
    assert (work.lkey, work.remote_address, work.rkey, work.imm) == (5, 6, 7, 8)
