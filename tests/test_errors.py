"""Tests of the tree of exceptions: its shape and texts, and copying and pickling."""

from __future__ import annotations

import copy
import errno
import inspect
import pickle
import re

import pytest

from aiordma import errors
from aiordma.errors import (
    WORK_COMPLETION_ERRORS,
    AddressError,
    AuthenticationError,
    BufferStateError,
    BusyError,
    ConnectionBrokenError,
    ConnectionClosedError,
    ConnectionManagerError,
    DeviceEventError,
    DeviceNotFoundError,
    HandshakeBrokenError,
    IntegrityError,
    InternalError,
    LeaseEndedError,
    LibraryNotFoundError,
    LimitError,
    LocalRangeError,
    MessageTooLongError,
    OutcomeUnknownError,
    PostError,
    ProtocolError,
    QPTransitionError,
    QueueFullError,
    QuotaError,
    RangeError,
    RDMAError,
    RejectedError,
    RemoteAccessError,
    RemoteRangeError,
    RequestRefusedError,
    RouteError,
    ServiceRejectedError,
    TraceFormatError,
    UnencryptedError,
    UnreachableError,
    UnsupportedError,
    VerbsError,
    WorkCompletionError,
    WorkRequestFlushedError,
    WrongLoopError,
    work_completion_error,
)

SAYS: list[tuple[RDMAError, dict[str, object], str]] = [
    (
        VerbsError(errno.ENOMEM, "ibv_reg_mr", "raise RLIMIT_MEMLOCK"),
        {"errno": errno.ENOMEM, "verb": "ibv_reg_mr"},
        "[Errno 12] ibv_reg_mr: Cannot allocate memory; raise RLIMIT_MEMLOCK",
    ),
    (VerbsError(0, "ibv_alloc_pd"), {}, "…without an errno…"),
    (
        QPTransitionError("no", missing=1, forbidden=2),
        {"errno": errno.EINVAL, "missing": 1, "forbidden": 2},
        "…no…",
    ),
    (
        QueueFullError("ibv_post_recv", 4, "128 entries"),
        {"bad_index": 4, "errno": errno.ENOMEM},
        "…work request 4…queue is full…",
    ),
    (
        UnsupportedError("memory windows", device="rxe0"),
        {"errno": errno.EOPNOTSUPP, "capability": "memory windows"},
        "…device 'rxe0' does not support memory windows…",
    ),
    (UnsupportedError("memory windows"), {}, "…the device does not…"),
    (
        DeviceNotFoundError("mlx5_9", iter(["embedded0", "rxe0"])),
        {"errno": errno.ENODEV, "name": "mlx5_9", "known": ("embedded0", "rxe0")},
        "…available devices: embedded0, rxe0…",
    ),
    (DeviceNotFoundError("x"), {}, "…no RDMA device…"),
    (
        LibraryNotFoundError("libibverbs.so.1", detail="no such file"),
        {"library": "libibverbs.so.1", "symbol": None, "verb": "dlopen"},
        "…install libibverbs1…(no such file)…",
    ),
    (
        LibraryNotFoundError("librdmacm.so.1", symbol="rdma_establish"),
        {"symbol": "rdma_establish"},
        "…librdmacm.so.1 has no symbol rdma_establish…",
    ),
    (LibraryNotFoundError("libefa.so.1"), {}, "…the package that contains it…"),
    (
        work_completion_error(
            10, operation="read", qp_num=0x1F, wr_id=7, vendor_err=0x68, detail="region 3"
        ),
        {"status": 10, "operation": "read", "qp_num": 0x1F, "wr_id": 7, "vendor_err": 0x68},
        "read on queue pair 0x1f: …(IBV_WC_REM_ACCESS_ERR), vendor error 0x68; region 3…",
    ),
    (work_completion_error(5), {}, "work request: …"),
    (work_completion_error(99), {"status": 99}, "…(status 99)…"),
    (
        AddressError("no way", event="RDMA_CM_EVENT_ADDR_ERROR", status=-errno.ENODEV),
        {"errno": errno.ENODEV, "event": "RDMA_CM_EVENT_ADDR_ERROR", "status": -errno.ENODEV},
        "[Errno 19] no way (RDMA_CM_EVENT_ADDR_ERROR: No such device)",
    ),
    (RouteError("x"), {"errno": errno.ENETUNREACH}, "…x…"),
    (UnreachableError("x"), {"errno": errno.EHOSTUNREACH}, "…x…"),
    (ConnectionManagerError("x"), {}, "x"),
    (
        RejectedError(reason=8, private_data=b"\0"),
        {"errno": errno.ECONNREFUSED, "reason": 8, "status": 8, "private_data": b"\0"},
        "…no listener on that port (RDMA_CM_EVENT_REJECTED, status 8)…",
    ),
    (RejectedError(reason=1234), {}, "…the connection was rejected (RDMA…"),
    (ServiceRejectedError(reason=2), {}, "…the peer's application rejected the connection…"),
    (ServiceRejectedError(reason=1), {}, "…no listener on that port…"),
    (ConnectionClosedError(), {"by_peer": False}, "the connection is closed"),
    (ConnectionClosedError(by_peer=True), {"by_peer": True}, "the peer has closed the connection"),
    (ConnectionClosedError("mine", by_peer=True), {}, "mine"),
    (
        MessageTooLongError(100, 64),
        {"amount": 100, "limit": 64},
        "…100 bytes: the receiver accepts at most 64…",
    ),
    (
        RemoteRangeError(60, 8, 64),
        {"offset": 60, "length": 8, "region_length": 64, "right": ""},
        "cannot access 8 bytes at offset 60 of a remote region (64 bytes): out of range",
    ),
    (RemoteRangeError(0, 8, 64, right="write"), {}, "…missing the right to write"),
    (LocalRangeError(0, 8, 64, detail="odd"), {}, "…a local buffer (64 bytes): odd…"),
    (InternalError("impossible"), {}, "…please report it)"),
]
"""`…` matches any text."""


ERRORS: list[RDMAError] = [
    *(error for error, _, _ in SAYS),
    RDMAError("something"),
    PostError(errno.EINVAL, "ibv_post_send", 3),
    DeviceEventError("CQ_ERR", device="mlx5_0", element="<CompletionQueue>"),
    ConnectionBrokenError(),
    OutcomeUnknownError("it may have been done or not"),
    ProtocolError("the peer sent nonsense"),
    IntegrityError("a frame was changed"),
    UnencryptedError(),
    AuthenticationError("not the same key"),
    RequestRefusedError(3, "over the quota"),
    HandshakeBrokenError("after 3 bytes"),
    LimitError("too many", amount=9, limit=8),
    QuotaError("too much", amount=9, limit=8),
    RangeError(1, 2, 3),
    BufferStateError("released"),
    LeaseEndedError("it has ended", 7),
    TraceFormatError("no JSON", path="run.jsonl", line=7),
    BusyError("in use"),
    WrongLoopError("made before fork()"),
    *map(work_completion_error, WORK_COMPLETION_ERRORS),
]


def all_classes() -> list[type[RDMAError]]:
    return [
        cls
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, RDMAError) and cls.__module__ == errors.__name__
    ]


def test_every_error_class_has_an_example() -> None:
    assert {*map(type, ERRORS)} == set(all_classes())


@pytest.mark.parametrize("error", ERRORS)
def test_errors_can_be_copied_and_pickled(error: RDMAError) -> None:
    error.add_note("seen by a test")
    for again in (
        copy.copy(error),
        copy.deepcopy(error),
        *(pickle.loads(pickle.dumps(error, n)) for n in range(pickle.HIGHEST_PROTOCOL + 1)),
    ):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.args == error.args
        assert vars(again) == vars(error)
        if isinstance(error, OSError):
            assert isinstance(again, OSError)
            assert (again.errno, again.strerror) == (error.errno, error.strerror)


def test_module_docstring_shows_the_exception_hierarchy() -> None:
    assert errors.__doc__
    drawn = re.findall(r"^ *[│├└─ ]*(\w+Error)\b", errors.__doc__, re.MULTILINE)
    completions = {*WORK_COMPLETION_ERRORS.values()}
    assert sorted(drawn) == sorted(cls.__name__ for cls in all_classes() if cls not in completions)
    # The indentation of a class in the drawing must match its depth in the hierarchy.
    for line in errors.__doc__.splitlines():
        if match := re.match(r"    ([│├└─ ]*)(\w+Error)\b", line):
            cls = getattr(errors, match[2])
            depth = [base for base in cls.__mro__ if issubclass(base, RDMAError)]
            assert len(match[1]) == 4 * (len(depth) - 1), line
            builtins = re.search(r"Error \((\w+)\)", line)
            if builtins:
                assert any(base.__name__ == builtins[1] for base in cls.__mro__), line


@pytest.mark.parametrize(("error", "attributes", "text"), SAYS)
def test_errors_have_expected_attributes_and_messages(
    error: RDMAError, attributes: dict[str, object], text: str
) -> None:
    assert {name: getattr(error, name) for name in attributes} == attributes
    assert re.fullmatch(".*".join(map(re.escape, text.split("…"))), str(error)), str(error)


def test_work_completion_error_selects_class_by_status() -> None:
    cause = ValueError("first")
    assert work_completion_error(10, cause=cause).__cause__ is cause
    kinds = {5: WorkRequestFlushedError, 10: RemoteAccessError, 99: WorkCompletionError}
    assert {status: type(work_completion_error(status)) for status in kinds} == kinds
    with pytest.raises(ValueError, match="SUCCESS"):
        work_completion_error(0)
    assert "vendor" not in str(work_completion_error(5))
    assert "queue is full" not in str(PostError(errno.EINVAL, "ibv_post_send", 0))
    assert not issubclass(ConnectionBrokenError, ConnectionClosedError)


def test_work_completion_statuses_have_distinct_advice() -> None:
    sentences = {cls.advice for cls in WORK_COMPLETION_ERRORS.values()}
    assert len(sentences) == len(WORK_COMPLETION_ERRORS)
    assert WorkCompletionError.advice not in sentences
