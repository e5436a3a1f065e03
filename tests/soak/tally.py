"""Counts of operations and verified bytes, and the process that has made them."""

from __future__ import annotations

import asyncio
import random
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """Counts of operations and of verified bytes, and the errors."""

    done: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    wrong: list[str] = field(default_factory=list)

    def count(self, what: str, size: int = 0) -> None:
        self.done[what] += 1
        self.bytes += size

    def take(self) -> Tally:
        """The counts since the last call."""
        taken = Tally(self.done.copy(), self.bytes, self.wrong.copy())
        self.done.clear()
        self.bytes = 0
        self.wrong.clear()
        return taken


class Member:
    """A process of the soak: its settings, its random choices, and what it tells."""

    def __init__(self, options: dict[str, Any], say: Callable[[object], None]) -> None:
        self._name: str = options["name"]
        self._device: str = options["device"]
        self._host: str = options["host"]
        self._chance = random.Random(f"{options['seed']} {self._name}")
        self._say = say
        self._tally = Tally()
        self._workers: list[asyncio.Task[None]] = []

    def _wrong(self, what: str, error: BaseException | None = None) -> None:
        text = f"{self._name}: {what}"
        self._tally.wrong.append(text if error is None else f"{text}\n{told(error)}")

    def report(self) -> None:
        """What has been done since the last time."""
        taken = self._tally.take()
        self._say({"done": taken.done, "bytes": taken.bytes, "wrong": taken.wrong})


def told(error: BaseException) -> str:
    """The full state of the session, for finding the reason of a failure."""
    return "".join(traceback.format_exception(error))[-9000:]
