"""The two libraries, and what importing does not do."""

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

UNTYPED: Any = ffi  # the stub knows only what the package does with it


def test_embedded_is_one_object_with_all_calls() -> None:
    assert embedded() is embedded()
    assert embedded().name == "embedded"
    assert repr(embedded()) == "<Library embedded>"


def test_what_an_older_library_lacks_is_named() -> None:
    table = UNTYPED.new(
        "struct aiordma_calls *", UNTYPED.cast("struct aiordma_calls *", embedded().table)[0]
    )
    assert Library("newer", table).missing_calls() == ()
    table.ibv_set_ece = table.rdma_get_remote_ece = ffi.NULL
    assert Library("older", table).missing_calls() == ("ibv_set_ece", "rdma_get_remote_ece")


def test_the_connection_manager_in_the_child_of_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused where the library goes on with what its parent had opened, and was used there."""
    table = embedded().table
    inherits, unused, own = (
        Library("old", table, inherited=True),
        Library("old", table, inherited=True),
        Library("new", table),
    )
    for library in (inherits, own, inherits):
        cm.EventChannel(library).close()
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    with pytest.raises(UnsupportedError, match="forked after its parent had used it") as caught:
        cm.EventChannel(inherits)
    assert "via='tcp'" in str(caught.value)
    for library in (own, unused, unused):
        cm.EventChannel(library).close()


def test_missing_library_is_named() -> None:
    text = "library libibverbs.so.1 cannot be loaded (no such file); install libibverbs1"
    error = _not_found(2, text)
    assert isinstance(error, LibraryNotFoundError)
    assert error.library == "libibverbs.so.1"
    assert error.symbol is None
    assert "no such file" in str(error)
    assert "install" in str(error)


def test_missing_symbol_is_named() -> None:
    error = _not_found(38, "symbol ibv_new is missing in libibverbs.so.1, which is too old; update")
    assert isinstance(error, LibraryNotFoundError)
    assert (error.library, error.symbol) == ("libibverbs.so.1", "ibv_new")


def test_another_text_is_kept() -> None:
    assert "something else" in str(_not_found(5, "something else"))


# Run in a process of its own, so that nothing has been imported yet.
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
def test_import_does_nothing(flags: list[str]) -> None:
    subprocess.run([sys.executable, *flags, "-c", _IMPORT], check=True, timeout=300)


# The loader finds no library of that name: a wrapper directory cannot hide an installed one, so
# the child replaces the C call's answer by asking for a table under a name that does not exist.
_NO_LIBRARY = """
from aiordma import verbs
from aiordma._native import library
from aiordma.errors import LibraryNotFoundError
def missing():
    raise LibraryNotFoundError("libibverbs.so.1")
import aiordma.verbs._device.device as device
device.system = missing
assert [found.name for found in verbs.devices()] == ["embedded0"]
assert verbs.find_device().name == "embedded0"
"""


def test_without_the_system_library_there_is_the_embedded_device() -> None:
    subprocess.run([sys.executable, "-c", _NO_LIBRARY], check=True, timeout=300)
