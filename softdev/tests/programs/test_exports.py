"""Tests that the library of `aiordma run` can replace the distribution's libraries."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from softdev.tests.abi.exports_check import table_of_exports
from tests.cli.test_run import dynamic_symbols

from .conftest import run_program

LIBRARIES = {"libibverbs.so.1": "libibverbs1", "librdmacm.so.1": "librdmacm1"}

# This program imitates an application that is linked with a provider's library. Loading the library
# resolves all of its symbols. The program then asks whether the library supports the device.
PROVIDER = """
import ctypes, os
provider = ctypes.CDLL("libmlx5.so.1", os.RTLD_NOW)
verbs = ctypes.CDLL(None)
verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
device = ctypes.c_void_p(verbs.ibv_get_device_list(None)[0])
provider.mlx5dv_is_supported.restype = ctypes.c_bool
print(provider.mlx5dv_is_supported(device))
"""


def system_library(name: str) -> Path:
    """Return the path of the distribution's library."""
    found = next(Path("/usr/lib").glob(f"*/{name}"), None)
    if found is None:
        pytest.fail(f"{name} is missing: apt-get install {LIBRARIES[name]}", pytrace=False)
    return found


@pytest.mark.parametrize("name", LIBRARIES)
def test_every_name_of_the_system_library_is_exported(name: str) -> None:
    names = {it for it, here in dynamic_symbols(system_library(name)).items() if here}
    assert "ibv_open_device" in names or "rdma_connect" in names
    # Skip version nodes, the linker's symbols, and verbs_register_driver_*, whose suffix depends on
    # the version of rdma-core.
    others = re.compile(r"[A-Z]|_init$|_fini$|_edata$|_end$|__bss_start$|verbs_register_driver_|$")
    assert {it for it in names if not others.match(it)} - table_of_exports().keys() == set()


def test_provider_library_loads_and_rejects_the_device() -> None:
    assert run_program(sys.executable, "-c", PROVIDER).expect() == "False\n"


def test_linked_program_prints_no_version_warnings() -> None:
    done = run_program("ibv_devices")
    done.expect()
    assert done.errors == ""
