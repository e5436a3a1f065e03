"""Tests of rdma(8) under `aiordma run`.

The embedded device is listed by aiordma. The real program runs for everything else.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from aiordma import verbs

from .test_run import aiordma_run

GUID = verbs.find_device("embedded0").guid.to_bytes(8, "big").hex(":", 2)
with verbs.find_device("embedded0").open() as context:
    NETDEV = context.query_gid(0).ndev
LINK = {
    "ifindex": 0,
    "ifname": "embedded0",
    "port": 1,
    "state": "ACTIVE",
    "physical_state": "LINK_UP",
    "netdev": NETDEV,
    "netdev_index": socket.if_nametoindex(NETDEV),
}
DEVICE = {
    "ifindex": 0,
    "ifname": "embedded0",
    "node_type": "ca",
    "fw": "1",
    "node_guid": GUID,
    "sys_image_guid": GUID,
}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("link show -j", LINK),
        ("-j link", LINK),
        ("-j -p li sh embedded0/1", LINK),
        ("dev show -j", DEVICE),
        ("-jp dev show embedded0", DEVICE),
        ("-djp dev", DEVICE),
    ],
)
def test_rdma_json_lists_the_device(words: str, expected: dict[str, object]) -> None:
    done = aiordma_run("sh", "-c", f"rdma {words}")
    assert (json.loads(done.stdout), done.stderr) == ([expected], "")


def test_rdma_text_lists_the_device() -> None:
    printed = [aiordma_run("rdma", *words).stdout for words in (["link"], ["dev", "show"])]
    assert printed == [
        f"link embedded0/1 state ACTIVE physical_state LINK_UP netdev {NETDEV} \n",
        f"0: embedded0: node_type ca fw 1 node_guid {GUID} sys_image_guid {GUID} \n",
    ]


def test_rdma_lists_several_devices() -> None:
    two = {"AIORDMA_EMBEDDED_DEVICES": "2"}
    links = json.loads(aiordma_run("rdma", "-j", "link", **two).stdout)
    loopback = {"netdev": "lo", "netdev_index": 1}
    assert links == [LINK, LINK | {"ifindex": 1, "ifname": "embedded1"} | loopback]
    one = aiordma_run("rdma", "link", "show", "embedded1/1", **two).stdout
    assert one == "link embedded1/1 state ACTIVE physical_state LINK_UP netdev lo \n"
    devices = aiordma_run("rdma", "dev", **two).stdout.splitlines()
    assert [line.split(": ")[:2] for line in devices] == [["0", "embedded0"], ["1", "embedded1"]]


@pytest.mark.parametrize(
    "words",
    ["link add rxe0 type rxe netdev lo", "link show rxe0/1", "dev show rxe0", "res", "-V", ""],
)
def test_unhandled_rdma_commands_run_the_real_program(words: str, tmp_path: Path) -> None:
    real = tmp_path / "rdma"
    real.write_text('#!/bin/sh\necho real "$@"\n')
    real.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert aiordma_run("rdma", *words.split(), PATH=path).stdout == f"real {words}".rstrip() + "\n"


def test_missing_rdma_program_is_reported(tmp_path: Path) -> None:
    for needed in ("sh", "dirname"):
        (tmp_path / needed).symlink_to(f"/usr/bin/{needed}")
    done = aiordma_run("rdma", "system", PATH=str(tmp_path))
    assert done.returncode == 127
    assert "iproute2" in done.stderr
