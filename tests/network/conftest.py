"""Two machines, as far as the device can tell: two network namespaces, and an agent in each.

Of the embedded device alone: SoftRoCE's network is the kernel's business.
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

# Seconds that a path may be silent before it counts as lost, where none is lost: more than a slow
# machine takes.  The device's own are 20.
PATIENCE = 60

# The same where a path is lost.  Half of them is more than connecting takes.
IMPATIENCE = 6

# Seconds for an answer, however slow the machine is.
LIMIT = 110.0


class Order:
    """A command that an agent executes."""

    def __init__(self, agent: AgentProcess, number: int) -> None:
        self.agent = agent
        self._number = number

    def result(self, seconds: float = LIMIT) -> Any:
        """Wait for its result; the test fails if it failed or takes too long."""
        answer = self._answer(seconds)
        if "error" in answer:
            pytest.fail(answer["error"], pytrace=True)
        return answer["result"]

    def error(self, seconds: float = LIMIT) -> str:
        """The error that it failed with."""
        answer = self._answer(seconds)
        assert "error" in answer, answer
        return str(answer["error"])

    def done(self) -> bool:
        """Whether it has ended, successfully or not."""
        self.agent.read(0)
        return self._number in self.agent.answers

    def _answer(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while not self.done():
            if not self.agent.read(deadline - time.monotonic()):
                pytest.fail(f"no answer within {seconds} s")
        return self.agent.answers[self._number]


class AgentProcess:
    """`tests.network.agent` in a namespace, and one of its devices."""

    def __init__(self, namespace: Namespace, patience: int) -> None:
        self.namespace = namespace
        self.device = "embedded0"
        # Of a queue pair: rounded up and with all its tries, no longer than the patience.
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
        """The same process, and another device, whose interface is the end of that cable."""
        other = copy.copy(self)
        other.device, other.namespace = device, end
        return other

    def start(self, name: str, **arguments: Any) -> Order:
        """Start a command without waiting."""
        number = next(self._numbers)
        order = {"number": number, "device": self.device, "name": name, "arguments": arguments}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return Order(self, number)

    def call(self, name: str, **arguments: Any) -> Any:
        """Execute a command and wait for its result."""
        return self.start(name, **arguments).result()

    def read(self, seconds: float) -> bool:
        """Read answers; False when none arrived in that time."""
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
        """Stop its process; return when none of its threads runs any more."""
        # The process is the agent: `ip netns exec` replaces itself by it.
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        """Let its process run again."""
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def cables() -> int:
    """How many join the two namespaces."""
    return 1


@pytest.fixture
def wire(cables: int) -> Iterator[Network]:
    """The two namespaces."""
    with network(cables) as made:
        yield made


Start = Callable[..., AgentProcess]


@pytest.fixture
def start(wire: Network) -> Iterator[Start]:
    """Start an agent in a namespace; it ends with the test."""
    with ExitStack() as stack:

        def start(namespace: Namespace, patience: int = PATIENCE) -> AgentProcess:
            agent = AgentProcess(namespace, patience)
            stack.callback(agent.end)
            return agent

        yield start


@pytest.fixture
def agents(wire: Network, start: Start) -> tuple[AgentProcess, AgentProcess]:
    """An agent at each end."""
    return start(wire.left), start(wire.right)


@pytest.fixture
def impatient(wire: Network, start: Start) -> tuple[AgentProcess, AgentProcess]:
    """An agent at each end, which soon gives up a path."""
    return start(wire.left, IMPATIENCE), start(wire.right, IMPATIENCE)


Agents = tuple[AgentProcess, AgentProcess]


def address_of(namespace: Namespace, family: str) -> str:
    """The first address of that kind."""
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
    """Connect the left agent to the right one, which echoes."""
    left, right = agents
    port = right.call("listen", host=host, via=via)
    serving = right.start("serve")
    left.call("connect", host=host, port=port, via=via)
    serving.result()


def pair(
    agents: Agents, kind: str, family: str, ack_timeout: float | None = None
) -> dict[str, Any]:
    """Connect queue pairs; return the memory of the right one."""
    left, right = agents
    ends = [
        agent.call("make", kind=kind, ip=address_of(agent.namespace, family)) for agent in agents
    ]
    for agent, peer in ((left, ends[1]), (right, ends[0])):
        agent.call("bring_up", peer=peer["peer"], ack_timeout=ack_timeout or agent.ack_timeout)
    return {"address": ends[1]["address"], "rkey": ends[1]["rkey"]}


def exchange(agents: Agents, count: int, size: int) -> None:
    """Send messages of queue pairs in both directions at once; all arrive."""
    orders = []
    for seed, (sender, receiver) in enumerate((agents, agents[::-1])):
        receiver.call("post", count=count, size=size)
        orders.append(receiver.start("receive", count=count, size=size, seed=1000 * seed))
        orders.append(sender.start("send", count=count, size=size, seed=1000 * seed))
    assert [order.result() for order in orders] == [["SUCCESS"] * count] * 4
