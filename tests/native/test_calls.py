"""Tests of the checked calls: conventions, exceptions, and agreement with the C table."""

from __future__ import annotations

import errno
import resource
from typing import Any

import pytest

from aiordma._native import Calls, Convention, convention_of, embedded, failure, ffi, lib
from aiordma._native.calls import checked
from aiordma.errors import UnsupportedError, VerbsError


def test_call_missing_in_an_older_library_raises_unsupported_error() -> None:
    older = ffi.new("struct aiordma_calls *", embedded().table[0])
    older.ibv_get_device_list = ffi.NULL
    with pytest.raises(UnsupportedError, match="ibv_get_device_list: the installed library is too"):
        Calls(older).ibv_get_device_list(ffi.NULL)


def test_calling_conventions_match_the_c_return_types() -> None:
    kinds = {
        Convention.POINTER: {"pointer"},
        Convention.COUNT: {"primitive"},
        Convention.PLAIN: {"void", "pointer", "primitive", "enum"},
    }
    types = {name: ffi.typeof(getattr(lib, name)) for name in dir(lib) if "_ibv_" in name}
    for table in ("aiordma_calls", "aiordma_provider_calls"):
        types |= {name: field.type for name, field in ffi.typeof(f"struct {table}").fields}
    del types["device"]
    found = set()
    for name, ctype in types.items():
        convention = convention_of(name.removeprefix("aiordma_"), ctype.result.cname)
        found.add(convention)
        if convention in kinds:
            assert ctype.result.kind in kinds[convention], name
        else:
            assert ctype.result.cname == "int", name
    assert found == set(Convention)


def _call(convention: Convention, result: object, code: int = 0) -> Any:
    """Wrap a C function that returns `result` and sets errno to `code`, and call it."""

    def function(*arguments: object) -> object:
        if code:
            ffi.errno = code
        return result

    return checked("ibv_test", function, convention)()


@pytest.mark.parametrize(
    ("convention", "result", "code", "expected"),
    [
        (Convention.ERRNO, errno.EBUSY, 0, errno.EBUSY),
        (Convention.ERRNO, -1, errno.ENOMEM, errno.ENOMEM),
        (Convention.ERRNO, -1, 0, 0),
        (Convention.ERRNO, -errno.ENOMEM, 0, errno.ENOMEM),
        (Convention.MINUS_ONE, -1, errno.EADDRINUSE, errno.EADDRINUSE),
        (Convention.MINUS_ONE, errno.EINVAL, 0, errno.EINVAL),
        (Convention.POINTER, ffi.NULL, errno.ENOMEM, errno.ENOMEM),
        (Convention.POINTER, ffi.NULL, 0, 0),
        (Convention.COUNT, -errno.EINVAL, 0, errno.EINVAL),
        (Convention.EVENT, -1, errno.EIO, errno.EIO),
    ],
)
def test_failed_call_raises_verbs_error_with_its_errno(
    convention: Convention, result: object, code: int, expected: int
) -> None:
    ffi.errno = errno.EPERM  # a stale errno must not be reported
    with pytest.raises(VerbsError) as caught:
        _call(convention, result, code)
    assert caught.value.errno == expected
    assert caught.value.verb == "ibv_test"
    assert "ibv_test" in str(caught.value)
    assert ("without an errno" in str(caught.value)) is (expected == 0)


def test_denied_system_call_is_not_reported_as_unsupported_by_the_device() -> None:
    error = failure("timerfd_create", errno.ENOSYS)
    assert type(error) is VerbsError
    assert str(error) == "[Errno 38] timerfd_create: Function not implemented"


def test_too_many_open_files_error_includes_the_limits() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(VerbsError, match=rf"is {soft} \(hard limit: {hard}\).*ulimit -n"):
        _call(Convention.MINUS_ONE, -1, errno.EMFILE)


@pytest.mark.parametrize(
    ("convention", "result", "expected"),
    [
        (Convention.ERRNO, 0, None),
        (Convention.MINUS_ONE, 0, None),
        (Convention.POINTER, 17, 17),
        (Convention.COUNT, 3, 3),
        (Convention.EVENT, 0, True),
        (Convention.PLAIN, -1, -1),
    ],
)
def test_successful_call_converts_its_result(
    convention: Convention, result: object, expected: object
) -> None:
    assert _call(convention, result) == expected


def test_interrupted_event_call_is_retried() -> None:
    codes = [errno.EINTR, errno.EINTR, errno.EAGAIN]

    def interrupted() -> int:
        ffi.errno = codes.pop(0)
        return -1

    assert checked("ibv_test", interrupted, Convention.EVENT)() is False
    assert not codes  # EAGAIN means no event


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, 524])
def test_unsupported_errnos_raise_unsupported_error(code: int) -> None:
    error = failure("ibv_resize_cq", code)
    assert isinstance(error, UnsupportedError)
    assert error.verb == "ibv_resize_cq"
    assert error.errno == code
