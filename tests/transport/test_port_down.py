"""Test that connecting through a port that is not ACTIVE fails immediately with the reason."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from aiordma import Config, prepare_connection
from aiordma._native import lib
from aiordma._transport import connect_cm
from aiordma.errors import RejectedError, RouteError, VerbsError
from aiordma.verbs import EventType
from aiordma.verbs._device import route_lookup
from aiordma.verbs._qp import bring_up

from .connection_factory import SMALL, ConnectionFactory, check_alive, ends


@contextmanager
def port_down(device: str) -> Iterator[None]:
    """Take the port of the embedded device down inside the block."""
    assert device == "embedded0"
    assert lib.aiordma_embedded_raise(EventType.PORT_ERR) == 0
    try:
        yield
    finally:
        assert lib.aiordma_embedded_raise(EventType.PORT_ACTIVE) == 0


def check(error: BaseException) -> None:
    assert isinstance(error, RouteError)
    assert error.errno == errno.ENETDOWN
    assert "port 1 of embedded0 is DOWN, not ACTIVE" in str(error)
    assert str(error).count("Errno") == 1


@pytest.mark.any_device
async def test_connect_raises_route_error_when_the_local_port_is_down(
    factory: ConnectionFactory,
) -> None:
    async with await factory.listen() as listener:
        with port_down(factory.device):
            check(await ends(factory.connect(listener.port), RouteError))
        client, server = await factory.both(listener)  # the port is up again
        async with client, server:
            with port_down(factory.device):  # in-band over the TCP bootstrap
                check(await ends(factory.connect(listener.port), RouteError))
            await check_alive(client, server)


@pytest.mark.any_device
async def test_prepare_connection_raises_route_error_when_the_port_is_down(
    factory: ConnectionFactory,
) -> None:
    with port_down(factory.device):
        check(await ends(prepare_connection(device=factory.device), RouteError))


@pytest.mark.any_device
@pytest.mark.parametrize("in_band", [False, True])
async def test_connect_is_rejected_when_the_listener_port_is_down(
    factory: ConnectionFactory, in_band: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ends use the same port here, so the test reports it as down only to the listener's
    handshakes.
    """

    def active_port(context: Any, port_num: int) -> Any:
        task = asyncio.current_task()
        assert task is not None
        if "Acceptor" in getattr(task.get_coro(), "__qualname__", ""):
            raise VerbsError(errno.ENETDOWN, "ibv_query_port", "port 1 of mlx5_0 is DOWN")
        return route_lookup.active_port(context, port_num)

    config = Config(in_band=in_band, connect_timeout=SMALL.connect_timeout)
    async with await factory.listen(config) as listener:
        client = await factory.connect(listener.port, config)
        async with client, await listener.accept():
            monkeypatch.setattr(connect_cm, "active_port", active_port)
            monkeypatch.setattr(bring_up, "active_port", active_port)
            error = await ends(factory.connect(listener.port, config), RejectedError)
            assert "port 1 of mlx5_0 is DOWN" in str(error)
            assert str(error).count("Errno") == 1


@pytest.mark.any_device
async def test_connection_survives_a_brief_port_outage(factory: ConnectionFactory) -> None:
    """Connections wait for the port as long as their timeouts allow."""
    async with factory.pair() as (client, server):
        with port_down(factory.device):
            sending = asyncio.create_task(client.send(b"x"))
            await asyncio.sleep(0)
        await sending
        assert bytes(await server.recv()) == b"x"
