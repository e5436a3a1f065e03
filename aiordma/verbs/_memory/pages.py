"""Memory of the library's own: anonymous pages, huge ones where they are wanted and free."""

from __future__ import annotations

import errno
import logging
import mmap
from contextlib import suppress
from typing import NamedTuple

from aiordma._native import failure

logger = logging.getLogger("aiordma.verbs")

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
# Of the generic ABI of Linux (mmap(2)); Python has no name for it before 3.13.
_MAP_HUGETLB = 0x40000


class Pages(NamedTuple):
    """Whole pages, held for as long as ``view`` is; and the size of one in bytes."""

    view: memoryview
    page_size: int


class Mapped:
    """A mark for types whose objects lie in memory that `allocate` has mapped."""

    __slots__ = ()


def allocate(length: int, huge_pages: bool) -> Pages:
    """New memory of at least ``length`` bytes: zeros, page aligned, with nothing else on its pages.

    With ``huge_pages`` on such pages, if enough of them are free; if not, that is logged as a
    warning, and the kernel is asked to merge ordinary ones (madvise(2), MADV_HUGEPAGE).
    VerbsError (ENOMEM) for more than the kernel lets this process have.
    """
    if not huge_pages:
        return Pages(memoryview(_map(length)), mmap.PAGESIZE)
    info = _meminfo()
    size = info.get("Hugepagesize", 0)
    if size:
        whole = -(-length // size) * size  # munmap(2) wants whole pages
        try:
            mapping = mmap.mmap(-1, whole, flags=_PRIVATE | _MAP_HUGETLB)
        except (OSError, OverflowError):  # ENOMEM: not enough are free
            pass
        else:
            return Pages(memoryview(mapping), size)
    logger.warning(
        "%d bytes on ordinary pages: too few huge pages of %d bytes are free (%d of them);"
        " reserve some with /proc/sys/vm/nr_hugepages",
        length,
        size,
        info.get("HugePages_Free", 0),
    )
    mapping = _map(length)
    with suppress(OSError):  # EINVAL: a kernel without transparent huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return Pages(memoryview(mapping), mmap.PAGESIZE)


def _map(length: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, length, flags=_PRIVATE)
    except (OSError, OverflowError) as error:  # OverflowError: more than any address space
        raise failure(
            "mmap",
            getattr(error, "errno", errno.ENOMEM),
            f"{length} bytes of new memory to register: the kernel does not let this process have"
            " so much (free memory, vm.overcommit_memory, 'ulimit -v'); ask for less",
        ) from None


def _meminfo() -> dict[str, int]:
    """``/proc/meminfo``: sizes in bytes, numbers as they are (proc(5))."""
    found = {}
    with open("/proc/meminfo") as lines:
        text = lines.read()
    for line in text.splitlines():
        name, value, *unit = line.replace(":", " ").split()
        found[name] = int(value) * (1024 if unit == ["kB"] else 1)
    return found
