"""The tree of exceptions: its shape, its texts, and that all of it copies and pickles."""

from __future__ import annotations

import copy
import errno
import inspect
import pickle
import re
from collections.abc import Callable

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

MAKERS: list[Callable[[], RDMAError]] = [
    lambda: RDMAError("something"),
    lambda: VerbsError(errno.ENOMEM, "ibv_reg_mr", "raise RLIMIT_MEMLOCK"),
    lambda: VerbsError(0, "ibv_alloc_pd"),
    lambda: QPTransitionError("RC RESET -> RTS is no transition", missing=3, forbidden=4),
    lambda: PostError(errno.EINVAL, "ibv_post_send", 3),
    lambda: QueueFullError("ibv_post_send", 0, "128 entries"),
    lambda: UnsupportedError("extended completion queues", device="rxe0", verb="ibv_create_cq_ex"),
    lambda: DeviceNotFoundError("mlx5_9", ["embedded0", "rxe0"]),
    lambda: LibraryNotFoundError("libibverbs.so.1", detail="cannot open shared object file"),
    lambda: LibraryNotFoundError("librdmacm.so.1", symbol="rdma_establish"),
    lambda: DeviceEventError("CQ_ERR", device="mlx5_0", element="<CompletionQueue>"),
    lambda: ConnectionManagerError("refused", event="RDMA_CM_EVENT_CONNECT_ERROR", status=-22),
    lambda: AddressError("no way", event="RDMA_CM_EVENT_ADDR_ERROR", status=-errno.ENODEV),
    lambda: RouteError("no route"),
    lambda: UnreachableError("no answer", event="RDMA_CM_EVENT_UNREACHABLE", status=-110),
    lambda: RejectedError(reason=28, private_data=b"not today\0\0"),
    lambda: ServiceRejectedError(reason=2, private_data=b"not today\0\0"),
    ConnectionClosedError,
    lambda: ConnectionClosedError(by_peer=True),
    ConnectionBrokenError,
    lambda: ProtocolError("the peer sent nonsense"),
    lambda: IntegrityError("a frame was changed"),
    UnencryptedError,
    lambda: AuthenticationError("not the same key"),
    lambda: RequestRefusedError(3, "over the quota"),
    lambda: HandshakeBrokenError("after 3 bytes"),
    lambda: LimitError("too many", amount=9, limit=8),
    lambda: QuotaError("too much", amount=9, limit=8),
    lambda: MessageTooLongError(100, 64),
    lambda: RangeError(1, 2, 3),
    lambda: LocalRangeError(60, 8, 64, detail="odd"),
    lambda: RemoteRangeError(60, 8, 64, right="write"),
    lambda: BufferStateError("released"),
    lambda: LeaseEndedError("it has ended", 7),
    lambda: TraceFormatError("no JSON", path="run.jsonl", line=7),
    lambda: BusyError("in use"),
    lambda: WrongLoopError("made before fork()"),
    lambda: InternalError("impossible"),
    lambda: work_completion_error(77),
    *(
        lambda status=status: work_completion_error(
            status, operation="read", qp_num=0x11, wr_id=5, vendor_err=0x68, detail="at the end"
        )
        for status in WORK_COMPLETION_ERRORS
    ),
]


def all_classes() -> list[type[RDMAError]]:
    return [
        cls
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, RDMAError) and cls.__module__ == errors.__name__
    ]


def test_every_class_is_made_here() -> None:
    assert {type(make()) for make in MAKERS} == set(all_classes())


@pytest.mark.parametrize("make", MAKERS)
def test_copies_and_pickles(make: Callable[[], RDMAError]) -> None:
    error = make()
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


@pytest.mark.parametrize("make", MAKERS)
def test_has_a_text(make: Callable[[], RDMAError]) -> None:
    assert len(str(make())) >= len("in use")
    assert type(make()).__doc__


def test_the_docstring_draws_the_tree() -> None:
    assert errors.__doc__
    drawn = re.findall(r"^ *[│├└─ ]*(\w+Error)\b", errors.__doc__, re.MULTILINE)
    completions = {*WORK_COMPLETION_ERRORS.values()}
    assert sorted(drawn) == sorted(cls.__name__ for cls in all_classes() if cls not in completions)
    # Each stands below its parent: the depth of the drawing is the depth of the class.
    for line in errors.__doc__.splitlines():
        if match := re.match(r"    ([│├└─ ]*)(\w+Error)\b", line):
            cls = getattr(errors, match[2])
            depth = [base for base in cls.__mro__ if issubclass(base, RDMAError)]
            assert len(match[1]) == 4 * (len(depth) - 1), line
            builtins = re.search(r"Error \((\w+)\)", line)
            if builtins:
                assert any(base.__name__ == builtins[1] for base in cls.__mro__), line


@pytest.mark.parametrize(
    ("cls", "base"),
    [
        (VerbsError, OSError),
        (AddressError, OSError),
        (RouteError, OSError),
        (UnreachableError, OSError),
        (RejectedError, ConnectionRefusedError),
        (ConnectionClosedError, ConnectionError),
        (ConnectionBrokenError, ConnectionError),
        (RemoteRangeError, ValueError),
        (LocalRangeError, ValueError),
    ],
)
def test_can_be_caught_as_a_builtin(cls: type[RDMAError], base: type[Exception]) -> None:
    assert issubclass(cls, base)


def test_verbs_error_names_verb_and_errno() -> None:
    error = VerbsError(errno.ENOMEM, "ibv_reg_mr", "raise RLIMIT_MEMLOCK")
    assert (error.errno, error.verb) == (errno.ENOMEM, "ibv_reg_mr")
    assert str(error) == "[Errno 12] ibv_reg_mr: Cannot allocate memory; raise RLIMIT_MEMLOCK"
    assert "without an errno" in str(VerbsError(0, "ibv_alloc_pd"))


def test_kinds_of_verbs_errors() -> None:
    transition = QPTransitionError("no", missing=1, forbidden=2)
    assert (transition.errno, transition.missing, transition.forbidden) == (errno.EINVAL, 1, 2)
    full = QueueFullError("ibv_post_recv", 4, "128 entries")
    assert (full.bad_index, full.errno) == (4, errno.ENOMEM)
    assert "work request 4" in str(full)
    assert "queue is full" in str(full)
    assert "queue is full" not in str(PostError(errno.EINVAL, "ibv_post_send", 0))
    unsupported = UnsupportedError("memory windows", device="rxe0")
    assert (unsupported.errno, unsupported.capability) == (errno.EOPNOTSUPP, "memory windows")
    assert "device 'rxe0' does not offer memory windows" in str(unsupported)
    assert "the device does not" in str(UnsupportedError("memory windows"))


def test_unknown_device_lists_the_known_ones() -> None:
    error = DeviceNotFoundError("mlx5_9", iter(["embedded0", "rxe0"]))
    assert (error.errno, error.name, error.known) == (
        errno.ENODEV,
        "mlx5_9",
        ("embedded0", "rxe0"),
    )
    assert "there are: embedded0, rxe0" in str(error)
    assert "no device at all" in str(DeviceNotFoundError("x"))


def test_missing_library_says_what_to_install() -> None:
    error = LibraryNotFoundError("libibverbs.so.1", detail="no such file")
    assert (error.library, error.symbol, error.verb) == ("libibverbs.so.1", None, "dlopen")
    assert "install libibverbs1" in str(error)
    assert "(no such file)" in str(error)
    symbol = LibraryNotFoundError("librdmacm.so.1", symbol="rdma_establish")
    assert "librdmacm.so.1 has no symbol rdma_establish" in str(symbol)
    assert "the package that contains it" in str(LibraryNotFoundError("libefa.so.1"))


def test_work_completion() -> None:
    cause = ValueError("first")
    error = work_completion_error(
        10, operation="read", qp_num=0x1F, wr_id=7, vendor_err=0x68, detail="region 3", cause=cause
    )
    assert type(error) is RemoteAccessError
    assert (error.status, error.operation, error.qp_num, error.wr_id, error.vendor_err) == (
        10,
        "read",
        0x1F,
        7,
        0x68,
    )
    assert error.__cause__ is cause
    text = str(error)
    assert text.startswith("read on queue pair 0x1f: ")
    assert "(IBV_WC_REM_ACCESS_ERR), vendor error 0x68; region 3" in text
    assert type(work_completion_error(5)) is WorkRequestFlushedError
    assert str(work_completion_error(5)).startswith("work request: ")
    assert "vendor" not in str(work_completion_error(5))


def test_a_status_of_the_future() -> None:
    error = work_completion_error(99)
    assert type(error) is WorkCompletionError
    assert "(status 99)" in str(error)


def test_success_is_no_error() -> None:
    with pytest.raises(ValueError, match="SUCCESS"):
        work_completion_error(0)


def test_each_status_has_a_sentence_of_its_own() -> None:
    sentences = {cls.advice for cls in WORK_COMPLETION_ERRORS.values()}
    assert len(sentences) == len(WORK_COMPLETION_ERRORS)
    assert WorkCompletionError.advice not in sentences


def test_connection_manager() -> None:
    address = AddressError("no way", event="RDMA_CM_EVENT_ADDR_ERROR", status=-errno.ENODEV)
    assert (address.errno, address.event, address.status) == (
        errno.ENODEV,
        "RDMA_CM_EVENT_ADDR_ERROR",
        -errno.ENODEV,
    )
    assert str(address) == "[Errno 19] no way (RDMA_CM_EVENT_ADDR_ERROR: No such device)"
    assert RouteError("x").errno == errno.ENETUNREACH
    assert UnreachableError("x").errno == errno.EHOSTUNREACH
    assert str(ConnectionManagerError("x")) == "x"


def test_rejection_says_why() -> None:
    error = RejectedError(reason=8, private_data=b"\0")
    assert (error.errno, error.reason, error.status, error.private_data) == (
        errno.ECONNREFUSED,
        8,
        8,
        b"\0",
    )
    assert "no listener on that port (RDMA_CM_EVENT_REJECTED, status 8)" in str(error)
    assert "the connection was rejected (RDMA" in str(RejectedError(reason=1234))
    assert "the application there rejected it" in str(ServiceRejectedError(reason=2))
    assert "no listener on that port" in str(ServiceRejectedError(reason=1))


def test_closed_and_broken_are_told_apart() -> None:
    assert str(ConnectionClosedError()) == "the connection is closed"
    assert str(ConnectionClosedError(by_peer=True)) == "the peer has closed the connection"
    assert str(ConnectionClosedError("mine", by_peer=True)) == "mine"
    assert not issubclass(ConnectionBrokenError, ConnectionClosedError)


def test_limits_and_ranges() -> None:
    long = MessageTooLongError(100, 64)
    assert (long.amount, long.limit) == (100, 64)
    assert "100 bytes; the peer takes at most 64" in str(long)
    out = RemoteRangeError(60, 8, 64)
    assert (out.offset, out.length, out.region_length, out.right) == (60, 8, 64, "")
    assert str(out) == "offset 60, length 8 of a remote region of 64 bytes: out of range"
    assert str(RemoteRangeError(0, 8, 64, right="write")).endswith("without the right to write")
    assert "a local buffer of 64 bytes: odd" in str(LocalRangeError(0, 8, 64, detail="odd"))


def test_a_bug_asks_to_be_reported() -> None:
    assert str(InternalError("impossible")).endswith("please report it)")
