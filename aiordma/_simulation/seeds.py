"""Runs of a simulation with many seeds, in several processes."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .faults import Fault

VARIABLE = "AIORDMA_SIMULATION_SEEDS"
MAX_RUNS = 200  # maximum number of runs to find a sufficient subset of the faults
BAR_WIDTH = 30

Attempt = Callable[[int], BaseException | None]
"""A function that runs one seed and returns its exception, or None."""


@dataclass(frozen=True)
class Seeds:
    """The result of `simulate` with several seeds.

    `ran` is the number of seeds that ran. `failed` maps each failed seed to the first line of its
    error.
    """

    ran: int
    failed: dict[int, str]


environment_uses = 0
"""The number of simulations in this process that have used AIORDMA_SIMULATION_SEEDS."""


def seeds_from_environment() -> range | None:
    """Return the seeds in AIORDMA_SIMULATION_SEEDS ("61", or "0:1000" for 0 to 999), or None."""
    global environment_uses  # noqa: PLW0603 - one for the process
    if not (text := os.environ.get(VARIABLE)):
        return None
    try:
        first, colon, end = text.partition(":")
        seeds = range(int(first), int(end) if colon else int(first) + 1)
        if seeds and seeds[0] >= 0:
            environment_uses += 1
            return seeds
    except ValueError:
        pass
    raise ValueError(
        f"{VARIABLE} must be a seed such as 61, or a range such as 0:1000, not {text!r}"
    )


def rerun_command() -> str:
    """Return the command that runs this program or test, or "" in an interactive session."""
    if test := os.environ.get("PYTEST_CURRENT_TEST"):
        return shlex.join(["pytest", test.rpartition(" (")[0]])
    name, *arguments = sys.orig_argv
    return shlex.join([os.path.basename(name), *arguments]) if arguments else ""


def run_seeds(attempt: Attempt, seeds: Sequence[int], stop: bool) -> Seeds:
    """Run each seed once. With `stop`, end after the first failure."""
    ran, failed = 0, dict[int, str]()
    with _progress(len(seeds)) as show, _results(attempt, seeds) as results:
        try:
            for seed, text in results:
                ran += 1
                if text:
                    failed[seed] = text
                show(ran, len(failed))
                if text and stop:
                    break
        except RuntimeError as error:  # includes BrokenProcessPool
            error.add_note(f"seed {seeds[ran]} or one of the next seeds terminated its process")
            raise
    return Seeds(ran, failed)


_inherited_attempt: Attempt | None = None
"""The function that the forked processes inherit and call."""


PR_SET_PDEATHSIG = 1  # from prctl(2)


def _end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, so that it does not wait forever."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _try_in_process(seed: int) -> tuple[int, str]:
    assert _inherited_attempt
    return seed, _first_line(_inherited_attempt(seed))


def _first_line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0] if error else ""


@contextmanager
def _results(attempt: Attempt, seeds: Collection[int]) -> Iterator[Iterator[tuple[int, str]]]:
    """Yield an iterator over the seeds and their results, in the order of `seeds`.

    A result is the first line of the seed's error, or "" if the seed passed.
    """
    global _inherited_attempt  # noqa: PLW0603 - inherited by the child processes
    if (count := min(len(os.sched_getaffinity(0)), len(seeds))) < 2:
        yield ((seed, _first_line(attempt(seed))) for seed in seeds)
        return
    from concurrent.futures import ProcessPoolExecutor  # noqa: PLC0415 - slow to import
    from multiprocessing import get_context  # noqa: PLC0415 - slow to import

    _inherited_attempt = attempt
    with ProcessPoolExecutor(count, get_context("fork"), _end_with_parent) as pool:
        try:
            with warnings.catch_warnings():
                # Python warns about forking a multi-threaded process, but the child processes do
                # not need the other threads.
                warnings.simplefilter("ignore", DeprecationWarning)
                results = pool.map(_try_in_process, seeds)
            yield results
        finally:
            _inherited_attempt = None
            pool.shutdown(cancel_futures=True)


@contextmanager
def _progress(count: int) -> Iterator[Callable[[int, int], Any]]:
    """Yield a function that shows a progress bar if standard error is a terminal."""

    def show(ran: int, failed: int) -> None:
        bar = "#" * (BAR_WIDTH * ran // count)
        print(
            f"\r[{bar:{BAR_WIDTH}}] {ran} of {count} seeds, {failed} failed",
            end="",
            file=sys.stderr,
        )

    if sys.stderr.isatty():
        yield show
        print(file=sys.stderr)
    else:
        yield lambda *_: None


def minimize_faults(fails: Callable[[list[Fault]], bool], faults: list[Fault]) -> list[Fault]:
    """Drop each fault that the failure does not depend on, and return the remaining faults."""
    # Each attempt is a simulation, so limit their number.
    kept = faults
    for fault in faults[::-1][:MAX_RUNS]:
        fewer = [one for one in kept if one is not fault]
        if fails(fewer):
            kept = fewer
    return kept
