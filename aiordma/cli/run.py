"""`aiordma run`: run unmodified libibverbs and librdmacm programs on the embedded device."""

from __future__ import annotations

import importlib.resources
import os
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self

import click

from aiordma._core.environment import unknown_variables

from .file_path import FilePath

UNUSED_STATUS = 125
"""The exit status if a program was required to use the device but did not.

Commands such as env(1) and timeout(1) also use this status for their own failures.
"""


# Like the shell and env(1), exit with status 127 if the program is not found, and with status 126
# if it cannot be run for another reason.
class CannotRunError(click.ClickException):
    exit_code = 126


class NotFoundError(CannotRunError):
    exit_code = 127


class UnusedError(click.ClickException):
    """Raised if running the program would not test the device."""

    exit_code = UNUSED_STATUS


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--failure-traces",
    metavar="FOLDER",
    type=FilePath(file_okay=False, path_type=Path),
    help="Trace each process. If PROGRAM fails, keep the traces in a new folder in FOLDER.",
)
@click.option(
    "--must-use",
    is_flag=True,
    help="Exit with status 125 if PROGRAM succeeds but no process opened the device, or a fault of "
    "AIORDMA_EMBEDDED_FAULTS never happened. Do not run PROGRAM if an AIORDMA_* variable is "
    "unknown.",
)
@click.argument("program")
@click.argument("arguments", metavar="[ARGUMENT]...", nargs=-1, type=click.UNPROCESSED)
def run(
    program: str, arguments: tuple[str, ...], failure_traces: Path | None, must_use: bool
) -> NoReturn:
    """Run a verbs program on the embedded device.

    PROGRAM is any program that uses libibverbs and librdmacm. It does not have to be modified. This
    command appends the embedded device to LD_PRELOAD, so that it replaces both libraries in PROGRAM
    and its child processes. For programs that open these libraries with dlopen(), the command also
    prepends a folder to LD_LIBRARY_PATH.

    The only RDMA device that PROGRAM finds, in /sys/class/infiniband and /dev/infiniband, is
    embedded0. The rdma(8) command in its PATH also shows this device.

    PROGRAM replaces this process, so its exit status and its handling of signals remain the same.
    If you pass an option, this process waits for PROGRAM instead. It then forwards signals to
    PROGRAM, and exits with the same status or signal.

    The exit status is 127 if PROGRAM does not exist. It is 126 if PROGRAM cannot be started, or if
    the dynamic linker would ignore LD_PRELOAD because PROGRAM is statically linked, set-user-ID, or
    built for another architecture.
    """
    if not program:
        raise click.BadParameter("the program name must not be empty", param_hint="PROGRAM")
    check_environment(must_use)
    programs = f"{library().parent / 'bin'}:{os.environ.get('PATH', os.defpath)}"
    path = find(program, programs)
    check(path)
    environment = {
        **os.environ,
        "PATH": programs,
        "LD_PRELOAD": preload_value(os.environ.get("LD_PRELOAD", "")),
        "LD_LIBRARY_PATH": library_search_path(os.environ.get("LD_LIBRARY_PATH", "")),
    }
    if traced := os.environ.get("AIORDMA_TRACE"):
        # Pass an absolute path, because the program may change its working directory before it
        # opens the device.
        environment["AIORDMA_TRACE"] = os.path.abspath(traced)
    sys.stdout.flush()
    # Python ignores these signals. Restore the defaults, because exec() preserves ignored signals.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    try:
        if failure_traces or must_use:
            run_watched(path, [program, *arguments], environment, failure_traces, must_use)
        os.execve(path, [program, *arguments], environment)
    except OSError as error:
        raise CannotRunError(f"cannot start {path}: {error.strerror}") from error


def check_environment(must_use: bool) -> None:
    """Warn about unknown AIORDMA_* variables, or raise UnusedError if ``must_use`` is True."""
    for text in unknown_variables(os.environ).values():
        if must_use:
            raise UnusedError(f"{text}; --must-use does not allow unknown variables")
        print(f"aiordma: {text}", file=sys.stderr)


def library() -> Path:
    """Return the path of the embedded device's library, libibverbs.so.1.

    The same directory contains the library under other names that programs may open.
    """
    path = Path(str(importlib.resources.files("aiordma._native") / "preload" / "libibverbs.so.1"))
    if not path.exists():
        raise CannotRunError(f"library not found: {path}; reinstall aiordma")
    if any(character in str(path) for character in ":; "):
        raise CannotRunError(
            f"cannot add {path} to LD_PRELOAD, because spaces, colons and semicolons in the path "
            "would act as separators; install aiordma in another directory"
        )
    return path


def preload_value(present: str) -> str:
    """Append the embedded device's library to an LD_PRELOAD value.

    The library is not prepended, because a sanitizer runtime must come first.
    """
    for word in re.split("[ :]", present):
        if Path(word).name.startswith("librspreload.so"):
            raise CannotRunError(
                "the embedded device does not support rsockets, so the program would silently fall "
                f"back to kernel TCP; remove {word} from LD_PRELOAD"
            )
    return f"{present}:{library()}" if present else str(library())


def library_search_path(present: str) -> str:
    """Prepend the embedded device's library directory to an LD_LIBRARY_PATH value.

    Programs that call dlopen() find the embedded device's library in this directory.
    """
    folder = str(library().parent)
    return f"{folder}:{present}" if present else folder


def find(program: str, programs: str | None = None) -> str:
    """Find a program the way a shell does, and return its path.

    PATH is searched only for names that do not contain a slash.
    """
    path = shutil.which(program, path=programs)
    if path is not None:
        return path
    if os.sep in program and Path(program).exists():
        reason = "it is a folder" if Path(program).is_dir() else "it is not executable"
        raise CannotRunError(f"cannot start {program}: {reason}")
    where = "" if os.sep in program else " in PATH"
    raise NotFoundError(f"program {program} not found{where}")


# ---- checks whether the dynamic linker will preload ---------------------------------------------


@dataclass(frozen=True, slots=True)
class ELF:
    machine: tuple[int, int, int]  # ELF class, byte order and architecture
    dynamic: bool  # whether the program requests a dynamic linker

    @classmethod
    def read(cls, path: str) -> Self | None:
        """Read a file's ELF header.

        Returns None if the file is not an ELF file or cannot be read.
        """
        try:
            with open(path, "rb") as file:
                head = file.read(64)
                if head[:4] != b"\x7fELF" or len(head) < 52:
                    return None
                is_64_bit, order = head[4] == 2, "<" if head[5] == 1 else ">"
                # Read e_machine, e_phoff, and e_phentsize with e_phnum (elf(5)).
                (machine,) = struct.unpack_from(order + "H", head, 18)
                (table_start,) = struct.unpack_from(
                    order + ("Q" if is_64_bit else "I"), head, 32 if is_64_bit else 28
                )
                entry_size, count = struct.unpack_from(order + "HH", head, 54 if is_64_bit else 42)
                file.seek(table_start)
                table = file.read(entry_size * count)
        except (OSError, struct.error):
            return None
        # Only programs that use the dynamic linker have this segment.
        interp = 3  # PT_INTERP
        segment_types = [
            struct.unpack_from(order + "I", table, at)[0]
            for at in range(0, len(table) - 3, max(entry_size, 4))
        ]
        return cls((head[4], head[5], machine), interp in segment_types)


def check(path: str) -> None:
    """Raise CannotRunError if the dynamic linker would ignore LD_PRELOAD. See ld.so(8)."""
    if reason := privilege_reason(path):
        raise CannotRunError(
            f"{path} {reason}, so the dynamic linker ignores LD_PRELOAD for it; "
            "run a copy without this privilege"
        )
    elf = ELF.read(path)
    if elf is None:  # a script, whose interpreter can be preloaded
        return
    if not elf.dynamic:
        raise CannotRunError(
            f"{path} is statically linked, so its libibverbs cannot be replaced; "
            "link it dynamically"
        )
    ours = ELF.read(str(library()))
    if ours is not None and ours.machine != elf.machine:
        raise CannotRunError(
            f"cannot preload {library()} into {path}, which was built for another architecture"
        )


def privilege_reason(path: str) -> str:
    """Return why the program would gain privileges that its caller lacks.

    Returns an empty string if the program would not gain any privileges.
    """
    status = os.stat(path)
    if status.st_mode & 0o4000 and status.st_uid != os.getuid():
        return "is set-user-ID"
    if status.st_mode & 0o2000 and status.st_gid != os.getgid():
        return "is set-group-ID"
    try:
        os.getxattr(path, "security.capability")
    except OSError:  # the file has no capabilities, or the file system does not support them
        return ""
    return "has file capabilities" if os.getuid() else ""


# ---- waiting for the program --------------------------------------------------------------------

FORWARDED = {
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2,
}  # fmt: skip

SI_KERNEL = 0x80
"""The `si_code` of signals sent by the terminal (sigaction(2))."""

FAULTS = "AIORDMA_EMBEDDED_FAULTS"


def run_watched(
    path: str,
    words: list[str],
    environment: Mapping[str, str],
    failure_traces: Path | None,
    must_use: bool,
) -> NoReturn:
    """Run the program with tracing enabled, and exit the same way the program does.

    If the program fails, its traces are kept in a new directory inside ``failure_traces``. Every
    process that opens the device creates a trace. If there are no traces, the program did not use
    the device.

    Raises:
        OSError: If the program cannot be started.
    """
    traces = new_folder(failure_traces, os.path.basename(path))
    kept = False
    try:
        status = wait(path, words, {**environment, "AIORDMA_TRACE": f"{traces}/%p.jsonl"})
        used = traces.exists() and any(traces.iterdir())  # the program may have cleaned up TMPDIR
        if status == 0 and must_use and (text := unused_reason(path, traces, environment)):
            print(f"aiordma: {text}", file=sys.stderr)
            status = UNUSED_STATUS
        kept = status != 0 and failure_traces is not None and used
        if kept:
            print(
                f"aiordma: {path} failed; to see its trace, run: aiordma trace {traces}/*.jsonl",
                file=sys.stderr,
            )
    finally:
        if not kept:
            shutil.rmtree(traces, ignore_errors=True)
    end(status)


def unused_reason(path: str, traces: Path, environment: Mapping[str, str]) -> str:
    """Return why a program that exited successfully did not test the device.

    Returns an empty string if the program did test the device.
    """
    if not traces.exists():
        return (
            f"{path} removed {traces}; aiordma needs this folder to see whether it used embedded0"
        )
    if not any(traces.iterdir()):
        return f"{path} succeeded without opening embedded0"
    if not (plan := environment.get(FAULTS)):
        return ""
    from aiordma import testing  # noqa: PLC0415 - slow to import

    if not testing._has_fault(part.partition("=")[0] for part in plan.split(",")):
        return f"{path} succeeded, but {FAULTS}={plan} has no fault"
    never = testing._never_happened(plan, traces)
    return f"{path} succeeded, but faults of {FAULTS} never happened: {never}" if never else ""


def new_folder(parent: Path | None, program: str) -> Path:
    """Create a directory for traces.

    The directory's path must not contain %p. The path becomes part of AIORDMA_TRACE, where %p
    stands for a process ID.
    """
    hint = "--failure-traces" if parent else "TMPDIR"
    try:
        folder = (parent or Path(tempfile.gettempdir())).absolute()
        if "%p" in str(folder):
            raise click.BadParameter(f"{folder} must not contain %p", param_hint=hint)
        folder.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=program.replace("%", "_") + ".", dir=folder))
    except OSError as error:
        # The error from tempfile.gettempdir() has no file name, but its message lists the
        # directories that were tried.
        where = f"{error.filename}: " if error.filename else ""
        raise click.BadParameter(f"{where}{error.strerror}", param_hint=hint) from error


def wait(path: str, words: list[str], environment: Mapping[str, str]) -> int:
    """Run the program and return its exit status.

    The status is negative if a signal killed the program. Signals sent by other processes are
    forwarded to the program. Signals from the terminal are not forwarded, because the program
    receives them directly.
    """
    # The caller may have set SIGCHLD to be ignored. The kernel would then send no signal and keep
    # no exit status (waitpid(2)).
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})
    pid = os.posix_spawn(path, words, environment, setsigmask=before)
    while True:
        arrived = signal.sigwaitinfo({*FORWARDED, signal.SIGCHLD})
        if arrived.si_signo != signal.SIGCHLD:
            if arrived.si_code != SI_KERNEL:
                os.kill(pid, arrived.si_signo)
        elif (ended := os.waitpid(pid, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(ended[1])


def end(status: int) -> NoReturn:
    """Exit with the program's ``status``.

    If a signal killed the program, this process kills itself with the same signal, but does not
    dump core.
    """
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), -status)
    sys.exit(status if status >= 0 else 128 - status)
