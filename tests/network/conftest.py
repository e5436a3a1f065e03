"""Fixtures that simulate two machines by network namespaces, with an agent in each.

They only serve the embedded device, because the kernel handles SoftRoCE's network.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from .namespaces import Namespace, Network, network

ROOT = Path(__file__).parents[2]

# Path timeout in seconds for tests that do not lose a path. It is longer than the default of 20 to
# allow for slow machines.
PATIENCE = 60

# Path timeout in seconds for tests that lose a path. Connecting must take less than half of it.
IMPATIENCE = 6

# Maximum time in seconds to wait for an agent's response, even on a slow machine.
LIMIT = 110.0


class Order:
    """A command that an agent executes."""

    def __init__(self, agent: AgentProcess, number: int) -> None:
        self.agent = agent
        self._number = number

    def result(self, seconds: float = LIMIT) -> Any:
        """Return the command's result. The test fails if the command fails or times out."""
        answer = self._answer(seconds)
        if "error" in answer:
            pytest.fail(answer["error"], pytrace=True)
        return answer["result"]

    def error(self, seconds: float = LIMIT) -> str:
        """Return the error message of a command that must fail."""
        answer = self._answer(seconds)
        assert "error" in answer, answer
        return str(answer["error"])

    def done(self) -> bool:
        """Return whether the command has finished, successfully or not."""
        self.agent.read(0)
        return self._number in self.agent.answers

    def _answer(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while not self.done():
            if not self.agent.read(deadline - time.monotonic()):
                pytest.fail(f"no answer within {seconds} s")
        return self.agent.answers[self._number]


class AgentProcess:
    """A client for one device of a `tests.network.agent` process that runs in a namespace."""

    def __init__(self, namespace: Namespace, patience: int) -> None:
        self.namespace = namespace
        self.device = "embedded0"
        # ACK timeout of a queue pair in seconds. Even if rounding doubles it, its eight attempts
        # take no longer than the path timeout.
        self.ack_timeout = patience / 16
        self.answers: dict[int, dict[str, Any]] = {}
        self._numbers = itertools.count(1)
        self._rest = bytearray()
        self._process = subprocess.Popen(
            namespace.command(sys.executable, "-W", "error", "-m", "tests.network.agent"),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "AIORDMA_EMBEDDED_PATH_TIMEOUT": str(patience)},
        )

    def of(self, device: str, end: Namespace) -> AgentProcess:
        """Return a client for another device of this process. `end` is the device's interface."""
        other = copy.copy(self)
        other.device, other.namespace = device, end
        return other

    def start(self, name: str, **arguments: Any) -> Order:
        """Send a command without waiting for its result."""
        number = next(self._numbers)
        order = {"number": number, "device": self.device, "name": name, "arguments": arguments}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return Order(self, number)

    def call(self, name: str, **arguments: Any) -> Any:
        """Send a command and return its result."""
        return self.start(name, **arguments).result()

    def read(self, seconds: float) -> bool:
        """Read responses for up to `seconds`. Return False if none arrived."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], max(seconds, 0))[0]:
            return False
        data = os.read(self._process.stdout.fileno(), 65536)
        if not data:
            pytest.fail(f"the agent has ended: {self._process.wait()}")
        self._rest += data
        *lines, self._rest[:] = self._rest.split(b"\n")
        for line in lines:
            answer = json.loads(line)
            self.answers[answer["number"]] = answer
        return True

    def stop(self) -> None:
        """Stop the agent's process, and wait until all its threads have stopped."""
        # This is the agent's PID, because `ip netns exec` replaces itself with the command.
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        """Resume the stopped process."""
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def cables() -> int:
    """Return the number of cables between the two namespaces."""
    return 1


@pytest.fixture
def wire(cables: int) -> Iterator[Network]:
    """Provide a network of two namespaces and the cables between them."""
    with network(cables) as made:
        yield made


Start = Callable[..., AgentProcess]


@pytest.fixture
def start(wire: Network) -> Iterator[Start]:
    """Provide a function that starts an agent in a namespace. Agents are killed after the test."""
    with ExitStack() as stack:

        def start(namespace: Namespace, patience: int = PATIENCE) -> AgentProcess:
            agent = AgentProcess(namespace, patience)
            stack.callback(agent.end)
            return agent

        yield start


@pytest.fixture
def agents(wire: Network, start: Start) -> tuple[AgentProcess, AgentProcess]:
    """Provide an agent at each end of the first cable."""
    return start(wire.left), start(wire.right)


@pytest.fixture
def impatient(wire: Network, start: Start) -> tuple[AgentProcess, AgentProcess]:
    """Provide an agent with the short path timeout at each end of the first cable."""
    return start(wire.left, IMPATIENCE), start(wire.right, IMPATIENCE)


Agents = tuple[AgentProcess, AgentProcess]


def address_of(namespace: Namespace, family: str) -> str:
    """Return the namespace's address of the given family."""
    addresses = {"IPv4": namespace.ipv4, "IPv6": namespace.ipv6, "link-local": namespace.link_local}
    return addresses[family]


@pytest.fixture(params=["IPv4", "IPv6"])
def family(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


@pytest.fixture(params=["cm", "tcp"])
def via(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


def connect(agents: Agents, host: str, via: str) -> None:
    """Connect the left agent to the right one, which serves echoes."""
    left, right = agents
    port = right.call("listen", host=host, via=via)
    serving = right.start("serve")
    left.call("connect", host=host, port=port, via=via)
    serving.result()


def pair(
    agents: Agents, kind: str, family: str, ack_timeout: float | None = None
) -> dict[str, Any]:
    """Connect two queue pairs. Return the address and rkey of the right one's memory."""
    left, right = agents
    ends = [
        agent.call("make", kind=kind, ip=address_of(agent.namespace, family)) for agent in agents
    ]
    for agent, peer in ((left, ends[1]), (right, ends[0])):
        agent.call("bring_up", peer=peer["peer"], ack_timeout=ack_timeout or agent.ack_timeout)
    return {"address": ends[1]["address"], "rkey": ends[1]["rkey"]}


def exchange(agents: Agents, count: int, size: int) -> None:
    """Send messages between queue pairs in both directions concurrently. All must arrive."""
    orders = []
    for seed, (sender, receiver) in enumerate((agents, agents[::-1])):
        receiver.call("post", count=count, size=size)
        orders.append(receiver.start("receive", count=count, size=size, seed=1000 * seed))
        orders.append(sender.start("send", count=count, size=size, seed=1000 * seed))
    assert [order.result() for order in orders] == [["SUCCESS"] * count] * 4
