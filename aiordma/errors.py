"""Every exception that aiordma raises of its own, as one tree.

::

    RDMAError
    ├── VerbsError (OSError)             a verb failed: .verb .errno
    │   ├── QPTransitionError            .missing .forbidden attributes of a modify
    │   ├── PostError                    .bad_index: the first work request not posted
    │   │   └── QueueFullError           because there is no room for it
    │   ├── UnsupportedError             .capability that .device does not offer
    │   ├── DeviceNotFoundError          .name asked for, .known names
    │   └── LibraryNotFoundError         .library, .symbol that is not there
    ├── WorkCompletionError              posted work failed: .status .operation .qp_num .wr_id
    │   └── ...                          one class per status, see WORK_COMPLETION_ERRORS
    ├── DeviceEventError                 the device says that it, or a part of it, has failed
    ├── ConnectionManagerError           no connection came about: .event .status
    │   ├── AddressError (OSError)       the address does not resolve to a device
    │   ├── RouteError (OSError)         the address is known, the way to it is not
    │   ├── UnreachableError (OSError)   nobody answers there
    │   └── RejectedError (ConnectionRefusedError)    .reason .private_data
    │       └── ServiceRejectedError     the same, by a datagram service
    ├── ConnectionClosedError (ConnectionError)   closed in order; .by_peer says by whom
    ├── ConnectionBrokenError (ConnectionError)   the peer or the link died; __cause__ says how
    ├── ProtocolError                    the peer said something that is not the protocol
    ├── AuthenticationError (ConnectionRefusedError)   not the same key on both sides
    ├── RequestRefusedError              the peer understood a request and said no: .code .text
    ├── LimitError                       a limit would be passed: .amount .limit
    │   ├── QuotaError                   of memory that is lent or held
    │   └── MessageTooLongError          of what the peer takes in one message
    ├── RangeError (ValueError)          .offset .length .region_length .right
    │   ├── LocalRangeError              of the caller's own memory
    │   └── RemoteRangeError             of the peer's memory
    ├── BufferStateError                 a buffer was used after its release, or released twice
    ├── BusyError                        someone else is using it right now
    ├── WrongLoopError (RuntimeError)    used in another loop, thread or process than its own
    ├── TraceFormatError (ValueError)    a file is no trace: .path .line
    └── InternalError                    a bug in aiordma

What stands in parentheses is a builtin that the class is derived from as well. Each text says
what failed, whose fault it is where that is known, and what to change. All of them can be copied
and pickled (a ``__cause__`` does not travel with a pickle, as with any exception).
"""

from __future__ import annotations

import errno as _errno
import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar


def _rebuild(cls: type[RDMAError], args: tuple[object, ...]) -> RDMAError:
    # Pickle and copy would call cls(*args), but constructors here take more than the text that
    # ends up in args. The builtin base alone is run; the attributes follow as the state.
    error = cls.__new__(cls)
    super(RDMAError, error).__init__(*args)
    return error


class RDMAError(Exception):
    """The base of all exceptions of aiordma."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle by the arguments of the builtin base and the attributes."""
        return _rebuild, (type(self), self.args), self.__dict__.copy()


# --- verbs ---------------------------------------------------------------------------------------


class VerbsError(RDMAError, OSError):
    """A verb failed. ``verb`` is its name in C, ``errno`` what it reported (0 if nothing)."""

    verb: str

    def __init__(self, errno: int, verb: str, detail: str = "") -> None:
        text = f"{verb}: {os.strerror(errno) if errno else 'failed without an errno'}"
        super().__init__(errno, f"{text}; {detail}" if detail else text)
        self.verb = verb


class QPTransitionError(VerbsError):
    """A queue pair cannot be modified so; ``detail`` says what would be right.

    ``missing`` and ``forbidden`` are bits of ``enum ibv_qp_attr_mask``; both 0 when there is no
    such transition at all.
    """

    def __init__(
        self,
        detail: str,
        *,
        missing: int = 0,
        forbidden: int = 0,
        errno: int = _errno.EINVAL,
        verb: str = "ibv_modify_qp",
    ) -> None:
        super().__init__(errno, verb, detail)
        self.missing = missing
        self.forbidden = forbidden


class PostError(VerbsError):
    """Work requests were not posted: those before ``bad_index`` are, it and the rest are not."""

    def __init__(self, errno: int, verb: str, bad_index: int, detail: str = "") -> None:
        where = f"work request {bad_index} and those after it were not posted"
        super().__init__(errno, verb, f"{where}; {detail}" if detail else where)
        self.bad_index = bad_index


class QueueFullError(PostError):
    """There is no room in the queue: poll completions, or make a queue pair with a larger one."""

    def __init__(self, verb: str, bad_index: int, detail: str = "") -> None:
        full = "the queue is full"
        super().__init__(_errno.ENOMEM, verb, bad_index, f"{full}; {detail}" if detail else full)


class UnsupportedError(VerbsError):
    """``device`` does not offer ``capability``."""

    def __init__(
        self, capability: str, *, device: str = "", verb: str = "", errno: int = _errno.EOPNOTSUPP
    ) -> None:
        by = f"device {device!r}" if device else "the device"
        super().__init__(errno, verb or capability, f"{by} does not offer {capability}")
        self.capability = capability
        self.device = device


class DeviceNotFoundError(VerbsError):
    """There is no device ``name``; ``known`` are the names there are.

    ``wanted`` says what was looked for beside a name, ``detail`` what the devices have of it.
    """

    def __init__(
        self, name: str, known: Iterable[str] = (), *, wanted: str = "", detail: str = ""
    ) -> None:
        self.name = name
        self.known = tuple(known)
        who = f"device {name!r}" if name or not wanted else "device"
        if wanted:
            who += f" with {wanted}"
        if not self.known:
            there = "there is no device at all"
        else:
            there = f"there are: {detail or ', '.join(self.known)}"
        super().__init__(_errno.ENODEV, "ibv_get_device_list", f"no {who}; {there}")


_PACKAGES = {
    "libibverbs.so.1": "libibverbs1 and ibverbs-providers (Debian, Ubuntu) or libibverbs (Fedora)",
    "librdmacm.so.1": "librdmacm1 (Debian, Ubuntu) or librdmacm (Fedora)",
}


class LibraryNotFoundError(VerbsError):
    """A system library, or a symbol in it, is not there; the text says what to install.

    ``detail`` is what the dynamic linker said.
    """

    def __init__(self, library: str, *, symbol: str | None = None, detail: str = "") -> None:
        package = _PACKAGES.get(library, "the package that contains it")
        if symbol is None:
            text = f"{library} is not installed; install {package}, or use the embedded device"
        else:
            text = f"{library} has no symbol {symbol}: it is too old; upgrade {package}"
        super().__init__(
            _errno.ELIBACC,
            "dlopen" if symbol is None else "dlsym",
            f"{text} ({detail})" if detail else text,
        )
        self.library = library
        self.symbol = symbol


# --- work completions ----------------------------------------------------------------------------

_work_completion_errors: dict[int, type[WorkCompletionError]] = {}


class WorkCompletionError(RDMAError):
    """Work was posted and its completion says that it failed.

    ``status`` is a value of ``enum ibv_wc_status``, ``status_name`` its name, ``operation`` what
    was posted (``"send"``, ``"read"`` ...; empty when unknown), ``vendor_err`` the device's own
    number. A status without a class of its own gives this class.
    """

    status_name: ClassVar[str] = ""
    advice: ClassVar[str] = "the device reported a status that this version does not know"

    def __init_subclass__(cls, *, status: int, name: str, **keywords: object) -> None:
        super().__init_subclass__(**keywords)
        cls.status_name = name
        cls.__doc__ = f"``IBV_WC_{name}``: {cls.advice}."
        _work_completion_errors[status] = cls

    def __init__(
        self,
        status: int,
        *,
        operation: str = "",
        qp_num: int | None = None,
        wr_id: int | None = None,
        vendor_err: int = 0,
        detail: str = "",
    ) -> None:
        where = f" on queue pair {qp_num:#x}" if qp_num is not None else ""
        text = f"{operation or 'work request'}{where}: {self.advice} "
        text += f"(IBV_WC_{self.status_name})" if self.status_name else f"(status {status})"
        if vendor_err:
            text += f", vendor error {vendor_err:#x}"
        super().__init__(f"{text}; {detail}" if detail else text)
        self.status = status
        self.operation = operation
        self.qp_num = qp_num
        self.wr_id = wr_id
        self.vendor_err = vendor_err


class LocalLengthError(WorkCompletionError, status=1, name="LOC_LEN_ERR"):
    advice = (
        "a message was longer than the buffers of the receive, or longer than the port allows;"
        " post larger receives or send less"
    )


class LocalQPOperationError(WorkCompletionError, status=2, name="LOC_QP_OP_ERR"):
    advice = (
        "this side's queue pair cannot do the work request as posted; compare it with the queue"
        " pair's type, state and capabilities"
    )


class LocalEECOperationError(WorkCompletionError, status=3, name="LOC_EEC_OP_ERR"):
    advice = "this side's end-to-end context cannot do the work request (reliable datagram)"


class LocalProtectionError(WorkCompletionError, status=4, name="LOC_PROT_ERR"):
    advice = (
        "a local buffer of the work request is not covered by its lkey: wrong key, range or"
        " protection domain, or no local write; it is this side's to correct"
    )


class WorkRequestFlushedError(WorkCompletionError, status=5, name="WR_FLUSH_ERR"):
    advice = (
        "the work request was not done, since the queue pair is in the error state; what put it"
        " there is the cause"
    )


class MemoryWindowBindError(WorkCompletionError, status=6, name="MW_BIND_ERR"):
    advice = (
        "the memory window was not bound: the region must be registered with MW_BIND, cover the"
        " range and have the rights"
    )


class BadResponseError(WorkCompletionError, status=7, name="BAD_RESP_ERR"):
    advice = "the peer's device answered with something that fits no request of ours"


class LocalAccessError(WorkCompletionError, status=8, name="LOC_ACCESS_ERR"):
    advice = "a write with immediate arrived and its range or rights failed on this side"


class RemoteInvalidRequestError(WorkCompletionError, status=9, name="REM_INV_REQ_ERR"):
    advice = (
        "the peer's device refused the request as such: message longer than the receive posted"
        " there, operation not enabled, misaligned atomic or too many reads at once"
    )


class RemoteAccessError(WorkCompletionError, status=10, name="REM_ACCESS_ERR"):
    advice = (
        "the peer's memory may not be touched so: wrong or withdrawn rkey, outside the region,"
        " or the right was not given; ask the peer for a region that has it"
    )


class RemoteOperationError(WorkCompletionError, status=11, name="REM_OP_ERR"):
    advice = "the peer's device could not carry the request out; look at the errors of that side"


class RetryExceededError(WorkCompletionError, status=12, name="RETRY_EXC_ERR"):
    advice = (
        "the peer did not acknowledge in time, all retries are used: it or the way to it is gone,"
        " or timeout and retry_cnt are too small for this network"
    )


class RNRRetryExceededError(WorkCompletionError, status=13, name="RNR_RETRY_EXC_ERR"):
    advice = (
        "the peer had no receive posted for too long: it must post more receives, or this side"
        " needs flow control or a larger rnr_retry"
    )


class LocalRDDViolationError(WorkCompletionError, status=14, name="LOC_RDD_VIOL_ERR"):
    advice = "queue pair and end-to-end context are of different reliable datagram domains"


class RemoteInvalidReadRequestError(WorkCompletionError, status=15, name="REM_INV_RD_REQ_ERR"):
    advice = "the peer's device refused a reliable datagram request as invalid"


class RemoteAbortedError(WorkCompletionError, status=16, name="REM_ABORT_ERR"):
    advice = "the peer aborted the operation; look at the errors of that side"


class InvalidEECNumberError(WorkCompletionError, status=17, name="INV_EECN_ERR"):
    advice = "there is no such end-to-end context number (reliable datagram)"


class InvalidEECStateError(WorkCompletionError, status=18, name="INV_EEC_STATE_ERR"):
    advice = "the end-to-end context is in the wrong state (reliable datagram)"


class FatalDeviceError(WorkCompletionError, status=19, name="FATAL_ERR"):
    advice = "the device failed fatally; close everything on it and open it again"


class ResponseTimeoutError(WorkCompletionError, status=20, name="RESP_TIMEOUT_ERR"):
    advice = "the peer's answer did not come in time"


class GeneralCompletionError(WorkCompletionError, status=21, name="GENERAL_ERR"):
    advice = "the transport failed in a way that has no name; see the vendor's error"


class TagMatchingError(WorkCompletionError, status=22, name="TM_ERR"):
    advice = "tag matching failed on the shared receive queue"


class TagMatchingIncompleteError(WorkCompletionError, status=23, name="TM_RNDV_INCOMPLETE"):
    advice = "a tag-matched rendezvous was left for software to finish"


WORK_COMPLETION_ERRORS: Mapping[int, type[WorkCompletionError]] = MappingProxyType(
    _work_completion_errors
)
"""The class of each failing ``enum ibv_wc_status``."""


def work_completion_error(
    status: int,
    *,
    operation: str = "",
    qp_num: int | None = None,
    wr_id: int | None = None,
    vendor_err: int = 0,
    detail: str = "",
    cause: BaseException | None = None,
) -> WorkCompletionError:
    """Make the exception for a completion's ``status`` (not for success, 0: ValueError).

    ``cause`` becomes its ``__cause__``: for a flush, the first failure of that queue pair.
    """
    if status == 0:
        raise ValueError("IBV_WC_SUCCESS is not an error")
    error = WORK_COMPLETION_ERRORS.get(status, WorkCompletionError)(
        status,
        operation=operation,
        qp_num=qp_num,
        wr_id=wr_id,
        vendor_err=vendor_err,
        detail=detail,
    )
    error.__cause__ = cause
    return error


# --- asynchronous events -------------------------------------------------------------------------

# ibv_get_async_event(3): what can be done about those after which nothing works any more.
_EVENT_ADVICE = {
    "CQ_ERR": "the completion queue overran or broke, and every queue pair on it with it",
    "QP_FATAL": "the device could not go on with the queue pair: the kernel's log may say why; or,"
    " of the embedded device, the peer's process is gone, or the way to it",
    "QP_REQ_ERR": "the peer's request was invalid; look at the errors of that side",
    "QP_ACCESS_ERR": "the peer reached for memory that it has no right to; it is the peer's fault",
    "SRQ_ERR": "the shared receive queue broke, and every queue pair on it with it",
    "DEVICE_FATAL": "the device failed; close everything on it and open it again",
}


class DeviceEventError(RDMAError):
    """The device reported by an asynchronous event that nothing more can be done.

    ``event`` is its name (``IBV_EVENT_`` left out), ``device`` the device, ``element`` what it is
    about, empty when it is about the device itself.
    """

    def __init__(self, event: str, *, device: str = "", element: str = "") -> None:
        about = f" about {element}" if element else ""
        text = f"device {device!r} reports IBV_EVENT_{event}{about}"
        advice = _EVENT_ADVICE.get(event)
        super().__init__(f"{text}: {advice}" if advice else text)
        self.event = event
        self.device = device
        self.element = element


# --- connections ---------------------------------------------------------------------------------


class ConnectionManagerError(RDMAError):
    """The connection manager reported that no connection comes about.

    ``event`` is the name of the event (``"RDMA_CM_EVENT_..."``, empty when a call failed at
    once), ``status`` its status: a negative errno, or the reason of a rejection.
    """

    _default_errno: ClassVar[int] = 0

    def __init__(self, message: str, *, event: str = "", status: int = 0) -> None:
        text = f"{message} ({event}, status {status})" if event else message
        if isinstance(self, OSError):
            super().__init__(-status if status < 0 else self._default_errno, text)
        else:
            super().__init__(text)
        self.event = event
        self.status = status


class AddressError(ConnectionManagerError, OSError):
    """The address could not be bound or resolved to an RDMA device: no device has a way there."""

    _default_errno = _errno.EADDRNOTAVAIL


class RouteError(ConnectionManagerError, OSError):
    """The address was resolved, the route to it was not."""

    _default_errno = _errno.ENETUNREACH


class UnreachableError(ConnectionManagerError, OSError):
    """The peer's host does not answer connection requests."""

    _default_errno = _errno.EHOSTUNREACH


class RejectedError(ConnectionManagerError, ConnectionRefusedError):
    """The peer's host answered and refused.

    ``reason`` is the number of IBTA clause 12.6.7.2 (28: by the application; 8: nobody listens),
    or a negative errno; ``private_data`` what came with it, trailing zeros included.
    """

    _default_errno = _errno.ECONNREFUSED
    # The ones that a user can do something about.
    _reasons: ClassVar[Mapping[int, str]] = MappingProxyType(
        {
            1: "the peer has no queue pair left",
            3: "the peer is out of resources",
            4: "the request timed out",
            5: "the peer does not support the request",
            8: "nobody listens on that port",
            10: "the peer still has a connection of these numbers",
            28: "the application there refused",
            35: "the peer does not accept the vendor's options that were offered (ECE)",
        }
    )

    def __init__(
        self,
        message: str = "the connection was rejected",
        *,
        reason: int = 0,
        private_data: bytes = b"",
        event: str = "RDMA_CM_EVENT_REJECTED",
    ) -> None:
        why = self._reasons.get(reason)
        super().__init__(f"{message}: {why}" if why else message, event=event, status=reason)
        self.reason = reason
        self.private_data = private_data


class ServiceRejectedError(RejectedError):
    """A datagram service was asked for and refused: ``reason`` is the status of the answer.

    IBTA clause 12.11.2 (2: by the application; 1: nobody listens).
    """

    _reasons = MappingProxyType(
        {
            1: "nobody listens on that port",
            2: "the application there refused",
            3: "the peer has no queue pair for it",
            4: "the service has moved",
            5: "the peer speaks another version",
        }
    )


class ConnectionClosedError(RDMAError, ConnectionError):
    """The connection has been closed in order: by this side, or ``by_peer`` with its goodbye."""

    def __init__(self, message: str = "", *, by_peer: bool = False) -> None:
        who = "the peer has closed the connection" if by_peer else "the connection is closed"
        super().__init__(message or who)
        self.by_peer = by_peer


class ConnectionBrokenError(RDMAError, ConnectionError):
    """The connection ended without a goodbye: the peer died, or the link; see ``__cause__``."""

    def __init__(self, message: str = "the connection broke") -> None:
        super().__init__(message)


class ProtocolError(RDMAError):
    """The peer said something that is not the protocol; the connection ends with it."""


class AuthenticationError(RDMAError, ConnectionRefusedError):
    """The two sides have not the same key, or only one of them was given one (``auth=``)."""


class RequestRefusedError(RDMAError):
    """The peer understood a request and refused it: ``code`` (of the protocol) and ``text``."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"the peer refused the request: {text} (code {code})")
        self.code = code
        self.text = text


# --- limits, ranges, states ----------------------------------------------------------------------


class LimitError(RDMAError):
    """``amount`` was asked for and ``limit`` is the most; units are those of the text."""

    def __init__(self, message: str, *, amount: int = 0, limit: int = 0) -> None:
        super().__init__(message)
        self.amount = amount
        self.limit = limit


class QuotaError(LimitError):
    """More memory was asked for than one side lends, or a pool may hold."""


class MessageTooLongError(LimitError):
    """A message of ``amount`` bytes for a peer that takes ``limit`` at most; nothing was sent.

    Or for memory of ``limit`` bytes, given to ``recv_into``; the message stays to be received.
    """

    def __init__(self, length: int, limit: int, *, received: bool = False) -> None:
        if received:
            text = f"the next message has {length} bytes, the memory for it {limit}"
        else:
            text = f"a message of {length} bytes; the peer takes at most {limit}"
        super().__init__(text, amount=length, limit=limit)


class RangeError(RDMAError, ValueError):
    """A range of a region that cannot be used as asked; nothing was posted.

    ``offset`` and ``length`` are what was asked for, ``region_length`` what there is (bytes);
    ``right`` names the right that is missing, when it is that.
    """

    _whose: ClassVar[str] = "region"

    def __init__(
        self, offset: int, length: int, region_length: int, *, right: str = "", detail: str = ""
    ) -> None:
        text = f"offset {offset}, length {length} of a {self._whose} of {region_length} bytes"
        why = f"without the right to {right}" if right else "out of range"
        super().__init__(f"{text}: {detail or why}")
        self.offset = offset
        self.length = length
        self.region_length = region_length
        self.right = right


class LocalRangeError(RangeError):
    """A range of the caller's own memory."""

    _whose = "local buffer"


class RemoteRangeError(RangeError):
    """A range of the peer's memory."""

    _whose = "remote region"


class BufferStateError(RDMAError):
    """A buffer was used after its release, released twice, or released while in use."""


class BusyError(RDMAError):
    """The object is in use by someone else; try again when they are done."""


class WrongLoopError(RDMAError, RuntimeError):
    """The object belongs to another event loop, or thread, or to the parent of this process."""


class TraceFormatError(RDMAError, ValueError):
    """Line ``line`` (from 1) of the file ``path`` is not what the line of a trace may be."""

    def __init__(self, detail: str, path: str = "", line: int = 0) -> None:
        super().__init__(f"{path or 'trace'}, line {line}: {detail}")
        self.path = path
        self.line = line


class InternalError(RDMAError):
    """Something that cannot happen did: a bug in aiordma, not in its user or its peer."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message} (a bug in aiordma: please report it)")
