"""Fixtures for all tests: the devices, the event loops, and the leak check.

``pytest --device rxe0`` selects the device. If the device is missing, the tests that need it fail
instead of being skipped. ``pytest --device embedded0 --peer rxe88`` runs the second end of each
pair on another device. A test also fails if it leaks open files, threads or device objects.

pytest-asyncio runs each coroutine on a new event loop in debug mode. tests/combinations.py chooses
between asyncio's loop and uvloop.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import itertools
import os
import signal
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias
from zlib import crc32

import hypothesis
import pytest
import uvloop

from aiordma import cm, testing, verbs
from aiordma.errors import DeviceNotFoundError, UnsupportedError
from aiordma.verbs import AccessFlags
from tests import combinations, stacks
from tests.combinations import LOOPS, noting
from tests.session.pair import new_loop

EMBEDDED = "embedded0"
NOT_REPEATED = pytest.StashKey[int]()

# Disable numpy's threads. They exit at a fork and restart in a later test, where they look like a
# leak.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Restore the default SIGINT handler. Shells start background jobs with SIGINT ignored, and child
# processes inherit this setting.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The time limit of a coroutine test on the embedded device, in seconds. It is generous, because a
# busy machine is many times slower than an idle one. It must be below `timeout` in pyproject.toml,
# because pytest-timeout cannot interrupt a coroutine that is waiting on uvloop.
TIME_LIMIT = 100.0

# Time limits are multiplied by this factor on other devices, which run in a virtual machine with
# emulated processors. It is the machine's measured slowdown.
SLOW = 8.0

# Examples have no deadline, because their duration means nothing on an emulated or busy machine.
hypothesis.settings.register_profile("aiordma", deadline=None, print_blob=True)
hypothesis.settings.register_profile(
    "slow device", hypothesis.settings.get_profile("aiordma"), max_examples=2
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", default=EMBEDDED, help="RDMA device to test on (default: embedded0)"
    )
    parser.addoption(
        "--peer",
        help="RDMA device of the other end, which listens: only tests that need no more than a pair"
        " or a factory of connections, those by TCP (default: that of --device)",
    )
    parser.addoption(
        "--every-combination",
        action="store_true",
        help="tests with several combinations of event loop, connection method and polling, each in"
        " all or half of them, not in one; on the embedded device",
    )
    parser.addoption(
        "--only-native",
        action="store_true",
        help="only the tests that ask for a device, and those of folders that test compiled code",
    )
    parser.addoption(
        "--once",
        action="store_true",
        help="each test with one set of its parameters, always the same: where they take long",
    )


@pytest.hookimpl(trylast=True)  # after the terminal reporter has been registered
def pytest_configure(config: pytest.Config) -> None:
    if terminal := config.pluginmanager.get_plugin("terminalreporter"):
        config.pluginmanager.register(NamedAtOnce(terminal))
    for line in (
        "needs(capability): on a device that lacks it, the test must end in UnsupportedError",
        "any_device: the device only carries what is tested: not repeated on another one",
        *combinations.DESCRIPTIONS,
    ):
        config.addinivalue_line("markers", line)
    hypothesis.settings.load_profile("aiordma" if all_embedded(config) else "slow device")


def all_embedded(config: pytest.Config) -> bool:
    """Return whether both ends of all tests use the embedded device."""
    return config.getoption("--device") == EMBEDDED and not config.getoption("--peer")


def links() -> str:
    """Return the value of AIORDMA_EMBEDDED_LINKS, or its default."""
    return os.environ.get("AIORDMA_EMBEDDED_LINKS") or "shared"


def pytest_report_header(config: pytest.Config) -> list[str]:
    every = every_combination(config)
    return [
        f"RDMA device: {config.getoption('--device')}",
        f"that of the peer: {config.getoption('--peer') or 'the same'}",
        f"links of the embedded device: {links()}",
        f"direct wake-up of tasks: {'off' if os.environ.get('AIORDMA_NO_DIRECT_WAKE') else 'on'}",
        f"combinations of event loop, connection method and polling: {'all' if every else 'one'}",
    ]


# --- leaks -------------------------------------------------------------------------------------

# The maximum time in seconds to wait after a test for its resources to be freed.
PATIENCE = 30.0


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaks open files, threads or device objects."""
    if "device_name" in request.fixturenames:
        request.getfixturevalue("device")  # opens the devices that librdmacm never closes
    with testing.check_leaks(timeout=PATIENCE):
        yield


# --- the device --------------------------------------------------------------------------------


# The option `--only-native` selects the tests that request a device and all tests in these folders.
# Some tests in these folders run compiled code without requesting a device, for example in another
# process.
NATIVE_FOLDERS = {
    Path(__file__).parent / "tests" / name
    for name in ("datapath", "loop", "memory", "native", "simulation", "transport")
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that this run's options do not affect."""
    repeated = [item for item in items if is_repeated(config, item)]
    if config.getoption("--once"):
        repeated = one_of_each(repeated)
    config.stash[NOT_REPEATED] = len(items) - len(repeated)
    items[:] = repeated


def one_of_each(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return one parameter set of each test, chosen by a hash of the test's name."""
    tests: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    return [sets[crc32(name.encode()) % len(sets)] for name, sets in tests.items()]


def is_repeated(config: pytest.Config, item: pytest.Item) -> bool:
    """Return whether the device, build or combinations of this run affect the test."""
    asks = "device_name" in getattr(item, "fixturenames", ())
    if combinations.is_on_pair(item) and not all_embedded(config):
        return False
    if config.getoption("--peer"):
        return is_between_two(item)
    if not all_embedded(config):
        return asks and item.get_closest_marker("any_device") is None
    if config.getoption("--only-native"):
        return asks or not NATIVE_FOLDERS.isdisjoint(item.path.parents)
    if config.getoption("--every-combination") and links() == "shared":
        return combinations.is_repeated(item)
    return True


# Fixtures whose ends may be on two devices, and fixtures that support only one device.
OF_TWO_DEVICES = frozenset({"connected_pair", "factory", "pair"})
OF_ONE_DEVICE = frozenset(
    {"channel", "context", "cq", "deviations", "device", "device_name", "heard", "host", "pd", "qp"}
)


def is_between_two(item: pytest.Item) -> bool:
    """Return whether the test can run with its two ends on different devices."""
    asked = inspect.signature(item.obj).parameters if isinstance(item, pytest.Function) else ()
    return not OF_TWO_DEVICES.isdisjoint(asked) and OF_ONE_DEVICE.isdisjoint(asked)


def pytest_collection_finish() -> None:
    """Freeze all existing objects, so that later garbage collections skip them."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if count := config.stash.get(NOT_REPEATED, 0):
        terminalreporter.write_line(
            f"{count} tests to which this run makes no difference are not repeated"
        )


@pytest.fixture(scope="session")
def device_name(request: pytest.FixtureRequest) -> str:
    """The name of the device to test."""
    name = request.config.getoption("--device")
    assert isinstance(name, str)
    return name


@pytest.fixture(scope="session")
def peer_name(request: pytest.FixtureRequest, device_name: str) -> str:
    """The name of the peer's device."""
    return request.config.getoption("--peer") or device_name


@pytest.fixture(scope="session")
def device(device_name: str, peer_name: str) -> verbs.Device:
    """The device to test."""
    found = find("--device", device_name)
    if peer_name == device_name:
        # librdmacm never closes its devices. Open them here, so that they do not count as leaks.
        cm.get_devices(found.library)
    return found


@pytest.fixture(scope="module")
def peer(device: verbs.Device, peer_name: str) -> verbs.Device:
    """The peer's device, which is `device` itself unless `--peer` selects another one."""
    return device if peer_name == device.name else find("--peer", peer_name)


def find(option: str, name: str) -> verbs.Device:
    """Return the device selected by an option. Fail the test if the device is missing."""
    try:
        return verbs.find_device(name)
    except DeviceNotFoundError as error:
        pytest.fail(f"{option} {name}: {error}", pytrace=False)


# Known deviations of devices from the specification. The test for a deviation asserts that the
# deviation still exists, and therefore fails once the device has been fixed.
DEVIATIONS: dict[str, frozenset[str]] = {
    "rxe": frozenset(
        {
            "only bonding tells of another address",
            "an id that is bound beside a listener is in its way",
            "a message too long for the receive is an operational error",
            "what waited in SQD begins with the next post",
            "a failed send of an unreliable queue pair is fatal",
            "QP_LAST_WQE_REACHED never comes",
            "a window reaches as far as its region",
            "no zero based windows of type 1",
            "WITH_INV is told as IP_CSUM_OK",
            "a multicast message does not come back to its host",
            "the kernel takes the hop limit of the route",
            "the service level is not kept",
        }
    )
}

# Capabilities that no software device supports.
NOT_OF_SOFTWARE = frozenset({"RAW_PACKET"})

# The capabilities that each kind of device lacks. The ``needs`` marker refers to these names.
LACKS: dict[str, frozenset[str]] = {
    "embedded": NOT_OF_SOFTWARE,
    "rxe": NOT_OF_SOFTWARE
    | {
        "ATOMIC_WRITE",
        "FLUSH",
        "IPv6 multicast",
        "SRQ numbers",
        "XRC",
        "device memory",
        "dma-buf",
        "extended completion queues",
        "faults",
        "moderation",
        "null memory regions",
        "on-demand paging",
        "parent domains",
        "rereg",
    },
}


def kind_of(device_name: str) -> str:
    """Return a device's name without its number."""
    return device_name.rstrip("0123456789")


@pytest.fixture(scope="session")
def deviations(device_name: str) -> frozenset[str]:
    """The device's known deviations from the specification."""
    return DEVIATIONS.get(kind_of(device_name), frozenset())


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Expect UnsupportedError if a test needs a capability that the device lacks."""
    names = [pyfuncitem.config.getoption(option) or EMBEDDED for option in ("--device", "--peer")]
    lacks = frozenset().union(*(LACKS.get(kind_of(name), ()) for name in names))
    missing = lacks & {marker.args[0] for marker in pyfuncitem.iter_markers("needs")}
    if not missing:
        return (yield)
    try:
        yield
    except UnsupportedError:
        return True
    pytest.fail(f"the device is listed as lacking {', '.join(missing)}, yet the test ran through")


@pytest.fixture
def context(device: verbs.Device) -> Iterator[verbs.Context]:
    with device.open() as context:
        yield context


@pytest.fixture
def pd(context: verbs.Context) -> Iterator[verbs.ProtectionDomain]:
    with context.alloc_pd() as pd:
        yield pd


@pytest.fixture
def channel(context: verbs.Context) -> Iterator[verbs.CompletionChannel]:
    with context.create_comp_channel() as channel:
        yield channel


@pytest.fixture
def cq(context: verbs.Context) -> Iterator[verbs.CompletionQueue]:
    with context.create_cq(64) as cq:
        yield cq


@pytest.fixture
def qp(pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue) -> Iterator[verbs.QueuePair]:
    """A reliable connected (RC) queue pair in the RESET state."""
    with pd.create_qp(cq) as qp:
        yield qp


@pytest.fixture(scope="session")
def host(device: verbs.Device) -> str:
    """An IP address of the device."""
    return address_of(device)


@pytest.fixture(scope="module")
def peer_host(peer: verbs.Device) -> str:
    """An IP address of the peer's device."""
    return address_of(peer)


def address_of(device: verbs.Device) -> str:
    with device.open() as context:
        return str(context.choose_gid().gid.ip)


ALL_REMOTE = AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC


@dataclass
class End:
    """One end of a connected pair: a queue pair, its completion queue and 64 KiB of memory."""

    qp: verbs.QueuePair
    cq: verbs.CompletionQueue
    mr: verbs.MemoryRegion

    def completions(self, count: int, timeout: float = 100) -> list[verbs.WorkCompletion]:
        """Return the next ``count`` completions, or fail the test after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        found: list[verbs.WorkCompletion] = []
        while len(found) < count:
            found += self.cq.poll(count - len(found))
            if time.monotonic() > deadline:
                pytest.fail(f"{count} completions expected within {timeout} s, there: {found}")
            os.sched_yield()
        return found

    def completion(self) -> verbs.WorkCompletion:
        return self.completions(1)[0]

    def sge(self, offset: int = 0, length: int = 8) -> verbs.ScatterGatherElement:
        """Return a scatter/gather element for a part of the memory."""
        return verbs.ScatterGatherElement(self.mr.addr + offset, length, self.mr.lkey)

    def post_recv(self, wr_id: int = 1, length: int = 64) -> None:
        """Post a receive into the first ``length`` bytes of the memory."""
        self.qp.post_recv([verbs.ReceiveWorkRequest(wr_id, [self.sge(0, length)])])

    def post(
        self,
        opcode: verbs.WROpcode,
        peer: End | None = None,
        length: int = 8,
        *,
        wr_id: int = 1,
        flags: int = verbs.SendFlags.SIGNALED,
        rkey: int | None = None,
        imm_data: int = 0,
    ) -> None:
        """Post a request for the first ``length`` bytes of this end's and the peer's memory."""
        there, key = (peer.mr.addr, peer.mr.rkey) if peer is not None else (0, 0)
        self.qp.post_send_one(
            wr_id,
            opcode,
            flags,
            self.mr.addr,
            length,
            self.mr.lkey,
            there,
            key if rkey is None else rkey,
            imm_data,
        )


Pair: TypeAlias = tuple[End, End]
ConnectedPair: TypeAlias = Callable[..., Pair]


@dataclass
class PairFactory:
    """Creates connected pairs with all remote access rights in two protection domains."""

    pds: tuple[verbs.ProtectionDomain, verbs.ProtectionDomain]
    made: list[verbs.CompletionQueue | verbs.QueuePair | verbs.MemoryRegion]

    def __call__(
        self,
        capabilities: verbs.QPCapabilities | None = None,
        *,
        channel: verbs.CompletionChannel | None = None,
        qp_type: verbs.QPType = verbs.QPType.RC,
        send_ops: verbs.SendOps = verbs.SendOps.NONE,
        sq_sig_all: bool = False,
        **connect: Any,
    ) -> Pair:
        ends = []
        kinds: Any = {"qp_type": qp_type, "send_ops": send_ops, "sq_sig_all": sq_sig_all}
        for pd in self.pds:
            cq = pd.context.create_cq(256, channel)
            self.made.append(cq)
            qp = pd.create_qp(cq, capabilities=capabilities, **kinds)
            self.made.append(qp)
            mr = pd.reg_mr(1 << 16, AccessFlags.LOCAL_WRITE | ALL_REMOTE)
            self.made.append(mr)
            ends.append(End(qp, cq, mr))
        first, second = (end.qp.endpoint() for end in ends)
        connect.setdefault("access", ALL_REMOTE)
        ends[0].qp.connect(first, second, **connect)
        ends[1].qp.connect(second, first, **connect)
        return ends[0], ends[1]


@pytest.fixture
def peer_pd(
    device: verbs.Device, peer: verbs.Device, pd: verbs.ProtectionDomain
) -> Iterator[verbs.ProtectionDomain]:
    """The peer's protection domain, or `pd` if both ends use the same device."""
    if peer is device:
        yield pd
        return
    with peer.open() as context, context.alloc_pd() as other:
        yield other


@pytest.fixture
def connected_pair(
    pd: verbs.ProtectionDomain, peer_pd: verbs.ProtectionDomain
) -> Iterator[ConnectedPair]:
    """A factory for connected pairs. The fixture closes all their objects after the test."""
    make = PairFactory((pd, peer_pd), [])
    yield make
    # For each end, close the completion queue first. This also closes the queue pair, so that it no
    # longer uses the memory when the memory region is closed.
    for it in make.made:
        it.close()


@pytest.fixture
def pair(connected_pair: ConnectedPair) -> Pair:
    """Two connected ends."""
    return connected_pair()


@pytest.fixture
def heard(connected_pair: ConnectedPair, channel: verbs.CompletionChannel) -> Pair:
    """Two connected ends whose completion queues share a completion channel."""
    return connected_pair(channel=channel)


# --- the event loops ---------------------------------------------------------------------------


def _innermost(
    frames: Iterable[tuple[FrameType, int]],
    *,
    limit: int | None = None,
    lookup_lines: bool = True,
    **_: object,
) -> traceback.StackSummary:
    """Return a stack summary that reads source lines lazily. For asyncio, keep only four frames."""
    asyncios = limit is None or not lookup_lines
    return traceback.StackSummary.from_list(
        traceback.FrameSummary(
            frame.f_code.co_filename, line, frame.f_code.co_name, lookup_line=False
        )
        for frame, line in itertools.islice(frames, 4 if asyncios else limit)
    )


# In debug mode, asyncio records the stack on which each future, task and handle was created. Most
# frames belong to pytest. Recording all of them would take a sixth of a transport test's run time.
traceback.StackSummary.extract = staticmethod(_innermost)  # type: ignore[assignment]


def _start_libuv() -> None:
    """Make libuv create the four threads and the pipe it keeps, before the first leak check."""
    loop = uvloop.new_event_loop()
    loop.run_until_complete(loop.getaddrinfo("localhost", 1))
    loop.close()


_start_libuv()


def every_combination(config: pytest.Config) -> bool:
    """Return whether tests run in all combinations. Only embedded devices are fast enough."""
    return all_embedded(config) and bool(config.getoption("--every-combination"))


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Function
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return the event loop factories for a coroutine test, by name."""
    values = combinations.values(config, item, every_combination(config))
    virtual = noting(functools.partial(new_loop, crc32(item.nodeid.encode())))
    return {name: LOOPS.get(name, virtual) for name in values["loop_name"]}


@pytest.fixture(autouse=True)
def loops(no_leaks: None) -> Iterator[None]:
    """Fail a test if an event loop's exception handler is called.

    pytest-asyncio creates and closes the test's own loop within this fixture.
    """
    before = combinations.loops_made()
    yield
    if combinations.loops_made() != before:
        gc.collect()  # so that unawaited tasks and futures are reported now
        gc.freeze()  # so that later collections skip objects such as newly imported modules
    told = combinations.reported.copy()
    combinations.reported.clear()
    assert not told, f"reported to the event loop: {told}"


@pytest.fixture
def reported(loops: None) -> Iterator[list[dict[str, Any]]]:
    """The contexts passed to the loops' exception handlers. They do not make the test fail."""
    yield combinations.reported
    combinations.reported.clear()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Add a time limit to a coroutine test."""
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        item.obj = within(TIME_LIMIT * (1 if all_embedded(item.config) else SLOW), item.obj)


def within(
    limit: float, test: Callable[..., Coroutine[Any, Any, None]]
) -> Callable[..., Coroutine[Any, Any, None]]:
    """Wrap a test so that it prints all stacks and fails after ``limit`` seconds."""

    @functools.wraps(test)
    async def limited(*arguments: Any, **keywords: Any) -> None:
        __tracebackhide__ = True
        timer = asyncio.get_running_loop().call_later(limit, stacks.show, os.getpid())
        async with asyncio.timeout(limit):
            await test(*arguments, **keywords)
        timer.cancel()

    return limited


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer() -> Generator[None, object, object]:
    """Print the stacks of all the test's processes if pytest-timeout's limit is reached."""
    done = yield
    ends = signal.getsignal(signal.SIGALRM)
    assert callable(ends)
    signal.signal(signal.SIGALRM, lambda *it: [stacks.show(os.getpid()), ends(*it)])
    return done


class NamedAtOnce:
    """Prints each failure immediately, because a later test may hang before the summary."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            where = report.longreprtext.rstrip().rpartition("\n")[2]
            self.terminal.write(f"\nfailed in {report.when}: {report.nodeid}: {where}\n")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Add the test's combination to its report, which pytest shows if the test fails."""
    chooser = item.config.stash.get(combinations.COMBINATIONS, None)
    if chooser and (chosen := chooser.chosen.get(item.nodeid.partition("[")[0])):
        item.add_report_section("setup", "combination", ", ".join(chosen.values()))
