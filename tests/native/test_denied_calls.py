"""Test system calls that the kernel denies, as seccomp filters of containers do."""

from __future__ import annotations

import errno
import json
import platform
from functools import cache

import pytest

from tests.denied_calls import CALLS, MACHINES, Call
from tests.processes import run_python

from .denied_calls_child import ERRORS

pytestmark = pytest.mark.skipif(
    platform.machine() not in MACHINES, reason="the numbers of the calls are not known here"
)

CASES = [
    pytest.param(links, call, error, id=f"{links}-{call.name}-{errno.errorcode[error]}")
    for call in CALLS
    for links in call.links
    for error in ERRORS
]


@cache
def outcomes(links: str) -> dict[str, str]:
    done = run_python("-m", "tests.native.denied_calls_child", links)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.xdist_group("denied_calls")
@pytest.mark.parametrize(("links", "call", "error"), CASES)
def test_denied_system_call_is_reported_unless_it_has_a_fallback(
    links: str, call: Call, error: int
) -> None:
    found = outcomes(links)[f"{call.name} {errno.errorcode[error]}"]
    if call.is_needed:
        assert f"[Errno {error}]" in found
        assert f"the system call {call.name}," in found
    else:
        assert found == "works"
