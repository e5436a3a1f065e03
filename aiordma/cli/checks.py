"""The checks of `aiordma doctor`: one function per check, each tested by itself."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, StrEnum

from aiordma import verbs

from .facts import DeviceFacts, Facts, PortFacts

MIB = 1 << 20

# By judgement: a pool begins with some slabs of 4 MiB; large messages need hundreds of MiB.
MEMLOCK_LEAST = 16 * MIB
MEMLOCK_GOOD = 1024 * MIB

RAISE_MEMLOCK = (
    "raise it: `* - memlock unlimited` in /etc/security/limits.conf and a new login, "
    "LimitMEMLOCK=infinity for a systemd service, --ulimit memlock=-1 for a container"
)


class Verdict(StrEnum):
    """``PROBLEM``: a card cannot be used. ``WARNING``: it can, but some function does not work."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: what was found, and what to do; ``advice`` is empty with OK."""

    check: str
    verdict: Verdict
    text: str
    advice: str = ""


Check = Callable[[Facts], Iterator[Finding]]


def library(facts: Facts) -> Iterator[Finding]:
    """The system's libibverbs and librdmacm."""
    if facts.library_problem:
        yield Finding(
            "library",
            Verdict.PROBLEM,
            facts.library_problem,
            "install rdma-core's libraries (Debian, Ubuntu: apt-get install libibverbs1 "
            "ibverbs-providers librdmacm1; Fedora, RHEL: dnf install libibverbs librdmacm)",
        )
    elif facts.missing_calls:
        yield Finding(
            "library",
            Verdict.WARNING,
            f"libibverbs and librdmacm are too old for {', '.join(facts.missing_calls)}",
            "nothing, unless you need these calls; otherwise upgrade rdma-core",
        )
    else:
        yield Finding("library", Verdict.OK, "libibverbs and librdmacm have every call")


def kernel(facts: Facts) -> Iterator[Finding]:
    """The kernel's devices, and the modules that programs need to open them."""
    if not facts.kernel_devices:
        loaded = ", ".join(facts.modules) or "none"
        yield Finding(
            "kernel",
            Verdict.PROBLEM,
            f"the kernel ({facts.kernel}) has no RDMA device; modules loaded: {loaded}",
            "load the card's module (such as mlx5_ib or irdma), or make a software device: "
            "modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0",
        )
        return
    told = [
        f"{name} ({driver})" if driver else name for name, driver in facts.kernel_devices.items()
    ]
    yield Finding("kernel", Verdict.OK, f"the kernel has {', '.join(told)}")
    for has, module, purpose in (
        (facts.has_uverbs, "ib_uverbs", "no program can use a device"),
        (facts.has_rdma_cm, "rdma_ucm", 'the connection manager (via="cm") cannot be used'),
    ):
        if not has:
            yield Finding(
                "kernel",
                Verdict.PROBLEM,
                f"the module {module} is not loaded: {purpose}",
                f"modprobe {module}, and its name in /etc/modules-load.d/rdma.conf",
            )


def providers(facts: Facts) -> Iterator[Finding]:
    """Whether libibverbs knows each device of the kernel."""
    if facts.library_problem or not facts.kernel_devices or not facts.has_uverbs:
        return  # reported by another check
    known = {device.name for device in facts.devices}
    there = ", ".join(facts.providers) or "none"
    unknown = [name for name in facts.kernel_devices if name not in known]
    for name in unknown:
        yield Finding(
            "providers",
            Verdict.WARNING if known else Verdict.PROBLEM,
            f"libibverbs does not list {name} of the kernel; its providers: {there}",
            "install the providers (Debian, Ubuntu: ibverbs-providers), of the same version as "
            "libibverbs"
            + (f"; show it the device's node ({facts.container})" if facts.container else ""),
        )
    if not unknown:
        yield Finding("providers", Verdict.OK, f"libibverbs lists {', '.join(sorted(known))}")


def permissions(facts: Facts) -> Iterator[Finding]:
    """The device nodes that programs open."""
    if not facts.kernel_devices:
        return
    give = (
        f"start the container ({facts.container}) with --device /dev/infiniband"
        if facts.container
        else "udev makes them from rdma-core's rules: udevadm trigger, or install rdma-core"
    )
    present = [node.path.rpartition("/")[2] for node in facts.nodes]
    for beginning, needed in (("uverbs", facts.has_uverbs), ("rdma_cm", facts.has_rdma_cm)):
        if needed and not any(name.startswith(beginning) for name in present):
            yield Finding(
                "permissions",
                Verdict.PROBLEM,
                f"there is no /dev/infiniband/{beginning}{'*' if beginning == 'uverbs' else ''}",
                give,
            )
    relevant = [node for node in facts.nodes if "/uverbs" in node.path or "/rdma_cm" in node.path]
    for node in relevant:
        if not node.usable:
            yield Finding(
                "permissions",
                Verdict.PROBLEM,
                f"this user may not read and write {node.path} ({node.rights})",
                "rdma-core's udev rules give every user access (mode 0666): install rdma-core, or "
                "chmod 666 it",
            )
    if relevant and all(node.usable for node in relevant):
        paths = ", ".join(node.path for node in relevant)
        yield Finding("permissions", Verdict.OK, f"this user may use {paths}")


def memlock(facts: Facts) -> Iterator[Finding]:
    """How much memory may be registered."""
    if facts.ignores_memlock:
        yield Finding("memlock", Verdict.OK, "this process has CAP_IPC_LOCK: no limit applies")
        return
    if facts.memlock == resource.RLIM_INFINITY:
        yield Finding("memlock", Verdict.OK, "the limit on locked memory is unlimited")
        return
    text = f"the limit on locked memory (ulimit -l) is {facts.memlock / MIB:g} MiB"
    if facts.memlock >= MEMLOCK_GOOD:
        yield Finding("memlock", Verdict.OK, text)
        return
    below = facts.memlock_hard == resource.RLIM_INFINITY or facts.memlock_hard > facts.memlock
    itself = "`ulimit -l hard` gives this user more; or " if below else ""
    too_little = facts.memlock < MEMLOCK_LEAST
    yield Finding(
        "memlock",
        Verdict.PROBLEM if too_little else Verdict.WARNING,
        text + (", less than one program needs" if too_little else ", which large messages exceed"),
        itself + RAISE_MEMLOCK,
    )


def is_active(port: PortFacts) -> bool:
    return port.state is verbs.PortState.ACTIVE


def ports(facts: Facts) -> Iterator[Finding]:
    """Whether each device has a port that is up; the machine needs one."""
    some = any(is_active(port) for device in facts.devices for port in device.ports)
    wrong = Verdict.WARNING if some else Verdict.PROBLEM
    for device in facts.devices:
        if device.problem:
            yield Finding(
                "ports",
                wrong,
                f"{device.name} cannot be opened: {device.problem}",
                "see permissions",
            )
        for port in device.ports:
            name = f"port {port.number} of {device.name}"
            if is_active(port):
                yield Finding("ports", Verdict.OK, f"{name} is ACTIVE")
            else:
                ethernet = port.link_layer is verbs.LinkLayer.ETHERNET
                yield Finding(
                    "ports",
                    wrong,
                    f"{name} is {port.state.name}",
                    "check the cable, and `ip link set ... up` of its interface"
                    if ethernet
                    else "check the cable, and that a subnet manager (opensm) runs on the network",
                )


def gids(facts: Facts) -> Iterator[Finding]:
    """Whether the active ports have addresses that other machines can reach."""
    active = [
        (device, port) for device in facts.devices for port in device.ports if is_active(port)
    ]
    some = any(usable_gids(port) for _, port in active)
    for device, port in active:
        name = f"port {port.number} of {device.name}"
        usable = usable_gids(port)
        if usable:
            best = min(usable, key=verbs.GIDEntry.preference)
            yield Finding("GIDs", Verdict.OK, f"{name} has {best}")
        elif not port.gids:
            yield Finding(
                "GIDs",
                Verdict.WARNING if some else Verdict.PROBLEM,
                f"{name} has no GID",
                "give its network interface an IP address",
            )
        else:
            best = min(port.gids, key=verbs.GIDEntry.preference)
            yield Finding(
                "GIDs",
                Verdict.WARNING,
                f"the best GID of {name}, {best}, {best.problem()}",
                "give its network interface an IP address",
            )


def usable_gids(port: PortFacts) -> list[verbs.GIDEntry]:
    return [entry for entry in port.gids if not entry.problem()]


def fork(facts: Facts) -> Iterator[Finding]:
    """Whether a process that has registered memory may fork."""
    if facts.library_problem:
        return
    if facts.fork is None:
        yield Finding(
            "fork",
            Verdict.WARNING,
            "this libibverbs does not report whether fork() is safe after memory was registered",
            "set RDMAV_FORK_SAFE=1 for programs that fork, or upgrade rdma-core",
        )
    elif facts.fork is verbs.ForkStatus.DISABLED and facts.devices:
        yield Finding(
            "fork",
            Verdict.WARNING,
            "the kernel does not copy registered pages at fork(): a write after it may "
            "detach them from the device",
            "set RDMAV_FORK_SAFE=1 for programs that fork, or use Linux 5.12 or newer",
        )
    elif facts.devices:
        yield Finding("fork", Verdict.OK, "fork() leaves registered memory where it is")


def container(facts: Facts) -> Iterator[Finding]:
    """Whether a container hides devices of the host."""
    if facts.container and not facts.kernel_devices:
        yield Finding(
            "container",
            Verdict.WARNING,
            f"this is a container ({facts.container}), which may hide the host's devices",
            "run aiordma doctor on the host too; start the container with "
            "--device /dev/infiniband --ulimit memlock=-1, with --network host for RoCE",
        )


def embedded(facts: Facts) -> Iterator[Finding]:
    """Whether the embedded device works."""
    if problem := embedded_problem(facts.embedded):
        yield Finding("embedded", Verdict.PROBLEM, f"embedded0 does not work: {problem}", REPORT)
        return
    beyond = [entry for port in facts.embedded.ports for entry in usable_gids(port)]
    if beyond:
        yield Finding(
            "embedded",
            Verdict.OK,
            f"embedded0 works, and other machines reach it at {beyond[0].gid.ip}",
        )
    else:
        yield Finding(
            "embedded",
            Verdict.WARNING,
            "embedded0 works, but only within this machine: it has no address beyond loopback",
            "give the machine an IP address if other machines shall reach it",
        )


def peers(facts: Facts) -> Iterator[Finding]:
    """How embedded0 reaches other processes of this user on this machine."""
    if embedded_problem(facts.embedded):
        return  # reported by another check
    found = facts.local_peers
    if found.links == "tcp":
        yield Finding(
            "peers",
            Verdict.OK,
            "embedded0 uses TCP within this machine too, because of AIORDMA_EMBEDDED_LINKS=tcp",
        )
    elif found.share_problem:
        yield Finding(
            "peers",
            Verdict.WARNING,
            f"processes cannot share memory ({found.share_problem}): embedded0 uses TCP",
            "raise the limit, or allow memfd_create in the container's seccomp filter",
        )
    elif found.copy_problem or found.pidfd_problem:
        told = "; ".join(filter(None, (found.copy_problem, found.pidfd_problem)))
        yield Finding(
            "peers",
            Verdict.WARNING,
            "embedded0 uses shared memory between the processes of this user, but not all of its "
            f"functions: {told}",
            "nothing, unless long messages within this machine must be fast; "
            "kernel.yama.ptrace_scope and the container's seccomp filter control it",
        )
    else:
        yield Finding(
            "peers",
            Verdict.OK,
            "embedded0 uses shared memory and cross-memory attach between processes of this user",
        )


def choice(facts: Facts) -> Iterator[Finding]:
    """The device that `connect` and `listen` use when they are given none."""
    by = f"AIORDMA_DEVICE={facts.named}" if facts.named else ""
    if not facts.chosen:
        yield Finding(
            "choice",
            Verdict.WARNING,
            f"programs that name no device fail: {facts.chosen_why}",
            f"change {by}" if by else "see the findings above",
        )
    elif facts.named not in ("", "system"):
        yield Finding("choice", Verdict.OK, f"programs use {facts.chosen}, because of {by}")
    elif facts.is_fallback:
        yield Finding(
            "choice",
            Verdict.WARNING,
            f"programs that name no device use {facts.chosen}, which is software: "
            f"{facts.chosen_why}",
            "AIORDMA_DEVICE=system makes that an error, AIORDMA_DEVICE=embedded0 the choice",
        )
    else:
        yield Finding(
            "choice",
            Verdict.OK,
            f"programs that name no device use {facts.chosen}: {facts.chosen_why}",
        )


REPORT = "please report this: it should work on every Linux machine with a loopback interface"


def embedded_problem(device: DeviceFacts) -> str:
    if device.problem:
        return device.problem
    if not any(is_active(port) and port.gids for port in device.ports):
        return "no port is active"
    return ""


CHECKS: tuple[Check, ...] = (
    library, kernel, providers, permissions, memlock, ports, gids, fork, container, embedded,
    peers, choice,
)  # fmt: skip


class Conclusion(Enum):
    """The result of `aiordma doctor`: its exit status, for scripts, and the last line."""

    READY = 0, "RDMA devices of this machine can be used."
    SOFTWARE = 0, "Only the embedded device can be used, and programs use it."
    NO_CARD = 1, "Only the embedded device can be used, and programs look for another one."
    NOTHING = 3, "Neither a device of the system nor the embedded device can be used."  # 2: options

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        self.text = text


def examine(facts: Facts) -> list[Finding]:
    """Every finding; a check comes after those that it depends on."""
    return [finding for check in CHECKS for finding in check(facts)]


def conclude(facts: Facts, findings: list[Finding]) -> Conclusion:
    """The devices that programs which name none can use here."""
    problems = {finding.check for finding in findings if finding.verdict is Verdict.PROBLEM}
    if not problems - {"embedded"}:
        return Conclusion.READY
    if "embedded" in problems:
        return Conclusion.NOTHING
    return Conclusion.SOFTWARE if facts.chosen == facts.embedded.name else Conclusion.NO_CARD
