"""Fixtures of the transport tests.

The tests are coroutines. Each runs with an event loop, a connection method ("cm" or "tcp"), and
with or without polling; tests/combinations.py chooses the combinations. The fixture `factory` makes
the connections.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aiordma._event_loop import completion_reader
from aiordma._event_loop.adaptive_polling import AdaptivePolling
from aiordma.transport import Via
from conftest import SLOW, all_embedded, every_combination
from tests import combinations
from tests.session.pair import PairFactory

from .connection_factory import ConnectionFactory


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    combinations.parametrize(metafunc, every_combination(metafunc.config))


@pytest.fixture
def loop_name(request: pytest.FixtureRequest) -> str:
    """Provide a key of LOOPS for a synchronous test. Coroutine tests already run on a loop."""
    value: str = request.param
    return value


@pytest.fixture
def connection_method(request: pytest.FixtureRequest) -> Via:
    """Provide the method by which connections are established."""
    value: Via = request.param
    return value


@pytest.fixture
def polling_mode(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set how this process's drivers poll for completions, regardless of their `Config`.

    With "sleeping", they never poll. With "adaptive", the default, the event loop polls, and so
    does each task that is about to wait. With "between turns", only the loop polls. Tests that
    count loop iterations need this mode, because an await that finds its completion by polling
    returns without another iteration.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "sleeping":
            patch.setattr(completion_reader, "AdaptivePolling", lambda spin_us: AdaptivePolling(0))
        elif request.param == "between turns":
            patch.setattr(completion_reader, "BRIEF_SPIN_US", 0)
        yield


@pytest.fixture
def factory(
    request: pytest.FixtureRequest,
    device_name: str,
    peer_name: str,
    peer_host: str,
    connection_method: Via,
    polling_mode: None,
    pytestconfig: pytest.Config,
) -> ConnectionFactory:
    if combinations.is_on_pair(request.node):
        return PairFactory(device_name, peer_host, connection_method, 1.0)
    return ConnectionFactory(
        device_name,
        peer_host,
        connection_method,
        1.0 if all_embedded(pytestconfig) else SLOW,
        listens_on=peer_name,
    )
