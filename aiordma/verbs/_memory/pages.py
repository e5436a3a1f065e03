"""Allocation of anonymous pages, including huge pages if requested and available."""

from __future__ import annotations

import errno
import logging
import mmap
from contextlib import suppress
from typing import NamedTuple

from aiordma._native import failure

logger = logging.getLogger("aiordma.verbs")

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
# The value in Linux's generic ABI (mmap(2)). Python's mmap module may not define this constant.
_MAP_HUGETLB = 0x40000


class Pages(NamedTuple):
    """Anonymous memory owned by ``view``, and its page size in bytes."""

    view: memoryview
    page_size: int


class Mapped:
    """A base class that marks types whose memory comes from `allocate`."""

    __slots__ = ()


def allocate(length: int, huge_pages: bool) -> Pages:
    """Map at least ``length`` zeroed bytes of anonymous memory.

    If ``huge_pages`` is true, the memory consists of huge pages. If too few of them are free, the
    function logs a warning, maps ordinary pages, and asks the kernel to combine them into huge
    pages (MADV_HUGEPAGE, see madvise(2)).

    Raises:
        VerbsError: With ENOMEM, if the kernel cannot provide the memory.
    """
    if not huge_pages:
        return Pages(memoryview(_map(length)), mmap.PAGESIZE)
    meminfo = _meminfo()
    huge_page_size = meminfo.get("Hugepagesize", 0)
    if huge_page_size:
        # munmap(2) requires whole huge pages.
        rounded_length = -(-length // huge_page_size) * huge_page_size
        try:
            mapping = mmap.mmap(-1, rounded_length, flags=_PRIVATE | _MAP_HUGETLB)
        except (OSError, OverflowError):  # ENOMEM if too few huge pages are free
            pass
        else:
            return Pages(memoryview(mapping), huge_page_size)
    logger.warning(
        "using ordinary pages for %d bytes, because too few huge pages of %d bytes are free (%d);"
        " reserve huge pages with /proc/sys/vm/nr_hugepages",
        length,
        huge_page_size,
        meminfo.get("HugePages_Free", 0),
    )
    mapping = _map(length)
    with suppress(OSError):  # EINVAL if the kernel lacks transparent huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return Pages(memoryview(mapping), mmap.PAGESIZE)


def _map(length: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, length, flags=_PRIVATE)
    except (OSError, OverflowError) as error:  # OverflowError if the length exceeds ssize_t
        raise failure(
            "mmap",
            getattr(error, "errno", errno.ENOMEM),
            f"cannot allocate {length} bytes of memory; request less memory, or check free memory,"
            " vm.overcommit_memory and 'ulimit -v'",
        ) from None


def _meminfo() -> dict[str, int]:
    """Return the fields of ``/proc/meminfo``, with sizes converted to bytes (proc(5))."""
    fields = {}
    with open("/proc/meminfo") as lines:
        text = lines.read()
    for line in text.splitlines():
        name, value, *unit = line.replace(":", " ").split()
        fields[name] = int(value) * (1024 if unit == ["kB"] else 1)
    return fields
