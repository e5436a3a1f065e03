"""The only module that turns the failures of C calls into exceptions.

C calls report failures in several ways, which :mod:`.conventions` lists. A call of this module
returns the result of the C call without the error code: None, a pointer or a number. Its types are
in the stub of the compiled module, which is generated from softdev/abi/calls.h and
native/verbs/interface.h.
"""

from __future__ import annotations

import errno
import functools
import os
import resource as limits
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiordma.errors import UnsupportedError, VerbsError

from ._lib import ffi, lib
from .conventions import Convention, convention_of

if TYPE_CHECKING:
    from . import handles as h
    from ._lib import CheckedCalls, CheckedProviderCalls
else:
    CheckedCalls = CheckedProviderCalls = object

# 524 is the kernel's internal ENOTSUPP, which some calls leak to user space.
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, 524})

# Failures of these calls say nothing about the device's features. For example, a seccomp filter may
# have returned ENOSYS.
_SYSTEM_CALLS = frozenset({"fcntl", "socket", "timerfd_create", "timerfd_settime"})


def failure(verb: str, code: int, detail: str = "") -> VerbsError:
    """Return the exception for a call that failed with errno value ``code``."""
    if code in _UNSUPPORTED and verb not in _SYSTEM_CALLS:
        return UnsupportedError(detail or verb, verb=verb, errno=code)
    if code == errno.EMFILE:
        detail = f"{detail}; {open_files_hint()}" if detail else open_files_hint()
    return VerbsError(code, verb, detail)


def shortage_hint() -> str:
    """Return an error hint if this process is out of file descriptors, or else ""."""
    try:
        os.close(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return f"this process cannot open more files: {open_files_hint()}"
    return ""


def open_files_hint() -> str:
    """Return an error hint that states the limit on open files and how to raise it."""
    soft, hard = limits.getrlimit(limits.RLIMIT_NOFILE)
    return (
        f"the limit on open files (RLIMIT_NOFILE) of this process is {soft} (hard limit: {hard}),"
        " and every connection over TCP uses one; raise the limit with 'ulimit -n' or LimitNOFILE="
        " in the systemd unit"
    )


def errno_of(code: int) -> int:
    """Return the errno value of a failed call.

    Some providers return -1 and set errno, and some return the negative errno value.
    """
    if code == -1:
        return ffi.errno
    return abs(code)


def explained(error: VerbsError, detail: str) -> VerbsError:
    """Return a copy of the error with a message that contains `detail`."""
    return failure(error.verb, error.errno or 0, detail)


def checked(verb: str, call: Callable[..., Any], convention: Convention) -> Callable[..., Any]:
    """Wrap a C function so that failures, as defined by its convention, raise exceptions."""

    # Clear errno before each call. Otherwise, if a failed call did not set errno, a stale value
    # would be reported.
    def status(*arguments: object) -> None:
        """Call a function that returns 0 on success."""
        ffi.errno = 0
        code: int = call(*arguments)
        if code:
            if convention is Convention.ERRNO:
                raise failure(verb, errno_of(code))
            # By the manual page, the call returns -1 and sets errno. Older librdmacm versions and
            # some providers return the errno value instead.
            raise failure(verb, ffi.errno or abs(code))

    def pointer(*arguments: object) -> object:
        """Call a function that returns NULL on failure."""
        ffi.errno = 0
        result: object = call(*arguments)
        if not result:
            raise failure(verb, ffi.errno)
        return result

    def count(*arguments: object) -> int:
        """Call a function that returns a negative errno value on failure."""
        result: int = call(*arguments)
        if result < 0:
            raise failure(verb, -result)
        return result

    def event(*arguments: object) -> bool:
        """Call a function that fetches an event; return False if no event is pending."""
        while True:
            ffi.errno = 0
            if call(*arguments) == 0:
                return True
            code = ffi.errno
            if code == errno.EAGAIN:
                return False
            if code != errno.EINTR:
                raise failure(verb, code)

    return {
        Convention.ERRNO: status,
        Convention.MINUS_ONE: status,
        Convention.POINTER: pointer,
        Convention.COUNT: count,
        Convention.EVENT: event,
        Convention.PLAIN: call,
    }[convention]


class Calls(CheckedCalls):
    """One library's functions, each raising :class:`VerbsError` (or its ``UnsupportedError``).

    Functions that no library exports are defined in native/verbs/extended.c, with the prefix
    ``aiordma_``.
    """

    def __init__(self, table: h.aiordma_calls) -> None:
        calls = _functions("aiordma_calls", table)
        for name in dir(lib):
            if name.startswith("aiordma_ibv_"):
                calls[name.removeprefix("aiordma_")] = getattr(lib, name)
        _set_all(self, calls, lambda verb: "the installed library is too old")


class ProviderCalls(CheckedProviderCalls):
    """The functions of the providers' own libraries. Each of them may be missing."""

    def __init__(self, table: h.aiordma_provider_calls) -> None:
        calls = _functions("aiordma_provider_calls", table)
        missing = "lib{}.so.1 is not installed or too old"
        _set_all(self, calls, lambda verb: missing.format(verb.partition("dv_")[0]))


def _functions(structure: str, table: object) -> dict[str, Any]:
    """Return all functions of a C table by name, including missing ones, which are NULL."""
    fields = ffi.typeof(f"struct {structure}").fields
    return {name: getattr(table, name) for name, field in fields if field.type.kind == "function"}


def _set_all(target: object, calls: dict[str, Any], missing_reason: Callable[[str], str]) -> None:
    """Set each function as an attribute. `missing_reason` says why one is missing."""
    for verb, call in calls.items():
        if call:
            checked_call = checked(verb, call, convention_of(verb, ffi.typeof(call).result.cname))
        else:
            checked_call = functools.partial(_unsupported, verb, missing_reason(verb))
        setattr(target, verb, checked_call)


def _unsupported(verb: str, reason: str, *arguments: object) -> None:
    raise failure(verb, errno.ENOSYS, f"{verb}: {reason}")
