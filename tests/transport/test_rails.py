"""Connections over several devices: the tests of the folder `rails`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.conftest import kind_of
from tests.processes import run_python


@pytest.fixture
def several(device_name: str) -> Iterator[dict[str, str]]:
    """Of the tests' environment: which devices.  A second rxe is there for them alone."""
    if kind_of(device_name) == "embedded":
        yield {"AIORDMA_EMBEDDED_DEVICES": "3"}
        return
    for line in (
        "ip link add dummy1 type dummy",
        "ip addr add 10.9.10.1/24 dev dummy1",
        "ip link set dummy1 up",
        "rdma link add rxe1 type rxe netdev dummy1",
    ):
        subprocess.run(line.split(), check=True, timeout=60)
    yield {"AIORDMA_RAILS": f"{device_name},rxe1"}
    for line in ("rdma link delete rxe1", "ip link delete dummy1"):
        subprocess.run(line.split(), check=True, timeout=60)


@pytest.mark.timeout(1600)  # in an emulated machine
def test_over_several_devices(several: dict[str, str]) -> None:
    """With embedded devices all of them; with others those of what the rails carry."""
    done = run_python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/transport/rails",
        **several, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
