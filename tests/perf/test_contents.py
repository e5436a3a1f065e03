"""Tests of the payload of measurements, and of its comparison."""

from __future__ import annotations

import gc
from random import Random

import pytest

from aiordma.perf.contents import PART, contents, difference
from aiordma.perf.machine import garbage_collection_disabled


def test_contents_are_determined_by_the_seed() -> None:
    assert contents(7, 100) == contents(7, 100) != contents(8, 100)
    assert contents(7, 0) == b""
    assert contents(7, PART + 3) == Random(7).randbytes(PART + 3)
    assert len(contents(7, 256 << 20)) == 256 << 20


@pytest.mark.parametrize(
    ("got", "text"),
    [
        (b"abc", ""),
        (b"ab", "2 bytes instead of 3"),
        (b"abd", "byte 2 is 0x64 instead of 0x63"),
        (b"xyz", "byte 0 is 0x78 instead of 0x61"),
    ],
)
def test_difference_reports_the_first_mismatched_byte(got: bytes, text: str) -> None:
    assert difference(got, b"abc") == text
    assert difference(memoryview(got), b"abc") == text


def test_nested_gc_disabling_restores_the_garbage_collector() -> None:
    assert gc.isenabled()
    with garbage_collection_disabled():
        with garbage_collection_disabled():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
