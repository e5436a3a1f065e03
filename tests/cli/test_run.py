"""`aiordma run`: refused programs, started programs, and the preload library."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from aiordma import verbs
from aiordma.cli import run as command
from aiordma.cli.run import ELF, CannotRunError, NotFoundError

ROOT = Path(__file__).parents[2]

# Calls of libibverbs by their public names, as a program that is linked with it finds them.
FIRST_DEVICE = """
import ctypes
verbs = ctypes.CDLL(None)
verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
verbs.ibv_get_device_name.restype = ctypes.c_char_p
verbs.ibv_get_device_guid.restype = ctypes.c_uint64
verbs.ibv_get_device_name.argtypes = verbs.ibv_get_device_guid.argtypes = [ctypes.c_void_p]
count = ctypes.c_int()
device = verbs.ibv_get_device_list(ctypes.byref(count))[0]
guid = verbs.ibv_get_device_guid(device).to_bytes(8, "little").hex()
print(count.value, verbs.ibv_get_device_name(device).decode(), guid)
"""


def aiordma_run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aiordma", "run", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_program_finds_the_embedded_device_under_the_public_names() -> None:
    done = aiordma_run(sys.executable, "-c", FIRST_DEVICE)
    guid = verbs.find_device("embedded0").guid
    assert (done.stdout, done.stderr) == (f"1 embedded0 {guid:016x}\n", "")
    assert done.returncode == 0


def test_without_it_the_names_are_not_there() -> None:
    """Or they are those of the system's library: the program needs the preload library."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_DEVICE], capture_output=True, text=True, check=False
    )
    assert "embedded0" not in done.stdout


def test_programs_that_the_program_starts_find_it_too() -> None:
    done = aiordma_run("sh", "-c", 'exec "$0" -c "$1"', sys.executable, FIRST_DEVICE)
    assert done.stdout.startswith("1 embedded0 ")


def test_status_arguments_and_signals_are_the_programs_own() -> None:
    done = aiordma_run("sh", "-c", 'echo "$@"; exit 7', "sh", "-h", "--help", "--", "a b")
    assert (done.returncode, done.stdout) == (7, "-h --help -- a b\n")
    assert aiordma_run("--", "sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM


def test_what_is_preloaded_already_comes_first(tmp_path: Path) -> None:
    other = tmp_path / "other.so"
    shutil.copy(command.library(), other)
    # What is there when the tests run under a sanitizer has to stay.
    present = ":".join(filter(None, (os.environ.get("LD_PRELOAD"), str(other))))
    done = aiordma_run("sh", "-c", 'echo "$LD_PRELOAD"', LD_PRELOAD=present)
    assert done.stdout == f"{present}:{command.library()}\n"
    assert command.preloaded("") == str(command.library())


@pytest.mark.parametrize("folder", ["a b", "a:b"])
def test_a_path_that_ld_preload_cannot_name(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "library", lambda: tmp_path / folder / "_preload.abi3.so")
    with pytest.raises(CannotRunError, match="spaces and colons"):
        command.preloaded("")


# ---- programs that cannot be run ----------------------------------------------------------------


def test_no_such_program() -> None:
    done = aiordma_run("no-such-program")
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr == "Error: no program no-such-program in PATH\n"
    with pytest.raises(NotFoundError, match=r"^no program \./no-such-program$"):
        command.find("./no-such-program")


def test_what_is_no_program(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("not a program")
    with pytest.raises(CannotRunError, match="is not executable"):
        command.find(str(text))
    with pytest.raises(CannotRunError, match="is a folder"):
        command.find(str(tmp_path))
    text.chmod(0o755)
    done = aiordma_run(str(text))
    assert done.returncode == 126
    assert done.stderr == f"Error: {text} cannot be started: Exec format error\n"


# What is changed or read here are 64-bit ELF files, of the interpreter and of our library.
Change = Callable[[bytearray], None]


def without_interpreter(image: bytearray) -> None:
    """Make an ELF file static: no program header is PT_INTERP (3)."""
    (start,) = struct.unpack_from("=Q", image, 32)
    size, count = struct.unpack_from("=HH", image, 54)
    for at in range(start, start + size * count, size):
        if struct.unpack_from("=I", image, at) == (3,):
            struct.pack_into("=I", image, at, 0)


def of_another_machine(image: bytearray) -> None:
    struct.pack_into("=H", image, 18, 0x5A)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (without_interpreter, "is statically linked"),
        (of_another_machine, "is for another architecture"),
    ],
)
def test_what_nothing_can_be_preloaded_into(change: Change, text: str, tmp_path: Path) -> None:
    image = bytearray(Path(os.path.realpath(sys.executable)).read_bytes())
    path = tmp_path / "program"
    path.write_bytes(image)
    command.check(str(path))
    change(image)
    path.write_bytes(image)
    with pytest.raises(CannotRunError, match=text):
        command.check(str(path))


@pytest.mark.parametrize("size", [0, 3, 4, 20, 60])
def test_a_torn_file_is_no_program_of_ours(size: int, tmp_path: Path) -> None:
    path = tmp_path / "torn"
    path.write_bytes(Path(sys.executable).read_bytes()[:size])
    found = ELF.read(str(path))
    assert found is None or not found.dynamic
    assert ELF.read(str(tmp_path / "missing")) is None


@pytest.mark.parametrize(("bit", "text"), [(0o4000, "set-user-ID"), (0o2000, "set-group-ID")])
def test_rights_of_its_own(
    bit: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "program"
    shutil.copy(sys.executable, path)
    path.chmod(0o755 | bit)
    command.check(str(path))  # its owner gains nothing
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    monkeypatch.setattr(os, "getgid", lambda: path.stat().st_gid + 1)
    with pytest.raises(CannotRunError, match=f"is {text}.*run a copy"):
        command.check(str(path))


def test_file_capabilities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "program"
    shutil.copy(sys.executable, path)
    monkeypatch.setattr(os, "getxattr", lambda path, name: b"")
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    with pytest.raises(CannotRunError, match="has file capabilities"):
        command.check(str(path))
    monkeypatch.setattr(os, "getuid", lambda: 0)
    command.check(str(path))


# ---- the library --------------------------------------------------------------------------------

# Beyond native/abi/calls.h: what programs of rdma-core use of libibverbs besides.
OTHERS = {
    "ibv_dofork_range",
    "ibv_dontfork_range",
    "ibv_get_sysfs_path",
    "ibv_query_gid_type",
    "ibv_read_sysfs_file",
    "ibv_reg_mr_iova",
    "ibv_resolve_eth_l2_from_gid",
    "rsocket",
}


def dynamic_symbols(path: Path) -> dict[str, bool]:
    """The names in the dynamic symbol table, and whether each is defined there."""
    image = path.read_bytes()
    (start,) = struct.unpack_from("=Q", image, 40)
    size, count = struct.unpack_from("=HH", image, 58)
    sections = [struct.unpack_from("=IIQQQQIIQQ", image, start + at * size) for at in range(count)]
    table = next(section for section in sections if section[1] == 11)  # SHT_DYNSYM
    names = sections[table[6]]
    symbols = {}
    for at in range(table[4], table[4] + table[5], 24):
        name, _, _, section, _, _ = struct.unpack_from("=IBBHQQ", image, at)
        end = image.index(b"\0", names[4] + name)
        symbols[image[names[4] + name : end].decode()] = section != 0
    return symbols


def test_the_library_has_the_public_names_and_nothing_else() -> None:
    calls = {
        line.split(", ")[2]
        for line in (ROOT / "native" / "abi" / "calls.h").read_text().splitlines()
        if line.startswith(("CALL(", "OPTIONAL("))
    }
    symbols = dynamic_symbols(command.library())
    defined = {name for name, here in symbols.items() if here}
    assert defined - {"_init", "_fini"} == calls | OTHERS
    assert not any(
        name.startswith(("Py", "ibv_", "rdma_")) for name in symbols if name not in defined
    )


def test_a_broken_installation_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(click.ClickException, match="has no _preload library"):
        command.library()
