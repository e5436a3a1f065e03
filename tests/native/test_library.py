"""Tests of the two libraries, and that importing the package has no effects."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from aiordma import cm
from aiordma._native import embedded, ffi
from aiordma._native.library import Library, _not_found
from aiordma.errors import LibraryNotFoundError, UnsupportedError
from tests.processes import run_python

UNTYPED: Any = ffi  # the stub covers only the package's own use


def test_embedded_library_is_a_singleton() -> None:
    assert embedded() is embedded()
    assert embedded().name == "embedded"
    assert repr(embedded()) == "<Library embedded>"


def test_missing_calls_lists_functions_absent_from_an_older_library() -> None:
    table = UNTYPED.new(
        "struct aiordma_calls *", UNTYPED.cast("struct aiordma_calls *", embedded().table)[0]
    )
    assert Library("newer", table).missing_calls() == ()
    table.ibv_set_ece = table.rdma_get_remote_ece = ffi.NULL
    assert Library("older", table).missing_calls() == ("ibv_set_ece", "rdma_get_remote_ece")


def test_event_channel_is_unsupported_in_a_child_with_inherited_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is refused only if the library keeps the parent's state and the parent has used it."""
    table = embedded().table
    inherits, unused, own = (
        Library("old", table, keeps_devices_on_fork=True),
        Library("old", table, keeps_devices_on_fork=True),
        Library("new", table),
    )
    for library in (inherits, own, inherits):
        cm.EventChannel(library).close()
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    with pytest.raises(
        UnsupportedError, match="forked child whose parent had already opened devices"
    ) as caught:
        cm.EventChannel(inherits)
    assert "via='tcp'" in str(caught.value)
    for library in (own, unused, unused):
        cm.EventChannel(library).close()


def test_library_not_found_error_identifies_the_library_and_symbol() -> None:
    text = "library libibverbs.so.1 cannot be loaded (no such file); install libibverbs1"
    for error, symbol, told in (
        (_not_found(2, text), None, "no such file"),
        (_not_found(38, "symbol ibv_new is missing in libibverbs.so.1, update"), "ibv_new", ""),
    ):
        assert isinstance(error, LibraryNotFoundError)
        assert (error.library, error.symbol) == ("libibverbs.so.1", symbol)
        assert told in str(error)
    assert "something else" in str(_not_found(5, "something else"))


# This runs in a child process, because the test process has already imported the modules.
_IMPORT = """
import logging, os, threading
def held():
    return sorted(os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
                  if os.path.exists(f"/proc/self/fd/{n}"))
before = held()
import aiordma.verbs, aiordma.cm
assert held() == before, (before, held())
assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1
assert not logging.root.handlers
with open("/proc/self/maps") as maps:
    text = maps.read()
assert "libibverbs" not in text and "librdmacm" not in text
"""


@pytest.mark.parametrize("flags", [[], ["-X", "dev"]])
def test_import_has_no_side_effects(flags: list[str]) -> None:
    subprocess.run([sys.executable, *flags, "-c", _IMPORT], check=True, timeout=300)


OPENS = """
from aiordma import cm, verbs
device = verbs.devices()[-1]
for what in device.open, lambda: cm.EventChannel(device.library):
    try:
        what()
    except OSError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("variable", "value", "cause", "remedy"),
    [
        (
            "TRACE",
            "/proc/run.%p",
            "No such file or directory",
            "cannot write a trace there; name a regular",
        ),
        ("TRACE", "/", "Is a directory", "cannot write a trace there; name a regular"),
        (
            "TRACE",
            "/dev/full",
            "Invalid argument",
            "because it is not a regular file; name another",
        ),
        ("TRACE", "x" * 4096, "File name too long", "cannot write a trace there; name a regular"),
        ("EMBEDDED_DEVICES", "5", "Invalid argument", "expected a number of devices from 1 to 4,"),
        ("EMBEDDED_FAULTS", "seed=1,speed=3", "Invalid argument", "'speed=3': unknown part; e"),
        ("EMBEDDED_LINKS", "smoke", "Invalid argument", "expected 'shared', 'tcp' or 'roce'"),
        ("EMBEDDED_PATH_TIMEOUT", "0", "Invalid argument", "expected a number of seconds from 1 "),
    ],
)
def test_error_identifies_the_invalid_environment_variable(
    variable: str, value: str, cause: str, remedy: str
) -> None:
    """Programs in C get the message on standard error."""
    done = run_python("-c", OPENS, **{f"AIORDMA_{variable}": value})
    wrong = f"AIORDMA_{variable} is '{value[:700]}': "
    opened, channel = done.stdout.splitlines()
    assert f"ibv_open_device: {cause}; {wrong}" in opened
    assert f"rdma_create_event_channel: {cause}; {wrong}" in channel
    assert remedy in opened
    assert remedy in channel
    assert done.stderr.count(f"aiordma: {wrong}") == 2
