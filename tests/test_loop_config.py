"""Tests of LoopConfig, and of its settings in Config, in all functions that open a device."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aiordma import (
    Config,
    Connection,
    Listener,
    LoopConfig,
    blocking,
    configure_loop,
    connect,
    create_connection,
    create_server,
    listen,
    open_connection,
    prepare_connection,
    reconnect,
    rpc,
    start_server,
    start_stream_server,
    testing,
)
from aiordma._transport.connection_group import GroupMember
from aiordma.errors import host_port
from aiordma.transport import Via
from tests.event_loop.test_loop_settings import OTHER, OTHERS, ignored, warned
from tests.processes import run_python

VIA = pytest.mark.parametrize("via", ["cm", "tcp"])
HELD = LoopConfig(polling=0.001)


@pytest.fixture
def options(device_name: str) -> dict[str, Any]:
    return {"device": device_name, "via": "tcp"}


@asynccontextmanager
async def device_in_use(
    host: str, config: Config, **options: Any
) -> AsyncIterator[tuple[Listener, str]]:
    """Use the device with these settings, and describe the connection that opened it."""
    async with (
        await listen(host, 0, **options) as listener,
        await connect(host, listener.port, config=config, **options),
        await listener.accept(),
    ):
        opener = f"the connection to {host_port((host, listener.port))}, which opened the device"
        yield listener, opener


# ---- the settings of a real device ---------------------------------------------------------------


def settings_of(conn: Connection) -> LoopConfig:
    """Return the settings that the parts of a connection's driver have."""
    driver = conn._endpoint.driver
    return LoopConfig(
        pool_limit=driver.pool.limit,
        huge_pages=driver.pool._registered._huge_pages,
        cached_registrations=driver.registrations._max_count,
        polling=driver._reader._polling.spin_us / 1e6,
    )


@VIA
@pytest.mark.parametrize("by", ["LoopConfig", "Config", "nothing"])
async def test_device_is_opened_with_the_settings(
    host: str, options: dict[str, Any], via: Via, by: str
) -> None:
    options["via"] = via
    if by == "LoopConfig":
        configure_loop(OTHER)
    config = Config(**OTHERS) if by == "Config" else Config()
    async with (
        await listen(host, 0, **options) as listener,
        await connect(host, listener.port, config=config, **options) as client,
        await listener.accept() as server,
    ):
        expected = LoopConfig() if by == "nothing" else OTHER
        assert settings_of(client) == settings_of(server) == expected
        with pytest.raises(RuntimeError, match=r"LoopConfig\.pool_limit=\d+ is too late"):
            configure_loop(LoopConfig(pool_limit=32 << 20))
        configure_loop(expected)


# ---- each function that takes a Config -----------------------------------------------------------


async def ignore(*_: object) -> None:
    """A handler that ends immediately."""


async def by_connect(host: str, server: Any, client: Any) -> None:
    async with (
        await listen(host, 0, **server) as listener,
        await connect(host, listener.port, **client),
        await listener.accept(),
    ):
        pass


async def by_reconnect(host: str, server: Any, client: Any) -> None:
    async with await start_server(ignore, host, 0, **server) as serving:
        async for conn in reconnect(host, serving.port, **client):
            async with conn:
                break


async def by_streams(host: str, server: Any, client: Any) -> None:
    async with await start_stream_server(ignore, host, 0, **server) as serving:
        _, writer = await open_connection(host, serving.address[1], **client)
        writer.close()
        await writer.wait_closed()


async def by_protocols(host: str, server: Any, client: Any) -> None:
    async with await create_server(asyncio.Protocol, host, 0, **server) as serving:
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        class Closing(asyncio.Protocol):
            def connection_lost(self, exc: Exception | None) -> None:
                closed.set_result(None)

        transport, _ = await create_connection(Closing, host, serving.address[1], **client)
        transport.close()
        await closed


async def by_rpc(host: str, server: Any, client: Any) -> None:
    async with (
        await rpc.start_server({}, host, 0, **server) as serving,
        await rpc.connect(host, serving.port, **client),
    ):
        pass


async def out_of_band(host: str, server: Any, client: Any) -> None:
    ends = [
        await prepare_connection(**{name: side[name] for name in ("device", "config")})
        for side in (server, client)
    ]
    for end, other in (ends, ends[::-1]):
        end.accept(other.endpoint)
    first, second = await asyncio.gather(*(end.start() for end in ends))
    async with first, second:
        pass


FUNCTIONS: dict[str, Callable[[str, Any, Any], Awaitable[None]]] = {
    function.__name__: function
    for function in (by_connect, by_reconnect, by_streams, by_protocols, by_rpc, out_of_band)
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("side", ["server", "client"])
@VIA
async def test_each_side_is_warned_of_settings_without_effect(
    host: str, options: dict[str, Any], name: str, side: str, via: Via
) -> None:
    options["via"] = "tcp" if name == "out_of_band" else via  # it uses the device as TCP does
    async with device_in_use(host, Config(polling=HELD.polling), **options) as (_, opener):
        ends = {"server": options, "client": options}
        for config, texts in (
            (Config(polling=HELD.polling, pool_limit=LoopConfig().pool_limit), []),
            (Config(polling=0), [ignored("polling", 0.0, options["device"], 0.001, opener)]),
        ):
            both = {it: {**given, "config": Config()} for it, given in ends.items()}
            both[side]["config"] = config
            with warned(*texts):
                await FUNCTIONS[name](host, both["server"], both["client"])


async def test_in_band_connection_is_warned_of_settings_without_effect(
    host: str, options: dict[str, Any]
) -> None:
    async with device_in_use(host, Config(), **options) as (listener, opener):
        with warned(ignored("polling", 0.0, options["device"], 0.0002, opener)):
            config = Config(polling=0)
            conn = await connect(host, listener.port, config=config, **options)
        async with conn, await listener.accept():
            assert isinstance(conn._link, GroupMember)


async def test_out_of_band_connection_can_open_a_device(options: dict[str, Any]) -> None:
    device = options["device"]
    async with await prepare_connection(device=device, config=Config(polling=0)):
        opener = "an out-of-band connection, which opened the device"
        with warned(ignored("polling", 1.0, device, 0.0, opener)):
            pending = await prepare_connection(device=device, config=Config(polling=1))
        await pending.close()


async def test_connection_fails_without_leaks_if_the_warning_is_an_error(
    host: str, options: dict[str, Any]
) -> None:
    async with device_in_use(host, Config(), **options) as (listener, _):
        with pytest.raises(RuntimeWarning, match=r"Config\.polling=0\.0 has no effect"):
            await connect(host, listener.port, config=Config(polling=0), **options)
        async with await connect(host, listener.port, **options), await listener.accept():
            pass


async def test_first_connection_without_polling_causes_no_warning(
    host: str, options: dict[str, Any]
) -> None:
    """This is how the integrations use their own processes."""
    config = Config(polling=0.0)
    for _ in range(3):
        await by_connect(host, {**options, "config": config}, {**options, "config": config})


# ---- other event loops ---------------------------------------------------------------------------


@pytest.fixture
def blocking_stopped(no_leaks: None) -> Iterator[None]:
    """Stop the background thread after the test, so that the leak check does not report it."""
    yield
    blocking.stop()


@VIA
def test_blocking_loop_has_its_own_settings(
    host: str, device_name: str, via: Via, blocking_stopped: None
) -> None:
    options: dict[str, Any] = {"device": device_name, "via": via}

    async def use(listener: blocking.Listener) -> None:
        """Connect from another event loop, so that the listener opens the device of its loop."""
        configure_loop(OTHER)
        address = listener.address
        async with await connect(*address, **options) as conn:
            server = await asyncio.to_thread(listener.accept)
            assert settings_of(conn) == OTHER
            assert settings_of(server.asynchronous) == HELD
            opener = f"the listener on {host_port(address)}, which opened the device"
            text = f"LoopConfig.polling=0.0002 is too late: {device_name} uses polling=0.001, "
            with pytest.raises(RuntimeError, match=re.escape(f"{text}chosen by {opener}; call")):
                await asyncio.to_thread(blocking.configure_loop, LoopConfig())
            await asyncio.to_thread(server.close)

    with blocking.listen(host, 0, config=Config(polling=HELD.polling), **options) as listener:
        asyncio.run(use(listener))
    blocking.stop()
    blocking.configure_loop(HELD)
    with blocking.listen(host, 0, **options) as listener:
        with warned(ignored("polling", 0.0, device_name, 0.001, "configure_loop()")):
            client = blocking.connect(*listener.address, config=Config(polling=0), **options)
        with client, listener.accept() as server:
            assert settings_of(server.asynchronous) == HELD


FORKED = """
import asyncio, os, sys, aiordma
from aiordma import Config, LoopConfig

device, host = sys.argv[1:]

async def use(polling, configured, then=lambda: None):
    if configured:
        aiordma.configure_loop(LoopConfig(polling=polling))
    options = dict(device=device, via="tcp", config=Config(polling=polling))
    async with (
        await aiordma.listen(host, 0, **options) as listener,
        await aiordma.connect(host, listener.port, **options) as conn,
        await listener.accept(),
    ):
        assert conn._endpoint.driver._choice.settings == LoopConfig(polling=polling)
        then()

loop = asyncio.new_event_loop()
in_use = loop.create_task(use(0.5, True, loop.stop))  # the device stays open
loop.run_forever()
child = os.fork()
if not child:
    asyncio.run(use(0.1, False))
    asyncio.run(use(0.2, True))
    os._exit(0)
loop.run_until_complete(in_use)
loop.run_until_complete(loop.shutdown_asyncgens())
loop.close()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_forked_child_chooses_its_own_settings(device_name: str, host: str) -> None:
    warned_of = ["-W", "error", "-W", "ignore::DeprecationWarning"]
    done = run_python(*warned_of, "-c", FORKED, device_name, host)
    assert done.returncode == 0, done.stderr


@pytest.mark.any_device
@pytest.mark.needs("faults")
def test_each_simulated_host_has_its_own_settings() -> None:
    async def serve() -> None:
        configure_loop(OTHER)
        async with (
            await listen("", 7471, config=Config(polling=0)) as listener,
            await listener.accept() as conn,
        ):
            assert conn._endpoint.driver._choice.settings == OTHER
            (await conn.recv()).release()

    async def ask(_: testing.World) -> None:
        async with await connect("server", 7471, config=Config(polling=0.5)) as conn:
            assert conn._endpoint.driver._choice.settings == LoopConfig(polling=0.5)
            with pytest.raises(RuntimeError, match="chosen by the connection to "):
                configure_loop(OTHER)
            await conn.send(b"a message")

    testing.simulate(ask, seed=1, hosts={"server": serve})
