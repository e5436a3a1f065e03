"""The exceptions of aiordma.

::

    RDMAError
    ├── VerbsError (OSError)             a verb failed: .verb .errno
    │   ├── QPTransitionError            .missing .forbidden attributes of a modify
    │   ├── PostError                    .bad_index: the first work request not posted
    │   │   └── QueueFullError           because the queue has no room
    │   ├── UnsupportedError             .capability is not supported by .device
    │   ├── DeviceNotFoundError          .name was not found among .known
    │   └── LibraryNotFoundError         .library or .symbol is missing
    ├── WorkCompletionError              a work request failed: .status .operation .qp_num .wr_id
    │   └── ...                          one class per status, see WORK_COMPLETION_ERRORS
    ├── DeviceEventError                 the device, or an object on it, has failed
    ├── ConnectionManagerError           a connection could not be established: .event .status
    │   ├── AddressError (OSError)       the address does not resolve to a device
    │   ├── RouteError (OSError)         there is no route to the address
    │   ├── UnreachableError (OSError)   the host does not respond
    │   └── RejectedError (ConnectionRefusedError)    .reason .private_data
    │       └── ServiceRejectedError     rejected by a datagram service
    ├── ConnectionClosedError (ConnectionError)   closed by this side, or .by_peer
    ├── ConnectionBrokenError (ConnectionError)   the peer, its program or the link failed
    ├── OutcomeUnknownError              an operation may have been executed when its rail broke
    ├── ProtocolError                    the peer violated the protocol
    │   ├── HandshakeBrokenError (ConnectionError)    the peer ended during the handshake
    │   └── IntegrityError               encrypted data was modified on the way
    ├── UnencryptedError                 an operation on memory with encrypt=True
    ├── AuthenticationError (ConnectionRefusedError)   the two sides have different keys
    ├── RequestRefusedError              the peer refused a request: .code .text
    ├── LimitError                       a limit would be exceeded: .amount .limit
    │   ├── QuotaError                   the limit on lent or pooled memory
    │   └── MessageTooLongError          the limit on the length of a message
    ├── RangeError (ValueError)          .offset .length .region_length .right
    │   ├── LocalRangeError              in local memory
    │   └── RemoteRangeError             in the peer's memory
    ├── BufferStateError                 a buffer was used after its release, or released twice
    │   └── LeaseEndedError              for a region of the peer: .region_id
    ├── BusyError                        another task, thread or operation is using the object
    ├── WrongLoopError (RuntimeError)    used in another loop, thread or process
    ├── TraceFormatError (ValueError)    a line of a file is not a trace record: .path .line
    └── InternalError                    a bug in aiordma

A name in parentheses is a builtin exception that the class also derives from. The text of an error
says what failed, on which object or peer, why, and what to do. All errors can be copied and
pickled; pickling drops ``__cause__``, as with any exception.
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
    """The base class of all exceptions of aiordma."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the arguments of the builtin base class and the attributes."""
        return _rebuild, (type(self), self.args), self.__dict__.copy()


def host_port(address: tuple[str, int]) -> str:
    """Return ``host:port``, or ``[host]:port`` for IPv6 (RFC 3986), for error messages."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def add_hint(error: Exception, hint: str) -> None:
    """Append advice to the text of an error that has not been raised yet."""
    error.args = (*error.args[:-1], f"{error.args[-1]}; {hint}")
    if isinstance(error, OSError):
        error.strerror = error.args[-1]


def cause_text(error: BaseException) -> str:
    """Return the text of an error for use in another one, without its errno."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


# --- verbs ---------------------------------------------------------------------------------------


class VerbsError(RDMAError, OSError):
    """A verb failed. ``verb`` is its C name, ``errno`` the reported error (0 if there is none)."""

    verb: str

    def __init__(self, errno: int, verb: str, detail: str = "") -> None:
        text = f"{verb}: {os.strerror(errno) if errno else 'failed without an errno'}"
        super().__init__(errno, f"{text}; {detail}" if detail else text)
        self.verb = verb


class QPTransitionError(VerbsError):
    """A queue pair cannot be modified as requested; ``detail`` says what is allowed.

    ``missing`` and ``forbidden`` are bits of ``enum ibv_qp_attr_mask``. Both are 0 if the
    transition does not exist.
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
    """Work requests were not posted: the one at ``bad_index`` and those after it."""

    def __init__(self, errno: int, verb: str, bad_index: int, detail: str = "") -> None:
        where = f"work request {bad_index} and those after it were not posted"
        super().__init__(errno, verb, f"{where}; {detail}" if detail else where)
        self.bad_index = bad_index


class QueueFullError(PostError):
    """The queue has no room: poll completions, or create the queue pair with a larger queue."""

    def __init__(self, verb: str, bad_index: int, detail: str = "") -> None:
        full = "the queue is full: poll completions first, or create it larger"
        super().__init__(_errno.ENOMEM, verb, bad_index, f"{full}; {detail}" if detail else full)


class UnsupportedError(VerbsError):
    """``device`` does not support ``capability``."""

    def __init__(
        self, capability: str, *, device: str = "", verb: str = "", errno: int = _errno.EOPNOTSUPP
    ) -> None:
        by = f"device {device!r}" if device else "the device"
        super().__init__(errno, verb or capability, f"{by} does not offer {capability}")
        self.capability = capability
        self.device = device


class DeviceNotFoundError(VerbsError):
    """There is no device called ``name``; ``known`` are the names of the available devices.

    ``wanted`` is a required property. ``detail`` is what each device has instead, or why there are
    no devices.
    """

    def __init__(
        self, name: str, known: Iterable[str] = (), *, wanted: str = "", detail: str = ""
    ) -> None:
        self.name = name
        self.known: tuple[str, ...] = tuple(known)
        sought = f"device {name!r}" if name or not wanted else "device"
        if wanted:
            sought += f" with {wanted}"
        if self.known:
            there = f"there are: {detail or ', '.join(self.known)}"
        else:
            there = detail or "there is no device at all"
        super().__init__(_errno.ENODEV, "ibv_get_device_list", f"no {sought}; {there}")


_PACKAGES = {
    "libibverbs.so.1": "libibverbs1 and ibverbs-providers (Debian, Ubuntu) or libibverbs (Fedora)",
    "librdmacm.so.1": "librdmacm1 (Debian, Ubuntu) or librdmacm (Fedora)",
}


class LibraryNotFoundError(VerbsError):
    """A system library or a symbol in it is missing; the text names the package to install.

    ``detail`` is the message of the dynamic linker.
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
    """A posted work request completed with an error status.

    ``status`` is a value of ``enum ibv_wc_status``, and ``status_name`` is its name. ``operation``
    is what was posted (``"send"``, ``"read"`` ...; empty if unknown). ``vendor_err`` is the
    vendor's error code. ``wr_id`` and ``qp_num`` identify the request. ``what`` describes the
    operation in the text, with its bytes, region and peer. A status without its own class uses this
    class.
    """

    status_name: ClassVar[str] = ""
    advice: ClassVar[str] = "the device reported a status that this version does not know"

    def __init_subclass__(cls, *, name: str, **keywords: object) -> None:
        super().__init_subclass__(**keywords)
        cls.status_name = name
        cls.__doc__ = f"``IBV_WC_{name}``: {cls.advice}."
        _work_completion_errors[len(_work_completion_errors) + 1] = cls

    def __init__(
        self,
        status: int,
        *,
        operation: str = "",
        qp_num: int | None = None,
        wr_id: int | None = None,
        vendor_err: int = 0,
        detail: str = "",
        what: str = "",
    ) -> None:
        where = f" on queue pair {qp_num:#x}" if qp_num is not None else ""
        text = f"{what or operation or 'work request'}{where}: {self.advice} "
        text += f"(IBV_WC_{self.status_name})" if self.status_name else f"(status {status})"
        if vendor_err:
            text += f", vendor error {vendor_err:#x}"
        super().__init__(f"{text}; {detail}" if detail else text)
        self.status = status
        self.operation = operation
        self.qp_num = qp_num
        self.wr_id = wr_id
        self.vendor_err = vendor_err


# In the order of ``enum ibv_wc_status``, from 1.
class LocalLengthError(WorkCompletionError, name="LOC_LEN_ERR"):
    advice = (
        "a message was longer than the buffers of the receive, or longer than the port allows;"
        " post larger receives or send less"
    )


class LocalQPOperationError(WorkCompletionError, name="LOC_QP_OP_ERR"):
    advice = (
        "this side's queue pair cannot do the work request as posted; compare it with the queue"
        " pair's type, state and capabilities"
    )


class LocalEECOperationError(WorkCompletionError, name="LOC_EEC_OP_ERR"):
    advice = "this side's end-to-end context cannot do the work request (reliable datagram)"


class LocalProtectionError(WorkCompletionError, name="LOC_PROT_ERR"):
    advice = (
        "a local buffer of the work request is not covered by its lkey (wrong key, range or"
        " protection domain, or no LOCAL_WRITE): correct it on this side"
    )


class WorkRequestFlushedError(WorkCompletionError, name="WR_FLUSH_ERR"):
    advice = (
        "the work request was not executed, because the queue pair is in the error state; the first"
        " failure on that queue pair is the cause"
    )


class MemoryWindowBindError(WorkCompletionError, name="MW_BIND_ERR"):
    advice = (
        "the memory window was not bound: the region must be registered with MW_BIND, cover the"
        " range and have the rights"
    )


class BadResponseError(WorkCompletionError, name="BAD_RESP_ERR"):
    advice = "the peer's device sent a response that matches no request of this side"


class LocalAccessError(WorkCompletionError, name="LOC_ACCESS_ERR"):
    advice = (
        "the peer wrote with immediate data to a range, or with rights, that this side does not"
        " allow"
    )


class RemoteInvalidRequestError(WorkCompletionError, name="REM_INV_REQ_ERR"):
    advice = (
        "the peer's device refused the request as such: message longer than the receive posted"
        " there, operation not enabled, misaligned atomic or too many reads at once"
    )


class RemoteAccessError(WorkCompletionError, name="REM_ACCESS_ERR"):
    advice = (
        "the peer does not allow this access to its memory: wrong or withdrawn rkey, outside the"
        " region, or a missing right; ask the peer for a region with that right"
    )


class RemoteOperationError(WorkCompletionError, name="REM_OP_ERR"):
    advice = "the peer's device could not execute the request; look at the errors of that side"


class RetryExceededError(WorkCompletionError, name="RETRY_EXC_ERR"):
    advice = (
        "the peer did not acknowledge in time, and all retries are used: the peer or the path to it"
        " is down or overloaded, the peer drops the requests because dest_qp_num, a PSN or the"
        " address does not match its queue pair, or timeout and retry_cnt are too small for this"
        " network"
    )


class RNRRetryExceededError(WorkCompletionError, name="RNR_RETRY_EXC_ERR"):
    advice = (
        "the peer had no receive posted for too long: it must post more receives, or this side"
        " needs flow control or a larger rnr_retry"
    )


class LocalRDDViolationError(WorkCompletionError, name="LOC_RDD_VIOL_ERR"):
    advice = "queue pair and end-to-end context are of different reliable datagram domains"


class RemoteInvalidReadRequestError(WorkCompletionError, name="REM_INV_RD_REQ_ERR"):
    advice = "the peer's device refused a reliable datagram request as invalid"


class RemoteAbortedError(WorkCompletionError, name="REM_ABORT_ERR"):
    advice = "the peer aborted the operation; look at the errors of that side"


class InvalidEECNumberError(WorkCompletionError, name="INV_EECN_ERR"):
    advice = "there is no such end-to-end context number (reliable datagram)"


class InvalidEECStateError(WorkCompletionError, name="INV_EEC_STATE_ERR"):
    advice = "the end-to-end context is in the wrong state (reliable datagram)"


class FatalDeviceError(WorkCompletionError, name="FATAL_ERR"):
    advice = "the device failed fatally; close everything on it and open it again"


class ResponseTimeoutError(WorkCompletionError, name="RESP_TIMEOUT_ERR"):
    advice = "the peer's response did not arrive in time"


class GeneralCompletionError(WorkCompletionError, name="GENERAL_ERR"):
    advice = "the transport failed for a reason without a status of its own; see the vendor error"


class TagMatchingError(WorkCompletionError, name="TM_ERR"):
    advice = "tag matching failed on the shared receive queue"


class TagMatchingIncompleteError(WorkCompletionError, name="TM_RNDV_INCOMPLETE"):
    advice = "a tag-matched rendezvous must be completed by software"


WORK_COMPLETION_ERRORS: Mapping[int, type[WorkCompletionError]] = MappingProxyType(
    _work_completion_errors
)
"""The exception class for each error of ``enum ibv_wc_status``."""


def work_completion_error(
    status: int,
    *,
    operation: str = "",
    qp_num: int | None = None,
    wr_id: int | None = None,
    vendor_err: int = 0,
    detail: str = "",
    what: str = "",
    cause: BaseException | None = None,
) -> WorkCompletionError:
    """Create the exception for a completion's ``status``.

    ``cause`` becomes its ``__cause__``; for a flushed request, it is the first failure of the queue
    pair.

    Raises:
        ValueError: If the status is 0, which means success.
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
        what=what,
    )
    error.__cause__ = cause
    return error


# --- asynchronous events -------------------------------------------------------------------------

# ibv_get_async_event(3): what to do about the events that end the use of an object.
_EVENT_ADVICE = {
    "CQ_ERR": "the completion queue overran or broke, and every queue pair on it with it",
    "QP_FATAL": "on the embedded device, the peer's process has ended, or the path to it is down or"
    " silent; a card cannot use the queue pair any more: see the kernel's log",
    "QP_REQ_ERR": "the peer's request was invalid; look at the errors of that side",
    "QP_ACCESS_ERR": "the peer accessed memory without the right to; correct the peer",
    "SRQ_ERR": "the shared receive queue broke, and every queue pair on it with it",
    "DEVICE_FATAL": "the device failed; close everything on it and open it again",
}


class DeviceEventError(RDMAError):
    """An asynchronous event reported that the device, or an object on it, has failed.

    ``event`` is the name of the event without ``IBV_EVENT_``. ``device`` is the name of the device.
    ``element`` is the failed object; it is empty for the device itself.
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

# What the end of the peer mostly means, as this side notices it. For the texts of this package.
PEER_GONE = "the peer does not answer: its process, machine or network has failed, or is overloaded"
ON_LOOPBACK = "one on 127.0.0.1 is reached from its own host alone"
TLS_HINT = "give ssl= on both sides or on neither"
UNANNOUNCED = (
    "the peer left without a goodbye: its device or process failed, or it gave this side up"
)


def in_short(error: BaseException) -> str:
    """Return what an error means for its connection, for an error whose ``__cause__`` it is."""
    if isinstance(error, RetryExceededError):
        return PEER_GONE
    if isinstance(error, WorkCompletionError):
        return f"{error.operation or 'a work request'} failed with {type(error).__name__}"
    if isinstance(error, DeviceEventError):
        if error.event == "QP_FATAL":
            return f"{PEER_GONE}, or, with a card, this side's device failed"
        return f"the device reports {error.event}"
    if isinstance(error, VerbsError):
        return f"{error.verb} failed with {_errno.errorcode.get(error.errno or 0, 'no errno')}"
    return cause_text(error)


class ConnectionManagerError(RDMAError):
    """A connection could not be established.

    ``event`` is the name of the connection manager's event (``"RDMA_CM_EVENT_..."``); it is empty
    if a call failed immediately. ``status`` is its status: a negative errno, or the reason for a
    rejection.
    """

    _default_errno: ClassVar[int] = 0

    def __init__(self, message: str, *, event: str = "", status: int = 0) -> None:
        self.event = event
        self.status = status
        if event:
            if status:
                event += f": {os.strerror(-status)}" if status < 0 else f", status {status}"
            message = f"{message} ({event})"
        if isinstance(self, OSError):
            super().__init__(-status if status < 0 else self._default_errno, message)
        else:
            super().__init__(message)


class AddressError(ConnectionManagerError, OSError):
    """The address could not be bound, or no RDMA device has a route to it."""

    _default_errno = _errno.EADDRNOTAVAIL


class RouteError(ConnectionManagerError, OSError):
    """The address was resolved, but no route to it was found."""

    _default_errno = _errno.ENETUNREACH


class UnreachableError(ConnectionManagerError, OSError):
    """The peer's host does not respond to connection requests."""

    _default_errno = _errno.EHOSTUNREACH


class RejectedError(ConnectionManagerError, ConnectionRefusedError):
    """The peer's host rejected the connection.

    ``reason`` is a number of IBTA clause 12.6.7.2 (28: by the application; 8: no listener on the
    port), or a negative errno. ``private_data`` is what the peer attached, including trailing
    zeros. ``by_application`` means that the listener's ``on_request`` refused it; the text contains
    its reason.
    """

    _default_errno = _errno.ECONNREFUSED
    # The reasons that a user can do something about.
    _reasons: ClassVar[Mapping[int, str]] = MappingProxyType(
        {
            1: "the peer has no queue pair to spare",
            3: "the peer is out of resources",
            4: "the request timed out",
            5: "the peer does not support the request",
            8: "no listener on that port",
            10: "the peer still has a connection with this communication ID",
            28: "the application there rejected it",
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
        by_application: bool = False,
    ) -> None:
        why = "" if by_application else self._reasons.get(reason)
        super().__init__(f"{message}: {why}" if why else message, event=event, status=reason)
        self.reason = reason
        self.private_data = private_data
        self.by_application = by_application


class ServiceRejectedError(RejectedError):
    """A datagram service rejected the request: ``reason`` is the status of its reply.

    See IBTA clause 12.11.2 (2: by the application; 1: no listener on the port).
    """

    _reasons = MappingProxyType(
        {
            1: "no listener on that port",
            2: "the application there rejected it",
            3: "the peer has no queue pair for it",
            4: "the service has moved to another port",
            5: "the peer speaks another version",
        }
    )


class ConnectionClosedError(RDMAError, ConnectionError):
    """The connection was closed cleanly, by this side or ``by_peer``."""

    def __init__(self, message: str = "", *, by_peer: bool = False) -> None:
        text = "the peer has closed the connection" if by_peer else "the connection is closed"
        super().__init__(message or text)
        self.by_peer = by_peer


class ConnectionBrokenError(RDMAError, ConnectionError):
    """The connection ended without a close: the peer, its program or the link failed.

    The text contains the likely cause. ``__cause__`` is the failure that this side's device
    reported, if there was one.
    """

    def __init__(self, message: str = "the connection broke") -> None:
        super().__init__(message)


class OutcomeUnknownError(RDMAError):
    """The rail of an operation broke, and the operation may or may not have been executed, once.

    The connection continues on another rail.
    """


class ProtocolError(RDMAError):
    """The peer violated the protocol. The connection has ended."""


class HandshakeBrokenError(ProtocolError, ConnectionError):
    """The peer ended during the handshake, as a process does that is killed."""


class IntegrityError(ProtocolError):
    """Data on an encrypted connection was modified, repeated, dropped or reordered on the way."""


class UnencryptedError(RDMAError):
    """An operation on memory was attempted on a connection that encrypts everything.

    With ``encrypt=True``, reads, writes, atomics and shared memory are refused, because devices do
    not encrypt them.
    """

    def __init__(self) -> None:
        super().__init__(
            "operations on the peer's memory cannot be encrypted, and this connection allows only "
            'what is (encrypt=True): send messages, or give encrypt="messages" on both sides, '
            "where such operations travel in clear"
        )


class AuthenticationError(RDMAError, ConnectionRefusedError):
    """The two sides have different keys, or only one of them has a key (``auth=``) or encrypts."""


class RequestRefusedError(RDMAError):
    """The peer refused a request; ``code`` (of the protocol) and ``text`` say why.

    ``peer`` is its address, for the text.
    """

    def __init__(self, code: int, text: str, *, peer: str = "") -> None:
        super().__init__(f"{peer or 'the peer'} refused the request: {text} (code {code})")
        self.code = code
        self.text = text


# --- limits, ranges, states ----------------------------------------------------------------------


class LimitError(RDMAError):
    """``amount`` was requested, but ``limit`` is the maximum, in the unit that the text names."""

    def __init__(self, message: str, *, amount: int = 0, limit: int = 0) -> None:
        super().__init__(message)
        self.amount = amount
        self.limit = limit


class QuotaError(LimitError):
    """More memory was requested than a peer lends, or than a pool may hold."""


class MessageTooLongError(LimitError):
    """A message of ``amount`` bytes exceeds the peer's limit of ``limit``; nothing was sent.

    It may also exceed the memory passed to ``recv_into``; the message can still be received.
    """

    def __init__(self, length: int, limit: int, *, received: bool = False) -> None:
        if received:
            text = f"the next message has {length} bytes, the memory given for it {limit}"
        else:
            text = (
                f"a message of {length} bytes; the receiver takes at most {limit}"
                " (Config.max_message of the receiver)"
            )
        super().__init__(text, amount=length, limit=limit)


class RangeError(RDMAError, ValueError):
    """A range of a region cannot be accessed as requested. Nothing was posted.

    ``offset`` and ``length`` are the requested range, and ``region_length`` is the size of the
    region, in bytes. ``right`` is the missing right, if that is the reason. ``region_id`` is the
    number of the peer's region, as its repr shows it.
    """

    _whose: ClassVar[str] = "region"

    def __init__(
        self,
        offset: int,
        length: int,
        region_length: int,
        *,
        right: str = "",
        detail: str = "",
        region_id: int | None = None,
    ) -> None:
        name = f"a {self._whose}" if region_id is None else f"{self._whose} {region_id:#x}"
        text = f"offset {offset}, length {length} of {name} of {region_length} bytes"
        why = f"without the right to {right}" if right else "out of range"
        super().__init__(f"{text}: {detail or why}")
        self.offset = offset
        self.length = length
        self.region_length = region_length
        self.right = right
        self.region_id = region_id


class LocalRangeError(RangeError):
    """A range of local memory cannot be accessed as requested."""

    _whose = "local buffer"


class RemoteRangeError(RangeError):
    """A range of the peer's memory cannot be accessed as requested."""

    _whose = "remote region"


class BufferStateError(RDMAError):
    """A buffer was used after its release, released twice, or released while in use."""


class LeaseEndedError(BufferStateError):
    """The lease of a region of the peer has ended, or the peer has revoked the region.

    Nothing was posted, and the connection stays open. ``region_id`` is that of the region's token.
    """

    def __init__(self, message: str, region_id: int) -> None:
        super().__init__(message)
        self.region_id = region_id


class BusyError(RDMAError):
    """Another task, thread or operation is using the object. Try again when it is done."""


class WrongLoopError(RDMAError, RuntimeError):
    """The object belongs to another event loop or thread, or to the parent of this process."""


class TraceFormatError(RDMAError, ValueError):
    """Line ``line`` (counted from 1) of the file ``path`` is not a trace record."""

    def __init__(self, detail: str, path: str = "", line: int = 0) -> None:
        super().__init__(f"{path or 'trace'}, line {line}: {detail}")
        self.path = path
        self.line = line


class InternalError(RDMAError):
    """An invariant of aiordma was violated: a bug in aiordma, not in its user or peer."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message} (a bug in aiordma: please report it)")
