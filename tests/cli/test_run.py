"""Tests of `aiordma run`: the programs that it starts or refuses, and the preload library."""

from __future__ import annotations

import importlib.resources
import os
import re
import shutil
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from aiordma import trace, verbs
from aiordma.cli import run as command
from aiordma.cli.run import ELF, CannotRunError, NotFoundError
from aiordma.verbs import FaultCounts
from softdev.tests.abi.exports_check import table_of_exports
from tests.processes import run, run_python

ROOT = Path(__file__).parents[2]

# Calls libibverbs by its public names, like a program linked with it.
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
    return run_python("-m", "aiordma", "run", *words, cwd=Path.cwd(), **environment)


FAULTS = """
import ctypes
import sys
device = ctypes.CDLL(None)
count = device.aiordma_embedded_fault_count
count.restype = ctypes.c_int64
error = ctypes.create_string_buffer(100)
print(device.aiordma_embedded_faults(b"losses=1", error, 100), error.value.decode()[:11])
print(device.aiordma_embedded_faults(b"losses=1", None, 100), count(None))
print(device.aiordma_embedded_faults(b"loss=1", error, 100))
print(device.aiordma_embedded_faults(None, None, 0))
print(*(count(name.encode()) for name in sys.argv[1:]))
print(device.aiordma_embedded_raise(0))
"""


def test_aiordma_program_sees_only_the_embedded_device_under_run() -> None:
    program = """
from aiordma import verbs
print(*(device.name for device in verbs.devices()), verbs.missing_library())
"""
    done = aiordma_run(sys.executable, "-c", program)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("embedded0 ")
    assert "under `aiordma run`, it is the embedded device" in done.stdout


def test_program_can_call_the_fault_injection_api() -> None:
    """Event number 0 (CQ_ERR) cannot be raised on request. The call returns EINVAL."""
    done = aiordma_run(sys.executable, "-c", FAULTS, *FaultCounts._fields, "losses")
    zeros = " ".join("0" for _ in FaultCounts._fields)
    assert done.stdout == f"22 'losses=1':\n22 -1\n0\n0\n{zeros} -1\n22\n", done.stderr


def test_child_processes_find_the_embedded_device() -> None:
    done = aiordma_run("sh", "-c", 'exec "$0" -c "$1"', sys.executable, FIRST_DEVICE)
    guid = verbs.find_device("embedded0").guid
    assert (done.stdout, done.stderr) == (f"1 embedded0 {guid:016x}\n", "")
    assert done.returncode == 0
    # Without `aiordma run`, the names are undefined or belong to the system's library.
    assert "embedded0" not in run_python("-c", FIRST_DEVICE).stdout


def test_run_passes_arguments_and_returns_the_exit_status() -> None:
    done = aiordma_run("sh", "-c", 'echo "$@"; exit 7', "sh", "-h", "--help", "--", "a b")
    assert (done.returncode, done.stdout) == (7, "-h --help -- a b\n")
    assert aiordma_run("--", "sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM


def test_existing_preload_comes_first(tmp_path: Path) -> None:
    other = tmp_path / "other.so"
    shutil.copy(command.library(), other)
    # Keep the existing LD_PRELOAD, which the tests need under a sanitizer.
    present = ":".join(filter(None, (os.environ.get("LD_PRELOAD"), str(other))))
    done = aiordma_run("sh", "-c", 'echo "$LD_PRELOAD"', LD_PRELOAD=present)
    assert done.stdout == f"{present}:{command.library()}\n"
    assert command.preload_value("") == str(command.library())


@pytest.mark.parametrize("folder", ["a b", "a:b", "a;b"])
def test_install_path_with_ld_preload_separators_is_rejected(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / folder / "preload"
    installed.mkdir(parents=True)
    (installed / "libibverbs.so.1").touch()
    monkeypatch.setattr(importlib.resources, "files", lambda package: installed.parent)
    with pytest.raises(CannotRunError, match="spaces, colons and semicolons"):
        command.library()


def test_ignored_signals_are_restored_for_the_program() -> None:
    """A program in a pipeline must end on SIGPIPE, as it does without `aiordma run`."""
    for options in ([], ["--must-use"]):
        done = aiordma_run(*options, "sh", "-c", "grep SigIgn /proc/self/status")
        ignored = int(done.stdout.split()[1], 16)
        assert not ignored & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)


# ---- programs that are waited for ---------------------------------------------------------------

NEVER = "succeeded, but faults of AIORDMA_EMBEDDED_FAULTS never happened"
# Opens the device, then executes its argument.
OPENED = (
    FIRST_DEVICE
    + """
import os, signal, sys
verbs.ibv_open_device.argtypes = [ctypes.c_void_p]
verbs.ibv_open_device(device)
print("opened", flush=True)
exec(sys.argv[1])
"""
)


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL)],
)
def test_traces_are_saved_only_when_the_program_fails(
    end: str, status: int, tmp_path: Path
) -> None:
    traces = tmp_path / "some" / "traces"
    done = aiordma_run(
        "--failure-traces", str(traces), "--must-use", sys.executable, "-c", OPENED, end
    )
    assert done.returncode == status, done.stderr
    if not status:
        assert list(traces.iterdir()) == []
        assert done.stderr == ""
        return
    (path,) = traces.glob("*/*.jsonl")
    assert f" failed; to see its trace, run: aiordma trace {path.parent}/*.jsonl\n" in done.stderr
    (run,) = trace.read(path)
    assert (run.end is None) == (status < 0)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_relative_trace_path_is_unaffected_by_chdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    moved = f"import os; os.chdir('/'){OPENED}"
    done = aiordma_run(sys.executable, "-c", moved, "", AIORDMA_TRACE="%p.jsonl")
    assert (done.returncode, done.stderr) == (0, "")
    (path,) = tmp_path.iterdir()
    assert len(trace.read(path)) == 1


def test_must_use_fails_when_device_or_faults_are_unused(tmp_path: Path) -> None:
    done = aiordma_run("--must-use", "true")
    assert done.returncode == 125
    assert done.stderr.endswith("true succeeded without opening embedded0\n")
    opens = ["--must-use", sys.executable, "-c", OPENED, ""]
    for plan, message in {
        "register=@1": f"{NEVER}: register=@1\n",
        "register=0.5,seed=1": f"{NEVER}: register=0.5\n",
        "delay=1ms": f"{NEVER}: delay=1ms\n",
        "seed=7": "succeeded, but AIORDMA_EMBEDDED_FAULTS=seed=7 has no fault\n",
        "handshake=0.5": "",
    }.items():
        done = aiordma_run(*opens, AIORDMA_EMBEDDED_FAULTS=plan)
        assert done.stderr.endswith(message)
        assert done.returncode == (125 if message else 0)
    options = ["--must-use", "--failure-traces", str(tmp_path)]
    assert aiordma_run(*options, "sh", "-c", "exit 9").returncode == 9
    assert list(tmp_path.iterdir()) == []


def test_unknown_variable_is_reported_and_fatal_with_must_use() -> None:
    message = (
        "unknown environment variable AIORDMA_EMBEDDED_FAULT: did you mean AIORDMA_EMBEDDED_FAULTS?"
    )
    done = aiordma_run("echo", "runs", AIORDMA_EMBEDDED_FAULT="loss=1")
    assert (done.stdout, done.stderr) == ("runs\n", f"aiordma: {message}\n")
    assert done.returncode == 0
    done = aiordma_run("--must-use", "echo", "runs", AIORDMA_EMBEDDED_FAULT="loss=1")
    assert done.stdout == ""
    assert done.stderr == f"Error: {message}; --must-use does not allow unknown variables\n"
    assert done.returncode == 125


def test_must_use_fails_when_the_program_removes_the_traces(tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    done = aiordma_run("--must-use", "sh", "-c", 'rm -r "$TMPDIR"', TMPDIR=str(folder))
    assert done.returncode == 125
    assert f"sh removed {folder}/sh." in done.stderr


def test_signal_is_forwarded_to_the_program() -> None:
    words = [sys.executable, "-m", "aiordma", "run", "--must-use", sys.executable, "-c", OPENED]
    ends = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9)); print(1, flush=True)"
    with subprocess.Popen([*words, ends + "; signal.pause()"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while process.stdout.readline() != b"1\n":
            assert process.poll() is None
        process.terminate()
        assert process.wait(100) == 9


IGNORING_CHILDREN = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, "-m", "aiordma", "run", *sys.argv[1:]])
"""


def test_exit_status_is_returned_when_sigchld_is_ignored() -> None:
    """Child processes inherit an ignored SIGCHLD, and then the kernel keeps no exit status."""
    program = [sys.executable, "-c", IGNORING_CHILDREN, "--must-use", "sh", "-c", "exit 7"]
    assert subprocess.run(program, timeout=100, check=False).returncode == 7


def test_invalid_trace_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, text in (
        ("file", "is a file"),
        ("file/x", "Not a directory"),
        ("%p", "must not contain %p"),
    ):
        done = aiordma_run("--failure-traces", str(tmp_path / folder), "true")
        assert done.returncode == 2
        assert text in done.stderr
    (tmp_path / "%p").mkdir()
    done = aiordma_run("--must-use", "true", TMPDIR=str(tmp_path / "%p"))
    assert done.returncode == 2
    assert f"TMPDIR: {tmp_path}/%p must not contain %p" in done.stderr


# ---- rsockets -----------------------------------------------------------------------------------

# The functions of rsocket(7).
RSOCKETS = """
    raccept rbind rclose rconnect rfcntl rgetpeername rgetsockname rgetsockopt riomap riounmap
    riowrite rlisten rpoll rread rreadv rrecv rrecvfrom rrecvmsg rselect rsend rsendmsg rsendto
    rsetsockopt rshutdown rsocket rwrite rwritev
"""
CALL_EACH = """
import ctypes, errno, sys
device = ctypes.CDLL(None, use_errno=True)
for name in sys.argv[1].split():
    result = getattr(device, name)(0, 0, 0)
    print(name, result, ctypes.get_errno() == errno.EOPNOTSUPP)
"""


def test_rsocket_calls_fail_and_report_one_error() -> None:
    done = aiordma_run(sys.executable, "-c", CALL_EACH, RSOCKETS)
    assert done.returncode == 0
    assert done.stdout == "".join(f"{name} -1 True\n" for name in RSOCKETS.split())
    (line,) = done.stderr.splitlines()
    assert line.startswith("aiordma run: the embedded device has no rsockets")
    assert "uses the kernel's TCP instead of RDMA" in line


@pytest.mark.parametrize("present", ["librspreload.so", "/lib/a.so:/lib/rsocket/librspreload.so.1"])
def test_librspreload_is_refused(present: str) -> None:
    """It would run the program on the kernel's TCP, although the user expects RDMA."""
    with pytest.raises(CannotRunError, match=r"back to kernel TCP.* remove \S+ from LD_PRELOAD"):
        command.preload_value(present)


# ---- programs that cannot be run ----------------------------------------------------------------


def test_unknown_program_is_reported_as_not_found() -> None:
    done = aiordma_run("no-such-program")
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr == "Error: program no-such-program not found in PATH\n"
    with pytest.raises(NotFoundError, match=r"^program \./no-such-program not found$"):
        command.find("./no-such-program")


def test_file_that_is_not_executable_is_rejected(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("not a program")
    with pytest.raises(CannotRunError, match="is not executable"):
        command.find(str(text))
    with pytest.raises(CannotRunError, match="is a folder"):
        command.find(str(tmp_path))
    text.chmod(0o755)
    done = aiordma_run(str(text))
    assert done.returncode == 126
    assert done.stderr == f"Error: cannot start {text}: Exec format error\n"


# A function that modifies the contents of a 64-bit ELF file in place.
Change = Callable[[bytearray], None]


def without_interpreter(image: bytearray) -> None:
    """Make an ELF file static by removing its PT_INTERP (3) program header."""
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
        (of_another_machine, "which was built for another architecture"),
    ],
)
def test_program_that_cannot_use_ld_preload_is_rejected(
    change: Change, text: str, tmp_path: Path
) -> None:
    image = bytearray(Path(os.path.realpath(sys.executable)).read_bytes())
    path = tmp_path / "program"
    path.write_bytes(image)
    command.check(str(path))
    change(image)
    path.write_bytes(image)
    with pytest.raises(CannotRunError, match=text):
        command.check(str(path))


@pytest.mark.parametrize("size", [0, 3, 4, 20, 60])
def test_truncated_elf_file_is_not_dynamic(size: int, tmp_path: Path) -> None:
    path = tmp_path / "torn"
    path.write_bytes(Path(sys.executable).read_bytes()[:size])
    found = ELF.read(str(path))
    assert found is None or not found.dynamic
    assert ELF.read(str(tmp_path / "missing")) is None


@pytest.mark.parametrize("right", ["set-user-ID", "set-group-ID", "file capabilities"])
def test_privileged_program_is_rejected(
    right: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "program"
    shutil.copy(sys.executable, path)
    path.chmod({"set-user-ID": 0o4755, "set-group-ID": 0o2755}.get(right, 0o755))
    if right == "file capabilities":
        monkeypatch.setattr(os, "getxattr", lambda path, name: b"")
        monkeypatch.setattr(os, "getuid", lambda: 0)
    command.check(str(path))  # the owner and root gain no privileges
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    monkeypatch.setattr(os, "getgid", lambda: path.stat().st_gid + 1)
    with pytest.raises(CannotRunError, match=f"{right}.*run a copy"):
        command.check(str(path))


# ---- the library --------------------------------------------------------------------------------


def dynamic_symbols(path: Path) -> dict[str, bool]:
    """Map each name in the dynamic symbol table to whether it is defined (nm(1))."""
    printed = run("nm", "--dynamic", "--format=posix", path, check=True).stdout
    found = re.findall(r"^([^\s@]+)\S* (\w)", printed, re.MULTILINE)
    return {name: kind not in "Uvw" for name, kind in found if kind != "A"}


def test_preload_library_exports_only_public_symbols() -> None:
    symbols = dynamic_symbols(command.library())
    defined = {name for name, here in symbols.items() if here}
    drivers = {name for name in defined if name.startswith("verbs_register_driver_")}
    assert "verbs_register_driver_34" in drivers
    assert defined - {"_init", "_fini"} - drivers == {*table_of_exports(), "aiordma_run"}
    needed = symbols.keys() - defined
    assert not any(name.startswith(("Py", "ibv_", "rdma_")) for name in needed)


def test_missing_preload_library_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.resources, "files", lambda package: tmp_path)
    with pytest.raises(
        click.ClickException, match=r"library not found: .*libibverbs\.so\.1; reinstall"
    ):
        command.library()
