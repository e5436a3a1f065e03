"""The checks run by `aiordma doctor`. Each function is one check."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import wraps

from aiordma import verbs

from .devices import DeviceInfo
from .doctor_facts import Facts

MIB = 1 << 20

# The limits on locked memory below which the check reports a problem or a warning. The values are
# estimates. A pool starts with a few 4 MiB slabs, and large messages need hundreds of MiB.
MIN_MEMLOCK = 16 * MIB
RECOMMENDED_MEMLOCK = 1024 * MIB

RAISE_MEMLOCK = (
    "raise it: add `* - memlock unlimited` to /etc/security/limits.conf and log in again, set "
    "LimitMEMLOCK=infinity for a systemd service, or use --ulimit memlock=-1 for a container"
)
CHECK_INTERFACE = "check the cable, and bring up its interface with `ip link set ... up`"
CHECK_SUBNET_MANAGER = "check the cable, and that a subnet manager (opensm) is running"
GIVE_ADDRESS = "assign an IP address to its network interface"
REPORT = (
    "correct the environment variable or allow the system call that the finding names; otherwise "
    "please report this, because embedded0 should work on every Linux machine with a loopback "
    "interface"
)


class Verdict(StrEnum):
    """A check's verdict.

    ``PROBLEM`` means that no card can be used, or that the embedded device cannot be used.
    ``WARNING`` covers everything else that may need attention.
    """

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


OK, WARNING, PROBLEM = Verdict.OK, Verdict.WARNING, Verdict.PROBLEM


@dataclass(frozen=True, slots=True)
class Finding:
    """A check's result, with advice on fixing any problem.

    The advice is empty if there is nothing to fix.
    """

    check: str
    verdict: Verdict
    text: str
    advice: str = ""


Check = Callable[[Facts], list[Finding]]
UnnamedFinding = tuple[Verdict, str] | tuple[Verdict, str, str]
"""A finding without the check's name."""

CHECKS: list[Check] = []
"""All checks, in definition order. Each check follows the checks it depends on."""


def check(name: str) -> Callable[[Callable[[Facts], Iterator[UnnamedFinding]]], Check]:
    """Return a decorator that registers a function as the check ``name``."""

    def make(run: Callable[[Facts], Iterator[UnnamedFinding]]) -> Check:
        @wraps(run)
        def findings(facts: Facts) -> list[Finding]:
            return [Finding(name, *unnamed) for unnamed in run(facts)]

        CHECKS.append(findings)
        return findings

    return make


@check("library")
def library(facts: Facts) -> Iterator[UnnamedFinding]:
    """Check that rdma-core's libraries are installed and have all functions."""
    if facts.library_problem:
        yield (
            PROBLEM,
            facts.library_problem,
            "install rdma-core's libraries (Debian, Ubuntu: apt-get install libibverbs1 "
            "ibverbs-providers librdmacm1; Fedora, RHEL: dnf install libibverbs librdmacm)",
        )
    elif facts.missing_calls:
        yield (
            WARNING,
            f"libibverbs and librdmacm are too old for {', '.join(facts.missing_calls)}",
            "upgrade rdma-core if you need these functions",
        )
    else:
        yield OK, "libibverbs and librdmacm have all functions"


@check("kernel")
def kernel(facts: Facts) -> Iterator[UnnamedFinding]:
    """Check that the kernel has RDMA devices, and the modules through which programs use them."""
    if not facts.kernel_devices:
        loaded = ", ".join(facts.modules) or "none"
        yield (
            PROBLEM,
            f"the kernel ({facts.kernel}) has no RDMA device; modules loaded: {loaded}",
            "load the card's module (such as mlx5_ib or irdma), or create a software device: "
            "modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0",
        )
        return
    devices = [
        f"{name} ({driver})" if driver else name for name, driver in facts.kernel_devices.items()
    ]
    yield OK, f"the kernel has {', '.join(devices)}"
    for is_loaded, module, consequence in (
        (facts.has_uverbs, "ib_uverbs", "no program can use a device"),
        (facts.has_rdma_cm, "rdma_ucm", 'the connection manager (via="cm") cannot be used'),
    ):
        if not is_loaded:
            yield (
                PROBLEM,
                f"the module {module} is not loaded, so {consequence}",
                f"run `modprobe {module}`, and add it to /etc/modules-load.d/rdma.conf",
            )


@check("providers")
def providers(facts: Facts) -> Iterator[UnnamedFinding]:
    """Check that libibverbs has a provider for each of the kernel's devices."""
    if facts.library_problem or not facts.kernel_devices or not facts.has_uverbs:
        return  # reported by another check
    known = {device.name for device in facts.devices}
    installed_providers = ", ".join(facts.providers) or "none"
    unknown = [name for name in facts.kernel_devices if name not in known]
    for name in unknown:
        yield (
            WARNING if known else PROBLEM,
            f"libibverbs does not list the kernel's {name}; its providers: {installed_providers}",
            "install the providers (Debian, Ubuntu: ibverbs-providers) in the same version as "
            "libibverbs"
            + (f"; give it the device's node ({facts.container})" if facts.container else ""),
        )
    if not unknown:
        yield OK, f"libibverbs lists {', '.join(sorted(known))}"


@check("permissions")
def permissions(facts: Facts) -> Iterator[UnnamedFinding]:
    """Check that this user can open the nodes in /dev/infiniband."""
    if not facts.kernel_devices:
        return
    missing_node_advice = (
        f"start the container ({facts.container}) with --device /dev/infiniband"
        if facts.container
        else "run `udevadm trigger`, or install rdma-core, which has the udev rules"
    )
    present = [node.path.rpartition("/")[2] for node in facts.nodes]
    for prefix, module_is_loaded in (("uverbs", facts.has_uverbs), ("rdma_cm", facts.has_rdma_cm)):
        if module_is_loaded and not any(name.startswith(prefix) for name in present):
            yield (
                PROBLEM,
                f"there is no /dev/infiniband/{prefix}{'*' if prefix == 'uverbs' else ''}",
                missing_node_advice,
            )
    relevant = [node for node in facts.nodes if "/uverbs" in node.path or "/rdma_cm" in node.path]
    for node in relevant:
        if not node.usable:
            yield (
                PROBLEM,
                f"this user has no read and write access to {node.path} ({node.rights})",
                "install rdma-core, whose udev rules give all users access (mode 0666), or change "
                "the mode with chmod",
            )
    if relevant and all(node.usable for node in relevant):
        paths = ", ".join(node.path for node in relevant)
        yield OK, f"this user can use {paths}"


@check("memlock")
def memlock(facts: Facts) -> Iterator[UnnamedFinding]:
    """Check the limit on locked memory, because registering memory locks it."""
    if facts.ignores_memlock:
        yield OK, "this process has CAP_IPC_LOCK, so it can lock any amount of memory"
        return
    if facts.memlock == resource.RLIM_INFINITY:
        yield OK, "the limit on locked memory is unlimited"
        return
    text = f"the limit on locked memory (ulimit -l) is {facts.memlock / MIB:g} MiB"
    if facts.memlock >= RECOMMENDED_MEMLOCK:
        yield OK, text
        return
    can_raise = facts.memlock_hard == resource.RLIM_INFINITY or facts.memlock_hard > facts.memlock
    shell_hint = "run `ulimit -l hard` in the shell, or " if can_raise else ""
    too_little = facts.memlock < MIN_MEMLOCK
    yield (
        PROBLEM if too_little else WARNING,
        text + (", not enough for a program" if too_little else ", not enough for large messages"),
        shell_hint + RAISE_MEMLOCK,
    )


@check("ports")
def ports(facts: Facts) -> Iterator[UnnamedFinding]:
    """Report devices that cannot be opened and ports that are inactive.

    The findings are problems if the machine has no active port, and warnings otherwise.
    """
    any_active = any(port.is_active for device in facts.devices for port in device.ports)
    verdict = WARNING if any_active else PROBLEM
    for device in facts.devices:
        if device.problem:
            yield (
                verdict,
                f"{device.name} cannot be opened: {device.problem}",
                "see the check permissions",
            )
        for port in device.ports:
            name = f"port {port.attributes.port_num} of {device.name}"
            ethernet = port.attributes.link_layer is verbs.LinkLayer.ETHERNET
            if port.is_active:
                yield OK, f"{name} is ACTIVE"
            elif ethernet:
                yield verdict, f"{name} is {port.attributes.state.name}", CHECK_INTERFACE
            else:
                yield verdict, f"{name} is {port.attributes.state.name}", CHECK_SUBNET_MANAGER


@check("GIDs")
def gids(facts: Facts) -> Iterator[UnnamedFinding]:
    """Check that active ports have addresses that other machines can reach."""
    active = [(device, port) for device in facts.devices for port in device.ports if port.is_active]
    any_usable = any(port.usable_gids for _, port in active)
    for device, port in active:
        name = f"port {port.attributes.port_num} of {device.name}"
        if not port.gids:
            yield WARNING if any_usable else PROBLEM, f"{name} has no GID", GIVE_ADDRESS
            continue
        best = min(port.usable_gids or port.gids, key=verbs.GIDEntry.preference)
        if problem := best.problem():
            yield WARNING, f"the best GID of {name}, {best}, {problem}", GIVE_ADDRESS
        else:
            yield OK, f"{name} has {best}"


@check("fork")
def fork(facts: Facts) -> Iterator[UnnamedFinding]:
    """Check that a fork does not detach registered memory from the device."""
    if facts.library_problem:
        return
    if facts.fork is None:
        yield (
            WARNING,
            "this libibverbs does not report whether fork() is safe with registered memory",
            "set RDMAV_FORK_SAFE=1 for programs that fork, or upgrade rdma-core",
        )
    elif facts.fork is verbs.ForkStatus.DISABLED and facts.devices:
        yield (
            WARNING,
            "the kernel does not copy registered pages at fork(), so a later write may "
            "detach them from the device",
            "set RDMAV_FORK_SAFE=1 for programs that fork, or use Linux 5.12 or newer",
        )
    elif facts.devices:
        yield OK, "fork() is safe with registered memory"


@check("container")
def container(facts: Facts) -> Iterator[UnnamedFinding]:
    """Warn that a container without devices may hide those of its host."""
    if facts.container and not facts.kernel_devices:
        yield (
            WARNING,
            f"this is a container ({facts.container}), which may hide the host's devices",
            "run aiordma doctor on the host, too; start the container with --device "
            "/dev/infiniband and --ulimit memlock=-1, and with --network host for RoCE",
        )


@check("embedded")
def embedded(facts: Facts) -> Iterator[UnnamedFinding]:
    """Check that the embedded device works, and whether other machines can reach it."""
    if problem := embedded_problem(facts.embedded):
        yield PROBLEM, f"embedded0 does not work: {problem}", REPORT
        return
    if reachable_gids := [entry for port in facts.embedded.ports for entry in port.usable_gids]:
        yield OK, f"embedded0 works, and other machines can reach it at {reachable_gids[0].gid.ip}"
    else:
        yield (
            WARNING,
            "embedded0 works, but only within this machine, because it only has loopback addresses",
            "assign an IP address to the machine if other machines need to reach it",
        )


@check("peers")
def peers(facts: Facts) -> Iterator[UnnamedFinding]:
    """Report how embedded0 reaches this user's other processes on this machine."""
    if embedded_problem(facts.embedded):
        return  # reported by another check
    found = facts.local_peers
    if wire := {"tcp": "TCP", "roce": "RoCE v2"}.get(found.links):
        yield (
            OK,
            f"embedded0 uses {wire} even within this machine, because of "
            f"AIORDMA_EMBEDDED_LINKS={found.links}",
        )
    elif found.share_problem:
        yield (
            WARNING,
            f"processes cannot share memory ({found.share_problem}), so embedded0 uses TCP",
            "raise the limit, or allow memfd_create in the container's seccomp filter",
        )
    elif found.copy_problem or found.pidfd_problem:
        reasons = "; ".join(filter(None, (found.copy_problem, found.pidfd_problem)))
        yield (
            WARNING,
            "embedded0 uses shared memory between processes of this user, but some functions are "
            f"not available: {reasons}",
            "if long messages within this machine must be fast, check "
            "kernel.yama.ptrace_scope and the container's seccomp filter",
        )
    else:
        yield (
            OK,
            "embedded0 uses shared memory and cross-memory attach between processes of this user",
        )


@check("choice")
def choice(facts: Facts) -> Iterator[UnnamedFinding]:
    """Report which device is used by programs that do not name one."""
    setting = f"AIORDMA_DEVICE={facts.named}" if facts.named else ""
    if not facts.chosen:
        yield (
            WARNING,
            f"programs that do not name a device fail: {facts.chosen_why}",
            f"change or unset {setting}" if setting else "see the findings above",
        )
    elif facts.named not in ("", "system"):
        yield OK, f"programs use {facts.chosen}, because of {setting}"
    elif facts.is_fallback:
        yield (
            WARNING,
            f"programs that do not name a device use {facts.chosen}, which is software: "
            f"{facts.chosen_why}",
            "set AIORDMA_DEVICE=system to make this fail, or AIORDMA_DEVICE=embedded0 to allow it",
        )
    else:
        yield OK, f"programs that do not name a device use {facts.chosen}: {facts.chosen_why}"


@check("environment")
def environment(facts: Facts) -> Iterator[UnnamedFinding]:
    for text in facts.unknown_variables:
        yield WARNING, text, "correct the name or unset the variable, because it has no effect"


def embedded_problem(device: DeviceInfo) -> str:
    if device.problem:
        return device.problem
    if not any(port.is_active and port.gids for port in device.ports):
        return "no port is active"
    return ""


class Conclusion(Enum):
    """The overall result of `aiordma doctor`.

    ``status`` is the exit status, and ``text`` is the last line of the output.
    """

    READY = 0, "The RDMA devices of this machine can be used."
    SOFTWARE = 0, "Only the embedded device can be used, and programs use it."
    NO_CARD = 1, "Only the embedded device can be used, but programs look for another one."
    NOTHING = 3, "Neither a system device nor the embedded device can be used."  # click uses 2

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        self.text = text


def examine(facts: Facts) -> list[Finding]:
    return [finding for findings in CHECKS for finding in findings(facts)]


def conclude(facts: Facts, findings: list[Finding]) -> Conclusion:
    """Return the overall result of the checks, for programs that do not specify a device."""
    problems = {finding.check for finding in findings if finding.verdict is PROBLEM}
    # If the other checks found no problem, a card works, and programs do not need the embedded
    # device.
    if not problems - {"embedded"}:
        return Conclusion.READY
    if "embedded" in problems:
        return Conclusion.NOTHING
    is_of_system = facts.chosen in [device.name for device in facts.devices]
    return Conclusion.SOFTWARE if facts.chosen and not is_of_system else Conclusion.NO_CARD
