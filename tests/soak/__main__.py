"""Starts the processes, kills some of them, and reports progress, errors and leaks."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiordma import verbs

from .pattern import write_patterns
from .tally import Tally
from .tls import write_certificates

MIB = 1 << 20
ROOT = Path(__file__).parents[2]

# The growth that a surviving process may have since warm-up, with everything closed, from heap
# fragments. A leaked message of the largest size would be as much.
GROWTH = 64 * MIB
# Seconds without an answer after which a process counts as hung, on the embedded device.
SILENT = 300.0
TOLD = 10.0  # seconds between two lines of progress
# The virtual machine emulates its processors; measured: about this many times slower.
SLOW = 8.0

LOOPS = ("asyncio", "uvloop")
LINKS = ("", "tcp")  # AIORDMA_EMBEDDED_LINKS


@dataclass
class Role:
    """A role in the soak, taken by one process after another if they are killed."""

    name: str
    survives: bool
    workers: int
    loop: str
    links: str
    hostile: bool = False
    starts: int = 0


class Process:
    """The main process's handle of a process of the soak."""

    def __init__(self, role: Role, process: asyncio.subprocess.Process, total: Tally) -> None:
        self.role = role
        self._process = process
        self._total = total
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())
        self.ports: dict[str, int] = {}
        self.killed = False
        self._ending = False

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            what = json.loads(line)
            if "answer" in what:
                self._answers.put_nowait(what["answer"])
            else:
                self._total.done.update(what["done"])
                self._total.bytes += what["bytes"]
                self._total.wrong += what["wrong"]
        code = await self._process.wait()
        if not self.killed and not self._ending:
            self._total.wrong.append(f"{self.role.name} ended with {code}")
        self._answers.put_nowait(None)

    async def tell(self, command: str, *arguments: object) -> Any:
        """The answer of the process; None if it failed or has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([command, arguments]).encode() + b"\n")
            await self._process.stdin.drain()
        except ConnectionError:
            return None
        return await self._answers.get()

    async def kill(self) -> None:
        if self._process.returncode is None:
            self.killed = True
            self._process.send_signal(signal.SIGKILL)
        await self._reading

    async def end(self) -> None:
        assert self._process.stdin is not None
        self._ending = True
        self._process.stdin.close()
        await self._reading


@dataclass
class Soak:
    """The whole soak."""

    seed: int
    device: str
    host: str
    slow: float
    folder: Path
    roles: list[Role]
    total: Tally = field(default_factory=Tally)
    processes: dict[str, Process] = field(default_factory=dict)
    killed: int = 0

    def survivors(self) -> list[Process]:
        return [process for process in self.processes.values() if process.role.survives]

    async def start(self, role: Role) -> Process:
        """A process for a role; a killed one restarts on the other loop, with other links."""
        options = {
            **{name: getattr(self, name) for name in ("device", "host", "slow", "seed")},
            "folder": str(self.folder),
            "name": role.name if role.survives else f"{role.name} {role.starts}",
            "survives": role.survives,
            "hostile": role.hostile,
            "loop": LOOPS[(LOOPS.index(role.loop) + role.starts) % 2],
        }
        links = LINKS[(LINKS.index(role.links) + role.starts // 2) % 2]
        role.starts += 1
        process = Process(
            role,
            await asyncio.create_subprocess_exec(
                sys.executable, "-X", "faulthandler", "-W", "always::ResourceWarning",
                "-m", "tests.soak.peer",
                json.dumps(options),
                cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "AIORDMA_EMBEDDED_LINKS": links}, limit=1 << 24,
            ),
            self.total,
        )  # fmt: skip
        self.processes[role.name] = process
        process.ports = await process.tell("open") or {}
        return process

    async def introduce(self) -> None:
        """Send every process the addresses of all listeners."""
        targets = {
            name: {"ports": process.ports, "survives": process.role.survives}
            for name, process in self.processes.items()
            if process.ports and (name == "server" or not process.role.survives)
        }
        for name, process in list(self.processes.items()):
            others = {other: target for other, target in targets.items() if other != name}
            await process.tell("meet", others)

    async def phase(self, seconds: float, chance: random.Random) -> list[str | None]:
        """Run traffic for some seconds, then stop it; return the resources of the survivors."""
        for role in self.roles:
            if role.name not in self.processes:
                await self.start(role)
        await self.introduce()
        for process in self.processes.values():
            await process.tell("run", process.role.workers)
        end = time.monotonic() + seconds
        mortals = [role for role in self.roles if not role.survives]
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, chance.uniform(0.2, 3) * self.slow))
            if mortals and left > self.slow:
                role = chance.choice(mortals)
                await self.processes.pop(role.name).kill()
                self.killed += 1
                born = await self.start(role)
                await self.introduce()
                await born.tell("run", role.workers)
        await asyncio.gather(*(process.tell("pause") for process in self.processes.values()))
        for role in mortals:
            await self.processes.pop(role.name).kill()
            self.killed += 1
        return [await process.tell("settle") for process in self.survivors()]

    async def close(self) -> list[dict[str, Any]]:
        """Close the connections and listeners of the survivors, clients first."""
        found = {}
        for process in sorted(self.survivors(), key=lambda one: one.role.name == "server"):
            found[process.role.name] = await process.tell("close")
        return [found[process.role.name] for process in self.survivors()]

    async def open(self) -> None:
        for process in self.survivors():
            process.ports = await process.tell("open") or {}


def roles(clients: int, workers: int) -> list[Role]:
    """A server and clients that survive, one of each that is killed repeatedly, a stranger."""
    return [
        Role("server", True, 0, "asyncio", ""),
        *(
            Role(f"client {number}", True, workers, LOOPS[(number + 1) % 2], LINKS[number % 2])
            for number in range(clients)
        ),
        Role("mortal server", False, 0, "uvloop", "tcp"),
        Role("mortal client", False, workers, "asyncio", ""),
        Role("stranger", False, workers, "asyncio", "", hostile=True),
    ]


def tell(soak: Soak, seconds: float) -> None:
    """What has been done so far."""
    total = soak.total
    print(
        f"{seconds:5.0f} s: {total.bytes / MIB:,.0f} MiB, {total.done.total():,} operations, "
        f"{soak.killed} killed, {len(total.wrong)} wrong",
        flush=True,
    )


async def run(soak: Soak, seconds: float) -> list[str]:
    """Warm up, run the soak, tell what was done; return the problems."""
    chance = random.Random(soak.seed)
    began = time.monotonic()
    warm = max(2.0 * soak.slow, seconds / 5)

    async def show() -> None:
        while True:
            await asyncio.sleep(TOLD)
            tell(soak, time.monotonic() - began)

    showing = asyncio.create_task(show())
    await soak.phase(warm / 2, chance)
    first = await soak.close()
    await soak.open()
    await soak.phase(warm / 2, chance)
    settled = await soak.phase(max(1.0, seconds - warm), chance)
    last = await soak.close()
    showing.cancel()
    tell(soak, time.monotonic() - began)
    for what, count in sorted(soak.total.done.items()):
        print(f"{count:12,} {what}")
    problems: list[str] = []
    for process, was, now, held in zip(soak.survivors(), first, last, settled, strict=True):
        name = process.role.name
        if was is None or now is None or held is None:
            problems.append(f"{name} did not get to its end")
            continue
        grown = now["memory"] - was["memory"]
        print(f"{name}: {now['peak'] / MIB:.0f} MiB at most, {grown / MIB:.1f} more since warm")
        if held:
            problems.append(f"{name} has more than before, with nothing under way: {held}")
        if now["left"]:
            problems.append(f"{name} leaked: {now['left']}")
        if grown > GROWTH:
            problems.append(f"{name} has grown by {grown} bytes")
        await process.end()
    return soak.total.wrong + problems


async def main(options: argparse.Namespace) -> int:
    seed = options.seed if options.seed is not None else secrets.randbits(32)
    print(f"soak: {options.seconds:g} s, seed {seed}", flush=True)
    device = verbs.find_device(options.device or os.environ.get("AIORDMA_DEVICE") or "embedded0")
    with device.open() as context:
        host = str(context.choose_gid().gid.ip)
    slow = 1.0 if device.library.name == "embedded" else SLOW
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_patterns(folder / "patterns", seed)
        write_certificates(folder)
        shares = roles(options.clients, options.workers)
        soak = Soak(seed, device.name, host, slow, folder, shares)
        try:
            async with asyncio.timeout(options.seconds + SILENT * slow):
                problems = await run(soak, options.seconds)
        except TimeoutError:
            print(soak.total)
            raise
        finally:
            for process in soak.processes.values():
                if not process._reading.done():
                    await process.kill()
    if problems:
        print(*problems, sep="\n")
        print(f"again: python -m tests.soak --seconds {options.seconds:g} --seed {seed}")
    return 1 if problems else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="of traffic (%(default)s)")
    parser.add_argument("--seed", type=int, help="repeats the plan of another run")
    parser.add_argument(
        "--clients", type=int, default=2, help="processes that stay to the end (%(default)s)"
    )
    parser.add_argument("--workers", type=int, default=4, help="connections of each at a time")
    parser.add_argument("--device", help="which device (embedded0)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(arguments())))
