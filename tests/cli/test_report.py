"""Tests of the table and the JSON of `aiordma echo`."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from aiordma.cli.report import Report, address_text, throughput_text
from aiordma.cli.round_trips import Result
from aiordma.cli.tables import size_text, time_text


def report(*results: Result) -> Report:
    return Report(
        device="embedded0",
        library="embedded",
        via="cm",
        loop="asyncio",
        local_address=("127.0.0.1", 40000),
        peer_address=("127.0.0.1", 50000),
        results=list(results),
    )


GOOD = Result(16 << 20, times=[0.5, 0.25, 1.0], payload=48 << 20)
BAD = Result(4, times=[1e-6], payload=4, mismatch="message 0: byte 3 was 0x01 and came back 0x02")


def shown(report: Report) -> str:
    """Return the report as plain text of at most 80 columns."""
    console = Console(file=io.StringIO(), width=80)
    report.show(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_echo_table_fits_80_columns_and_has_every_value() -> None:
    text = shown(report(Result(123_456, True, [0.123456] * 1000, 10**9), GOOD))
    assert max(map(len, text.splitlines())) <= 80
    assert "device embedded0 (embedded library), via cm, asyncio loop" in text
    assert "from 127.0.0.1:40000 to 127.0.0.1:50000" in text
    whole, good = (re.split(" {2,}", line.strip()) for line in text.splitlines() if "yes" in line)
    assert whole == ["123,456 B (all)", "1,000", "123,456", "123,456", "123,456", "0.016", "yes"]
    assert good == ["16 MiB", "3", "250,000", "500,000", "1,000,000", "0.058", "yes"]
    assert "both directions" in text


def test_echo_report_describes_a_mismatch() -> None:
    bad = report(GOOD, BAD)
    assert not bad.verified
    assert " NO " in shown(bad)
    assert "4 B: message 0: byte 3 was 0x01 and came back 0x02" in shown(bad)


def test_echo_report_json_has_every_value() -> None:
    reported = json.loads(report(GOOD, BAD).to_json())
    good, bad = reported.pop("results")
    assert reported == {
        "device": "embedded0",
        "library": "embedded",
        "via": "cm",
        "loop": "asyncio",
        "local_address": ["127.0.0.1", 40000],
        "peer_address": ["127.0.0.1", 50000],
        "verified": False,
    }
    assert good == {
        "size": 16 << 20,
        "whole_file": False,
        "messages": 3,
        "min_us": 250_000.0,
        "median_us": 500_000.0,
        "p99_us": 1_000_000.0,
        "gb_per_s": pytest.approx(2 * (48 << 20) / 1.75 / 1e9),
        "verified": True,
        "mismatch": None,
    }
    assert bad["mismatch"] == BAD.mismatch


def test_sizes_addresses_and_times_are_formatted_for_display() -> None:
    sizes = (0, 1, 1000, 1024, 1536, 1 << 20, 3 << 30)
    assert [size_text(size) for size in sizes] == [
        "0 B", "1 B", "1,000 B", "1 KiB", "1,536 B", "1 MiB", "3 GiB",
    ]  # fmt: skip
    assert address_text(("10.9.9.1", 7471)) == "10.9.9.1:7471"
    assert address_text(("fd09:9::1", 7471)) == "[fd09:9::1]:7471"
    assert address_text(None) == "an unknown address"
    assert [throughput_text(number) for number in (1e-9, 0.05, 1.2345)] == [
        "< 0.001", "0.050", "1.234",
    ]  # fmt: skip
    assert [time_text(us) for us in (0.04, 12.345, 1234.5)] == ["0.0", "12.3", "1,234"]
