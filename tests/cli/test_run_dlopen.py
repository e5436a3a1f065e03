"""Tests that dlopen() finds the library of `aiordma run`, and of calls that it lacks."""

from __future__ import annotations

import errno
import json
import sys
from typing import Any

import pytest

from softdev.tests.abi.exports_check import table_of_exports

from .test_run import aiordma_run

NOT_SUPPORTED = errno.errorcode[errno.EOPNOTSUPP]  # same number as ENOTSUP

# Loads the RDMA libraries and defines `address`, which looks up a versioned symbol.
SETUP = """
import ctypes, errno, json, sys
libc = ctypes.CDLL(None)
libc.dlvsym.restype = ctypes.c_void_p
libc.dlvsym.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
names = ["libibverbs.so.1", "libibverbs.so", "librdmacm.so.1", "librdmacm.so"]
libraries = [ctypes.CDLL(name) for name in names]
def address(library, name, version):
    return libc.dlvsym(library._handle, name.encode(), version.encode())
"""


def result_of(program: str, **values: object) -> Any:
    """Run a program under `aiordma run` with `values` as its argument. Return its JSON output."""
    done = aiordma_run(sys.executable, "-c", SETUP + program, json.dumps(values))
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_every_library_name_loads_the_preloaded_library() -> None:
    """The library has state, so a program must not load a second copy by any name."""
    found = result_of("""
import os
addresses = {ctypes.cast(it.ibv_open_device, ctypes.c_void_p).value for it in libraries}
addresses.add(ctypes.cast(libc.ibv_open_device, ctypes.c_void_p).value)
mapped = {line.split()[-1] for line in open("/proc/self/maps")}
folder = os.environ["LD_LIBRARY_PATH"].split(":")[0]
print(json.dumps([len(addresses), [f"{folder}/{name}" in mapped for name in names],
    any(("ibverbs" in it or "rdmacm" in it) and not it.startswith(folder) for it in mapped)]))
""")
    assert found == [1, [True] * 4, False]


def test_dlvsym_finds_every_export_under_its_version() -> None:
    table = {
        name: version
        for name, (version, _) in table_of_exports().items()
        if version not in ("PRIVATE", "LIBC")
    }
    assert len(table) > 150
    program = """
table = json.loads(sys.argv[1])["table"]
print(json.dumps([name for name in table for library in libraries
    if not address(library, name, table[name]) or address(library, name, "IBVERBS_1.39")]))
"""
    assert result_of(program, table=table) == []


# Unimplemented calls: how the call fails, its name, its ctypes result type, and its result.
FORMS = [
    ("null", "ibv_alloc_dmah", "c_void_p", None),
    ("null", "ibv_create_comp_cntr", "c_void_p", None),
    ("minus", "ibv_dm_export_dmabuf_fd", "c_int", -1),
    ("minus", "ibv_export_buf_dmabuf_fd", "c_int", -1),
    ("errno", "ibv_dealloc_dmah", "c_int", NOT_SUPPORTED),
    ("errno", "_ibv_query_comp_cntr_caps", "c_int", NOT_SUPPORTED),
    ("errno", "ibv_qp_attach_comp_cntr", "c_int", NOT_SUPPORTED),
    ("void", "ibv_copy_ah_attr_from_kern", "c_void_p", "anything"),
]


@pytest.mark.parametrize(("form", "name", "kind", "expected"), FORMS)
def test_unimplemented_call_fails_with_eopnotsupp(
    form: str, name: str, kind: str, expected: object
) -> None:
    assert table_of_exports()[name][1] == form
    program = """
library = ctypes.CDLL("libibverbs.so.1", use_errno=True)
values = json.loads(sys.argv[1])
call = getattr(library, values["name"])
call.restype = getattr(ctypes, values["kind"])
result = call(None, None)
print(json.dumps([errno.errorcode[ctypes.get_errno()], errno.errorcode.get(result, result)]))
"""
    error, result = result_of(program, name=name, kind=kind)
    assert error == NOT_SUPPORTED
    assert result == expected or form == "void"


def test_rdma_core_64_calls_succeed_or_fail_as_documented() -> None:
    """Allocating a buffer, registering it and querying the port speed are supported."""
    results = result_of("""
from ctypes import *
verbs = CDLL("libibverbs.so.1", use_errno=True)
for name in ("ibv_open_device", "ibv_alloc_pd", "ibv_alloc_buf", "ibv_reg_buf_mr", "ibv_reg_mr_ex"):
    getattr(verbs, name).restype = c_void_p
verbs.ibv_get_device_list.restype = POINTER(c_void_p)
class Attr(Structure):
    _fields_ = [("length", c_size_t), ("access", c_int), ("comp_mask", c_uint64),
        ("iova", c_uint64), ("addr", c_void_p), ("fd", c_int), ("fd_offset", c_uint64),
        ("dmah", c_void_p), ("buf", c_void_p)]
context = c_void_p(verbs.ibv_open_device(c_void_p(verbs.ibv_get_device_list(None)[0])))
pd, other = (c_void_p(verbs.ibv_alloc_pd(context)) for _ in range(2))
speed = c_uint64()
results = [verbs.ibv_query_port_speed(context, 1, byref(speed)), speed.value,
    errno.errorcode[verbs.ibv_query_port_speed(context, 2, byref(speed))]]
buf = c_void_p()
base = verbs.ibv_alloc_buf(pd, c_size_t(10000), byref(buf))
results.append(base % 4096)
def register(call, *arguments):
    mr = call(*arguments)
    if mr is None:
        return errno.errorcode[get_errno()]
    return verbs.ibv_dereg_mr(c_void_p(mr))
def of_buffer(pd, offset, length):
    return register(verbs.ibv_reg_buf_mr, pd, buf, c_void_p(base + offset), c_size_t(length), 1)
results += [of_buffer(pd, 0, 10000), of_buffer(pd, 9000, 1000), of_buffer(pd, 9000, 1001),
    of_buffer(pd, -1, 5), of_buffer(other, 0, 10000)]
def extended(mask):
    attr = Attr(length=100, access=1, comp_mask=mask, iova=0, addr=base, fd=-1, buf=buf)
    return register(verbs.ibv_reg_mr_ex, pd, byref(attr))
results += [extended(mask) for mask in (2, 3, 2 | 32, 2 | 16, 2 | 64, 0, 2 | 4, 2 | 32 | 4)]
verbs.ibv_free_buf(buf)
print(json.dumps(results))
""")
    assert results == [
        *(0, 2000, "EINVAL", 0),
        *(0, 0, "EINVAL", "EINVAL", "EINVAL"),
        *(0, 0, 0, NOT_SUPPORTED, NOT_SUPPORTED, "EINVAL", "EINVAL", "EINVAL"),
    ]
