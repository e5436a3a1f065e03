"""Explanations for memory registrations that fail due to the limit on locked memory."""

from __future__ import annotations

import errno
import resource as limits

from aiordma.errors import VerbsError

_CAP_IPC_LOCK = 14  # capabilities(7)


def locked_memory_hint(error: VerbsError) -> str:
    """Return a hint about why memory could not be registered, or an empty string.

    EFAULT means that the memory cannot be pinned. ENOMEM and EAGAIN may be due to the limit on
    locked memory. Registered pages are pinned and count towards RLIMIT_MEMLOCK, unless the process
    has the CAP_IPC_LOCK capability (getrlimit(2), capabilities(7)).
    """
    if error.errno == errno.EFAULT:
        return (
            "; no memory is mapped at these addresses, or it is a shared read-only mapping of a"
            " file, which Linux 6.1 and older cannot pin (use mmap.ACCESS_COPY)"
        )
    if error.errno not in (errno.ENOMEM, errno.EAGAIN):
        return ""
    soft, hard = (_bytes(limit) for limit in limits.getrlimit(limits.RLIMIT_MEMLOCK))
    status = _status()
    pinned = status.get("VmPin", "0 kB")
    if int(status.get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1:
        reason = (
            f"the limit on locked memory (RLIMIT_MEMLOCK, {soft}) does not apply, because this"
            " process has CAP_IPC_LOCK; the machine is out of memory, or the device has no room for"
            " more regions"
        )
    elif soft == "unlimited":
        reason = (
            "the limit on locked memory (RLIMIT_MEMLOCK) is unlimited; the machine is out of"
            " memory, or the device has no room for more regions"
        )
    else:
        reason = (
            f"the limit on locked memory (RLIMIT_MEMLOCK) of this process is {soft} (hard limit:"
            f" {hard}), and {pinned} are already pinned; raise the limit with 'ulimit -l', memlock"
            " in /etc/security/limits.conf or LimitMEMLOCK= in the systemd unit, or register less"
        )
    return f"; {reason}"


def _status() -> dict[str, str]:
    with open("/proc/self/status") as lines:
        parts = [line.partition(":") for line in lines]
    return {name: value.strip() for name, _, value in parts}


def _bytes(limit: int) -> str:
    return "unlimited" if limit == limits.RLIM_INFINITY else f"{limit} bytes"
