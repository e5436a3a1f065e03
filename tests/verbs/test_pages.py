"""Test that the library's own memory is on huge pages if available, and the warning if not."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiordma import verbs
from aiordma.verbs._memory import pages

POOL = Path("/proc/sys/vm/nr_hugepages")


@pytest.fixture
def free_huge_pages() -> Iterator[int]:
    """Provide the number of free huge pages, after requesting 4 if permitted."""
    before = POOL.read_text()
    try:
        POOL.write_text("4")
    except OSError:  # not root, or a container's read-only /proc
        yield pages._meminfo().get("HugePages_Free", 0)
        return
    yield pages._meminfo()["HugePages_Free"]
    POOL.write_text(before)


def test_huge_pages_are_used_when_available(
    pd: verbs.ProtectionDomain, free_huge_pages: int, caplog: pytest.LogCaptureFixture
) -> None:
    size = pages._meminfo().get("Hugepagesize", 0)
    with caplog.at_level(logging.WARNING), pd.reg_mr(size + 5 or 5, huge_pages=True) as mr:
        assert mr.length == len(mr.buf) == size + 5
        mr.buf[-1] = 7
        assert not any(mr.buf[:64])
        if free_huge_pages >= 2:
            assert mr.page_size == size
            assert mr.addr % size == 0
            assert not caplog.records
            assert pages._meminfo()["HugePages_Free"] == free_huge_pages - 2
        else:
            assert mr.page_size == mmap.PAGESIZE
            (record,) = caplog.records
            text = record.getMessage()
            assert f"using ordinary pages for {size + 5} bytes" in text
            assert "/proc/sys/vm/nr_hugepages" in text
    assert pages._meminfo().get("HugePages_Free", 0) == free_huge_pages


def test_huge_pages_fall_back_to_ordinary_pages_with_a_warning(
    pd: verbs.ProtectionDomain, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pd.reg_mr(10000) as mr, pd.reg_mr(bytearray(64)) as own:
        assert (mr.page_size, own.page_size) == (mmap.PAGESIZE, 0)
    assert not caplog.records
    with pytest.raises(ValueError, match="must be a size in bytes"):
        pd.reg_mr(bytearray(64), huge_pages=True)
    monkeypatch.setattr(pages, "_meminfo", dict)
    with pd.reg_mr(10000, huge_pages=True) as mr:
        assert mr.page_size == mmap.PAGESIZE
        assert mr.length == 10000
    assert "ordinary pages" in caplog.text
