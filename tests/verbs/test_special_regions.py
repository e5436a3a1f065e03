"""Test other kinds of memory: at another address, by pointer, on demand, of files or the device."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from aiordma import verbs
from aiordma._native import ffi
from aiordma.errors import (
    BufferStateError,
    LocalRangeError,
    RDMAError,
    UnsupportedError,
    VerbsError,
)
from aiordma.verbs import AccessFlags, Advice, ScatterGatherElement, SendFlags, WROpcode
from aiordma.verbs._memory.memory_region import reg_local_dma
from conftest import kind_of

if TYPE_CHECKING:
    from conftest import ConnectedPair, End

RIGHTS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ
PAGE = mmap.PAGESIZE


def transfer(one: End, opcode: WROpcode, local: tuple[int, int], remote: tuple[int, int]) -> None:
    """Transfer 8 bytes between a local (address, lkey) and a remote (address, rkey)."""
    one.qp.post_send_one(5, opcode, SendFlags.SIGNALED, local[0], 8, local[1], remote[0], remote[1])
    one.completion().raise_for_status()


def check_transfers(one: End, mr: verbs.MemoryRegion, *, at: int = 0) -> None:
    """Check that operations can use the region as remote memory and as local memory."""
    one.mr.buf[:8] = b"12345678"
    transfer(one, WROpcode.RDMA_WRITE, (one.mr.addr, one.mr.lkey), (mr.addr + at, mr.rkey))
    transfer(one, WROpcode.RDMA_READ, (one.mr.addr + 8, one.mr.lkey), (mr.addr + at, mr.rkey))
    assert bytes(one.mr.buf[8:16]) == b"12345678"
    transfer(one, WROpcode.RDMA_READ, (mr.addr + at + 8, mr.lkey), (one.mr.addr, one.mr.rkey))


# --- addresses ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("access", "iova"), [(RIGHTS, 0), (RIGHTS, 1 << 40), (RIGHTS | AccessFlags.ZERO_BASED, None)]
)
def test_region_is_addressed_by_iova(
    pd: verbs.ProtectionDomain, pair: tuple[End, End], access: AccessFlags, iova: int | None
) -> None:
    with pd.reg_mr(2 * PAGE, access, iova=iova) as mr:
        assert mr.addr == (iova or 0)
        check_transfers(pair[0], mr, at=24)
        assert bytes(mr.buf[24:40]) == b"12345678" * 2
    with pytest.raises(ValueError, match="iova must be 0"):
        pd.reg_mr(64, AccessFlags.ZERO_BASED, iova=64)


def test_reg_pointer_registers_raw_memory(
    pd: verbs.ProtectionDomain, pair: tuple[End, End]
) -> None:
    memory = (ctypes.c_char * 256)()
    with pd.reg_pointer(ctypes.addressof(memory), 256, RIGHTS) as mr:
        assert (mr.addr, mr.length) == (ctypes.addressof(memory), 256)
        check_transfers(pair[0], mr)
        assert memory.raw[:16] == b"12345678" * 2
        with pytest.raises(BufferStateError, match="memory does not belong to a Python object"):
            mr.buf  # noqa: B018
    place = ctypes.addressof(memory) % PAGE  # the offset within the page must match
    with pd.reg_pointer(ctypes.addressof(memory), 256, RIGHTS, iova=place) as mr:
        assert mr.addr == place
        check_transfers(pair[0], mr, at=16)
        assert memory.raw[16:32] == b"12345678" * 2


def test_reg_pointer_rejects_invalid_memory_and_rights(pd: verbs.ProtectionDomain) -> None:
    addr = PAGE  # never mapped by the kernel, which could reuse any other page
    with pytest.raises(
        VerbsError, match=r"ibv_reg_mr: .*cannot register 4096 bytes; no memory"
    ) as caught:
        pd.reg_pointer(addr, PAGE)
    assert caught.value.errno == errno.EFAULT
    with pytest.raises(ValueError, match="at least 1 byte long, not 0"):
        pd.reg_pointer(addr, 0)
    with pytest.raises(ValueError, match="also requires AccessFlags"):
        pd.reg_pointer(addr, 64, AccessFlags.REMOTE_WRITE)


# --- on demand ---------------------------------------------------------------------------------


@pytest.mark.needs("on-demand paging")
def test_on_demand_region_is_accessible_and_prefetched(
    pd: verbs.ProtectionDomain, pair: tuple[End, End]
) -> None:
    with pd.reg_mr(64 * PAGE, RIGHTS | AccessFlags.ON_DEMAND) as mr:
        mr.prefetch(0, PAGE, write=True)
        mr.prefetch(wait=False)
        check_transfers(pair[0], mr, at=32 * PAGE)
        assert bytes(mr.buf[32 * PAGE : 32 * PAGE + 8]) == b"12345678"


@pytest.mark.needs("on-demand paging")
def test_implicit_region_covers_the_whole_address_space(
    pd: verbs.ProtectionDomain, pair: tuple[End, End]
) -> None:
    memory = (ctypes.c_char * 64)()
    with pd.reg_implicit(RIGHTS) as mr:
        assert mr.access & AccessFlags.ON_DEMAND
        check_transfers(pair[0], mr, at=ctypes.addressof(memory))
    assert memory.raw[:16] == b"12345678" * 2


def test_local_dma_region_covers_all_process_memory(
    pd: verbs.ProtectionDomain, pair: tuple[End, End]
) -> None:
    """This includes memory that is mapped later. Devices that pin pages do not support it."""
    mr = reg_local_dma(pd)
    assert (mr is None) == (pd.context.library.reg_local_dma is None)
    if mr is not None:
        memory = ctypes.create_string_buffer(b"12345678", 8)
        one, two = pair
        local = ctypes.addressof(memory), mr.lkey
        transfer(one, WROpcode.RDMA_WRITE, local, (two.mr.addr, two.mr.rkey))
        assert bytes(two.mr.buf[:8]) == b"12345678"
        mr.close()


@pytest.mark.needs("on-demand paging")
def test_prefetch_rejects_ranges_outside_the_region(pd: verbs.ProtectionDomain) -> None:
    with pd.reg_mr(PAGE, RIGHTS | AccessFlags.ON_DEMAND) as mr:
        for offset, length in ((-1, 5), (0, PAGE + 1), (PAGE, 1), (5, 0)):
            with pytest.raises(LocalRangeError):
                mr.prefetch(offset, length)


def test_prefetch_of_a_pinned_region_only_checks_rights(pd: verbs.ProtectionDomain) -> None:
    """The pages are already present. Only a device that takes no advice at all refuses the call."""
    with pd.reg_mr(PAGE, AccessFlags.REMOTE_READ) as mr, suppress(UnsupportedError):
        sge = ScatterGatherElement(mr.addr, 64, mr.lkey)
        pd.advise_mr(Advice.PREFETCH_NO_FAULT, [sge])
        mr.prefetch()
        with pytest.raises(VerbsError, match=r"ibv_advise_mr: .*not permitted"):
            pd.advise_mr(Advice.PREFETCH_WRITE, [sge])
        with pytest.raises(VerbsError, match=r"ibv_advise_mr: .*not permitted"):
            mr.prefetch(write=True)


def test_reg_mr_reports_missing_on_demand_paging_support(
    context: verbs.Context, pd: verbs.ProtectionDomain
) -> None:
    if context.query_device_ex().odp_caps.general:
        with pytest.raises(ValueError, match="also requires AccessFlags"):
            pd.reg_mr(64, AccessFlags.REMOTE_WRITE | AccessFlags.ON_DEMAND)
        return
    data = bytearray(64)
    with pytest.raises(UnsupportedError, match=rf"'{context.name}' does not .*paging \(ODP\)"):
        pd.reg_mr(data, RIGHTS | AccessFlags.ON_DEMAND)
    data.extend(b"not pinned")


# --- registering again -------------------------------------------------------------------------


@pytest.mark.needs("rereg")
def test_rereg_replaces_memory_rights_and_protection_domain(
    context: verbs.Context, pd: verbs.ProtectionDomain, pair: tuple[End, End]
) -> None:
    old, new = bytearray(256), bytearray(512)
    with context.alloc_pd() as other:
        mr = other.reg_mr(old)
        mr.rereg(new, RIGHTS, pd)
        old.extend(b"no longer pinned")
        with pytest.raises(BufferError):
            new.extend(b"x")
        assert (mr.length, mr.access, mr.pd) == (512, RIGHTS, pd)
        assert mr.addr == ctypes.addressof(ctypes.c_char.from_buffer(new))
        check_transfers(pair[0], mr)
        assert new[:8] == b"12345678"
    assert not mr.closed  # the region has moved
    mr.rereg(access=AccessFlags.LOCAL_WRITE)
    with pytest.raises(RDMAError):
        check_transfers(pair[0], mr)
    mr.close()
    new.extend(b"x")


def test_failed_rereg_leaves_the_region_unchanged(
    pd: verbs.ProtectionDomain, pair: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    mr = pd.reg_mr(256, RIGHTS)
    before = (mr.addr, mr.length, mr.lkey, mr.rkey, mr.access)
    with pytest.raises(ValueError, match="at least one of memory, access and pd"):
        mr.rereg()
    with pytest.raises(ValueError, match="also requires AccessFlags"):
        mr.rereg(access=AccessFlags.REMOTE_WRITE)
    with pytest.raises(ValueError, match="read-only"):
        mr.rereg(b"only to be read")
    with pd.reg_mr(b"only to be read") as fixed:
        with pytest.raises(ValueError, match="cannot register a read-only bytes"):
            fixed.rereg(access=RIGHTS)
        assert fixed.access == AccessFlags.NONE
    calls = pd.context.library.calls
    monkeypatch.setattr(calls, "ibv_rereg_mr", lambda *arguments: -1)
    data = bytearray(64)
    with pytest.raises(VerbsError, match="cannot change <MemoryRegion"):
        mr.rereg(data)
    data.extend(b"x")
    assert (mr.addr, mr.length, mr.lkey, mr.rkey, mr.access) == before
    check_transfers(pair[0], mr)
    monkeypatch.setattr(calls, "ibv_rereg_mr", lambda *arguments: -4)
    with pytest.raises(VerbsError, match="has been closed"):
        mr.rereg(bytearray(64))
    assert mr.closed


def test_rereg_raises_unsupported_error_without_device_support(
    pd: verbs.ProtectionDomain, pair: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An example is rdma_rxe 6.1, whose library does not even ask the kernel."""

    def cannot(*arguments: object) -> int:
        ffi.errno = errno.EOPNOTSUPP
        return -4

    mr = pd.reg_mr(256, RIGHTS)
    data = bytearray(64)
    if kind_of(pd.context.name) != "rxe":
        monkeypatch.setattr(pd.context.library.calls, "ibv_rereg_mr", cannot)
    with pytest.raises(UnsupportedError, match="changing registered memory regions") as caught:
        mr.rereg(data)
    assert caught.value.device == pd.context.name
    data.extend(b"x")
    check_transfers(pair[0], mr)
    mr.close()


# --- of files ----------------------------------------------------------------------------------


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("aiordma-test")
    os.truncate(fd, 4 * PAGE)
    yield fd
    os.close(fd)


@pytest.mark.needs("dma-buf")
def test_reg_dmabuf_mr_registers_a_file_range(
    pd: verbs.ProtectionDomain, pair: tuple[End, End], file: int
) -> None:
    """A memfd replaces the dma-buf, which would need another device in the machine."""
    with pd.reg_dmabuf_mr(file, 2 * PAGE, RIGHTS, offset=PAGE) as mr:
        assert (mr.addr, mr.length) == (PAGE, 2 * PAGE)
        check_transfers(pair[0], mr, at=24)
        assert os.pread(file, 16, PAGE + 24) == b"12345678" * 2
        with pytest.raises(BufferStateError):
            mr.buf  # noqa: B018
    with pd.reg_dmabuf_mr(file, PAGE, RIGHTS, offset=PAGE, iova=1 << 30) as mr:
        assert mr.addr == 1 << 30
        check_transfers(pair[0], mr)


@pytest.mark.needs("dma-buf")
def test_reg_dmabuf_mr_rejects_ranges_outside_the_file(
    pd: verbs.ProtectionDomain, file: int
) -> None:
    pd.reg_dmabuf_mr(file, PAGE).close()
    for offset, length, iova in ((0, 5 * PAGE, 0), (PAGE, PAGE, PAGE + 1), (5 * PAGE, 1, 0)):
        text = f"cannot register {length} bytes at offset {offset} of dma-buf {file} as {iova:#x}"
        with pytest.raises(VerbsError, match=text) as caught:
            pd.reg_dmabuf_mr(file, length, offset=offset, iova=iova)
        assert caught.value.errno == errno.EINVAL


# --- of the device, and of nothing -------------------------------------------------------------


@pytest.mark.needs("device memory")
def test_device_memory_can_be_read_written_and_registered(
    context: verbs.Context, pd: verbs.ProtectionDomain, pair: tuple[End, End]
) -> None:
    with context.alloc_dm(256, log_align_req=6) as dm:
        assert dm.length == 256
        dm.write(b"abcdefgh", 8)
        assert dm.read(16, 4) == bytes(4) + b"abcdefgh" + bytes(4)
        assert dm.read() == bytes(8) + b"abcdefgh" + bytes(240)
        with pd.reg_dm_mr(dm, RIGHTS) as mr:
            assert (mr.addr, mr.length) == (0, 256)
            check_transfers(pair[0], mr, at=64)
            assert dm.read(16, 64) == b"12345678" * 2
        part = pd.reg_dm_mr(dm, RIGHTS, offset=128, length=64)
        assert part.length == 64
        check_transfers(pair[0], part)
        assert dm.read(8, 128) == b"12345678"
        for use in (
            lambda: dm.write(b"12345678", 252),
            lambda: dm.check(200, 64),
            lambda: dm.read(260),
            lambda: dm.read(4, 256),
            lambda: dm.read(4, -4),
            lambda: pd.reg_dm_mr(dm, offset=200, length=64),
        ):
            with pytest.raises(LocalRangeError):
                use()
        # Cards with device memory copy it in whole words only.
        for use in (lambda: dm.write(b"12345", 8), lambda: dm.read(4, 7)):
            with pytest.raises(VerbsError, match="Invalid argument"):
                use()
    assert part.closed  # closed together with the memory


@pytest.mark.needs("device memory")
def test_alloc_dm_rejects_sizes_out_of_range(context: verbs.Context) -> None:
    most = context.query_device_ex().max_dm_size or 1
    for length in (0, most + 1):
        with pytest.raises(ValueError, match=f"between 1 and {most} bytes on {context.name}"):
            context.alloc_dm(length)


@pytest.mark.needs("null memory regions")
def test_null_region_discards_part_of_a_read(
    pd: verbs.ProtectionDomain, pair: tuple[End, End]
) -> None:
    one, two = pair
    two.mr.buf[:16] = b"skip-me!keep-me!"
    with pd.alloc_null_mr() as nothing:
        assert nothing.rkey == 0
        pieces = (
            ScatterGatherElement(0, 8, nothing.lkey),
            ScatterGatherElement(one.mr.addr, 8, one.mr.lkey),
        )
        assert one.qp.capabilities.max_send_sge >= 2
        with one.qp.batch() as batch:
            batch.read(pieces, two.mr.addr, two.mr.rkey)
        one.completion().raise_for_status()
    assert bytes(one.mr.buf[:8]) == b"keep-me!"


# --- domains -----------------------------------------------------------------------------------


@pytest.mark.needs("parent domains")
def test_parent_domain_transfers_data_and_closes_with_its_thread_domain(
    context: verbs.Context, pd: verbs.ProtectionDomain
) -> None:
    td = context.alloc_td()
    both = context.alloc_parent_domain(pd, td)
    with context.create_cq(64) as cq:
        qp = both.create_qp(cq)
        mine = qp.endpoint()
        qp.connect(mine, mine, access=AccessFlags.REMOTE_WRITE)
        mr = pd.reg_mr(64, RIGHTS)  # usable by queue pairs of the parent domain
        mr.buf[:8] = b"12345678"
        qp.post_send_one(
            1, WROpcode.RDMA_WRITE, SendFlags.SIGNALED, mr.addr, 8, mr.lkey, mr.addr + 8, mr.rkey
        )
        (wc,) = cq.wait(spin=float("inf"), timeout=30)
        wc.raise_for_status()
        assert bytes(mr.buf[8:16]) == b"12345678"
        qp.close()
        mr.close()
    assert "ParentDomain" in repr(both)
    td.close()
    assert both.closed  # depends on both
    assert not pd.closed


@pytest.fixture
def pair(connected_pair: ConnectedPair) -> tuple[End, End]:
    return connected_pair(verbs.QPCapabilities(max_send_sge=2))
