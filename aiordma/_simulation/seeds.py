"""Runs of a simulation with one seed after the other, in several processes."""

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
# Of the search for the faults that are enough.
MOST_RUNS = 200
BAR = 30

Attempt = Callable[[int], BaseException | None]
"""A run with a seed, and what it raised."""


@dataclass(frozen=True)
class Seeds:
    """How many seeds `simulate` has run, and the first line of the error of each that failed."""

    ran: int
    failed: dict[int, str]


uses = 0
"""How many simulations of this process have had the seeds of the variable."""


def given_seeds() -> range | None:
    """Return the seeds of AIORDMA_SIMULATION_SEEDS: "61", or "0:1000" for those from 0 to 999."""
    global uses  # noqa: PLW0603 - one for the process
    if not (text := os.environ.get(VARIABLE)):
        return None
    try:
        first, colon, end = text.partition(":")
        seeds = range(int(first), int(end) if colon else int(first) + 1)
        if seeds and seeds[0] >= 0:
            uses += 1
            return seeds
    except ValueError:
        pass
    raise ValueError(f"{VARIABLE} is a seed such as 61, or a range such as 0:1000, not {text!r}")


def command() -> str:
    """That which runs this program, or the test that it is in; empty in an interactive Python."""
    if test := os.environ.get("PYTEST_CURRENT_TEST"):
        return shlex.join(["pytest", test.rpartition(" (")[0]])
    name, *arguments = sys.orig_argv
    return shlex.join([os.path.basename(name), *arguments]) if arguments else ""


def run_seeds(attempt: Attempt, seeds: Sequence[int], stop: bool) -> Seeds:
    """Each seed once; with `stop` until one fails."""
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
        except RuntimeError as error:  # BrokenProcessPool
            error.add_note(f"seed {seeds[ran]}, or one of the next ones, has ended its process")
            raise
    return Seeds(ran, failed)


_forked: Attempt | None = None
"""That of the processes, which inherit it."""


PR_SET_PDEATHSIG = 1  # prctl(2)


def _end_with_parent() -> None:
    """Killed, it would leave its processes to wait for ever."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _try_in_process(seed: int) -> tuple[int, str]:
    assert _forked
    return seed, _first_line(_forked(seed))


def _first_line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0] if error else ""


@contextmanager
def _results(attempt: Attempt, seeds: Collection[int]) -> Iterator[Iterator[tuple[int, str]]]:
    """Each seed, and the first line of what it raised."""
    global _forked  # noqa: PLW0603 - what is forked has this alone
    if (count := min(len(os.sched_getaffinity(0)), len(seeds))) < 2:
        yield ((seed, _first_line(attempt(seed))) for seed in seeds)
        return
    from concurrent.futures import ProcessPoolExecutor  # noqa: PLC0415 - heavy
    from multiprocessing import get_context  # noqa: PLC0415 - likewise

    _forked = attempt
    with ProcessPoolExecutor(count, get_context("fork"), _end_with_parent) as pool:
        try:
            with warnings.catch_warnings():
                # Python's of other threads, which no process needs.
                warnings.simplefilter("ignore", DeprecationWarning)
                results = pool.map(_try_in_process, seeds)
            yield results
        finally:
            _forked = None
            pool.shutdown(cancel_futures=True)


@contextmanager
def _progress(count: int) -> Iterator[Callable[[int, int], Any]]:
    """A bar on a terminal."""

    def show(ran: int, failed: int) -> None:
        bar = "#" * (BAR * ran // count)
        print(f"\r[{bar:{BAR}}] {ran} of {count} seeds, {failed} failed", end="", file=sys.stderr)

    if sys.stderr.isatty():
        yield show
        print(file=sys.stderr)
    else:
        yield lambda *_: None


def enough(fails: Callable[[list[Fault]], bool], faults: list[Fault]) -> list[Fault]:
    """The faults that are left when each was left out without which the run fails too."""
    kept = faults
    for fault in faults[::-1][:MOST_RUNS]:
        fewer = [one for one in kept if one is not fault]
        if fails(fewer):
            kept = fewer
    return kept
