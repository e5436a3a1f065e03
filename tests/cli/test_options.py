"""Tests of options: sizes with units, event loops by name, the device's own address."""

from __future__ import annotations

import asyncio
import importlib
import ipaddress

import click
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from aiordma import verbs
from aiordma.cli.options import loop_factory, own_address, parse_sizes
from aiordma.cli.tables import size_text


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("64", [64]),
        ("0", [0]),
        ("1,4, 16", [1, 4, 16]),
        ("64B,4K,4k,4KB,4KiB", [64] + 4 * [4096]),
        ("1M,1MiB,2G", [1 << 20, 1 << 20, 2 << 30]),
    ],
)
def test_parse_sizes_accepts_units_and_lists(text: str, sizes: list[int]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    "text", ["", ",", "64,", "x", "-1", "1.5", "1T", "KiB", "1 2", "\u0663", "9" * 5000]
)
def test_parse_sizes_rejects_invalid_text(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"^invalid size .*: expected"):
        parse_sizes(text)


def test_parse_sizes_rejects_sizes_beyond_the_maximum() -> None:
    assert parse_sizes("4294967296G") == [1 << 62]
    with pytest.raises(click.BadParameter, match=r"^invalid size .*: the maximum is"):
        parse_sizes("4294967297G")


@given(st.integers(0, 1 << 50))
def test_parse_sizes_accepts_the_output_of_size_text(size: int) -> None:
    assert parse_sizes(size_text(size).replace(",", "")) == [size]


def test_loop_factory_selects_the_loop_by_name() -> None:
    assert loop_factory("asyncio") is asyncio.new_event_loop
    assert loop_factory("uvloop") is uvloop.new_event_loop


def test_loop_factory_advises_installing_uvloop_when_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(click.UsageError, match="pip install uvloop"):
        loop_factory("uvloop")


def test_own_address_is_in_the_devices_gid_table(
    device: verbs.Device, context: verbs.Context
) -> None:
    ip = ipaddress.ip_address(own_address(device).partition("%")[0])
    assert context.find_gid(ip).gid.ip == ip


def test_own_address_is_loopback_for_the_embedded_device() -> None:
    assert own_address(verbs.find_device("embedded0")) == "127.0.0.1"
