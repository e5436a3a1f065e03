"""The exceptions raised by aiordma.

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
    │   ├── HandshakeBrokenError (ConnectionError)    the peer disconnected during the handshake
    │   └── IntegrityError               encrypted data was modified in transit
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

A name in parentheses is a builtin exception that is also a base class. All errors can be copied and
pickled. Pickling drops ``__cause__``, as with any exception.
"""

from __future__ import annotations

import errno as _errno
import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar


def _rebuild(cls: type[RDMAError], args: tuple[object, ...]) -> RDMAError:
    # By default, pickle and copy call cls(*args). This fails here, because args contains only the
    # message, while constructors take more arguments. Initialize only the builtin base class. The
    # attributes are restored from the state.
    error = cls.__new__(cls)
    super(RDMAError, error).__init__(*args)
    return error


class RDMAError(Exception):
    """The base class of all aiordma exceptions."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the state for copying and pickling the error.

        The state consists of the attributes and the arguments of the builtin base class.
        """
        return _rebuild, (type(self), self.args), self.__dict__.copy()


def host_port(address: tuple[str, int]) -> str:
    """Format an address as ``host:port``, or ``[host]:port`` for IPv6 (RFC 3986)."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def add_hint(error: Exception, hint: str) -> None:
    """Append advice to the message of an error that has not been raised yet."""
    error.args = (*error.args[:-1], f"{error.args[-1]}; {hint}")
    if isinstance(error, OSError):
        error.strerror = error.args[-1]


def cause_text(error: BaseException) -> str:
    """Return an error's message without its errno, for inclusion in another error message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


# --- verbs ---------------------------------------------------------------------------------------


class VerbsError(RDMAError, OSError):
    """A verb failed.

    ``verb`` is the C name of the verb. ``errno`` is the error code that the verb reported, or 0.
    ``detail`` is appended to the message.
    """

    verb: str

    def __init__(self, errno: int, verb: str, detail: str = "") -> None:
        text = f"{verb}: {os.strerror(errno) if errno else 'failed without an errno'}"
        super().__init__(errno, f"{text}; {detail}" if detail else text)
        self.verb = verb


class QPTransitionError(VerbsError):
    """A queue pair cannot be modified as requested. The message lists what is allowed.

    ``missing`` contains the required attributes that the call did not set. ``forbidden`` contains
    the attributes that the call must not set. The two values are combinations of
    ``enum ibv_qp_attr_mask`` bits. They are 0 if there is no transition from the current state to
    the requested state.
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
    """Some work requests were not posted.

    ``bad_index`` is the index of the first work request that was not posted. Subsequent work
    requests were not posted either.
    """

    def __init__(self, errno: int, verb: str, bad_index: int, detail: str = "") -> None:
        where = f"work request {bad_index} and those after it were not posted"
        super().__init__(errno, verb, f"{where}; {detail}" if detail else where)
        self.bad_index = bad_index


class QueueFullError(PostError):
    """A queue has no room for another work request.

    Poll completions first, or create the queue pair with a larger queue.
    """

    def __init__(self, verb: str, bad_index: int, detail: str = "") -> None:
        full = "the queue is full: poll completions first, or create a larger queue"
        super().__init__(_errno.ENOMEM, verb, bad_index, f"{full}; {detail}" if detail else full)


class UnsupportedError(VerbsError):
    """``device`` does not support ``capability``."""

    def __init__(
        self, capability: str, *, device: str = "", verb: str = "", errno: int = _errno.EOPNOTSUPP
    ) -> None:
        by = f"device {device!r}" if device else "the device"
        super().__init__(errno, verb or capability, f"{by} does not support {capability}")
        self.capability = capability
        self.device = device


class DeviceNotFoundError(VerbsError):
    """No device has the requested name or property.

    ``name`` is the requested name, and ``known`` lists the names of the available devices.
    ``wanted`` is the requested property. In the message, ``detail`` replaces the list of devices.
    """

    def __init__(
        self, name: str, known: Iterable[str] = (), *, wanted: str = "", detail: str = ""
    ) -> None:
        self.name = name
        self.known: tuple[str, ...] = tuple(known)
        if wanted:
            sought = f"no device {name!r} with {wanted}" if name else f"no device with {wanted}"
        else:
            sought = f"device {name!r} not found"
        if self.known:
            available = f"available devices: {detail or ', '.join(self.known)}"
        else:
            available = detail or "this system has no RDMA device"
        super().__init__(_errno.ENODEV, "ibv_get_device_list", f"{sought}; {available}")


_PACKAGES = {
    "libibverbs.so.1": "libibverbs1 and ibverbs-providers (Debian, Ubuntu) or libibverbs (Fedora)",
    "librdmacm.so.1": "librdmacm1 (Debian, Ubuntu) or librdmacm (Fedora)",
}


class LibraryNotFoundError(VerbsError):
    """A system library, or a symbol in it, is missing. The message names the package to install."""

    def __init__(self, library: str, *, symbol: str | None = None, detail: str = "") -> None:
        package = _PACKAGES.get(library, "the package that contains it")
        if symbol is None:
            text = f"{library} is not installed; install {package}, or use the embedded device"
        else:
            text = f"{library} has no symbol {symbol}: the library is too old; upgrade {package}"
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
    """A posted work request completed with an error.

    Each known status has its own subclass.

    ``status`` is an ``enum ibv_wc_status`` value, and ``status_name`` is its name. ``operation`` is
    the request type, such as ``"send"`` or ``"read"``, or empty if unknown. ``wr_id`` and
    ``qp_num`` identify the request. ``vendor_err`` is a vendor-specific error code.

    The message begins with ``what``, a longer description of the request such as ``"read of 8
    bytes"``, or with ``operation`` if ``what`` is empty. The message ends with ``detail``.
    """

    status_name: ClassVar[str] = ""
    advice: ClassVar[str] = "the device reported an unknown status"

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


# Keep these classes in the order of ``enum ibv_wc_status``. They are numbered from 1 in the order
# of their definitions.
class LocalLengthError(WorkCompletionError, name="LOC_LEN_ERR"):
    advice = (
        "the message was longer than the receive buffers, or longer than the port allows; post "
        "larger receives or send shorter messages"
    )


class LocalQPOperationError(WorkCompletionError, name="LOC_QP_OP_ERR"):
    advice = (
        "the local queue pair cannot execute this work request; check the request against the "
        "type, state and capabilities of the queue pair"
    )


class LocalEECOperationError(WorkCompletionError, name="LOC_EEC_OP_ERR"):
    advice = "the local end-to-end context cannot execute the work request (reliable datagram)"


class LocalProtectionError(WorkCompletionError, name="LOC_PROT_ERR"):
    advice = (
        "the lkey does not allow access to a local buffer: the key, range or protection domain "
        "is wrong, or the region lacks LOCAL_WRITE"
    )


class WorkRequestFlushedError(WorkCompletionError, name="WR_FLUSH_ERR"):
    advice = (
        "the work request was not executed, because the queue pair is in the error state; the first"
        " failure on that queue pair is the cause"
    )


class MemoryWindowBindError(WorkCompletionError, name="MW_BIND_ERR"):
    advice = (
        "the memory window was not bound: the region must be registered with MW_BIND, contain "
        "the range and allow the access"
    )


class BadResponseError(WorkCompletionError, name="BAD_RESP_ERR"):
    advice = "the peer's device sent a response that matches no request of this side"


class LocalAccessError(WorkCompletionError, name="LOC_ACCESS_ERR"):
    advice = (
        "this side does not allow the peer's write with immediate data: the range is invalid, or "
        "the region lacks REMOTE_WRITE"
    )


class RemoteInvalidRequestError(WorkCompletionError, name="REM_INV_REQ_ERR"):
    advice = (
        "the peer's device rejected the request: the message is longer than the posted receive, "
        "the operation is not enabled, the atomic operation is misaligned, or too many reads are "
        "in flight"
    )


class RemoteAccessError(WorkCompletionError, name="REM_ACCESS_ERR"):
    advice = (
        "the peer does not allow this access to its memory: the rkey is invalid or revoked, the "
        "range is outside the region, or the region lacks the right; ask the peer for a region "
        "that grants the right"
    )


class RemoteOperationError(WorkCompletionError, name="REM_OP_ERR"):
    advice = "the peer's device could not execute the request; check the errors on the peer's side"


class RetryExceededError(WorkCompletionError, name="RETRY_EXC_ERR"):
    advice = (
        "the peer did not acknowledge the request, even after all retries: the peer or the "
        "network is down or overloaded, the peer drops the request because dest_qp_num, a PSN or "
        "the address does not match its queue pair, or timeout and retry_cnt are too small for "
        "this network"
    )


class RNRRetryExceededError(WorkCompletionError, name="RNR_RETRY_EXC_ERR"):
    advice = (
        "the peer had no receive posted for too long: the peer must post more receives, or this "
        "side needs flow control or a larger rnr_retry"
    )


class LocalRDDViolationError(WorkCompletionError, name="LOC_RDD_VIOL_ERR"):
    advice = (
        "the queue pair and the end-to-end context belong to different reliable datagram domains"
    )


class RemoteInvalidReadRequestError(WorkCompletionError, name="REM_INV_RD_REQ_ERR"):
    advice = "the peer's device refused a reliable datagram request as invalid"


class RemoteAbortedError(WorkCompletionError, name="REM_ABORT_ERR"):
    advice = "the peer aborted the operation; check the errors on the peer's side"


class InvalidEECNumberError(WorkCompletionError, name="INV_EECN_ERR"):
    advice = "invalid end-to-end context number (reliable datagram)"


class InvalidEECStateError(WorkCompletionError, name="INV_EEC_STATE_ERR"):
    advice = "the end-to-end context is in the wrong state (reliable datagram)"


class FatalDeviceError(WorkCompletionError, name="FATAL_ERR"):
    advice = "the device has failed; close all objects that use the device, then open it again"


class ResponseTimeoutError(WorkCompletionError, name="RESP_TIMEOUT_ERR"):
    advice = "the peer's response did not arrive in time"


class GeneralCompletionError(WorkCompletionError, name="GENERAL_ERR"):
    advice = "the transport failed for an unspecified reason; see the vendor error code"


class TagMatchingError(WorkCompletionError, name="TM_ERR"):
    advice = "tag matching failed on the shared receive queue"


class TagMatchingIncompleteError(WorkCompletionError, name="TM_RNDV_INCOMPLETE"):
    advice = "a tag-matched rendezvous must be completed by software"


WORK_COMPLETION_ERRORS: Mapping[int, type[WorkCompletionError]] = MappingProxyType(
    _work_completion_errors
)
"""The exception class for each ``enum ibv_wc_status`` error."""


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
    """Create the exception for a completion with the given ``status``.

    ``cause`` becomes the exception's ``__cause__``. For a flushed request, pass the queue pair's
    first failure. The other arguments are those of :class:`WorkCompletionError`.

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

# Advice for events after which an object can no longer be used (ibv_get_async_event(3)).
_EVENT_ADVICE = {
    "CQ_ERR": "the completion queue overflowed or failed; every queue pair that uses the queue "
    "has failed as well",
    "QP_FATAL": "the queue pair has failed; on the embedded device, the peer's process has ended "
    "or the network path is down; on a card, see the kernel log",
    "QP_REQ_ERR": "the peer sent an invalid request; check the errors on the peer's side",
    "QP_ACCESS_ERR": "the peer accessed memory without permission; correct the peer's program",
    "SRQ_ERR": "the shared receive queue failed; every queue pair that uses the queue has failed "
    "as well",
    "DEVICE_FATAL": "the device has failed; close all objects that use the device, then open it "
    "again",
}


class DeviceEventError(RDMAError):
    """An asynchronous event reported that the device, or an object on it, has failed.

    ``event`` is the event's name without ``IBV_EVENT_``, and ``device`` is the device's name.
    ``element`` is the failed object, or empty if the device itself failed.
    """

    def __init__(self, event: str, *, device: str = "", element: str = "") -> None:
        about = f" for {element}" if element else ""
        text = f"device {device!r} reported IBV_EVENT_{event}{about}"
        advice = _EVENT_ADVICE.get(event)
        super().__init__(f"{text}: {advice}" if advice else text)
        self.event = event
        self.device = device
        self.element = element


# --- connections ---------------------------------------------------------------------------------

# Likely causes and hints for error messages about connections.
PEER_GONE = "the peer does not respond: its process, machine or network has failed or is overloaded"
ON_LOOPBACK = "a listener on 127.0.0.1 accepts connections only from its own host"
TLS_HINT = "pass ssl= on both sides or on neither"
UNANNOUNCED = (
    "the peer disconnected without a goodbye: its process or device failed, or this side did not "
    "respond to it"
)


def short_cause(error: BaseException) -> str:
    """Return a short description of the error that ended a connection."""
    if isinstance(error, RetryExceededError):
        return PEER_GONE
    if isinstance(error, WorkCompletionError):
        return f"{error.operation or 'a work request'} failed with {type(error).__name__}"
    if isinstance(error, DeviceEventError):
        if error.event == "QP_FATAL":
            return f"{PEER_GONE}, or, with a card, this side's device failed"
        return f"the device reported {error.event}"
    if isinstance(error, VerbsError):
        return f"{error.verb} failed with {_errno.errorcode.get(error.errno or 0, 'no errno')}"
    return cause_text(error)


class ConnectionManagerError(RDMAError):
    """A connection could not be established.

    ``event`` is the name of the connection manager event (``"RDMA_CM_EVENT_..."``), or empty if a
    call failed immediately. ``status`` is the event's status: a negative errno, or the reason code
    for a rejection.
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
    """The peer's host is not responding to connection requests."""

    _default_errno = _errno.EHOSTUNREACH


class RejectedError(ConnectionManagerError, ConnectionRefusedError):
    """The peer's host rejected the connection request.

    ``reason`` is a reason code defined in IBTA clause 12.6.7.2, or a negative errno. For example,
    28 means that the application rejected the connection, and 8 means that nothing is listening on
    the port. ``private_data`` contains the data attached by the peer, including trailing zeros.

    ``by_application`` is True if the listener's ``on_request`` refused the connection. In this
    case, the message contains the reason returned by ``on_request``.
    """

    _default_errno = _errno.ECONNREFUSED
    # This table lists only the reasons that users can act on.
    _reasons: ClassVar[Mapping[int, str]] = MappingProxyType(
        {
            1: "the peer has no free queue pair",
            3: "the peer is out of resources",
            4: "the request timed out",
            5: "the peer does not support the request",
            8: "no listener on that port",
            10: "the peer still has a connection with this communication ID",
            28: "the peer's application rejected the connection",
            35: "the peer does not accept the offered vendor options (ECE)",
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
    """A datagram service rejected the request.

    ``reason`` is the status code from the reply (IBTA clause 12.11.2). For example, 2 means that
    the application rejected the request, and 1 means that nothing is listening on the port.
    """

    _reasons = MappingProxyType(
        {
            1: "no listener on that port",
            2: "the peer's application rejected the connection",
            3: "the peer has no queue pair for this service",
            4: "the service has moved to another port",
            5: "the peer uses a different version",
        }
    )


class ConnectionClosedError(RDMAError, ConnectionError):
    """The connection was closed cleanly by this side, or by the peer if ``by_peer`` is True."""

    def __init__(self, message: str = "", *, by_peer: bool = False) -> None:
        text = "the peer has closed the connection" if by_peer else "the connection is closed"
        super().__init__(message or text)
        self.by_peer = by_peer


class ConnectionBrokenError(RDMAError, ConnectionError):
    """The connection broke, because the peer's machine, the peer's program or the link failed.

    The message contains the likely cause. If the local device reported a failure, ``__cause__``
    contains the device's error.
    """

    def __init__(self, message: str = "the connection broke") -> None:
        super().__init__(message)


class OutcomeUnknownError(RDMAError):
    """A rail failed during an operation, so it is unknown whether the operation was executed.

    The operation was executed at most once. The connection continues on another rail.
    """


class ProtocolError(RDMAError):
    """The connection ended because the peer violated the protocol."""


class HandshakeBrokenError(ProtocolError, ConnectionError):
    """The peer disconnected during the handshake, for example because its process was killed."""


class IntegrityError(ProtocolError):
    """Data on an encrypted connection was modified, replayed, dropped or reordered in transit."""


class UnencryptedError(RDMAError):
    """Remote memory operations are not allowed on a connection with ``encrypt=True``.

    Devices cannot encrypt reads, writes or atomic operations.
    """

    def __init__(self) -> None:
        super().__init__(
            "operations on the peer's memory are not allowed with encrypt=True, because devices "
            'cannot encrypt them: send messages instead, or pass encrypt="messages" on both sides '
            "to allow unencrypted operations"
        )


class AuthenticationError(RDMAError, ConnectionRefusedError):
    """The two sides use different keys, or different ``auth=`` or ``encrypt=`` arguments."""


class RequestRefusedError(RDMAError):
    """The peer refused a request.

    ``code`` is a reason code defined by the protocol, and ``text`` describes the reason.
    """

    def __init__(self, code: int, text: str, *, peer: str = "") -> None:
        super().__init__(f"{peer or 'the peer'} refused the request: {text} (code {code})")
        self.code = code
        self.text = text


# --- limits, ranges, states ----------------------------------------------------------------------


class LimitError(RDMAError):
    """A request exceeds a limit.

    ``amount`` is the requested amount, and ``limit`` is the maximum. The message states the unit.
    """

    def __init__(self, message: str, *, amount: int = 0, limit: int = 0) -> None:
        super().__init__(message)
        self.amount = amount
        self.limit = limit


class QuotaError(LimitError):
    """A request exceeds the peer's lending quota, or the size limit of the memory pool."""


class MessageTooLongError(LimitError):
    """A message exceeds the peer's limit, or does not fit in the buffer passed to ``recv_into``.

    An outgoing message that is too long is not sent. An incoming message that does not fit can
    still be received into a larger buffer.
    """

    def __init__(self, length: int, limit: int, *, received: bool = False) -> None:
        if received:
            text = f"the next message has {length} bytes, but the memory passed for it has {limit}"
        else:
            text = (
                f"cannot send a message of {length} bytes: the receiver accepts at most {limit}"
                " (Config.max_message of the receiver)"
            )
        super().__init__(text, amount=length, limit=limit)


class RangeError(RDMAError, ValueError):
    """A range of a region cannot be accessed as requested. Nothing was posted.

    ``offset`` and ``length`` describe the requested range, and ``region_length`` is the region's
    size. All three are in bytes. ``right`` is the missing access right, if any. ``region_id``
    identifies the region if it belongs to the peer. In the message, ``detail`` replaces the reason.
    """

    _region_kind: ClassVar[str] = "region"

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
        name = (
            f"a {self._region_kind}" if region_id is None else f"{self._region_kind} {region_id:#x}"
        )
        text = f"cannot access {length} bytes at offset {offset} of {name} ({region_length} bytes)"
        why = f"missing the right to {right}" if right else "out of range"
        super().__init__(f"{text}: {detail or why}")
        self.offset = offset
        self.length = length
        self.region_length = region_length
        self.right = right
        self.region_id = region_id


class LocalRangeError(RangeError):
    """A range of local memory cannot be accessed as requested."""

    _region_kind = "local buffer"


class RemoteRangeError(RangeError):
    """A range of the peer's memory cannot be accessed as requested."""

    _region_kind = "remote region"


class BufferStateError(RDMAError):
    """A buffer was used after its release, released twice, or released while in use."""


class LeaseEndedError(BufferStateError):
    """The lease on a peer's region has ended, or the peer has revoked the region.

    Nothing was posted, and the connection stays open. ``region_id`` identifies the region.
    """

    def __init__(self, message: str, region_id: int) -> None:
        super().__init__(message)
        self.region_id = region_id


class BusyError(RDMAError):
    """Another task, thread or operation is using the object."""


class WrongLoopError(RDMAError, RuntimeError):
    """The object belongs to another event loop, another thread or the parent process."""


class TraceFormatError(RDMAError, ValueError):
    """A line of a trace file is not a valid record.

    ``path`` is the file's path, and ``line`` is the line number, starting at 1.
    """

    def __init__(self, detail: str, path: str = "", line: int = 0) -> None:
        super().__init__(f"{path or 'trace'}, line {line}: {detail}")
        self.path = path
        self.line = line


class InternalError(RDMAError):
    """A bug in aiordma was detected. Please report it."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message} (a bug in aiordma: please report it)")
