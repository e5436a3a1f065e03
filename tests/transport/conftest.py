"""Tests of the transport are coroutines; `factory` makes their connections.

Such a test has an event loop, a connection method, "cm" or "tcp", and polls or not: in which
combination, tests/combinations.py says.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aiordma._loop import completion_reader
from aiordma._loop.adaptive_polling import AdaptivePolling
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
    """A key of LOOPS, for a test that is no coroutine: those have a loop."""
    value: str = request.param
    return value


@pytest.fixture
def connection_method(request: pytest.FixtureRequest) -> Via:
    """How connections find each other."""
    value: Via = request.param
    return value


@pytest.fixture
def polling_mode(request: pytest.FixtureRequest) -> Iterator[None]:
    """How the drivers of this process poll for completions, whatever their `Config` says.

    "sleeping": never.  "adaptive": as they do by default, the event loop as well as a task that is
    about to wait.  A test that counts iterations of the loop has the loop's alone, since an await
    that need not wait takes none.
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
