"""What happens to the device, as ids are told of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHILD = "tests.cm.device_events_child"


def run_child(device_name: str, what: str) -> str:
    """A process of its own: the device fails in all of it."""
    done = subprocess.run(
        [sys.executable, "-m", CHILD, device_name, what],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_removal(device_name: str) -> None:
    """The event names the id, says what to do, and the device can go when that is done."""
    assert run_child(device_name, "removal").split("\n")[:3] == [
        "DEVICE_REMOVAL of the listener",
        "the device is being removed; close what is on it (RDMA_CM_EVENT_DEVICE_REMOVAL, status 0)",
        "gone",
    ]


def test_another_address(device_name: str, deviations: frozenset[str]) -> None:
    told = "ADDR_CHANGE of the listener"
    if "only bonding tells of another address" in deviations:
        told = "nothing"
    assert run_child(device_name, "address").split("\n")[0] == told
