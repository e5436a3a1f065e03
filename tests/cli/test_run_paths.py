"""Tests of the device's files in /sys and /dev that programs see under `aiordma run`."""

from __future__ import annotations

import json
import os
import platform
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from aiordma import verbs
from aiordma.cli import run as command
from tests import denied_calls
from tests.processes import run, run_python

from .test_run import aiordma_run

CLASS = "/sys/class/infiniband/embedded0"
DEVICE = "/sys/devices/virtual/aiordma/embedded0"
NODE = "/dev/infiniband/uverbs1000"


def evaluate(*expressions: str, setup: str = "", **environment: str) -> list[Any]:
    """Evaluate Python expressions under `aiordma run`. An OSError becomes the name of its errno."""
    program = f"""
import contextlib, errno, glob, json, os, stat, sys
{setup}
def read(path):
    with open(path) as file:
        return file.read().rstrip("\\n")
def result(expression):
    try:
        return eval(expression)
    except OSError as error:
        return errno.errorcode[error.errno]
print(json.dumps([result(it) for it in json.loads(sys.argv[1])]))
"""
    done = aiordma_run(sys.executable, "-c", program, json.dumps(expressions), **environment)
    assert (done.returncode, done.stderr) == (0, "")
    values: list[Any] = json.loads(done.stdout)
    return values


def test_device_directories_list_only_the_embedded_device() -> None:
    listed = evaluate(
        *(
            f"sorted(os.listdir({path!r}))"
            for path in (
                "/sys/class/infiniband", "/sys/class/infiniband_verbs", "/dev/infiniband/",
                f"{CLASS}/ports", f"{CLASS}/device/net", f"{CLASS}/ports/1/pkeys",
            )
        ),
        "[it.name for it in os.scandir('/sys/class/infiniband')]",
        "glob.glob('/sys/class/infiniband/*/ports/*/gid_attrs/types/0')",
    )  # fmt: skip
    assert listed == [
        ["embedded0"],
        ["abi_version", "uverbs1000"],
        ["rdma_cm", "uverbs1000"],
        ["1"],
        ["lo"],
        ["0"],
        ["embedded0"],
        [f"{CLASS}/ports/1/gid_attrs/types/0"],
    ]


def test_sysfs_files_match_the_queried_attributes() -> None:
    with verbs.find_device("embedded0").open() as context:
        device, port = context.query_device(), context.query_port()
        table = context.query_gid_table()
    files = [
        "node_guid", "fw_ver", "node_type", "ports/1/state", "ports/1/phys_state",
        "ports/1/link_layer", "ports/1/rate", "ports/1/pkeys/0", "device/numa_node",
        "ports/1/gids/254", "ports/1/gid_attrs/types/254",
    ]  # fmt: skip
    guid = f"{device.node_guid:016x}"
    assert evaluate(*(f"read({f'{CLASS}/{name}'!r})" for name in files)) == [
        ":".join(guid[at : at + 4] for at in range(0, 16, 4)),
        device.fw_ver,
        "1: CA",
        f"{port.state}: {port.state.name}",
        "5: LinkUp",
        "Ethernet",
        "200 Gb/sec (4X HDR)",
        "0xffff",
        "-1",
        ":".join(["0000"] * 8),
        "EINVAL",
    ]
    for entry in table:
        at, gid = entry.gid_index, entry.gid.raw.hex()
        assert evaluate(
            f"read('{CLASS}/ports/1/gids/{at}')",
            f"read('{CLASS}/ports/1/gid_attrs/types/{at}')",
            f"read('{CLASS}/ports/1/gid_attrs/ndevs/{at}')",
        ) == [":".join(gid[i : i + 4] for i in range(0, 32, 4)), "RoCE v2", entry.ndev]


@pytest.mark.skipif(
    platform.machine() not in denied_calls.MACHINES, reason="the number of the call is not known"
)
def test_sysfs_files_are_pipes_when_memfd_create_is_denied() -> None:
    path = f"{CLASS}/ports/1/link_layer"
    setup = """
from tests import denied_calls
denied_calls.deny(denied_calls.BY_NAME["memfd_create"], errno.ENOSYS)
"""
    assert evaluate(
        f"read('{path}')",
        f"stat.S_ISFIFO(os.fstat(os.open('{path}', os.O_RDONLY)).st_mode)",
        f"os.get_inheritable(os.open('{path}', os.O_RDONLY | os.O_CLOEXEC))",
        setup=setup,
    ) == ["Ethernet", True, False]


FILE = f"{CLASS}/node_desc"
OPENED = f"os.open('{FILE}', os.O_RDONLY)"
DEV = "/sys/class/infiniband_verbs/uverbs1000"
REGULAR = stat.S_IFREG | 0o444
EXPRESSIONS = {
    # Links have the same targets as in sysfs.
    f"os.readlink('{CLASS}')": "../../devices/virtual/aiordma/embedded0/infiniband/embedded0",
    f"os.readlink('{CLASS}/device')": "../../../embedded0",
    f"os.path.realpath('{CLASS}/device')": DEVICE,
    f"os.path.realpath('{CLASS}/../..')": DEVICE,
    f"stat.S_ISLNK(os.lstat('{CLASS}').st_mode)": True,
    f"stat.S_ISDIR(os.stat('{CLASS}').st_mode)": True,
    f"os.readlink('{CLASS}/node_guid')": "EINVAL",
    f"os.path.samefile('{CLASS}/device/net/lo', '/sys/class/net/lo')": True,
    # The node can be inspected but not opened.
    f"stat.S_ISCHR(os.stat('{NODE}').st_mode)": True,
    f"os.access('{NODE}', os.R_OK | os.W_OK)": True,
    f"os.open('{NODE}', os.O_RDWR)": "ENXIO",
    "os.path.exists('/dev/infiniband/rdma_cm')": True,
    f"'%d:%d' % (os.major(os.stat('{NODE}').st_rdev), os.minor(os.stat('{NODE}').st_rdev))"
    f" == read('{DEV}/dev')": True,
    f"read('{DEV}/ibdev')": "embedded0",
    f"os.stat('{NODE}').st_rdev != os.stat('/dev/infiniband/rdma_cm').st_rdev": True,
    # Files are read-only, and not executable because vm.memfd_noexec may forbid executable memfds.
    f"os.open('{FILE}', os.O_WRONLY)": "EACCES",
    f"os.open('{FILE}', os.O_RDONLY | os.O_DIRECTORY)": "ENOTDIR",
    f"os.access('{FILE}', os.W_OK)": False,
    f"os.write({OPENED}, b'x')": "EPERM",
    f"os.access('{FILE}', os.R_OK)": True,
    f"os.stat('{FILE}').st_mode": REGULAR,
    f"os.stat({OPENED}).st_mode": REGULAR,
    # Paths are relative to an open directory.
    "os.read(os.open('ports/1/state', os.O_RDONLY, dir_fd=top), 99).decode()": "4: ACTIVE\n",
    "os.stat('node_type', dir_fd=top).st_size": 4096,
    "os.readlink('device', dir_fd=top)": "../../../embedded0",
    "os.path.samestat(os.stat('../..', dir_fd=top), os.stat('/dev/infiniband/..'))": False,
    "os.stat('no such file', dir_fd=top)": "ENOENT",
}


def test_links_nodes_and_directory_descriptors_behave_like_sysfs() -> None:
    found = evaluate(*EXPRESSIONS, setup=f"import os; top = os.open('{CLASS}', os.O_RDONLY)")
    assert dict(zip(EXPRESSIONS, found, strict=True)) == EXPRESSIONS


def test_all_embedded_devices_appear_in_sysfs() -> None:
    expected = {
        "sorted(os.listdir('/sys/class/infiniband'))": ["embedded0", "embedded1"],
        "sorted(os.listdir('/dev/infiniband'))": ["rdma_cm", "uverbs1000", "uverbs1001"],
        "read(one + '/ports/1/gids/0')": "0000:0000:0000:0000:0000:ffff:7f00:0002",
        "read(one + '/node_guid') != read(one[:-1] + '0/node_guid')": True,
        "os.readlink(one)": "../../devices/virtual/aiordma/embedded1/infiniband/embedded1",
        "os.listdir(one + '/device/infiniband_verbs')": ["uverbs1001"],
        "read('/sys/class/infiniband_verbs/uverbs1001/ibdev')": "embedded1",
        "os.minor(os.stat('/dev/infiniband/uverbs1001').st_rdev)": 1001,
        "os.read(os.open('node_desc', os.O_RDONLY, dir_fd=top), 99).decode()": "embedded1\n",
        "os.listdir(os.open('embedded1/ports', os.O_RDONLY, dir_fd=devices))": ["1"],
        # These paths mix two devices or name a device that does not exist.
        "os.stat(one + '/device/infiniband/embedded0')": "ENOENT",
        "os.stat('/sys/class/infiniband/embedded2')": "ENOENT",
        "os.stat('/sys/class/infiniband/embedded01')": "ENOENT",
        "os.stat('/dev/infiniband/uverbs999')": "ENOENT",
        # Like find(1), use a path relative to an open directory. The one here stands in for "/".
        "os.stat('sys', dir_fd=root).st_ino == os.stat(tree + '/sys').st_ino": True,
    }
    setup = f"""
import os
tree = {str(command.library().parent / "tree")!r}
root = os.open(tree, os.O_RDONLY)
one = "/sys/class/infiniband/embedded1"
top, devices = os.open(one, os.O_RDONLY), os.open("/sys/class/infiniband", os.O_RDONLY)
"""
    found = evaluate(*expected, setup=setup, AIORDMA_EMBEDDED_DEVICES="2")
    assert dict(zip(expected, found, strict=True)) == expected


def test_ibv_read_sysfs_file_rejects_short_buffers() -> None:
    """The buffer needs room for the newline, which a terminating zero then replaces."""
    setup = """
import ctypes
def text(size):
    buffer = ctypes.create_string_buffer(20)
    read = ctypes.CDLL(None).ibv_read_sysfs_file
    length = read(b"/sys/class/infiniband/embedded0", b"node_desc", buffer, ctypes.c_size_t(size))
    return [length, buffer.value.decode() if length >= 0 else None]
"""
    assert evaluate(*(f"text({size})" for size in (0, 4, 9, 10, 20)), setup=setup) == [
        [-1, None],
        [-1, None],
        [-1, None],
        [9, "embedded0"],
        [9, "embedded0"],
    ]


def test_dir_fd_paths_resolve_when_installed_behind_a_symlink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "preload").symlink_to(command.library().parent)
    path = tmp_path / "preload" / "libibverbs.so.1"
    monkeypatch.setattr(command, "library", lambda: path)
    program = f"import os; print(os.readlink('device', dir_fd=os.open('{CLASS}', os.O_RDONLY)))"
    done = run_python(
        "-c", program, LD_PRELOAD=command.preload_value(os.environ.get("LD_PRELOAD", ""))
    )
    assert (done.stdout, done.stderr) == ("../../../embedded0\n", "")


# A preloaded library that implements some C library functions by calling others.
OTHER = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
int fstatat(int dirfd, const char *path, struct stat *status, int flags)
{
	return flags ? lstat(path, status) : stat(path, status);
}
int faccessat(int dirfd, const char *path, int mode, int flags) { return access(path, mode); }
ssize_t readlinkat(int dirfd, const char *path, char *text, size_t size)
{
	return readlink(path, text, size);
}
"""


def test_preload_library_does_not_recurse_into_earlier_preloads(tmp_path: Path) -> None:
    source, other = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text(OTHER)
    run("cc", "-shared", "-fPIC", "-o", other, source, check=True)
    present = ":".join(filter(None, (os.environ.get("LD_PRELOAD"), str(other))))
    program = f"""
import os
print(os.stat("{CLASS}/node_desc").st_nlink, os.access("{CLASS}", os.R_OK))
print(os.readlink("{CLASS}/device"))
"""
    done = aiordma_run(sys.executable, "-c", program, LD_PRELOAD=present)
    assert (done.returncode, done.stdout) == (0, "1 True\n../../../embedded0\n"), done.stderr


def test_unrelated_paths_resolve_to_the_real_file_system() -> None:
    """This includes the paths of other devices, whether or not the machine has them."""
    others = (
        "/sys/class/infiniband/mlx5_0", "/sys/class/infiniband_mad", "/dev/infiniband/uverbs0",
        "/sys/class/infinibandx", "/sys/class/net", "/dev/null", f"{CLASS}/ports/2",
        f"{CLASS}/ports/1/gids/255", f"{CLASS}/ports/1/gids/00", f"{CLASS}/ports/1/gids/-1",
        f"{CLASS}x",
    )  # fmt: skip
    assert evaluate(*(f"os.path.lexists({path!r})" for path in others)) == [
        os.path.lexists(path) for path in others
    ]
    listing = sorted(os.listdir("/sys/class"))
    assert evaluate("sorted(os.listdir('/sys/class/infiniband/..'))") == [listing]


def test_shell_commands_can_read_the_device_files() -> None:
    """Without `aiordma run` the device is not there, even after other processes have seen it."""
    done = aiordma_run("ls", "-l", CLASS + "/")
    assert (done.returncode, done.stderr) == (0, "")
    assert "device -> ../../../embedded0" in done.stdout
    done = aiordma_run("cat", f"{CLASS}/node_desc")
    assert (done.returncode, done.stdout) == (0, "embedded0\n")
    assert run("ls", CLASS).returncode != 0
