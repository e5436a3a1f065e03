"""Test registration: owned and borrowed memory, access rights, and pins."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from pathlib import Path

import numpy as np
import pytest

from aiordma import MemoryPool, verbs
from aiordma.errors import BufferStateError, LocalRangeError, VerbsError
from aiordma.verbs import AccessFlags
from aiordma.verbs._memory.buffers import AnyMemory, bytes_of
from tests.processes import run_python

ALL = (
    AccessFlags.LOCAL_WRITE
    | AccessFlags.REMOTE_WRITE
    | AccessFlags.REMOTE_READ
    | AccessFlags.REMOTE_ATOMIC
)


def test_owned_memory_is_page_aligned_zeroed_and_writable(pd: verbs.ProtectionDomain) -> None:
    with pd.reg_mr(10000) as mr:
        assert mr.length == len(mr.buf) == 10000
        assert mr.addr % mmap.PAGESIZE == 0
        assert not any(mr.buf)
        mr.buf[9999] = 7
        assert mr.buf[9999] == 7
        assert mr.access is AccessFlags.LOCAL_WRITE
        assert f"{mr.lkey:#x}" in repr(mr)


def is_in_memory(address: int) -> bool:
    """Return whether the page at this address is resident (mincore(2))."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    found = ctypes.c_ubyte()
    libc = ctypes.CDLL(None, use_errno=True)
    code = libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(1), ctypes.byref(found))
    assert code == 0, ctypes.get_errno()
    return bool(found.value & 1)


def registration_loads_pages(memory: AnyMemory) -> bool:
    middle = verbs.address_of(memory) + bytes_of(memory).nbytes // 2
    assert not is_in_memory(middle)
    with (
        verbs.find_device("embedded0").open() as context,
        context.alloc_pd() as pd,
        pd.reg_mr(memory, AccessFlags.REMOTE_READ),
    ):
        return is_in_memory(middle)


def test_page_check_is_skipped_for_allocator_memory() -> None:
    """The pages of memory from an allocator exist as long as its bytes.

    Other memory is checked (softdev/abi/device_calls.h).
    """
    length = 64 << 20  # beyond what malloc ever takes from its heap (mallopt(3)): fresh pages
    numbers = np.zeros(length // 8)
    for memory in (bytes(length), numbers, numbers.reshape(2, -1)[1]):
        assert not registration_loads_pages(memory)
    with verbs.find_device("embedded0").open() as context, context.alloc_pd() as pd:
        pool = MemoryPool(pd, limit=2 * length)
        with pool.alloc(length) as buffer:
            assert not registration_loads_pages(buffer.view)
        pool.close()
    mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE)
    for memory in (mapping, np.frombuffer(mapping, np.uint8)):
        assert registration_loads_pages(memory)
        mapping.madvise(mmap.MADV_DONTNEED)


def test_region_shares_array_memory_and_keeps_it_alive(pd: verbs.ProtectionDomain) -> None:
    array = np.zeros((8, 64), dtype=np.uint64)
    with pd.reg_mr(array, ALL) as mr:
        view = array.data.cast("B")
        assert mr.length == len(view) == 4096
        mr.buf[17] = 99
        assert view[17] == 99
        view[18] = 98
        assert mr.buf[18] == 98
        reference = weakref.ref(array)
        del array, view
        assert reference() is not None
    assert reference() is None


def test_registered_memory_is_pinned_until_close(pd: verbs.ProtectionDomain) -> None:
    data = bytearray(64)
    mapping = mmap.mmap(-1, 4096)
    with pd.reg_mr(data), pd.reg_mr(mapping):
        with pytest.raises(BufferError):
            data.extend(b"x")
        with pytest.raises(BufferError):
            mapping.close()
    data.extend(b"x")
    mapping.close()


def test_reg_mr_rejects_write_access_to_read_only_memory(pd: verbs.ProtectionDomain) -> None:
    with pd.reg_mr(b"some bytes") as mr:
        assert mr.access is AccessFlags.NONE
        assert mr.buf.readonly
        assert bytes(mr.buf) == b"some bytes"
    with pd.reg_mr(b"some bytes", AccessFlags.REMOTE_READ) as mr:
        assert mr.buf.readonly
    for access in (AccessFlags.LOCAL_WRITE, ALL):
        with pytest.raises(ValueError, match="read-only bytes"):
            pd.reg_mr(b"some bytes", access)


def test_mapped_files_can_be_registered_for_remote_read(
    pd: verbs.ProtectionDomain, device_name: str, tmp_path: Path
) -> None:
    """On kernels that cannot pin a read-only shared mapping, the error says what to do."""
    file = tmp_path / "file"
    file.write_bytes(bytes(mmap.PAGESIZE))
    with file.open("rb") as opened:
        read, copy = (
            mmap.mmap(opened.fileno(), 0, access=access)
            for access in (mmap.ACCESS_READ, mmap.ACCESS_COPY)
        )
    pd.reg_mr(copy, AccessFlags.REMOTE_READ).close()
    old_linux = tuple(map(int, os.uname().release.split(".")[:2])) < (6, 2)
    if old_linux and device_name.startswith("rxe"):
        with pytest.raises(VerbsError, match=r"Bad address.*use mmap\.ACCESS_COPY"):
            pd.reg_mr(read, AccessFlags.REMOTE_READ)
    else:
        pd.reg_mr(read, AccessFlags.REMOTE_READ).close()


@pytest.mark.parametrize("access", [AccessFlags.REMOTE_WRITE, AccessFlags.REMOTE_ATOMIC])
def test_remote_write_and_atomic_require_local_write(
    pd: verbs.ProtectionDomain, access: AccessFlags
) -> None:
    data = bytearray(64)
    for memory in (4096, data):
        with pytest.raises(ValueError, match="also requires AccessFlags"):
            pd.reg_mr(memory, access)
    data.extend(b"not pinned")


@pytest.mark.parametrize("memory", [0, -1, b"", bytearray()])
def test_reg_mr_rejects_empty_memory(
    pd: verbs.ProtectionDomain, memory: int | bytes | bytearray
) -> None:
    with pytest.raises(ValueError, match=r"at least 1 byte long, not -?[01]$"):
        pd.reg_mr(memory)


@pytest.mark.parametrize("huge_pages", [False, True], ids=["ordinary", "huge"])
def test_reg_mr_raises_enomem_for_impossible_lengths(
    pd: verbs.ProtectionDomain, huge_pages: bool
) -> None:
    for length in (1 << 50, 1 << 70):
        with pytest.raises(VerbsError, match=f"allocate {length} bytes of .*request less") as no:
            pd.reg_mr(length, huge_pages=huge_pages)
        assert no.value.errno == errno.ENOMEM


def test_memory_can_be_registered_several_times(pd: verbs.ProtectionDomain) -> None:
    data = bytearray(64)
    # A device may ignore RELAXED_ORDERING, so adding it must change nothing.
    regions = [pd.reg_mr(data, ALL | AccessFlags.RELAXED_ORDERING) for _ in range(32)]
    assert len({mr.addr for mr in regions}) == 1
    assert len({mr.rkey for mr in regions}) == len({mr.lkey for mr in regions}) == 32
    for mr in regions:
        mr.close()


def test_closed_region_raises_buffer_state_error(pd: verbs.ProtectionDomain) -> None:
    mr = pd.reg_mr(64)
    view = mr.buf
    mr.close()
    mr.close()
    with pytest.raises(BufferStateError, match=rf"MemoryRegion {mr.addr:#x}\+64 is closed"):
        mr.buf  # noqa: B018
    view[0] = 1  # the view keeps the memory after the device is gone


def test_address_of_returns_the_start_of_a_buffer() -> None:
    memory = bytearray(100)
    assert verbs.address_of(memoryview(memory)[10:]) == verbs.address_of(memory) + 10
    memory.append(1)  # nothing refers to the buffer
    with pytest.raises(TypeError):
        verbs.address_of("text")
    with pytest.raises(BufferError):
        verbs.address_of(memoryview(memory)[::2])


FORGOTTEN = """
import gc, sys
from aiordma import MemoryPool, verbs

with verbs.open_device(sys.argv[1]) as context, context.alloc_pd() as pd:
    memory = bytearray(100)
    for make in (lambda: 4096, lambda: memory, lambda: memoryview(memory)[10:20]):
        cycle = [pd.reg_mr(make())]
        cycle += [cycle[0].buf, cycle]
        cycle[0].close()
        del cycle
        gc.collect()
        memory += b"."  # it is not pinned any more
print(len(memory))
"""


def test_region_views_in_reference_cycles_are_garbage_collected(device: verbs.Device) -> None:
    """A mistake would crash the process, so the test runs in a separate one."""
    done = run_python("-W", "error", "-c", FORGOTTEN, device.name)
    assert (done.returncode, done.stdout, done.stderr) == (0, "103\n", "")


def test_region_sge_accepts_only_ranges_inside_the_region(pd: verbs.ProtectionDomain) -> None:
    mr = pd.reg_mr(64)
    assert mr.sge() == (mr.addr, 64, mr.lkey)
    assert mr.sge(60) == (mr.addr + 60, 4, mr.lkey)
    assert mr.sge(8, 16) == (mr.addr + 8, 16, mr.lkey)
    for offset, length in ((-1, 4), (60, 5), (65, None), (0, -1)):
        with pytest.raises(LocalRangeError):
            mr.sge(offset, length)
    mr.close()
    with pytest.raises(BufferStateError):
        mr.sge()
