"""Chains of one-sided work requests."""

from __future__ import annotations

import gc

import pytest

from aiordma._core.operations import OperationKind
from aiordma._datapath.one_sided import TRANSFER_SIZE, WRChain
from aiordma._datapath.work_queue import WorkRequest

from .test_memory import READ, WRITE, Here, Memory, There

WRITES = OperationKind.WRITE


def test_a_chain_takes_only_what_is_allowed() -> None:
    user = object()
    memory, chain = Memory(), WRChain(user, WRITES)
    here = Here(memory)
    chain.write(here, There(user))
    chain.read(here, There(user))
    chain.write(Here(memory, 0), There(user, length=0))
    assert len(chain) == 2
    for there in (There(object()), There(user, READ), There(user, length=9)):
        with pytest.raises(LookupError, match="not allowed"):
            chain.write(here, there)
    with pytest.raises(LookupError, match="not allowed"):
        chain.read(here, There(user, WRITE))
    with pytest.raises(LookupError, match="not allowed"):
        chain.atomic(OperationKind.FETCH_AND_ADD, here, There(user), 1, 0)
    part, unusable = There(user), There(user)
    part._root = unusable
    chain.write(here, part)
    unusable._usable = False
    with pytest.raises(LookupError, match="not allowed"):
        chain.write(here, unusable)
    here.writable = False
    chain.write(here, There(user))
    with pytest.raises(LookupError, match="not allowed"):
        chain.read(here, There(user))
    here.gone = True
    with pytest.raises(LookupError, match="gone"):
        chain.write(here, There(user))
    assert len(chain) == 4
    long = TRANSFER_SIZE + 1
    chain.write(Here(memory, long), There(user, length=long))
    assert len(chain) == 6
    with pytest.raises(TypeError):
        chain.write(b"bytes", There(user))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        chain.write(here)  # type: ignore[call-arg]


def test_a_chain_holds_its_memory_until_its_release() -> None:
    user = object()
    memory, chain = Memory(), WRChain(user, WRITES)
    for _ in range(40):
        chain.write(Here(memory), There(user))
    memory.release()
    first = chain.part(1)
    assert (first.kind, first.entries, chain.entries) == (WRITES, 1, 39)
    del first
    rest = chain.part(39)
    del chain
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


def test_a_chain_that_is_part_of_a_circle_is_collected() -> None:
    class User:
        chain: WRChain

    memory, user = Memory(), User()
    user.chain = WRChain(user, WRITES)
    user.chain.write(Here(memory), There(user))
    memory.release()
    del user
    gc.collect()
    assert memory.retired == 1


def test_numbers_that_do_not_fit() -> None:
    with pytest.raises(TypeError):
        WorkRequest(0, "0", 0, 0, 0)  # type: ignore[arg-type]
    work = WorkRequest(1, 2, 3, 4, 5, 6, 7, 8)
    assert (work.kind, work.opcode, work.address, work.length) == (1, 2, 3, 4)
    assert (work.lkey, work.remote_address, work.rkey, work.imm) == (5, 6, 7, 8)
