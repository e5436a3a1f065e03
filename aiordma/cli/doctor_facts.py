"""Facts about a machine, collected for `aiordma doctor` and evaluated in `doctor_checks.py`."""

from __future__ import annotations

import os
import platform
import resource
import stat
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiordma
from aiordma import verbs
from aiordma._core.environment import unknown_variables
from aiordma.verbs._device import environment

from .devices import DeviceInfo
from .local_peers import LocalPeerFacts

# Name prefixes of RDMA kernel modules.
MODULES = (
    "ib_", "rdma", "iw_", "mlx4", "mlx5", "bnxt_re", "cxgb4", "efa", "erdma", "hfi1", "hns_roce",
    "irdma", "mana_ib", "ocrdma", "qedr", "siw", "usnic_verbs", "vmw_pvrdma",
)  # fmt: skip

CAP_IPC_LOCK = 14  # linux/capability.h


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A device node in /dev/infiniband.

    ``rights`` contains the node's mode, owner and group. ``usable`` is True if this process can
    open the node for reading and writing.
    """

    path: str
    rights: str
    usable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    kernel: str = ""
    library_problem: str = ""  # why libibverbs or librdmacm is missing; empty if both are installed
    missing_calls: tuple[str, ...] = ()  # calls that need a newer library
    providers: tuple[str, ...] = ()  # the providers that libibverbs is configured to load
    kernel_devices: dict[str, str] = field(default_factory=dict)  # name: kernel driver
    modules: tuple[str, ...] = ()
    has_uverbs: bool = False  # whether ib_uverbs is loaded or built in
    has_rdma_cm: bool = False  # whether rdma_ucm is loaded or built in
    nodes: tuple[NodeFacts, ...] = ()
    memlock: int = resource.RLIM_INFINITY
    memlock_hard: int = resource.RLIM_INFINITY
    ignores_memlock: bool = False  # whether the process has CAP_IPC_LOCK
    devices: tuple[DeviceInfo, ...] = ()  # devices of the system's libibverbs
    fork: verbs.ForkStatus | None = None  # None if the library does not report it
    container: str = ""
    embedded: DeviceInfo = field(default_factory=partial(DeviceInfo, "embedded0"))
    named: str = ""  # value of AIORDMA_DEVICE
    chosen: str = ""  # device that `connect` uses; empty if it would fail
    chosen_why: str = ""  # reason for the choice or the failure
    is_fallback: bool = False  # whether embedded0 is chosen because no other device is usable
    local_peers: LocalPeerFacts = field(default_factory=LocalPeerFacts)
    unknown_variables: tuple[str, ...] = ()  # one message per variable

    @classmethod
    def collect(cls, root: Path = Path("/")) -> Facts:
        """Collect facts about this machine.

        Files in /sys, /proc, /dev and /etc are looked up relative to ``root``.
        """
        unknown = unknown_variables(os.environ)
        environment.reported.update(unknown)  # reported by a check instead
        missing = verbs.missing_library()
        library = verbs.libraries()[0] if missing is None else None
        found = verbs.devices()
        named = os.environ.get("AIORDMA_DEVICE", "")
        chosen, why, is_fallback = choose()
        soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return cls(
            kernel=platform.release(),
            library_problem="" if missing is None else str(missing),
            missing_calls=() if library is None else library.missing_calls(),
            providers=providers(root),
            kernel_devices=kernel_devices(root),
            modules=modules(root),
            has_uverbs=(root / "sys/class/infiniband_verbs").is_dir(),
            has_rdma_cm=(root / "sys/class/misc/rdma_cm").exists(),
            nodes=nodes(root),
            memlock=soft,
            memlock_hard=hard,
            ignores_memlock=bool(effective_capabilities(root) >> CAP_IPC_LOCK & 1),
            devices=tuple(DeviceInfo.ask(device) for device in found if device.library is library),
            fork=None if library is None else verbs.fork_status(library),
            container=container(root),
            embedded=DeviceInfo.ask(next(it for it in found if it.library is not library)),
            named=named,
            chosen=chosen,
            chosen_why=why,
            is_fallback=is_fallback,
            local_peers=LocalPeerFacts.collect(),
            unknown_variables=tuple(unknown.values()),
        )


def choose() -> tuple[str, str, bool]:
    """Choose a device the way `connect` does.

    Returns:
        The device's name, the reason for the choice, and whether the device is a fallback. If no
        device can be chosen, the name is empty and the reason is the error message.
    """
    try:
        choice = verbs.choose_device()
    except aiordma.VerbsError as error:
        return "", error.strerror or str(error), False
    return choice.device.name, choice.reason, choice.is_fallback


def read(path: Path) -> str:
    """Return a file's text, or an empty string if the file is missing or unreadable."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def providers(root: Path) -> tuple[str, ...]:
    """Return the names of the drivers that libibverbs is configured to load.

    The names come from the `driver NAME` lines in libibverbs configuration files.
    """
    folder = root / "etc/libibverbs.d"
    lines = "\n".join(read(folder / name) for name in names(folder)).splitlines()
    words = [line.split() for line in lines]
    return tuple(sorted({line[1] for line in words if len(line) == 2 and line[0] == "driver"}))


def kernel_devices(root: Path) -> dict[str, str]:
    """Return the driver of each RDMA device known to the kernel, keyed by device name.

    The driver is an empty string for software devices.
    """
    folder = root / "sys/class/infiniband"
    found = {}
    for name in names(folder):
        driver = folder / name / "device" / "driver"
        found[name] = os.path.basename(os.path.realpath(driver)) if driver.exists() else ""
    return found


def modules(root: Path) -> tuple[str, ...]:
    loaded = [line.split()[0] for line in read(root / "proc/modules").splitlines() if line.strip()]
    return tuple(sorted(name for name in loaded if name.startswith(MODULES)))


def nodes(root: Path) -> tuple[NodeFacts, ...]:
    """Return the device nodes in /dev/infiniband, and whether this user can open them."""
    folder = root / "dev/infiniband"
    found = []
    for name in names(folder):
        path = folder / name
        try:
            status = path.stat()
        except OSError:
            continue
        if not stat.S_ISDIR(status.st_mode):  # skip by-path and by-ibdev, which contain links
            rights = f"{stat.filemode(status.st_mode)} {status.st_uid}:{status.st_gid}"
            usable = os.access(path, os.R_OK | os.W_OK)
            found.append(NodeFacts(f"/dev/infiniband/{name}", rights, usable))
    return tuple(found)


def effective_capabilities(root: Path) -> int:
    for line in read(root / "proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def container(root: Path) -> str:
    """Return the type of container this process runs in, such as docker.

    Returns an empty string if the process does not run in a container.
    """
    for name, kind in ((".dockerenv", "docker"), ("run/.containerenv", "podman")):
        if (root / name).exists():
            return kind
    for word in read(root / "proc/1/environ").split("\0"):
        name, _, kind = word.partition("=")
        if name == "container" and kind:
            return kind
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    return ""
