"""Test that rails are added to a connection, break, and end with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from aiordma import (
    Config,
    Connection,
    ConnectionBrokenError,
    ProtocolError,
    RequestRefusedError,
    blocking,
    connect,
    listen,
    open_connection,
    prepare_connection,
    start_server,
    start_stream_server,
    verbs,
)
from aiordma._core import protocol
from aiordma._event_loop import loop_settings
from aiordma._native import lib
from aiordma._options import Devices
from aiordma._transport.rails import AnsweringRails, Rail, Rails, RailState
from aiordma.errors import ConnectionManagerError, RejectedError, RouteError, host_port
from aiordma.verbs import EventType
from tests.event_loop.test_loop_settings import ignored, warned
from tests.transport.connection_factory import (
    KEY,
    SMALL,
    ConnectionFactory,
    check_alive,
    echo,
    ends,
    yield_loop,
)
from tests.transport.marks import by_cm, by_tcp, one_loop
from tests.transport.raw_peer import endpoint_at

from .joining import HOST, TWO, WAYS, further, joined, shown, until_rails

WITHOUT = ConnectionBrokenError("its cable")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "security", [{}, {"auth": KEY}, {"auth": KEY, "encrypt": True}], ids=["open", "key", "sealed"]
)
async def test_connection_uses_the_second_device_as_a_rail(
    way: str, security: dict[str, Any]
) -> None:
    async with joined(way, **security) as conns:
        await until_rails(conns)
        for conn in conns:
            assert shown(conn) == [("embedded0", "lead"), ("embedded1", "up")]
            assert conn.device == "embedded0"
        await check_alive(*conns)
        lead, other = conns[0].rails
        assert lead.since <= other.since
        assert lead.bytes_sent == lead.bytes_received == 5100
        assert other.bytes_sent == other.bytes_received == 0
    for conn in conns:
        assert [rail.state for rail in conn.rails] == ["down", "down"]
        assert_rail_released(conn)


@pytest.mark.parametrize("way", ["cm", "tcp", "in-band"])
@pytest.mark.parametrize(
    ("here", "there", "most", "states"),
    [
        ("all", "embedded0", None, ["lead"]),
        ("all", TWO, None, ["lead", "up", "down"]),
        ("all", "all", 2, ["lead", "up"]),
        (TWO, TWO, 1, ["lead"]),
    ],
)
async def test_either_side_can_limit_the_number_of_rails(
    way: str, here: Devices, there: Devices, most: int | None, states: list[str]
) -> None:
    """A listener allows as many rails as it names devices.

    With one device it allows no further rail.
    """
    async with joined(way, here, there, replace(SMALL, max_rails=most)) as conns:
        await until_rails(conns[:1], states)
        await until_rails(conns[1:], states[:2])
        for conn in conns:
            assert (conn._rails is not None) == (len(states) > 1)
        assert [conn._handshake.hello.rails for conn in conns] == [most != 1, len(states) > 1]
        await check_alive(*conns)


@pytest.mark.parametrize("way", ["cm", "tcp", "in-band"])
async def test_side_with_one_device_reuses_it_for_every_rail(way: str) -> None:
    config = replace(SMALL, max_rails=3)
    async with joined(way, here="all", there="embedded0", config=config) as conns:
        await until_rails(conns, ["lead", "up", "up"])
        assert [device for device, _ in shown(conns[0])] == ["embedded0", "embedded1", "embedded2"]
        assert [device for device, _ in shown(conns[1])] == ["embedded0"] * 3
        await check_alive(*conns)


async def test_rail_is_warned_of_settings_without_effect_on_its_device() -> None:
    """The other device has the settings, because the connection has opened it."""
    asked, current = (replace(SMALL, cached_registrations=count) for count in (2, 1))
    second: dict[str, Any] = {"device": TWO[1], "via": "tcp", "config": current}
    opener = "which opened the device"
    async with (
        await listen(HOST, 0, **second) as listener,
        await connect(HOST, listener.port, **second),
        await listener.accept(),
    ):
        holder = f"the connection to {host_port((HOST, listener.port))}, {opener}"
        text = ignored("cached_registrations", 2, TWO[1], 1, holder)
        with warned(text, text):  # each side has a rail on the device
            async with joined("tcp", config=asked) as conns:
                await until_rails(conns)


async def test_rail_chooses_the_settings_of_its_device() -> None:
    async with joined("tcp", config=replace(SMALL, cached_registrations=2)) as conns:
        await until_rails(conns)
        peer = conns[0].peer_address
        assert peer is not None
        opener = f"the connection with {host_port(peer)}, which opened the device"
        with warned(ignored("cached_registrations", 1, TWO[1], 2, opener)):
            config = replace(SMALL, cached_registrations=1)
            await (await prepare_connection(device=TWO[1], config=config)).close()


@pytest.mark.parametrize("way", WAYS)
async def test_each_device_is_opened_in_the_name_of_its_connection(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    openers: set[str] = set()
    choose = loop_settings.choose

    def observed(config: Config, opener: str) -> loop_settings.Choice:
        openers.add(opener)
        return choose(config, opener)

    monkeypatch.setattr(loop_settings, "choose", observed)
    async with joined(way) as conns:
        await until_rails(conns)
        rails = {f"the connection with {conn._owner.peer_name}" for conn in conns}
        if way == "out of band":
            leads = {"an out-of-band connection"}
        else:
            address = conns[0].peer_address
            assert address is not None
            where = host_port(address)
            leads = {f"the connection to {where}", f"the listener on {where}"}
        assert openers == leads | rails


@pytest.mark.parametrize("names", ["all", "embedded0,embedded1"])
async def test_aiordma_device_variable_accepts_several_devices(
    names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program needs no change to use several devices.

    Where one device is needed, it is the first.
    """
    monkeypatch.setenv("AIORDMA_DEVICE", names)
    options = Config(max_rails=2)
    async with (
        await listen(HOST, config=options) as listener,
        await connect(HOST, listener.port, config=options) as conn,
        await listener.accept(),
    ):
        assert [rail.device for rail in conn.rails] == ["embedded0", "embedded1"]
    with verbs.open_device() as context:
        assert context.name == "embedded0"


async def test_on_request_is_called_once_for_all_rails() -> None:
    asked = []

    async def take(request: object) -> None:
        asked.append(request)
        await yield_loop(10)

    async with joined("tcp", on_request=take) as conns:
        await until_rails(conns)
        assert len(asked) == 1


@by_cm
async def test_destination_address_selects_the_lead_device() -> None:
    async with await listen("0.0.0.0", device="all", config=SMALL) as listener:
        accepting = asyncio.create_task(listener.accept())
        client = await connect("127.0.0.2", listener.port, device=TWO, config=SMALL)
        async with client, await accepting as server:
            await until_rails((client, server))
            assert shown(client) == [("embedded1", "lead"), ("embedded0", "up")]
            assert shown(server) == [("embedded1", "lead"), ("embedded0", "up")]
        elsewhere = ["embedded0", "embedded2"]
        error = await ends(
            connect("127.0.0.2", listener.port, device=elsewhere), ConnectionManagerError
        )
        assert "'embedded1', not 'embedded0' or 'embedded2'" in str(error)
    async with await listen("0.0.0.0", device=["embedded1", "embedded2"]) as listener:
        error = await ends(connect(HOST, listener.port, device="embedded0"), RejectedError)
        assert "'embedded0', not 'embedded1' or 'embedded2'" in str(error)
    error = await ends(listen(HOST, device="embedded1"), ConnectionManagerError)
    assert "'embedded0', not 'embedded1'" in str(error)


@by_tcp
async def test_lead_device_matches_the_address_or_defaults_to_the_first() -> None:
    async with joined("tcp", ["embedded2", "embedded1"], ["embedded1", "embedded0"]) as conns:
        await until_rails(conns)
        assert shown(conns[0]) == [("embedded2", "lead"), ("embedded1", "up")]
        assert shown(conns[1]) == [("embedded0", "lead"), ("embedded1", "up")]


# ---- a rail that breaks --------------------------------------------------------------------------


def assert_rail_released(conn: Connection) -> None:
    assert further(conn).queue is None
    assert further(conn).endpoint is None


def raise_route_error(*_: object) -> NoReturn:
    raise RouteError("there is no way")


def on_offer_sent(
    monkeypatch: pytest.MonkeyPatch, happens: Callable[[Rails, Rail], object], *, lost: bool
) -> None:
    """Call `happens` after each rail offer. If `lost`, the offer itself is not sent."""
    tell = Rails._send

    def send_and_notify(self: Rails, message: protocol.Message) -> None:
        is_offer = isinstance(message, protocol.RailOffer)
        if not is_offer or not lost:
            tell(self, message)
        if is_offer:
            happens(self, self.rails[-1])

    monkeypatch.setattr(Rails, "_send", send_and_notify)


@pytest.mark.parametrize("refused", [False, True])
async def test_rail_goes_down_when_it_breaks_before_the_response(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    on_offer_sent(monkeypatch, lambda rails, rail: rails._fail_rail(rail, WITHOUT), lost=False)
    if refused:
        monkeypatch.setattr(AnsweringRails, "_create_connected_endpoint", raise_route_error)
    async with joined(factory.via) as conns:
        while further(conns[0]).state is not RailState.DOWN:
            assert further(conns[0]).state.public_state == "down"
            await yield_loop(1)
        assert refused != (len(conns[1].rails) == 2)
        assert refused or further(conns[1]).state is RailState.DOWN
        assert further(conns[0]).error is WITHOUT
        await check_alive(*conns)


async def test_early_rail_messages_from_listener_raise_protocol_error(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The messages arrive in place of the offer, which is never sent.

    The last ones answer the offer and immediately take the rail down.
    """

    def answer(rails: Rails, rail: Rail) -> None:
        number, offer, endpoint = rail.number, rail.offer_id, endpoint_at(HOST)
        for message in (
            protocol.RailAnswer(offer + 1, number, endpoint),
            protocol.RailDown(0, number),
        ):
            with pytest.raises(ProtocolError):
                rails.handle_control(message)
        assert rails.handle_control(protocol.RailAnswer(offer, number, endpoint))
        assert rail.state is RailState.CONNECTING
        assert not rails.handle_control(protocol.RailReady(0, number))
        assert not rails.handle_control(protocol.RailOffer(1, number + 1, endpoint))
        assert rail.queue is not None
        rail.queue.rail_broke(WITHOUT)  # reported in the loop's next iteration
        assert rails.handle_control(protocol.RailDown(0, number))

    on_offer_sent(monkeypatch, answer, lost=True)
    tell = Rails._send
    monkeypatch.setattr(
        Rails,
        "_send",
        lambda self, it: None if isinstance(it, protocol.RailDown) else tell(self, it),
    )
    async with joined(factory.via) as conns:
        await yield_loop(3)
        assert further(conns[0]).state is RailState.DOWN
        assert "the peer has stopped" in str(further(conns[0]).error)
        assert_rail_released(conns[0])
        await check_alive(*conns)


@one_loop
async def test_rail_stays_down_while_its_device_port_is_down(factory: ConnectionFactory) -> None:
    """The connecting side does not offer a rail on the device whose port is down.

    The listening side refuses an offer for that device instead of using another one.
    """
    assert lib.aiordma_embedded_raise_on(b"embedded1", EventType.PORT_ERR) == 0
    try:
        async with joined(factory.via) as conns:
            assert shown(conns[0]) == [("embedded0", "lead"), ("embedded1", "down")]
            assert isinstance(conns[0].rails[1].error, RouteError)
            assert shown(conns[1]) == [("embedded0", "lead")]
            await check_alive(*conns)
        async with joined(factory.via, here=["embedded0", "embedded2"]) as conns:
            await until_rails(conns[:1], ("lead", "down"))
            assert isinstance(error := conns[0].rails[1].error, RequestRefusedError)
            assert "embedded1 is DOWN" in str(error)
    finally:
        assert lib.aiordma_embedded_raise_on(b"embedded1", EventType.PORT_ACTIVE) == 0


async def test_refused_rail_goes_down_with_the_refusal_error(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AnsweringRails, "_create_connected_endpoint", raise_route_error)
    async with joined(factory.via) as conns:
        await until_rails(conns[:1], ("lead", "down"))
        assert isinstance(error := conns[0].rails[1].error, RequestRefusedError)
        assert error.code == protocol.ErrorCode.INTERNAL
        assert shown(conns[1]) == [("embedded0", "lead")]
        await yield_loop(1)
        assert_rail_released(conns[0])
        await check_alive(*conns)


async def test_closing_the_connection_at_any_point_releases_its_rails(
    factory: ConnectionFactory,
) -> None:
    for turns in range(12):
        for ended in (0, 1):
            async with joined(factory.via) as conns:
                await yield_loop(turns)
                conns[ended].abort()
            async with joined(factory.via) as conns:
                await yield_loop(turns)
                await conns[ended].close()
            for conn in conns:
                assert conn._rails is not None
                assert all(rail.queue is None for rail in conn._rails.rails)


# ---- what else takes devices ---------------------------------------------------------------------


async def test_servers_and_streams_accept_several_devices(factory: ConnectionFactory) -> None:
    where: dict[str, Any] = {"device": TWO, "via": factory.via}
    async with (
        await start_server(echo, HOST, **where) as server,
        await connect(HOST, server.port, **where) as conn,
    ):
        await until_rails([conn])
        await conn.send(b"there")
        assert bytes(await conn.recv()) == b"there"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(5))
        writer.close()

    async with await start_stream_server(answer, HOST, **where) as streams:
        reader, writer = await open_connection(HOST, streams.address[1], **where)
        await until_rails([writer.get_extra_info("connection")])
        writer.write(b"there")
        assert await reader.read() == b"there"
        writer.close()


def test_blocking_api_uses_several_devices() -> None:
    with (
        blocking.listen(HOST, device=TWO) as listener,
        blocking.connect(HOST, listener.port, device=TWO) as client,
        listener.accept() as server,
    ):
        client.send(b"there")
        assert server.recv() == b"there"
        assert [rail.device for rail in client.rails] == TWO
    blocking.stop()
