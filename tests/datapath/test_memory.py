"""Memory that is pinned by work requests and leased by its holders."""

from __future__ import annotations

import pytest

from aiordma._datapath.memory import Local, Pinned, Remote

WRITE, READ = 2, 4


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
        self._user = user
        self._usable = True
        self._allowed = allowed
        self.length = length
        self.address = 8192
        self.rkey = 7

    def _require(self, user: object, right: int, local: Local) -> None:
        if not local.gone:
            raise LookupError("not allowed")


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


def test_what_retiring_raises_is_raised_by_the_last_unpin() -> None:
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
    part_of_part._pin()
    memory.release()
    assert memory.retired == 0
    whole.gone = True
    for one in (whole, part, part_of_part):
        with pytest.raises(LookupError):
            one._pin()
    part._unpin()
    assert memory.retired == 1


def test_memory_without_a_holder_cannot_be_pinned() -> None:
    class Loose(Local):
        def _check(self) -> None:
            pass

    with pytest.raises(TypeError, match="cannot be pinned"):
        Loose()._pin()
    with pytest.raises(AttributeError):
        Loose()._unpin()
    with pytest.raises(TypeError):
        Loose().root = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        Remote()._root = None  # type: ignore[assignment]
