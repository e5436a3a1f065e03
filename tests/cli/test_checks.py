"""The checks of `aiordma doctor`, each on the facts of fictitious machines."""

from __future__ import annotations

import errno
from dataclasses import replace
from resource import RLIM_INFINITY
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma import verbs
from aiordma.cli import checks
from aiordma.cli.checks import Check, Conclusion, Finding, Verdict, conclude, examine
from aiordma.cli.devices import DeviceInfo, PortInfo
from aiordma.cli.facts import Facts, NodeFacts
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
    chosen_why="it is the first device of the system with an active port",
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


def only(check: Check, facts: Facts) -> Finding:
    (found,) = check(facts)
    return found


def verdicts(check: Check, facts: Facts) -> list[Verdict]:
    return [finding.verdict for finding in check(facts)]


# ---- a whole machine ----------------------------------------------------------------------------


def test_a_good_machine() -> None:
    findings = examine(GOOD)
    assert {finding.verdict for finding in findings} == {OK}
    assert [finding.check for finding in findings] == [
        "library", "kernel", "providers", "permissions", "memlock", "ports", "GIDs", "fork",
        "embedded", "peers", "choice",
    ]  # fmt: skip
    assert conclude(GOOD, findings) is Conclusion.READY


def test_a_bare_machine() -> None:
    findings = examine(BARE)
    assert [(finding.check, finding.verdict) for finding in findings] == [
        ("library", PROBLEM), ("kernel", PROBLEM), ("memlock", PROBLEM), ("embedded", WARNING),
        ("peers", OK), ("choice", WARNING),
    ]  # fmt: skip
    assert conclude(BARE, findings) is Conclusion.SOFTWARE


def test_a_bare_machine_that_is_asked_for_a_card() -> None:
    facts = replace(BARE, named="system", chosen="", is_fallback=False)
    assert conclude(facts, examine(facts)) is Conclusion.NO_CARD


def test_a_card_without_the_embedded_device() -> None:
    facts = replace(GOOD, embedded=DeviceInfo("embedded0", problem="no epoll"))
    assert conclude(facts, examine(facts)) is Conclusion.READY


def test_a_machine_on_which_nothing_works() -> None:
    broken = replace(BARE, embedded=DeviceInfo("embedded0", problem="no epoll"))
    assert conclude(broken, examine(broken)) is Conclusion.NOTHING
    assert only(checks.embedded, broken).text == "embedded0 does not work: no epoll"


def test_warnings_leave_the_status() -> None:
    facts = replace(GOOD, memlock=64 * MIB, fork=None)
    findings = examine(facts)
    assert WARNING in {finding.verdict for finding in findings}
    assert conclude(facts, findings) is Conclusion.READY


@pytest.mark.parametrize("facts", [GOOD, BARE, replace(BARE, container="docker")])
def test_what_is_not_well_has_advice_and_what_is_well_has_none(facts: Facts) -> None:
    for finding in examine(facts):
        assert bool(finding.advice) == (finding.verdict is not OK), finding
        assert "\n" not in finding.text + finding.advice


# ---- one question each --------------------------------------------------------------------------


def test_library() -> None:
    missing = only(checks.library, BARE)
    assert missing.verdict is PROBLEM
    assert "libibverbs.so.1 is not installed" in missing.text
    assert "apt-get install libibverbs1" in missing.advice
    old = only(checks.library, replace(GOOD, missing_calls=("ibv_set_ece", "ibv_query_ece")))
    assert old.verdict is WARNING
    assert "ibv_set_ece, ibv_query_ece" in old.text


def test_kernel() -> None:
    none = only(checks.kernel, replace(BARE, modules=("ib_core",)))
    assert none.verdict is PROBLEM
    assert none.text == "the kernel (6.1.0) has no RDMA device; modules loaded: ib_core"
    assert "modprobe rdma_rxe" in none.advice
    there = only(checks.kernel, replace(GOOD, kernel_devices={"mlx5_0": "mlx5_core", "rxe0": ""}))
    assert there.text == "the kernel has mlx5_0 (mlx5_core), rxe0"


@pytest.mark.parametrize(
    ("facts", "module"),
    [
        (replace(GOOD, has_uverbs=False), "ib_uverbs"),
        (replace(GOOD, has_rdma_cm=False), "rdma_ucm"),
    ],
)
def test_modules(facts: Facts, module: str) -> None:
    well, missing = checks.kernel(facts)
    assert (well.verdict, missing.verdict) == (OK, PROBLEM)
    assert f"the module {module} is not loaded" in missing.text
    assert missing.advice.startswith(f"modprobe {module}")


def test_providers() -> None:
    unknown = replace(GOOD, devices=(), providers=("rxe",))
    found = only(checks.providers, unknown)
    assert found.verdict is PROBLEM
    assert found.text == "libibverbs does not list mlx5_0 of the kernel; its providers: rxe"
    assert "ibverbs-providers" in found.advice
    # With another device listed, the unlisted one may be unwanted: a warning.
    beside = replace(GOOD, kernel_devices={"mlx5_0": "mlx5_core", "new0": "new"})
    assert only(checks.providers, beside).verdict is WARNING
    contained = only(checks.providers, replace(unknown, container="docker"))
    assert contained.advice.endswith("show it the device's node (docker)")
    for silent in (BARE, replace(GOOD, kernel_devices={}), replace(GOOD, has_uverbs=False)):
        assert not list(checks.providers(silent))


def test_permissions() -> None:
    assert "/dev/infiniband/uverbs0" in only(checks.permissions, GOOD).text
    closed = NodeFacts("/dev/infiniband/uverbs0", "crw------- 0:0", False)
    found = only(checks.permissions, replace(GOOD, nodes=(GOOD.nodes[0], closed)))
    assert found.verdict is PROBLEM
    assert found.text.endswith("may not read and write /dev/infiniband/uverbs0 (crw------- 0:0)")
    assert not list(checks.permissions(BARE))


def test_missing_nodes() -> None:
    no_nodes = replace(GOOD, nodes=())
    first, second = checks.permissions(no_nodes)
    assert first.text == "there is no /dev/infiniband/uverbs*"
    assert second.text == "there is no /dev/infiniband/rdma_cm"
    assert "udevadm" in first.advice
    for finding in checks.permissions(replace(no_nodes, container="podman")):
        assert finding.advice == "start the container (podman) with --device /dev/infiniband"
    assert not list(checks.permissions(replace(no_nodes, has_uverbs=False, has_rdma_cm=False)))


@pytest.mark.parametrize(
    ("soft", "hard", "verdict", "text", "itself"),
    [
        (RLIM_INFINITY, RLIM_INFINITY, OK, "unlimited", False),
        (4096 * MIB, 4096 * MIB, OK, "4096 MiB", False),
        (64 * MIB, 64 * MIB, WARNING, "64 MiB, which large messages exceed", False),
        (64 * MIB, 128 * MIB, WARNING, "64 MiB", True),
        (64 << 10, 64 << 10, PROBLEM, "0.0625 MiB, less than one program needs", False),
        (64 << 10, RLIM_INFINITY, PROBLEM, "0.0625 MiB", True),
    ],
)
def test_memlock(soft: int, hard: int, verdict: Verdict, text: str, itself: bool) -> None:
    facts = replace(GOOD, memlock=soft, memlock_hard=hard)
    found = only(checks.memlock, facts)
    assert found.verdict is verdict
    assert text in found.text
    assert ("`ulimit -l hard`" in found.advice) == itself
    assert ("limits.conf" in found.advice) == (verdict is not OK)
    assert only(checks.memlock, replace(facts, ignores_memlock=True)).verdict is OK


def test_ports() -> None:
    down = DeviceInfo("mlx5_0", (port(state=DOWN),))
    found = only(checks.ports, replace(GOOD, devices=(down,)))
    assert (found.verdict, found.text) == (PROBLEM, "port 1 of mlx5_0 is DOWN")
    assert "ip link set" in found.advice
    up = DeviceInfo("mlx5_1", (port(ROUTABLE),))
    assert verdicts(checks.ports, replace(GOOD, devices=(down, up))) == [WARNING, OK]
    waiting = DeviceInfo("mlx5_0", (port(state=INIT, link=INFINIBAND),))
    found = only(checks.ports, replace(GOOD, devices=(waiting,)))
    assert "subnet manager" in found.advice


def test_a_device_that_cannot_be_opened() -> None:
    closed = DeviceInfo("mlx5_0", problem=f"[Errno {errno.EACCES}] Permission denied")
    found = only(checks.ports, replace(GOOD, devices=(closed,)))
    assert found.verdict is PROBLEM
    assert "mlx5_0 cannot be opened: [Errno 13]" in found.text
    assert conclude(GOOD, [found]) is Conclusion.NO_CARD


def test_gids() -> None:
    assert "10.0.0.1" in only(checks.gids, GOOD).text
    none = DeviceInfo("mlx5_0", (port(),))
    found = only(checks.gids, replace(GOOD, devices=(none,)))
    assert (found.verdict, found.text) == (PROBLEM, "port 1 of mlx5_0 has no GID")
    other = DeviceInfo("mlx5_1", (port(ROUTABLE),))
    assert verdicts(checks.gids, replace(GOOD, devices=(none, other))) == [WARNING, OK]
    local = DeviceInfo("mlx5_0", (port(LINK_LOCAL),))
    found = only(checks.gids, replace(GOOD, devices=(local,)))
    assert found.verdict is WARNING
    assert "fe80::1" in found.text
    assert "beyond its own link" in found.text
    down = DeviceInfo("mlx5_0", (port(state=DOWN),))
    assert not list(checks.gids(replace(GOOD, devices=(down,))))
    fabric = port(gid("fe80::2", kind=verbs.GIDType.IB), link=INFINIBAND)
    assert verdicts(checks.gids, replace(GOOD, devices=(DeviceInfo("ib0", (fabric,)),))) == [OK]


def test_fork() -> None:
    assert verdicts(checks.fork, GOOD) == [OK]
    for status in (verbs.ForkStatus.DISABLED, None):
        found = only(checks.fork, replace(GOOD, fork=status))
        assert found.verdict is WARNING
        assert "RDMAV_FORK_SAFE=1" in found.advice
    assert not list(checks.fork(BARE))
    assert not list(checks.fork(replace(GOOD, devices=())))


def test_container() -> None:
    assert not list(checks.container(BARE))
    assert not list(checks.container(replace(GOOD, container="docker")))
    found = only(checks.container, replace(BARE, container="docker"))
    assert found.verdict is WARNING
    assert "--device /dev/infiniband" in found.advice


def test_embedded() -> None:
    assert (
        only(checks.embedded, GOOD).text
        == "embedded0 works, and other machines reach it at 10.0.0.1"
    )
    assert only(checks.embedded, BARE).verdict is WARNING
    for device in (
        DeviceInfo("embedded0"),
        DeviceInfo("embedded0", (port(LOOPBACK, state=DOWN),)),
    ):
        assert only(checks.embedded, replace(BARE, embedded=device)).verdict is PROBLEM


@pytest.mark.parametrize(
    ("found", "verdict", "text"),
    [
        (LocalPeerFacts(), OK, "shared memory and cross-memory attach"),
        (LocalPeerFacts("tcp", "none", "none", "none"), OK, "AIORDMA_EMBEDDED_LINKS=tcp"),
        (
            LocalPeerFacts(share_problem="memfd_create: No"),
            WARNING,
            "(memfd_create: No): embedded0",
        ),
        (LocalPeerFacts(copy_problem="copy: No"), WARNING, "functions: copy: No"),
        (LocalPeerFacts(pidfd_problem="fd: No"), WARNING, "functions: fd: No"),
        (LocalPeerFacts(copy_problem="a", pidfd_problem="b"), WARNING, "functions: a; b"),
    ],
)
def test_peers(found: LocalPeerFacts, verdict: Verdict, text: str) -> None:
    finding = only(checks.peers, replace(GOOD, local_peers=found))
    assert finding.verdict is verdict
    assert text in finding.text
    assert bool(finding.advice) == (verdict is not OK)
    broken = replace(GOOD, local_peers=found, embedded=DeviceInfo("embedded0"))
    assert not list(checks.peers(broken))


@pytest.mark.parametrize(
    ("named", "chosen", "verdict", "text"),
    [
        ("", "mlx5_0", OK, "programs that name no device use mlx5_0: the reason"),
        ("system", "mlx5_0", OK, "programs that name no device use mlx5_0: the reason"),
        ("mlx5_0", "mlx5_0", OK, "programs use mlx5_0, because of AIORDMA_DEVICE=mlx5_0"),
        ("embedded0", "embedded0", OK, "programs use embedded0, because of AIORDMA_DEVICE="),
        ("", "embedded0", WARNING, "use embedded0, which is software: the reason"),
        ("system", "", WARNING, "programs that name no device fail: the reason"),
        ("mlx5_9", "", WARNING, "programs that name no device fail: the reason"),
        ("", "", WARNING, "programs that name no device fail: the reason"),
    ],
)
def test_choice(named: str, chosen: str, verdict: Verdict, text: str) -> None:
    is_fallback = chosen == "embedded0" and not named
    facts = replace(
        GOOD, named=named, chosen=chosen, chosen_why="the reason", is_fallback=is_fallback
    )
    (finding,) = checks.choice(facts)
    assert finding.verdict is verdict
    assert text in finding.text
    assert bool(finding.advice) == (verdict is WARNING)
