"""`aiordma run`: unmodified programs for libibverbs and librdmacm on the embedded device."""

from __future__ import annotations

import importlib.util
import os
import shutil
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self

import click

import aiordma


# Exit statuses as those of the shell and of env(1).
class CannotRunError(click.ClickException):
    """The program cannot run on the embedded device."""

    exit_code = 126


class NotFoundError(CannotRunError):
    """No program has that name."""

    exit_code = 127


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("program")
@click.argument("arguments", metavar="[ARGUMENT]...", nargs=-1, type=click.UNPROCESSED)
def run(program: str, arguments: tuple[str, ...]) -> NoReturn:
    """Run a verbs program on the embedded device.

    PROGRAM is any unmodified program for libibverbs and librdmacm. LD_PRELOAD, to which the
    embedded device is appended, makes the dynamic linker resolve the calls of both libraries to
    the embedded device, also in programs that PROGRAM starts. The only device is embedded0.
    Libraries that PROGRAM opens with dlopen() are not replaced.

    PROGRAM replaces this process, so exit status and signals are its own. Exit status 127: there
    is no such program. 126: it cannot be started, or the dynamic linker ignores LD_PRELOAD for it
    (static, set-user-ID, for another architecture).
    """
    path = find(program)
    check(path)
    environment = {**os.environ, "LD_PRELOAD": preloaded(os.environ.get("LD_PRELOAD", ""))}
    sys.stdout.flush()
    try:
        os.execve(path, [program, *arguments], environment)
    except OSError as error:
        raise CannotRunError(f"{path} cannot be started: {error.strerror}") from error


def library() -> Path:
    """The embedded device as a shared library with the names of libibverbs and librdmacm."""
    found = importlib.util.find_spec("aiordma._native._preload")
    if found is None or found.origin is None:
        folder = Path(aiordma.__file__).parent
        raise CannotRunError(f"{folder} has no _preload library: reinstall aiordma")
    return Path(found.origin)


def preloaded(present: str) -> str:
    """LD_PRELOAD with our library appended: a sanitizer's library must be the first."""
    path = str(library())
    if any(character in path for character in ": "):
        raise CannotRunError(
            f"LD_PRELOAD cannot name {path}: spaces and colons separate paths there; "
            "install aiordma elsewhere"
        )
    return f"{present}:{path}" if present else path


def find(program: str) -> str:
    """The path of a program, as a shell finds it: by PATH, unless it contains a slash."""
    path = shutil.which(program)
    if path is not None:
        return path
    if os.sep in program and Path(program).exists():
        reason = "is a folder" if Path(program).is_dir() else "is not executable"
        raise CannotRunError(f"{program} {reason}")
    where = "" if os.sep in program else " in PATH"
    raise NotFoundError(f"no program {program}{where}")


# ---- whether the dynamic linker preloads --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ELF:
    """The relevant fields of an ELF file's headers: elf(5)."""

    machine: tuple[int, int, int]  # class, byte order, machine
    dynamic: bool  # it names a dynamic linker

    @classmethod
    def read(cls, path: str) -> Self | None:
        """None for a file that is not ELF or cannot be read."""
        try:
            with open(path, "rb") as file:
                head = file.read(64)
                if head[:4] != b"\x7fELF" or len(head) < 52:
                    return None
                wide, order = head[4] == 2, "<" if head[5] == 1 else ">"
                (machine,) = struct.unpack_from(order + "H", head, 18)
                (start,) = struct.unpack_from(
                    order + ("Q" if wide else "I"), head, 32 if wide else 28
                )
                size, count = struct.unpack_from(order + "HH", head, 54 if wide else 42)
                file.seek(start)
                table = file.read(size * count)
        except (OSError, struct.error):
            return None
        interp = 3  # PT_INTERP
        types = [
            struct.unpack_from(order + "I", table, at)[0]
            for at in range(0, len(table) - 3, max(size, 4))
        ]
        return cls((head[4], head[5], machine), interp in types)


def check(path: str) -> None:
    """CannotRunError where the dynamic linker would silently ignore LD_PRELOAD: ld.so(8)."""
    if reason := privileged(path):
        raise CannotRunError(
            f"{path} {reason}, so the dynamic linker ignores LD_PRELOAD for it; "
            "run a copy without that right"
        )
    elf = ELF.read(path)
    if elf is None:  # a script: its interpreter is a program like others
        return
    if not elf.dynamic:
        raise CannotRunError(
            f"{path} is statically linked: its libibverbs cannot be replaced; link it dynamically"
        )
    ours = ELF.read(str(library()))
    if ours is not None and ours.machine != elf.machine:
        raise CannotRunError(
            f"{path} is for another architecture than {library()}, so it cannot be preloaded"
        )


def privileged(path: str) -> str:
    """Why the program would gain privileges that its caller lacks; empty when it would not."""
    status = os.stat(path)
    if status.st_mode & 0o4000 and status.st_uid != os.getuid():
        return "is set-user-ID"
    if status.st_mode & 0o2000 and status.st_gid != os.getgid():
        return "is set-group-ID"
    try:
        os.getxattr(path, "security.capability")
    except OSError:  # no capabilities, or a file system without them
        return ""
    return "has file capabilities" if os.getuid() else ""
