"""Tests of device events that ids receive."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import kind_of
from tests.processes import run_python

ROOT = Path(__file__).parents[2]
CHILD = "tests.cm.device_events_child"
HOST = "10.9.8.1"


def command(line: str, *, check: bool = True) -> None:
    subprocess.run(line.split(), check=check, timeout=60, capture_output=not check)


@pytest.fixture
def place(device_name: str) -> Iterator[tuple[str, str]]:
    """The name and address of a device that the test may remove."""
    if kind_of(device_name) == "embedded":
        yield device_name, "127.0.0.1"  # the child process's device
        return
    command("ip link add dummy9 type dummy")
    command(f"ip addr add {HOST}/24 dev dummy9")
    command("ip link set dummy9 up")
    command("rdma link add rxe9 type rxe netdev dummy9")
    yield "rxe9", HOST
    command("rdma link delete rxe9", check=False)  # a test may have removed it
    command("ip link delete dummy9")


def tell(place: tuple[str, str], what: str, timeout: float) -> list[str]:
    """Trigger an event in a child process that listens on the device. Return its output lines."""
    done = run_python("-m", CHILD, *place, what, str(timeout))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_device_removal_event_identifies_the_id_and_gives_advice(place: tuple[str, str]) -> None:
    assert tell(place, "removal", 30) == [
        "DEVICE_REMOVAL of the listener",
        "the device is being removed; close all objects on it (RDMA_CM_EVENT_DEVICE_REMOVAL)",
    ]


def test_address_change_event_identifies_the_id(
    place: tuple[str, str], deviations: frozenset[str]
) -> None:
    if "only bonding tells of another address" in deviations:
        assert tell(place, "address", 1) == ["nothing"]
    else:
        assert tell(place, "address", 30) == ["ADDR_CHANGE of the listener", "None"]
