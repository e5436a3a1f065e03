"""Files and directories that only this user can access."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TextIO


def check_private(path: Path, found: os.stat_result) -> None:
    """Raise PermissionError if a path belongs to another user or is accessible to others."""
    if found.st_uid != os.geteuid():
        raise PermissionError(
            f"{path} belongs to user {found.st_uid}, but this process runs as user "
            f"{os.geteuid()}; choose another path"
        )
    if mode := found.st_mode & 0o077:
        right = "700" if stat.S_ISDIR(found.st_mode) else "600"
        raise PermissionError(
            f"{path} is accessible to other users ({mode:03o}); run chmod {right} {path}"
        )


def open_private(path: Path) -> TextIO:
    """Open a private file for writing, and truncate it. Only this user can access the file.

    The embedded device applies the same rules to trace files (softdev/src/trace/trace_file.c).

    Raises:
        OSError: If the file cannot be written, or if it is a symbolic link, is not a regular file,
            has other hard links, belongs to another user or is accessible to others.
    """
    flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        # Try without O_CREAT first. With it, fs.protected_regular would deny access to another
        # user's file in /tmp, and check_private() could not name that user.
        try:
            fd = os.open(path, flags)
        except FileNotFoundError:
            fd = os.open(path, flags | os.O_CREAT, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(f"{path} is a symbolic link; use the path of the file itself") from error
        if error.errno == errno.ENXIO:  # a FIFO that nobody reads
            raise OSError(f"{path} is not a regular file") from error
        raise
    file = os.fdopen(fd, "w")
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is not a regular file")
        check_private(path, found)
        if found.st_nlink > 1:
            raise OSError(
                f"{path} has {found.st_nlink} hard links instead of one; choose another file"
            )
        os.ftruncate(fd, 0)
    except BaseException:
        file.close()
        raise
    return file
