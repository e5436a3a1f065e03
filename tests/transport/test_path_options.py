"""Test that options of the queue pair and its path reach the device."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from aiordma import Config, Connection, prepare_connection
from aiordma._transport.arguments import UNSUPPORTED_BY_CM
from aiordma.errors import RejectedError, RouteError, VerbsError
from aiordma.transport import connect, listen
from aiordma.verbs import MTU, QPAttributes

from .connection_factory import SMALL, ConnectionFactory, check_alive, ends
from .marks import by_tcp, one_loop

BOTH_WAYS: dict[str, Any] = {"retry_count": 3, "ack_timeout": 0.5, "type_of_service": 0x28}
BY_TCP: dict[str, Any] = {"path_mtu": 512, "pkey": 0xFFFF, "hop_limit": 17, "service_level": 3}


@pytest.fixture
def hop_limit(deviations: frozenset[str]) -> Callable[[int], int]:
    """Provide a function that returns the effective hop limit for a requested one."""
    return lambda asked: (
        64 if "the kernel takes the hop limit of the route" in deviations else asked
    )


def attributes(conn: Connection) -> QPAttributes:
    qp = conn._endpoint.qp
    assert qp is not None
    return qp.query()


def with_options(options: dict[str, Any]) -> Config:
    return replace(SMALL, **options)


async def test_path_options_are_applied_to_the_queue_pair(factory: ConnectionFactory) -> None:
    async with factory.pair(with_options(BOTH_WAYS)) as (client, server):
        await check_alive(client, server)
        for found in map(attributes, (client, server)):
            assert (found.retry_cnt, found.rnr_retry) == (3, 7)
            assert 0.5 <= found.timeout < 1
            assert found.ah_attr.traffic_class == 0x28


@by_tcp
async def test_tcp_only_options_are_applied_to_the_queue_pair(
    factory: ConnectionFactory, hop_limit: Callable[[int], int], deviations: frozenset[str]
) -> None:
    """Each side uses its own options, except that the smaller path MTU applies to both."""
    other = with_options(BY_TCP | {"path_mtu": 256, "hop_limit": 9, "retry_count": 1})
    async with factory.pair(with_options(BY_TCP), server=other) as (client, server):
        await check_alive(client, server)
        for conn, limit, retries in ((client, 17, 6), (server, 9, 1)):
            found = attributes(conn)
            assert found.path_mtu is MTU.MTU_256
            assert found.pkey_index == 0
            assert found.ah_attr.hop_limit == hop_limit(limit)
            assert found.ah_attr.sl == (0 if "the service level is not kept" in deviations else 3)
            assert found.retry_cnt == retries


@by_tcp
async def test_gid_index_option_selects_the_local_gid(factory: ConnectionFactory) -> None:
    async with await factory.listen() as listener:
        client, server = await factory.both(listener)
        async with client, server:
            index = attributes(client).ah_attr.sgid_index
            table = client._endpoint.driver.context.query_gid_table()
            config = replace(SMALL, gid_index=index)
            async with await factory.connect(listener.port, config) as same:
                assert attributes(same).ah_attr.sgid_index == index
            for entry in table:
                config = replace(SMALL, gid_index=entry.gid_index)
                async with await prepare_connection(device=factory.device, config=config) as half:
                    assert entry.gid.raw in half.endpoint
            config = replace(SMALL, gid_index=250)
            error = await ends(factory.connect(listener.port, config), VerbsError)
            assert error.errno in (errno.ENODATA, errno.EINVAL)
            assert f"GID index 250 of port 1 of {factory.device}" in str(error)


@by_tcp
async def test_unreachable_gid_error_contains_gid_and_device(factory: ConnectionFactory) -> None:
    """The error names both GIDs and the GID index."""
    async with await factory.listen() as listener:
        client, server = await factory.both(listener)
        async with client, server:
            table = client._endpoint.driver.context.query_gid_table()
        own = next(entry for entry in table if entry.gid.is_ipv4)
        other = next(entry for entry in table if not entry.gid.is_ipv4)
        config, wrong = (replace(SMALL, gid_index=entry.gid_index) for entry in (own, other))
        async with (
            await prepare_connection(device=factory.device, config=config) as half,
            await prepare_connection(device=factory.device, config=wrong) as peer,
        ):
            with pytest.raises(RouteError) as caught:
                half.accept(peer.endpoint)
        assert caught.value.errno == errno.ENETUNREACH
        for part in (f"index {own.gid_index}", str(own.gid.ip), str(other.gid), factory.device):
            assert part in str(caught.value)
        error = await ends(factory.connect(listener.port, wrong), RejectedError)
        for part in ("GID index", str(other.gid)[:10], factory.device):  # the reason is truncated
            assert part in str(error)


@by_tcp
async def test_unknown_pkey_raises_value_error(factory: ConnectionFactory) -> None:
    async with await factory.listen() as listener:
        config = replace(SMALL, pkey=0x1234)
        error = await ends(factory.connect(listener.port, config), ValueError)
        text = f"port 1 of {factory.device} has no P_Key 0x1234; its P_Keys are: 0xffff"
        assert text in str(error)


@pytest.mark.any_device
@one_loop
@pytest.mark.parametrize("name", UNSUPPORTED_BY_CM)
async def test_options_unsupported_by_the_connection_manager_are_rejected(
    name: str, device_name: str
) -> None:
    """Such options must not be ignored silently."""
    config = replace(SMALL, **{name: (BY_TCP | {"gid_index": 0})[name]})
    for call in (connect, listen):
        error = await ends(call("127.0.0.1", 1, device=device_name, config=config), ValueError)
        assert f"Config.{name}" in str(error)
        assert 'via="tcp"' in str(error)


@pytest.mark.parametrize(
    "wrong",
    [
        {"eager_size": 100},
        {"data_receives": 0},
        {"data_receives": 1 << 16},
        {"control_receives": 3},
        {"send_queue": 1},
        {"max_message": -1},
        {"max_regions": 0},
        {"max_connections": 0},
        {"max_connections_per_host": 0},
        {"max_rails": 9},
        {"connect_timeout": 0},
        {"close_timeout": -1},
        {"keep_alive": 0.0},
        {"keep_alive_timeout": 0.0},
        {"retry_count": 8},
        {"retry_count": -1},
        {"ack_timeout": 0},
        {"ack_timeout": 10_000},
        {"type_of_service": 256},
        {"path_mtu": 1500},
        {"gid_index": -1},
        {"pkey": 0},
        {"pkey": 0x10000},
        {"hop_limit": 256},
        {"service_level": 16},
    ],
    ids=str,
)
def test_config_rejects_values_out_of_range(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"Config.{name}"):
        Config(**wrong)
