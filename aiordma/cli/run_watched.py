"""`aiordma run` that waits for its program: traces kept on failure, and use of the device."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import click

FORWARDED = {
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
}

SI_KERNEL = 0x80
"""Where a signal of the terminal comes from: sigaction(2)."""

UNUSED = 125
"""The exit status where a program that must use the device has not: that of env(1), timeout(1)."""


def run_watched(
    path: str,
    words: list[str],
    environment: Mapping[str, str],
    failure_traces: Path | None,
    must_use: bool,
) -> NoReturn:
    """Run the program with a trace of each of its processes, and end as it ends.

    The traces stay in a folder of ``failure_traces`` if the program fails. Each process that opens
    the device begins a trace, so without one the device was not used. Raises OSError where the
    program cannot be started.
    """
    traces = new_folder(failure_traces, os.path.basename(path))
    kept = False
    try:
        status = wait(path, words, {**environment, "AIORDMA_TRACE": f"{traces}/%p.jsonl"})
        gone = not traces.exists()  # such as by a program that cleans up in TMPDIR
        used = not gone and any(traces.iterdir())
        if status == 0 and must_use and not used:
            if gone:
                text = (
                    f"{path} removed {traces}, which tells whether it opened embedded0: keep that"
                )
            else:
                text = f"{path} ended with 0 and never opened embedded0"
            print(f"aiordma: {text}", file=sys.stderr)
            status = UNUSED
        kept = status != 0 and failure_traces is not None and used
        if kept:
            print(f"aiordma: {path} failed: aiordma trace {traces}/*.jsonl", file=sys.stderr)
    finally:
        if not kept:
            shutil.rmtree(traces, ignore_errors=True)
    end(status)


def new_folder(parent: Path | None, program: str) -> Path:
    """A new folder for traces. Its path has no %p, which stands for a number in AIORDMA_TRACE."""
    hint = "--failure-traces" if parent else "TMPDIR"
    try:
        folder = (parent or Path(tempfile.gettempdir())).absolute()
        if "%p" in str(folder):
            raise click.BadParameter(f"{folder}: %p is not possible", param_hint=hint)
        folder.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=program.replace("%", "_") + ".", dir=folder))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""  # TMPDIR itself names its folders
        raise click.BadParameter(f"{where}{error.strerror}", param_hint=hint) from error


def wait(path: str, words: list[str], environment: Mapping[str, str]) -> int:
    """The exit status of the program, negative for a signal.

    Signals that other processes send here are sent on to it. Those of the terminal are not, since
    the terminal sends them to both.
    """
    # Ignored, as a caller may leave it, there would be no signal and no status: waitpid(2).
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
    """End as a program that ended with ``status``: by the same signal, without a second core."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), -status)
    sys.exit(status if status >= 0 else 128 - status)
