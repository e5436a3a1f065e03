"""Memory that the peer may read for a moment."""

from __future__ import annotations

import errno
import os

import pytest

from aiordma import verbs
from aiordma.errors import BufferStateError, VerbsError
from aiordma.verbs.opening import Opening


@pytest.mark.parametrize("memory", [bytes(100_000), bytearray(100_000)], ids=["bytes", "bytearray"])
def test_it_says_where_and_with_which_key(
    pd: verbs.ProtectionDomain, memory: bytes | bytearray
) -> None:
    opening = Opening(pd, memoryview(memory)[1000:])
    other = Opening(pd, memoryview(memory))
    assert opening.address == verbs.address_of(memory) + 1000
    assert opening.length == 99_000
    assert opening.rkey != other.rkey
    opening.close()
    other.close()


def test_the_memory_is_pinned_until_it_is_closed(pd: verbs.ProtectionDomain) -> None:
    memory = bytearray(5000)
    opening = Opening(pd, memoryview(memory))
    with pytest.raises(BufferError):
        memory.append(0)
    assert not opening.closed
    opening.close()
    assert opening.closed
    memory.append(0)
    opening.close()


def test_it_is_closed_before_the_protection_domain(context: verbs.Context) -> None:
    pd = context.alloc_pd()
    opening = Opening(pd, memoryview(bytes(5000)))
    with pytest.raises(VerbsError) as caught:
        pd.close()
    assert caught.value.errno == errno.EBUSY
    opening.close()
    pd.close()


def test_the_child_of_a_fork_leaves_it_alone(pd: verbs.ProtectionDomain) -> None:
    opening = Opening(pd, memoryview(bytes(5000)))
    child = os.fork()
    if not child:
        status = 1
        try:
            opening.close()  # a call would find the parent's device in this process, and crash
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    opening.close()


def test_not_in_a_domain_that_is_closed(context: verbs.Context) -> None:
    pd = context.alloc_pd()
    pd.close()
    with pytest.raises(BufferStateError):
        Opening(pd, memoryview(bytes(5000)))
