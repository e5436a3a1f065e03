"""Tests of the checks of `aiordma doctor`, with the facts of fictitious machines."""

from __future__ import annotations

from dataclasses import replace
from resource import RLIM_INFINITY
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma import verbs
from aiordma.cli import doctor_checks as checks
from aiordma.cli.devices import DeviceInfo, PortInfo
from aiordma.cli.doctor_checks import Check, Conclusion, Verdict, conclude, examine
from aiordma.cli.doctor_facts import Facts, NodeFacts
from aiordma.cli.local_peers import LocalPeerFacts
from aiordma.errors import LibraryNotFoundError

MIB = 1 << 20
OK, WARNING, PROBLEM = Verdict.OK, Verdict.WARNING, Verdict.PROBLEM
ACTIVE, DOWN, INIT = verbs.PortState.ACTIVE, verbs.PortState.DOWN, verbs.PortState.INIT
ETHERNET, INFINIBAND = verbs.LinkLayer.ETHERNET, verbs.LinkLayer.INFINIBAND


def gid(ip: str, index: int = 0, kind: verbs.GIDType = verbs.GIDType.ROCE_V2) -> verbs.GIDEntry:
    return verbs.GIDEntry(verbs.GID.from_ip(ip), index, 1, kind, "eth2")


def port(
    *gids: verbs.GIDEntry, state: verbs.PortState = ACTIVE, link: verbs.LinkLayer = ETHERNET
) -> PortInfo:
    attributes: Any = SimpleNamespace(port_num=1, state=state, link_layer=link)
    return PortInfo(attributes, gids)


LINK_LOCAL, ROUTABLE, LOOPBACK = gid("fe80::1"), gid("10.0.0.1", 3), gid("127.0.0.1")

# A server with a card, all well.
GOOD = Facts(
    kernel="6.1.0",
    providers=("mlx5", "rxe"),
    kernel_devices={"mlx5_0": "mlx5_core"},
    modules=("ib_core", "ib_uverbs", "mlx5_ib", "rdma_ucm"),
    has_uverbs=True,
    has_rdma_cm=True,
    nodes=(
        NodeFacts("/dev/infiniband/rdma_cm", "crw-rw-rw- 0:0", True),
        NodeFacts("/dev/infiniband/umad0", "crw------- 0:0", False),
        NodeFacts("/dev/infiniband/uverbs0", "crw-rw-rw- 0:0", True),
    ),
    devices=(DeviceInfo("mlx5_0", (port(LINK_LOCAL, ROUTABLE),)),),
    fork=verbs.ForkStatus.UNNEEDED,
    embedded=DeviceInfo("embedded0", (port(LOOPBACK, gid("10.0.0.1", 1)),)),
    chosen="mlx5_0",
    chosen_why="it is the first system device with an active port",
)
# A laptop: no card, no library.
BARE = Facts(
    kernel="6.1.0",
    library_problem=str(LibraryNotFoundError("libibverbs.so.1")),
    memlock=8 * MIB,
    memlock_hard=8 * MIB,
    embedded=DeviceInfo("embedded0", (port(LOOPBACK),)),
    chosen="embedded0",
    chosen_why="libibverbs.so.1 is not installed",
    is_fallback=True,
)


BROKEN = replace(BARE, embedded=DeviceInfo("embedded0", problem="no epoll"))


def device(name: str, *ports: PortInfo) -> DeviceInfo:
    return DeviceInfo(name, ports)


# ---- a whole machine ----------------------------------------------------------------------------


def test_every_check_passes_on_a_fully_configured_machine() -> None:
    findings = examine(GOOD)
    assert {finding.verdict for finding in findings} == {OK}
    assert [finding.check for finding in findings] == [
        "library", "kernel", "providers", "permissions", "memlock", "ports", "GIDs", "fork",
        "embedded", "peers", "choice",
    ]  # fmt: skip


def test_checks_report_problems_on_a_machine_without_rdma() -> None:
    assert [(finding.check, finding.verdict) for finding in examine(BARE)] == [
        ("library", PROBLEM), ("kernel", PROBLEM), ("memlock", PROBLEM), ("embedded", WARNING),
        ("peers", OK), ("choice", WARNING),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "conclusion"),
    [
        (GOOD, Conclusion.READY),
        (replace(GOOD, memlock=64 * MIB, fork=None), Conclusion.READY),  # warnings
        (replace(GOOD, embedded=BROKEN.embedded), Conclusion.READY),
        (replace(GOOD, devices=(DeviceInfo("mlx5_0", problem="EACCES"),)), Conclusion.NO_CARD),
        (BARE, Conclusion.SOFTWARE),
        (replace(BARE, named="embedded1", chosen="embedded1"), Conclusion.SOFTWARE),
        (replace(BARE, named="system", chosen="", is_fallback=False), Conclusion.NO_CARD),
        (BROKEN, Conclusion.NOTHING),
    ],
)
def test_conclude_reports_which_kind_of_device_is_usable(
    facts: Facts, conclusion: Conclusion
) -> None:
    assert conclude(facts, examine(facts)) is conclusion


# ---- one question each --------------------------------------------------------------------------

UNLISTED = replace(GOOD, devices=(), providers=("rxe",))
NO_NODES = replace(GOOD, nodes=())
CLOSED = NodeFacts("/dev/infiniband/uverbs0", "crw------- 0:0", False)
DOWN_PORT, UP = device("mlx5_0", port(state=DOWN)), device("mlx5_1", port(ROUTABLE))
WAITING = device("mlx5_0", port(state=INIT, link=INFINIBAND))
FABRIC = device("ib0", port(gid("fe80::2", kind=verbs.GIDType.IB), link=INFINIBAND))
MEMLOCK = "the limit on locked memory"


def memory(soft: int, hard: int) -> Facts:
    return replace(GOOD, memlock=soft, memlock_hard=hard)


def at(*devices: DeviceInfo) -> Facts:
    return replace(GOOD, devices=devices)


def links(*told: str, **problems: str) -> Facts:
    return replace(GOOD, local_peers=LocalPeerFacts(*told, **problems))


def choice(named: str, chosen: str) -> Facts:
    is_fallback = chosen == "embedded0" and not named
    why = "the reason"
    return replace(GOOD, named=named, chosen=chosen, chosen_why=why, is_fallback=is_fallback)


# A check, its facts, and the expected findings (verdict, part of the text, part of the advice).
FINDINGS: list[tuple[Check, Facts, list[tuple[Verdict, str, str]]]] = [
    (checks.library, BARE, [(PROBLEM, "libibverbs.so.1 is not installed", "install libibverbs1")]),
    (checks.library, replace(GOOD, missing_calls=("ibv_set_ece", "ibv_query_ece")),
        [(WARNING, "ibv_set_ece, ibv_query_ece", "upgrade")]),
    (checks.kernel, replace(BARE, modules=("ib_core",)), [(PROBLEM,
        "the kernel (6.1.0) has no RDMA device; modules loaded: ib_core", "modprobe rdma_rxe")]),
    (checks.kernel, replace(GOOD, kernel_devices={"mlx5_0": "mlx5_core", "rxe0": ""}),
        [(OK, "the kernel has mlx5_0 (mlx5_core), rxe0", "")]),
    (checks.kernel, replace(GOOD, has_uverbs=False),
        [(OK, "", ""), (PROBLEM, "module ib_uverbs is not loaded", "modprobe ib_uverbs")]),
    (checks.kernel, replace(GOOD, has_rdma_cm=False),
        [(OK, "", ""), (PROBLEM, "module rdma_ucm is not loaded", "modprobe rdma_ucm")]),
    (checks.providers, UNLISTED, [(PROBLEM,
        "libibverbs does not list the kernel's mlx5_0; its providers: rxe", "ibverbs-providers")]),
    # This is only a warning because libibverbs lists mlx5_0, which may be all the user needs.
    (checks.providers, replace(GOOD, kernel_devices={"mlx5_0": "mlx5_core", "new0": "new"}),
        [(WARNING, "new0", "")]),
    (checks.providers, replace(UNLISTED, container="docker"),
        [(PROBLEM, "", "give it the device's node (docker)")]),
    (checks.providers, BARE, []),
    (checks.providers, replace(GOOD, kernel_devices={}), []),
    (checks.providers, replace(GOOD, has_uverbs=False), []),
    (checks.permissions, GOOD, [(OK, "/dev/infiniband/uverbs0", "")]),
    (checks.permissions, replace(GOOD, nodes=(GOOD.nodes[0], CLOSED)), [(PROBLEM,
        "no read and write access to /dev/infiniband/uverbs0 (crw------- 0:0)", "udev rules")]),
    (checks.permissions, BARE, []),
    (checks.permissions, NO_NODES, [(PROBLEM, "there is no /dev/infiniband/uverbs*", "udevadm"),
        (PROBLEM, "there is no /dev/infiniband/rdma_cm", "udevadm")]),
    (checks.permissions, replace(NO_NODES, container="podman"),
        [(PROBLEM, "", "start the container (podman) with --device /dev/infiniband")] * 2),
    (checks.permissions, replace(NO_NODES, has_uverbs=False, has_rdma_cm=False), []),
    (checks.memlock, memory(RLIM_INFINITY, RLIM_INFINITY), [(OK, "unlimited", "")]),
    (checks.memlock, memory(4096 * MIB, 4096 * MIB), [(OK, "4096 MiB", "")]),
    (checks.memlock, memory(64 * MIB, 64 * MIB),
        [(WARNING, "64 MiB, not enough for large messages", "raise it: ")]),
    (checks.memlock, memory(64 * MIB, 128 * MIB), [(WARNING, "64 MiB", "`ulimit -l hard`")]),
    (checks.memlock, memory(64 << 10, 64 << 10),
        [(PROBLEM, "0.0625 MiB, not enough for a program", "raise it: ")]),
    (checks.memlock, memory(64 << 10, RLIM_INFINITY), [(PROBLEM, MEMLOCK, "`ulimit -l hard`")]),
    (checks.memlock, replace(BARE, ignores_memlock=True), [(OK, "CAP_IPC_LOCK", "")]),
    (checks.ports, at(DOWN_PORT), [(PROBLEM, "port 1 of mlx5_0 is DOWN", "ip link set")]),
    (checks.ports, at(DOWN_PORT, UP), [(WARNING, "DOWN", ""), (OK, "mlx5_1 is ACTIVE", "")]),
    (checks.ports, at(WAITING), [(PROBLEM, "INIT", "subnet manager")]),
    (checks.ports, at(DeviceInfo("mlx5_0", problem="[Errno 13] no")),
        [(PROBLEM, "mlx5_0 cannot be opened: [Errno 13] no", "see the check permissions")]),
    (checks.gids, GOOD, [(OK, "10.0.0.1", "")]),
    (checks.gids, at(device("a", port())), [(PROBLEM, "port 1 of a has no GID", "IP address")]),
    (checks.gids, at(device("a", port()), UP), [(WARNING, "no GID", ""), (OK, "10.0.0.1", "")]),
    (checks.gids, at(device("a", port(LINK_LOCAL))),
        [(WARNING, "only peers on the same link", "IP address")]),
    (checks.gids, at(DOWN_PORT), []),
    (checks.gids, at(FABRIC), [(OK, "fe80::2", "")]),
    (checks.fork, GOOD, [(OK, "", "")]),
    (checks.fork, replace(GOOD, fork=None), [(WARNING, "", "RDMAV_FORK_SAFE=1")]),
    (checks.fork, replace(GOOD, fork=verbs.ForkStatus.DISABLED),
        [(WARNING, "", "RDMAV_FORK_SAFE=1")]),
    (checks.fork, BARE, []),
    (checks.fork, at(), []),
    (checks.container, BARE, []),
    (checks.container, replace(GOOD, container="docker"), []),
    (checks.container, replace(BARE, container="docker"),
        [(WARNING, "docker", "--device /dev/infiniband")]),
    (checks.embedded, GOOD, [(OK, "works, and other machines can reach it at 10.0.0.1", "")]),
    (checks.embedded, BARE, [(WARNING, "", "IP address")]),
    (checks.embedded, BROKEN, [(PROBLEM, "does not work: no epoll", "environment variable")]),
    (checks.embedded, replace(BARE, embedded=device("embedded0")), [(PROBLEM, "no port", "")]),
    (checks.embedded, replace(BARE, embedded=device("embedded0", port(LOOPBACK, state=DOWN))),
        [(PROBLEM, "no port is active", "")]),
    (checks.peers, links(), [(OK, "shared memory and cross-memory attach", "")]),
    (checks.peers, links("tcp", "no", "no", "no"),
        [(OK, "uses TCP even within this machine, because of AIORDMA_EMBEDDED_LINKS=tcp", "")]),
    (checks.peers, links("roce"), [(OK, "RoCE v2 even within this machine", "")]),
    (checks.peers, links(share_problem="memfd: No"), [(WARNING, "(memfd: No), so embedded0", "")]),
    (checks.peers, links(copy_problem="copy: No"), [(WARNING, "not available: copy: No", "")]),
    (checks.peers, links(pidfd_problem="fd: No"), [(WARNING, "not available: fd: No", "")]),
    (checks.peers, links(copy_problem="a", pidfd_problem="b"), [(WARNING, "available: a; b", "")]),
    (checks.peers, BROKEN, []),
    (checks.choice, choice("", "mlx5_0"),
        [(OK, "programs that do not name a device use mlx5_0: the reason", "")]),
    (checks.choice, choice("system", "mlx5_0"),
        [(OK, "programs that do not name a device use mlx5_0: the reason", "")]),
    (checks.choice, choice("mlx5_0", "mlx5_0"),
        [(OK, "programs use mlx5_0, because of AIORDMA_DEVICE=mlx5_0", "")]),
    (checks.choice, choice("embedded0", "embedded0"),
        [(OK, "programs use embedded0, because of AIORDMA_DEVICE=", "")]),
    (checks.choice, choice("", "embedded0"), [(WARNING, "which is software: the reason", "")]),
    (checks.choice, choice("system", ""), [(WARNING, "a device fail: the reason", "change")]),
    (checks.choice, choice("", ""), [(WARNING, "do not name a device fail: the reason", "above")]),
    (checks.environment, GOOD, []),
    (checks.environment, replace(GOOD, unknown_variables=("unknown A", "unknown B")),
        [(WARNING, "unknown A", "correct the name or unset"), (WARNING, "unknown B", "correct")]),
]  # fmt: skip


@pytest.mark.parametrize(("check", "facts", "expected"), FINDINGS)
def test_finding_has_advice_unless_its_verdict_is_ok(
    check: Check, facts: Facts, expected: list[tuple[Verdict, str, str]]
) -> None:
    """The text and the advice of a finding have no line breaks."""
    for finding, (verdict, text, advice) in zip(check(facts), expected, strict=True):
        assert finding.verdict is verdict
        assert text in finding.text
        assert advice in finding.advice
        assert ("`ulimit -l hard`" in finding.advice) == ("ulimit" in advice)
        assert bool(finding.advice) == (verdict is not OK)
        assert "\n" not in finding.text + finding.advice
