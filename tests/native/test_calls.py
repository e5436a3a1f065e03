"""The checked calls: conventions, exceptions, and agreement with the C table."""

from __future__ import annotations

import errno
import inspect
import resource
from typing import Any, cast

import pytest

from aiordma._native import CONVENTIONS, EXTENDED, Calls, Convention, failure, ffi, lib
from aiordma._native.calls import checked
from aiordma.errors import UnsupportedError, VerbsError


def test_every_call_has_a_convention_and_a_type_and_is_in_the_table() -> None:
    fields = {name for name, _ in ffi.typeof("struct aiordma_calls").fields}
    assert set(CONVENTIONS) <= fields
    assert sorted(inspect.get_annotations(Calls)) == sorted({**CONVENTIONS, **EXTENDED})
    assert not set(EXTENDED) & set(CONVENTIONS)


def test_a_call_that_the_library_does_not_have_is_unsupported() -> None:
    class Older:
        ibv_get_device_list = ffi.NULL

        def __getattr__(self, name: str) -> object:
            return print

    calls = Calls(cast(Any, Older()))
    with pytest.raises(UnsupportedError, match="ibv_get_device_list: the installed library is too"):
        calls.ibv_get_device_list(cast(Any, ffi.NULL))


def test_conventions_fit_the_c_result_types() -> None:
    results = {
        Convention.POINTER: {"pointer"},
        Convention.ERRNO: {"primitive"},
        Convention.MINUS_ONE: {"primitive"},
        Convention.COUNT: {"primitive"},
        Convention.EVENT: {"primitive"},
        Convention.PLAIN: {"void", "pointer", "primitive", "enum"},
    }
    fields: dict[str, Any] = dict(ffi.typeof("struct aiordma_calls").fields)
    types = {name: fields[name].type for name in CONVENTIONS}
    types |= {name: ffi.typeof(getattr(lib, name.replace("ibv_", "aiordma_"))) for name in EXTENDED}
    for name, convention in {**CONVENTIONS, **EXTENDED}.items():
        result = types[name].result
        assert result.kind in results[convention], name
        if convention in (Convention.ERRNO, Convention.MINUS_ONE, Convention.EVENT):
            assert result.cname == "int", name


def _call(convention: Convention, result: object, code: int = 0) -> Any:
    """What the checked form of a C function returns that returns this and sets errno so."""

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
        (Convention.ERRNO, -errno.ENOMEM, 0, errno.ENOMEM),
        (Convention.MINUS_ONE, -1, errno.EADDRINUSE, errno.EADDRINUSE),
        (Convention.MINUS_ONE, errno.EINVAL, 0, errno.EINVAL),
        (Convention.POINTER, ffi.NULL, errno.ENOMEM, errno.ENOMEM),
        (Convention.POINTER, ffi.NULL, 0, 0),
        (Convention.COUNT, -errno.EINVAL, 0, errno.EINVAL),
        (Convention.EVENT, -1, errno.EIO, errno.EIO),
    ],
)
def test_failures(convention: Convention, result: object, code: int, expected: int) -> None:
    with pytest.raises(VerbsError) as caught:
        _call(convention, result, code)
    assert caught.value.errno == expected
    assert caught.value.verb == "ibv_test"
    assert "ibv_test" in str(caught.value)


def test_too_many_files_says_how_many_there_may_be() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(VerbsError, match=f"{soft} files open .* hard limit: {hard}.*ulimit -n"):
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
def test_successes(convention: Convention, result: object, expected: object) -> None:
    assert _call(convention, result) == expected


@pytest.mark.parametrize("convention", [Convention.ERRNO, Convention.POINTER])
def test_a_stale_errno_is_not_shown(convention: Convention) -> None:
    ffi.errno = errno.EPERM
    with pytest.raises(VerbsError) as caught:
        _call(convention, -1 if convention is Convention.ERRNO else ffi.NULL)
    assert caught.value.errno == 0
    assert "without an errno" in str(caught.value)


def test_event_says_whether_there_was_one() -> None:
    assert _call(Convention.EVENT, -1, errno.EAGAIN) is False


def test_event_is_tried_again_after_a_signal() -> None:
    codes = [errno.EINTR, errno.EINTR, errno.EAGAIN]

    def interrupted() -> int:
        ffi.errno = codes.pop(0)
        return -1

    assert checked("ibv_test", interrupted, Convention.EVENT)() is False
    assert not codes


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, 524])
def test_unsupported_is_told_apart(code: int) -> None:
    error = failure("ibv_resize_cq", code)
    assert isinstance(error, UnsupportedError)
    assert error.verb == "ibv_resize_cq"
    assert error.errno == code
