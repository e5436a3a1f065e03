"""The two libraries of calls: the system's libraries and the embedded device."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from aiordma.errors import InternalError, LibraryNotFoundError, UnsupportedError, VerbsError

from . import handles as h
from . import softdev
from ._lib import ffi, lib
from .calls import Calls, ProviderCalls, checked, explained
from .conventions import Convention

Register = Callable[[h.ibv_pd, h.VoidPointer | h.Characters, int, int], h.ibv_mr]


class Library:
    """The system's or the embedded verbs library.

    ``name`` is ``"system"`` or ``"embedded"``. The functions in ``calls`` raise exceptions. Each
    library has one instance, created by :func:`system` or :func:`embedded`. Any thread may use it.
    """

    __slots__ = (
        "_cm_owner_pid",
        "_keeps_devices_on_fork",
        "_providers",
        "calls",
        "dereg_mr",
        "name",
        "reg_local_dma",
        "reg_own_mr",
        "table",
    )

    def __init__(
        self, name: str, table: h.aiordma_calls, *, keeps_devices_on_fork: bool = False
    ) -> None:
        self.name: str = name
        self.table: h.aiordma_calls = table
        self.calls: Calls = Calls(table)
        device = table.device  # its optional functions are NULL if missing
        self.dereg_mr: int = _address(table.ibv_dereg_mr)
        """The address of ibv_dereg_mr, for C."""
        self.reg_own_mr: Register = (
            checked("ibv_reg_mr", device.reg_own_mr, Convention.POINTER)
            if self.offers("reg_own_mr")
            else self.calls.ibv_reg_mr
        )
        """ibv_reg_mr(3) for memory that is known to have no holes (see softdev/abi/device_calls.h).

        It is the usual function if the device has no other.
        """
        self.reg_local_dma: Callable[[h.ibv_pd], h.ibv_mr] | None = (
            checked("ibv_reg_mr", device.reg_local_dma, Convention.POINTER)
            if self.offers("reg_local_dma")
            else None
        )
        """A function that registers all memory for sending, or None if the device has none."""
        self._providers: ProviderCalls | None = None
        self._keeps_devices_on_fork = keeps_devices_on_fork
        self._cm_owner_pid: int | None = None

    def offers(self, entry: str) -> bool:
        """Return whether the library has an optional function from softdev/abi/device_calls.h."""
        return bool(getattr(self.table.device, entry))

    def open_failure(self, error: VerbsError, likely: str = "") -> VerbsError:
        """Return the error for a device or event channel that could not be opened, with the reason.

        Args:
            error: The error without a reason. It must be from this thread's latest attempt.
            likely: The likely reason, if the library does not report one.
        """
        if not self.offers("start_failure"):
            return explained(error, likely)
        reason = ffi.string(self.table.device.start_failure()).decode(errors="replace")
        return VerbsError(error.errno or 0, error.verb, reason) if reason else error

    def may_be_on_same_host(self, gid: bytes, peer: bytes) -> bool:
        """Return whether the addresses `gid` and `peer` may belong to the same host.

        The check is only needed for devices that connect to the address in a peer's endpoint. A
        library with such devices has `same_host` (softdev/abi/device_calls.h). For any other
        library, the result is True.
        """
        return not self.offers("same_host") or bool(self.table.device.same_host(gid, peer))

    def end_with_peer(self, qp: h.ibv_qp) -> None:
        """Make a queue pair fail as soon as its device detects the end of the peer's process.

        Call this before connecting the queue pair. It has no effect on cards, because they do not
        watch their peers.
        """
        if self.offers("end_with_peer"):
            self.table.device.end_with_peer(qp)

    def count_served(self, qp: h.ibv_qp) -> h.aiordma_served | None:
        """Return counters of the peer's reads and writes through `qp`, or None if not supported.

        Release the counters with `table.device.release_served`.
        """
        if not self.offers("count_served"):
            return None
        return self.table.device.count_served(qp) or None

    def enter_cm(self) -> None:
        """Record that this process uses the connection manager, and check that it may do so.

        Raises:
            UnsupportedError: In a forked child whose parent had already opened devices. librdmacm
                keeps these devices open, but for the kernel they belong to the parent.
        """
        pid = os.getpid()
        if self._cm_owner_pid is None:
            self._cm_owner_pid = pid
        if self._keeps_devices_on_fork and self._cm_owner_pid != pid:
            raise UnsupportedError(
                "the connection manager in a forked child whose parent had already opened devices; "
                "use via='tcp' in the child, or start the child with spawn or forkserver",
                device=f"the {self.name} library",
                verb="rdma_create_event_channel",
            )

    @property
    def providers(self) -> ProviderCalls:
        """The functions of the providers' own libraries, which are loaded on first use."""
        if self._providers is None:
            self._providers = ProviderCalls(lib.aiordma_provider_calls(self.table))
        return self._providers

    def missing_calls(self) -> tuple[str, ...]:
        """Return the names of functions that this library is too old to provide."""
        fields = ffi.typeof("struct aiordma_calls").fields
        return tuple(name for name, _ in fields or () if not getattr(self.table, name))

    def __repr__(self) -> str:
        return f"<Library {self.name}>"


def _address(function: object) -> int:
    return int(ffi.cast("uintptr_t", function))


_libraries: dict[str, Library] = {}

_MISSING_LIBRARY = re.compile(r"library (\S+) cannot be loaded \((.*)\); install ", re.DOTALL)
_MISSING_SYMBOL = re.compile(r"symbol (\S+) is missing in (\S+),")


def system() -> Library:
    """Return the system's libibverbs and librdmacm, which are loaded on the first call.

    Raises:
        LibraryNotFoundError: If a library or a symbol is missing. The next call tries again.
    """
    if (library := _libraries.get("system")) is None:
        table = ffi.new("struct aiordma_calls **")
        error = ffi.new("char[]", 1024)
        code = lib.aiordma_system_calls(table, error, len(error))
        if code:
            raise _not_found(code, os.fsdecode(ffi.string(error)))
        library = _libraries.setdefault(
            "system", Library("system", table[0], keeps_devices_on_fork=True)
        )
    return library


def _not_found(code: int, text: str) -> VerbsError:
    if match := _MISSING_LIBRARY.match(text):
        return LibraryNotFoundError(match[1], detail=match[2])
    if match := _MISSING_SYMBOL.match(text):
        return LibraryNotFoundError(match[2], symbol=match[1])
    return VerbsError(code, "dlopen", text)


def embedded() -> Library:
    """Return the embedded software device, which is always available."""
    if (library := _libraries.get("embedded")) is None:
        table = softdev.calls()
        if not table:
            raise InternalError("the embedded device has no function table")
        library = _libraries.setdefault("embedded", Library("embedded", table))
    return library
