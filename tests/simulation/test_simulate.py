"""Tests of aiordma.testing.simulate, which repeats a program's run for the same seed."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gc
import logging
import math
import os
import platform
import random
import re
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import time as taken_before
from typing import Any, Literal

import numpy as np
import pytest

import aiordma
from aiordma import testing
from aiordma._simulation import process
from aiordma._transport.observation import _Event
from aiordma.errors import BusyError, UnreachableError
from aiordma.transport import Statistics

PORT = 7471
BY_ALL: Any = {"device": "all", "auth": b"a key of both sides, long enough"}

pytestmark = pytest.mark.needs("faults")


Via = Literal["cm", "tcp"]


async def echo(via: Via = "cm", **options: Any) -> None:
    """Serve connections and send every message back."""

    async def answer(conn: aiordma.Connection) -> None:
        async for message in conn:
            with message:
                await conn.send(bytes(message))

    async with await aiordma.start_server(answer, "", PORT, via=via, **options) as server:
        await server.serve_forever()


async def streams(answer: Callable[..., Any]) -> None:
    """Serve plain asyncio streams."""
    async with await asyncio.start_server(answer, port=PORT) as server:
        await server.serve_forever()


async def ask(*sizes: int, via: Via = "cm") -> None:
    async with await aiordma.connect("server", PORT, via=via) as conn:
        for size in sizes:
            data = size.to_bytes(4) * (size // 4)
            await conn.send(data)
            with await conn.recv() as message:
                assert bytes(message) == data


def run(
    program: Callable[..., Coroutine[Any, Any, Any]], *args: Any, seed: int = 1, **options: Any
) -> tuple[str, float]:
    """Run a client next to an echo server. Return the trace and the final virtual time."""

    async def main(world: testing.World) -> tuple[str, float]:
        await world.host("client").run(program, *args)
        return world.trace, world.now

    return testing.simulate(main, seed=seed, hosts={"server": echo}, **options)


def test_simulation_run_is_determined_by_its_seed() -> None:
    """Another seed gives another run, even if the network behaves the same."""
    even = testing.FaultPlan(testing.Link(jitter=0))
    first, again, other = (run(ask, 64, 1 << 20, seed=seed, faults=even) for seed in (1, 1, 2))
    assert first == again
    assert first[0] != other[0]
    assert first[1] < 0.01


def test_polling_advances_virtual_time() -> None:
    async def main(world: testing.World) -> None:
        with aiordma.verbs.open_device() as context, context.create_cq(16) as cq:
            begun = world.now
            assert not cq.wait(spin=math.inf, timeout=0.01)
            assert 0.01 <= world.now - begun < 0.011

    testing.simulate(main, seed=1)


def test_simulated_tasks_are_woken_directly_by_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    async def client() -> None:
        loop = asyncio.get_running_loop()
        call_soon = loop.call_soon

        def counted(callback: Any, *args: Any, **options: Any) -> asyncio.Handle:
            if getattr(callback, "__name__", "") == "task_wakeup":
                asked.append(args)
            return call_soon(callback, *args, **options)

        async with await aiordma.connect("server", PORT) as conn:
            monkeypatch.setattr(loop, "call_soon", counted)
            for _ in range(20):
                conn.send_nowait(b"12345678")
                (await conn.recv()).release()
            monkeypatch.undo()

    run(client)
    assert len(asked) == (20 if os.environ.get("AIORDMA_NO_DIRECT_WAKE") else 0)


def test_packets_without_a_completion_do_not_wake_the_loop() -> None:
    async def main(world: testing.World) -> int:
        await world.host("client").run(ask, *[4 << 20] * 4)
        return world._turns

    assert testing.simulate(main, seed=1, hosts={"server": echo}) < 300


def test_sleep_advances_all_simulated_clocks_immediately() -> None:
    async def main(world: testing.World) -> None:
        monotonic, wall, loop = time.monotonic(), time.time(), asyncio.get_running_loop().time()
        await asyncio.sleep(3600)
        time.sleep(60)  # noqa: ASYNC251 - it blocks for no time
        assert 3660 <= time.monotonic() - monotonic < 3661
        assert 3660 <= time.time() - wall < 3661
        assert 3660 <= asyncio.get_running_loop().time() - loop < 3661
        assert 3660 <= world.now < 3661

    before = time.monotonic()
    testing.simulate(main, seed=1)
    assert time.monotonic() - before < 60


def test_stalled_error_reports_the_waiting_task() -> None:
    async def waits_for_ever() -> None:
        await asyncio.Event().wait()

    says = r"not wait for other threads or processes:\n(.*\n)*client: waits_for_ever"
    with pytest.raises(testing.StalledError, match=says) as caught:
        run(waits_for_ever)
    assert "simulate(seed=1)" in caught.value.__notes__[0]


def test_time_limit_error_reports_the_waiting_task() -> None:
    with pytest.raises(testing.TimeLimitError, match="client: sleep"):
        run(asyncio.sleep, 100, limit=99)


async def fails(*_: testing.World) -> None:
    await asyncio.sleep(1)
    raise ZeroDivisionError


def test_exception_in_a_service_ends_the_simulation() -> None:
    with pytest.raises(ZeroDivisionError):
        testing.simulate(lambda _: asyncio.sleep(10), seed=1, hosts={"server": fails})


def test_exception_in_an_executor_function_ends_the_simulation() -> None:
    """The exception of `pytest.fail` is not a subclass of Exception."""

    async def main(_: testing.World) -> None:
        await asyncio.to_thread(pytest.fail, "meant")

    with pytest.raises(pytest.fail.Exception, match="meant"):
        testing.simulate(main, seed=1)


def test_nested_simulation_raises_busy_error() -> None:
    async def main(_: testing.World) -> None:
        with pytest.raises(BusyError, match="already running a simulation"):
            testing.simulate(lambda _: asyncio.sleep(0), seed=1)

    testing.simulate(main, seed=1)


def test_process_wide_faults_raise_busy_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(_: testing.World) -> None:
        with testing.faults(loss=0.1):
            pytest.fail("faults are injected")

    with pytest.raises(BusyError, match=r"in a simulation: use World\.link .* FaultPlan"):
        testing.simulate(main, seed=1)
    in_vain = pytest.raises(BusyError, match=r"\(seed=1,loss=0\.1,.*\) have no effect .* FaultPlan")
    with testing.faults(device="embedded0", seed=1, loss=0.1) as faults, in_vain:
        faults._is_limited_to_process = False
        testing.simulate(main, seed=1)
    monkeypatch.setenv("AIORDMA_EMBEDDED_FAULTS", "seed=1,loss=0.1,rnr=0.2")
    with in_vain:
        testing.simulate(main, seed=1)


async def test_device_in_use_raises_busy_error() -> None:
    async with testing.connected_pair():
        with pytest.raises(BusyError, match=r"close all connections .* for a second"):
            testing.simulate(lambda _: asyncio.sleep(0), seed=1)


def test_link_fault_and_fault_plan_reject_invalid_arguments() -> None:
    for wrong in (
        lambda: testing.Link(loss=1.5),
        lambda: testing.Link(latency=-1),
        lambda: testing.Link(jitter=float("nan")),
        lambda: testing.Link(rate=0),
        lambda: testing.Link(loss=1e-7),  # too small to lose anything
        lambda: testing.Link(reorder=0.1, late=0),
        lambda: testing.FaultPlan(kills=-1),
        lambda: testing.FaultPlan(kills=1, until=0),
        lambda: testing.FaultPlan(pauses=1, duration=0),
        lambda: testing.FaultPlan(duration=float("inf")),
        lambda: testing.FaultPlan(until=float("nan")),
        lambda: testing.Fault("pause", "server", float("nan"), 1),
        lambda: testing.simulate(fails, limit=-1),
    ):
        with pytest.raises(ValueError, match="must be"):
            wrong()
    with pytest.raises(ValueError, match=r"end \(1\) must not be before begin \(2\)"):
        testing.Fault("pause", "server", 2, 1)
    once: Any = (testing.Fault("pause", "server", 1, 2) for _ in range(1))
    with pytest.raises(TypeError, match="exactly must be a list of Faults, not generator"):
        testing.FaultPlan(exactly=once)
    with pytest.raises(ValueError, match="exactly must not contain faults on host 'main'"):
        testing.FaultPlan(exactly=[testing.Fault("pause", "main", 1, 2)])
    with pytest.raises(ValueError, match="at_least is 1, but the plan has no faults: set a rate"):
        testing.FaultPlan(at_least=1, link=testing.Link(loss=0.1))
    with pytest.raises(TypeError, match="faults must be a FaultPlan, not Link"):
        testing.simulate(fails, faults=testing.Link())  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="hosts must be a mapping of names to programs, not list"):
        testing.simulate(fails, hosts=["server"])  # type: ignore[call-overload]
    with pytest.raises(
        TypeError, match="program of host 'main' must be an async function, not None"
    ):
        testing.simulate(None)  # type: ignore[call-overload]
    names: Any
    for names in "server", ["main"], [1], 5:
        with pytest.raises(ValueError, match=r"invalid hosts .*: expected a collection of names"):
            testing.FaultPlan(hosts=names)


async def takes_nothing() -> None:
    pass


async def takes_the_world(_: testing.World) -> None:
    pass


MAIN = "simulate(main): the program of host 'main'"
UNCALLED = "pass the function without calling it, or functools.partial(function, ...)"
ONE_SEED = "stop=False requires several seeds, as in simulate(seeds=range(1000), stop=False)"
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "main without an argument": (
        {"main": takes_nothing},
        TypeError,
        f"{MAIN}, takes_nothing, cannot be called with one argument, the World: too many "
        "positional arguments; write `async def main(world)`, and simulate(main)",
    ),
    "main with two arguments": (
        {"main": lambda world, other: takes_nothing()},
        TypeError,
        f"{MAIN}, <lambda>, cannot be called with one argument, the World: missing a required "
        "argument: 'other'; write `async def main(world)`, and simulate(main)",
    ),
    "main of text": (
        {"main": "main"},
        TypeError,
        f"{MAIN} must be an async function, not str 'main'; write `async def main(world)`, and "
        "simulate(main)",
    ),
    "a host with an argument": (
        {"hosts": {"server": takes_the_world}},
        TypeError,
        "simulate(hosts): the program of host 'server', takes_the_world, cannot be called "
        f"with no arguments: missing a required argument: '_'; {UNCALLED}",
    ),
    "a host without a program": (
        {"hosts": {"server": None}},
        TypeError,
        "simulate(hosts): the program of host 'server' must be an async function, not None; "
        f"{UNCALLED}",
    ),
    "a host without a name": (
        {"hosts": {1: takes_nothing}},
        TypeError,
        "each name in hosts must be the name of a host, not int 1",
    ),
    "seeds=10": (
        {"seeds": 10},
        TypeError,
        "seeds must be several ints, such as range(1000), not int 10; write range(10)",
    ),
    "seeds=0": (
        {"seeds": 0},
        TypeError,
        "seeds must be several ints, such as range(1000), not int 0",
    ),
    "seeds='0:10'": (
        {"seeds": "0:10"},
        TypeError,
        "seeds must be several ints, such as range(1000), not str '0:10'",
    ),
    "seeds=[1.5]": (
        {"seeds": [1.5]},
        TypeError,
        "each seed must be an int from 0 to 2^64 - 1, not float 1.5; round it, for "
        "example with int()",
    ),
    "seeds=[]": (
        {"seeds": []},
        ValueError,
        "seeds must not be empty; pass several, such as range(1000)",
    ),
    "seed='1'": ({"seed": "1"}, TypeError, "seed must be an int from 0 to 2^64 - 1, not str '1'"),
    "stop='no'": (
        {"seeds": range(2), "stop": "no"},
        TypeError,
        "stop must be True or False, not str 'no'",
    ),
    "stop without seeds": ({"stop": False}, TypeError, ONE_SEED),
    "stop with a seed": ({"seed": 1, "stop": False}, TypeError, ONE_SEED),
    "devices=True": (
        {"devices": True},
        TypeError,
        "devices must be an int from 1 to 4, not bool True",
    ),
    "limit='1h'": ({"limit": "1h"}, TypeError, "limit must be a number of seconds, not str '1h'"),
}


@pytest.mark.parametrize(("given", "error", "text"), WRONG.values(), ids=WRONG)
def test_simulate_error_identifies_the_invalid_argument(
    given: dict[str, Any], error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIORDMA_SIMULATION_SEEDS", "1")
    with pytest.raises(error) as raised:
        testing.simulate(**{"main": takes_the_world} | given)
    assert str(raised.value) == text


def test_fault_rejects_a_kind_that_is_not_a_string() -> None:
    kinds: Any
    for kinds in ["kill"], None, 5:
        with pytest.raises(ValueError, match="kind must be one of partition, cable, pause"):
            testing.Fault(kinds, "server", 1, 2)


def test_hosts_reject_invalid_programs_and_arguments() -> None:
    called: Any = ask(64)
    returns_none: Any = lambda: None  # noqa: E731 - it is shown by that name

    async def main(world: testing.World) -> None:
        with pytest.raises(TypeError, match=r"of host 'client' .* coroutine .*: run\(count, 20\)"):
            await world.host("client").run(called)
        with pytest.raises(
            TypeError, match="result of <lambda> on host 'client' must be a coroutine"
        ):
            world.host("client").serve(returns_none)
        with pytest.raises(TypeError) as raised:
            world.host("client").serve(takes_nothing, 64, "x")
        assert str(raised.value) == (
            "the program of host 'client', takes_nothing, cannot be called with the arguments 64, "
            "'x': too many positional arguments; pass the function and its arguments without "
            "calling it: run(count, 20)"
        )
        world.host("client").kill()
        world.host("client").boot()

    testing.simulate(main, seed=1)
    with pytest.raises(TypeError, match="result of <lambda> on host 'server' must be a coroutine"):
        testing.simulate(main, seed=1, hosts={"server": returns_none})


def test_fault_plan_that_affects_no_host_is_rejected() -> None:
    run = partial(testing.simulate, lambda _: asyncio.sleep(1), seed=1, hosts={"server": echo})
    given = testing.FaultPlan(exactly=[testing.Fault("pause", "servr", 0, 1)])
    for plan in testing.FaultPlan(hosts=["server", "servr"]), given:
        with pytest.raises(
            ValueError, match=r"hosts that never booted: servr \(hosts: main, server\)"
        ):
            run(faults=plan)
    cable = testing.FaultPlan(exactly=[testing.Fault("cable", "server", 0, 1, network=1)])
    with pytest.raises(ValueError, match=r"network 1 requires simulate\(devices=2\)"):
        run(faults=cable)
    with pytest.raises(ValueError, match="faults do not affect 'main', the only host"):
        testing.simulate(lambda _: asyncio.sleep(1), seed=1, faults=testing.FaultPlan(kills=1))
    with pytest.raises(
        ValueError, match=r"cables requires several devices; use simulate\(devices=2\)"
    ):
        testing.simulate(fails, seed=1, faults=testing.FaultPlan(cables=1))


def test_world_methods_reject_unknown_hosts_and_invalid_arguments() -> None:
    async def main(world: testing.World) -> None:
        for call in world.partition, world.heal:
            with pytest.raises(
                ValueError, match=r"host not found: 'serve' \(hosts: main, server\)"
            ):
                call("serve")
            for network in -1, 1:
                with pytest.raises(ValueError, match="network"):
                    call("server", network=network)
            with pytest.raises(TypeError, match="network must be an int"):
                call("server", network="embedded1")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="host not found: 'serve'"):
            world.link("server", "serve", loss=1)
        with pytest.raises(TypeError, match="each name must be the name of a host, not list"):
            world.partition(["server"])  # type: ignore[arg-type]
        assert [*world.hosts] == ["main", "server"]
        with pytest.raises(ValueError, match="requires the name of at least one host"):
            world.partition()
        with pytest.raises(ValueError, match="has no effect"):
            world.partition("server", "main")
        with pytest.raises(ValueError, match="cannot link host 'server' to itself"):
            world.link("server", "server", loss=1)
        for slowness in 0, -5, float("nan"), float("inf"):
            with pytest.raises(ValueError, match="slowness must be positive"):
                world.host("server").slowness = slowness

    testing.simulate(main, seed=1, hosts={"server": echo})


async def test_simulation_restores_the_running_event_loop() -> None:
    loop = asyncio.get_running_loop()
    testing.simulate(lambda _: asyncio.sleep(1), seed=1)
    assert asyncio.get_running_loop() is loop
    await asyncio.sleep(0)


# ---- the network ---------------------------------------------------------------------------------


def test_asyncio_streams_work_between_simulated_hosts() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        writer.close()

    async def main(world: testing.World) -> None:
        reader, writer = await asyncio.open_connection("server", PORT)
        writer.write(b"hello")
        writer.write_eof()
        assert await reader.read() == b"hello"
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("server", PORT + 1)
        world.partition("server")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.open_connection("server", PORT), 10)

    testing.simulate(main, seed=1, hosts={"server": partial(streams, answer)})


def test_localhost_refers_to_the_current_simulated_host() -> None:
    async def main(world: testing.World) -> None:
        serving = asyncio.ensure_future(echo())
        await asyncio.sleep(0.1)
        async with await aiordma.connect("localhost", PORT) as conn:
            await conn.send(b"12345678")
            (await conn.recv()).release()
        serving.cancel()
        for name in "localhost", "":
            with pytest.raises(ValueError, match="invalid host name"):
                world.host(name)
        with pytest.raises(TypeError, match="the name of a host must be text, not int 3"):
            world.host(3)  # type: ignore[arg-type]

    testing.simulate(main, seed=1)


def test_stream_data_arrives_complete_after_the_link_latency() -> None:
    """This includes data that arrives faster than the reader consumes it."""
    data, second = random.Random(1).randbytes(4 << 20), 0.5
    got: list[tuple[bytes, float]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append((await reader.read(1), time.monotonic()))
        got.append((await reader.readexactly(1), time.monotonic()))
        await asyncio.sleep(10)
        got.append((await reader.read(), time.monotonic()))
        writer.close()

    async def main(_: testing.World) -> None:
        reader, writer = await asyncio.open_connection("server", PORT)
        writer.write(b"1")
        await asyncio.sleep(second)
        writer.write(b"2")
        await asyncio.sleep(second)
        writer.write(data)
        writer.write_eof()
        assert not await reader.read()
        writer.close()

    far = testing.FaultPlan(testing.Link(latency=1, jitter=0))
    testing.simulate(main, seed=1, hosts={"server": partial(streams, answer)}, faults=far)
    assert b"".join(part for part, _ in got) == b"12" + data
    assert got[1][1] - got[0][1] == pytest.approx(second, abs=0.01)


def test_writer_waits_for_a_slow_reader() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3600)
        writer.write(b"%d" % len(await reader.read()))
        writer.close()

    async def main(world: testing.World) -> None:
        reader, writer = await asyncio.open_connection("server", PORT)
        sent = before = 0
        while world.now < 3600:
            writer.write(bytes(1 << 14))
            sent += 1 << 14
            if world.now < 1:
                before = sent
            await writer.drain()
        assert 1 << 18 < before < 1 << 20
        writer.write_eof()
        assert int(await reader.read()) == sent
        writer.close()

    testing.simulate(main, seed=1, hosts={"server": partial(streams, answer)})


def test_link_latency_and_rate_delay_messages() -> None:
    far = testing.Link(latency=0.05, jitter=0, rate=1e6)
    assert 0.5 < run(ask, 1 << 18, faults=testing.FaultPlan(far))[1] < 5


def test_partition_breaks_connections_until_healed() -> None:
    async def main(world: testing.World) -> None:
        conn = await aiordma.connect("server", PORT)
        world.partition("server")
        with pytest.raises(aiordma.ConnectionBrokenError):
            await conn.send(b"lost")
        with pytest.raises(UnreachableError):
            await ask(64)
        world.heal()
        await ask(64)
        await conn.close()

    testing.simulate(main, seed=1, hosts={"server": echo})


def test_partition_also_applies_to_hosts_added_afterwards() -> None:
    async def main(world: testing.World) -> None:
        world.partition("server")
        for end in partial(world.heal, "main"), partial(world.heal, "server"):
            late = world.host(f"host{len(world.hosts)}")
            with pytest.raises(UnreachableError):
                await late.run(ask, 64)
            end()
        await world.host("last").run(ask, 64)
        await late.run(ask, 64)

    testing.simulate(main, seed=1, hosts={"server": echo})


def test_each_device_of_a_host_has_its_own_network() -> None:
    async def exchange(conn: aiordma.Connection) -> None:
        await conn.send(bytes(1 << 20))
        (await conn.recv()).release()

    async def until(conn: aiordma.Connection, state: str) -> None:
        while conn.rails[-1].state != state:
            await exchange(conn)
            await asyncio.sleep(0.5)
        await exchange(conn)

    async def main(world: testing.World) -> None:
        async with await aiordma.connect("server", PORT, **BY_ALL) as conn:
            await until(conn, "up")
            world.partition("server", network=1)
            await until(conn, "down")
            world.heal("main", network=0)
            await asyncio.sleep(10)
            assert conn.rails[-1].state != "up"
            world.heal("server", network=1)
            await until(conn, "up")
            assert conn.rails[-1].bytes_received

    hosts = {"server": partial(echo, **BY_ALL)}
    testing.simulate(main, seed=1, hosts=hosts, devices=2)
    with pytest.raises(ValueError, match="devices"):
        testing.simulate(main, devices=5)


def test_simulation_has_only_the_requested_number_of_devices() -> None:
    """Their number does not depend on this process or on an earlier simulation."""

    def names() -> list[str]:
        return [it.name for it in aiordma.verbs.devices() if it.name.startswith("embedded")]

    async def main(_: testing.World) -> list[str]:
        return names()

    before = names()
    for count in (1, 3, 2):
        found = testing.simulate(main, seed=1, devices=count)
        assert found == [f"embedded{number}" for number in range(count)]
    assert names() == before


# ---- hosts ---------------------------------------------------------------------------------------


def test_killed_host_stops_responding_until_it_is_rebooted() -> None:
    ended: list[int] = []

    async def serve() -> None:
        try:
            await echo()
        finally:
            ended.append(len(ended))

    async def main(world: testing.World) -> None:
        server = world.host("server")
        conn = await aiordma.connect("server", PORT)
        running = asyncio.ensure_future(server.run(asyncio.sleep, 1000))
        await asyncio.sleep(1)
        server.kill()
        with pytest.raises(testing.KilledError):
            await running
        with pytest.raises(testing.KilledError):
            await server.run(asyncio.sleep, 0)
        before = world.now
        with pytest.raises(aiordma.ConnectionBrokenError):
            await conn.recv()
        assert world.now > before + 1  # the keep-alive detects it
        assert not ended
        server.boot()
        await asyncio.sleep(0.001)
        await ask(64, 1 << 20)
        await conn.close()

    testing.simulate(main, seed=1, hosts={"server": serve})


def test_rebooting_a_host_restarts_all_its_services() -> None:
    begun: list[str] = []

    async def serve(name: str) -> None:
        begun.append(name)

    async def main(world: testing.World) -> None:
        server = world.host("server")
        server.serve(serve, "b")
        await asyncio.sleep(1)
        server.kill()
        server.boot()
        await asyncio.sleep(1)

    testing.simulate(main, seed=1, hosts={"server": partial(serve, "a")})
    assert sorted(begun) == ["a", "a", "b", "b"]


@pytest.mark.parametrize("boots", [True, False])
def test_stream_to_a_killed_host_is_reset(boots: bool) -> None:
    async def main(world: testing.World) -> None:
        reader, writer = await asyncio.open_connection("server", PORT)
        await asyncio.sleep(1)
        world.host("server").kill()
        writer.write(b"lost")
        await asyncio.sleep(10)
        assert not reader.at_eof()
        if boots:
            world.host("server").boot()
        with pytest.raises(ConnectionResetError):
            await reader.read()
        assert world.now < (30 if boots else 300)
        writer.close()
        if not boots:
            before = world.now
            with pytest.raises(TimeoutError, match="Errno 110"):
                await asyncio.open_connection("server", PORT)
            assert 126 < world.now - before < 129

    testing.simulate(main, seed=1, hosts={"server": partial(streams, lambda *_: None)})


def test_paused_host_does_not_respond_until_resumed() -> None:
    async def main(world: testing.World) -> None:
        server = world.host("server")
        conn = await aiordma.connect("server", PORT)
        server.pause()
        sending = asyncio.ensure_future(conn.send(b"12345678"))
        await asyncio.sleep(0.3)  # shorter than all retries together
        assert not sending.done()
        server.resume()
        await sending
        with await conn.recv() as message:
            assert bytes(message) == b"12345678"
        await conn.close()

    testing.simulate(main, seed=1, hosts={"server": echo})


def test_host_slowness_delays_responses() -> None:
    async def main(world: testing.World) -> float:
        world.host("server").slowness = 1000
        await ask(64)
        return world.now

    assert testing.simulate(main, seed=1, hosts={"server": echo}) > 0.005


def test_fault_plan_injects_faults_only_until_its_end() -> None:
    plan = testing.FaultPlan(partitions=1, pauses=1, kills=1, duration=9, until=20)

    async def main(world: testing.World) -> tuple[int, str]:
        failures = 0
        while world.now < 25:
            try:
                await ask(64, 1 << 18)
            except (aiordma.RDMAError, OSError):
                failures += 1
            await asyncio.sleep(0.1)
        await ask(64)
        return failures, world.trace

    runs = {testing.simulate(main, seed=3, hosts={"server": echo}, faults=plan) for _ in range(2)}
    assert len(runs) == 1
    assert runs.pop()[0] >= 2


def test_fault_plan_cuts_only_the_cables_of_the_listed_hosts() -> None:
    """The connection survives, because each cut of the server's cables leaves one of the rails."""
    plan = testing.FaultPlan(cables=0.5, duration=1, until=20, hosts=["server"])
    cuts: list[str] = []

    async def client(world: testing.World) -> None:
        async with await aiordma.connect("server", PORT, **BY_ALL) as conn:
            while world.now < 25:
                await conn.send(bytes(64))
                (await conn.recv()).release()
                cuts.extend(str(rail.error) for rail in conn.rails if rail.error is not None)
                await asyncio.sleep(0.1)

    async def main(world: testing.World) -> None:
        await world.host("client").run(client, world)

    hosts = {"server": partial(echo, **BY_ALL)}
    testing.simulate(main, seed=2, devices=2, hosts=hosts, faults=plan)
    assert cuts


async def counts_twice(world: testing.World) -> None:
    """Fail if the client is cut off from the server after 5 s."""
    server = world.host("server")
    server.serve(echo)
    world.host("other")
    await world.host("client").run(asyncio.sleep, 4)
    asyncio.get_running_loop().create_task(asyncio.sleep(9))
    await asyncio.sleep(1)
    logging.getLogger("of a program").warning("counted")
    if world._is_cut(world.host("client"), server):
        raise AssertionError("21")


CUTS = testing.FaultPlan(partitions=1, pauses=0.001, duration=5, hosts=["client", "other"])


def failure(**options: Any) -> str:
    with pytest.raises(AssertionError, match=r"^21\n") as caught:
        testing.simulate(counts_twice, **options)
    return "\n".join(caught.value.__notes__)


def test_failure_note_lists_faults_and_waiting_tasks() -> None:
    faults = [
        testing.Fault("partition", "client", 0.5, 0.9),
        testing.Fault("kill", "other", 2, 3),
        testing.Fault("partition", "client", 4.5, 6),
    ]
    note = failure(seed=7, faults=testing.FaultPlan(exactly=faults))
    lines = [
        r"simulate\(seed=7\), at 5\.0\d+ s, trace \w{16}",
        r"faults: 3 of 3 faults replayed",
        r"  0\.50-0\.90 s: client is cut off from all others",
        r"  2\.00-3\.00 s: other is killed and boots again at the end",
        r"  4\.50-6\.00 s: client is cut off from all others",
        r"waiting tasks:",
        r"  main: sleep-\d+",
        r"      sleep at .*",
        r"repeat: ",
    ]
    assert re.match("\n".join(lines), note)
    assert re.search(
        r"\nrepeat: pytest tests/simulation/test_simulate\.py::test_failure_note\w+$", note
    )
    assert "0x" not in note


async def accepts() -> None:
    async with await aiordma.listen("", PORT) as listener:
        await listener.accept()


async def accepts_several() -> None:
    async with await aiordma.listen("", PORT) as listener:
        async for _ in listener:
            pass


async def serves_streams() -> None:
    async with await aiordma.start_stream_server(lambda *_: None, "0.0.0.0", PORT) as server:
        await server.serve_forever()


async def serves_beside_others() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(echo())
        await asyncio.sleep(10)


IDLE: dict[str, tuple[Callable[[], Coroutine[Any, Any, None]], list[str]]] = {
    "server": (echo, []),
    "listener": (accepts, []),
    "iteration": (accepts_several, []),
    "streams": (serves_streams, []),
    "asyncio's streams": (partial(streams, lambda *_: None), []),
    "task": (serves_beside_others, ["server: serves_beside_others", "sleep"]),
}


@pytest.mark.parametrize(("program", "shown"), IDLE.values(), ids=IDLE)
def test_failure_note_omits_idle_servers(
    program: Callable[[], Coroutine[Any, Any, None]], shown: list[str]
) -> None:
    async def main(_: testing.World) -> None:
        await asyncio.sleep(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        testing.simulate(main, seed=1, hosts={"server": program})
    [tasks] = re.findall(r"\nwaiting tasks:((?:\n  .*)+)", caught.value.__notes__[0])
    names = re.findall(r"^  (?:    )?(\S.*?)(?: at .*)?$", tasks, re.MULTILINE)
    assert names[:1] + names[-1:] == (shown or ["only idle servers"] * 2)
    assert not {"echo", "Server._accept"} & {*names}


def test_stalled_error_reports_a_program_waiting_in_accept() -> None:
    """Only services may wait for a client indefinitely."""
    for main, name in (
        (lambda _: accepts(), "main: <lambda>"),
        (lambda world: world.host("client").run(accepts_several), "client: accepts_several"),
    ):
        with pytest.raises(testing.StalledError) as caught:
            testing.simulate(main, seed=1)
        assert f"\n{name}\n" in str(caught.value)
        assert "    Listener.accept at " in str(caught.value)


def test_simulate_fails_when_fewer_faults_occur_than_at_least() -> None:
    async def main(world: testing.World) -> None:
        world.host("server")
        await asyncio.sleep(3)
        assert not world.faults

    plan = testing.FaultPlan(kills=0.001, pauses=0.5, until=1e-6, at_least=1)
    with pytest.raises(
        AssertionError,
        match=r"^the number of faults, 0, is below at_least=1: 0 pauses \(plan: 0\.0 .*\), 0 kills",
    ) as it:
        testing.simulate(main, seed=1, faults=plan)
    assert (
        "\nfaults: 0 pauses (plan: 0.0 on average), 0 kills (plan: 0.0 on average)"
        in it.value.__notes__[0]
    )


def test_replaying_recorded_faults_reproduces_the_run() -> None:
    async def main(world: testing.World) -> tuple[str, list[testing.Fault]]:
        with contextlib.suppress(aiordma.RDMAError, OSError):
            await world.host("client").run(ask, 64, 1 << 20)
        await asyncio.sleep(9)
        return world.trace, world.faults

    plan = testing.FaultPlan(partitions=1, pauses=1, kills=1)
    run = partial(testing.simulate, main, hosts={"server": echo})
    trace, faults = run(seed=1, faults=plan)
    assert len({fault.kind for fault in faults}) == 3
    assert run(seed=1, faults=testing.FaultPlan(exactly=faults)) == (trace, faults)


def test_failure_report_includes_a_minimal_fault_and_repeat_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report names a fault that suffices to make the seed fail."""
    run = partial(testing.simulate, counts_twice, faults=CUTS, seeds=range(40))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    seeds = run(stop=False)
    assert seeds.ran == 40
    assert 3 < len(seeds.failed) < 37
    assert {*seeds.failed.values()} == {"AssertionError: 21"}
    bar = f"[{'#' * 30}] 40 of 40 seeds, {len(seeds.failed)} failed\n"
    assert capsys.readouterr().err.endswith(bar)

    note = failure(faults=CUTS, seeds=seeds.failed)
    again = re.search(r"\nrepeat: AIORDMA_SIMULATION_SEEDS=(\d+) pytest ", note)
    assert again
    assert int(again[1]) in seeds.failed
    assert re.search(r"\nreplay with 1 of \d+ faults: .*exactly=\[Fault\([^)]*'client'", note)
    monkeypatch.setenv("AIORDMA_SIMULATION_SEEDS", again[1])
    assert failure(faults=CUTS) == note
    with pytest.raises(AssertionError):
        run()


@pytest.mark.parametrize("text", ["one", "3:", "5:5"])
def test_invalid_seeds_variable_is_rejected(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIORDMA_SIMULATION_SEEDS", text)
    with pytest.raises(ValueError, match=f"a seed such as 61, or a range .*, not '{text}'"):
        testing.simulate(counts_twice)


def test_unreproducible_failure_raises_runtime_error() -> None:
    """The program depends on its process id, which is not simulated."""
    here = os.getpid()

    async def main(_: testing.World) -> None:
        assert os.getpid() == here

    with pytest.raises(RuntimeError, match=r"^seed [01] failed .*AssertionError.*not simulated$"):
        testing.simulate(main, seeds=range(2))


def test_pytest_failure_is_attributed_to_its_seed() -> None:
    """Like CancelledError, the exception of `pytest.fail` is not a subclass of Exception."""

    async def main(_: testing.World) -> None:
        pytest.fail("as pytest.raises does")

    again = r"(?s)^as pytest.*\nrepeat: AIORDMA_SIMULATION_SEEDS=0 pytest "
    with pytest.raises(pytest.fail.Exception, match=again):
        testing.simulate(main, seeds=range(2))


def test_error_identifies_the_seed_when_its_process_exits() -> None:
    here = os.getpid()

    async def main(world: testing.World) -> None:
        if world.seed == 2 and os.getpid() != here:
            os._exit(1)

    with pytest.raises(RuntimeError) as it:
        testing.simulate(main, seeds=range(3))
    assert re.search(r"^seed [012] or one of the next seeds", it.value.__notes__[0])


def test_fault_starts_at_a_time_finer_than_a_nanosecond() -> None:
    """Rounding this time up to nanoseconds and converting it back gives an earlier time."""
    begin = 464.90332275000003
    assert math.ceil(begin * 1e9) / 1e9 < begin
    faults = [testing.Fault("pause", "server", at, math.inf) for at in (begin, math.inf)]

    async def main(world: testing.World) -> None:
        world.host("server")
        await asyncio.sleep(500)
        assert world.faults == faults[:1]

    testing.simulate(main, seed=1, faults=testing.FaultPlan(exactly=faults))


def test_unwritable_log_raises_and_restores_the_record_factory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = logging.getLogRecordFactory()
    monkeypatch.setenv("AIORDMA_SIMULATION_LOG", str(tmp_path))
    with pytest.raises(IsADirectoryError):
        testing.simulate(fails, seed=1)
    path = str(tmp_path / "missing" / "log")
    monkeypatch.setenv("AIORDMA_SIMULATION_LOG", path)
    with pytest.raises(FileNotFoundError) as raised:
        testing.simulate(fails, seed=1)
    assert str(raised.value) == (
        "[Errno 2] cannot write the log that AIORDMA_SIMULATION_LOG requests: "
        f"No such file or directory: {path!r}"
    )
    assert logging.getLogRecordFactory() is before


def test_second_simulation_is_rejected_while_the_first_one_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other threads are refused even before the simulation has hosts."""

    def file_handler(*_: object) -> logging.Handler:
        monkeypatch.delenv("AIORDMA_SIMULATION_LOG")
        with pytest.raises(BusyError, match="already running a simulation"):
            testing.simulate(fails, seed=1)
        return logging.NullHandler()

    monkeypatch.setenv("AIORDMA_SIMULATION_LOG", "log")
    monkeypatch.setattr(logging, "FileHandler", file_handler)
    testing.simulate(lambda _: asyncio.sleep(1), seed=1)


def test_seed_processes_exit_when_their_parent_is_killed() -> None:
    code = """
import asyncio, os
from aiordma import testing
async def main(world):
    os.write(1, b"%d\\n" % os.getpid())  # whole, where print may write twice
    await asyncio.sleep(1e9)
    while world.now: pass
testing.simulate(main, seeds=range(2), limit=1e10)
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            workers = {process.stdout.readline() for _ in range(2)}
        finally:
            process.kill()
        process.stdout.read()  # EOF once the workers have exited
    assert len(workers | {f"{process.pid}\n"}) == 3


def test_log_records_include_the_simulated_host_and_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AIORDMA_SIMULATION_LOG", str(tmp_path / "log"))
    testing.simulate(counts_twice, seed=1)
    [record] = [record for record in caplog.records if record.name == "of a program"]
    assert vars(record)["simulated_host"] == "main"
    assert 5 < vars(record)["simulated_time"] < 5.01
    assert "    5.000" in (log := (tmp_path / "log").read_text())
    assert " main WARNING of a program: counted\n" in log
    assert "INFO aiordma.simulation" not in log
    logging.getLogger().warning("later")
    assert "later" not in (tmp_path / "log").read_text()


def test_log_records_when_each_fault_begins_and_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def main(world: testing.World) -> None:
        world.host("client")
        await asyncio.sleep(5)
        world.partition("client")
        world.heal()

    faults = [
        testing.Fault("partition", "client", 0.5, 0.9),
        testing.Fault("kill", "server", 2, 3),
        testing.Fault("pause", "client", 2.5, 9),
    ]
    plan = testing.FaultPlan(exactly=faults)
    runs = []
    for log in str(tmp_path / "log"), "":
        monkeypatch.setenv("AIORDMA_SIMULATION_LOG", log)

        async def traced(world: testing.World) -> str:
            await main(world)
            return world.trace

        runs.append(testing.simulate(traced, seed=1, faults=plan, hosts={"server": echo}))
    assert runs[0] == runs[1]
    lines = (tmp_path / "log").read_text().splitlines()
    told = [line.split(maxsplit=4) for line in lines if " aiordma.simulation: " in line]
    partition, kill, pause = map(str, faults)
    assert [(round(float(time), 2), text) for time, _, _, _, text in told] == [
        (0.5, f"fault begins: {partition}"),
        (0.9, f"fault ends: {partition}"),
        (2.0, f"fault begins: {kill}"),
        (2.5, f"fault begins: {pause}"),
        (3.0, f"fault ends: {kill}"),
        (5.0, "client: cut off by the program"),
        (5.0, "all hosts: partitions healed"),
    ]


def test_fault_plan_does_not_undo_partitions_and_kills_by_the_program() -> None:
    async def main(world: testing.World) -> None:
        here, apart, dead = (world.host(name) for name in ("main", "apart", "dead"))
        await asyncio.sleep(5)
        world.partition("apart")
        dead.kill()
        while world.now < 30:
            await asyncio.sleep(0.1)
            assert world._is_cut(here, apart)
            assert not dead.alive
        world.heal()
        for cut in (True, True, False):  # at 40, 50 and 60 s
            await asyncio.sleep(10)
            assert world._is_cut(here, apart) is cut

    exactly = [
        testing.Fault("partition", "apart", 1, 2),
        testing.Fault("kill", "dead", 2, 3),
        testing.Fault("partition", "apart", 25, 45),
        testing.Fault("cable", "apart", 35, 55, network=0),
    ]
    testing.simulate(main, seed=1, faults=testing.FaultPlan(exactly=exactly))


def test_fault_plan_does_not_resume_hosts_paused_by_the_program() -> None:
    times: list[float] = []

    async def serve() -> None:
        while True:
            await asyncio.sleep(0.1)
            times.append(time.monotonic())

    async def main(world: testing.World) -> None:
        await asyncio.sleep(5)
        world.host("server").pause()
        paused = time.monotonic()
        await asyncio.sleep(20)
        assert times[0] < times[-1] < paused

    plan = testing.FaultPlan(pauses=1)
    testing.simulate(main, seed=1, hosts={"server": serve}, faults=plan)


def test_fault_plan_does_not_boot_hosts_killed_by_the_program() -> None:
    async def main(world: testing.World) -> None:
        server = world.host("server")
        while world.now < 30:
            await asyncio.sleep(0.3)
            server.kill()
            await asyncio.sleep(0.3)
            server.boot()

    for seed in range(3):
        testing.simulate(main, seed=seed, faults=testing.FaultPlan(kills=1))


def test_killed_hosts_leave_no_reference_cycles_or_warnings() -> None:
    """Garbage in the collector's oldest generation would stay for a long time."""

    async def main(world: testing.World) -> None:
        conn = await aiordma.connect("server", PORT)
        await conn.send(b"12345678")
        world.host("server").kill()
        await asyncio.sleep(0.1)
        world.host("server").boot()
        world.host("server").kill()  # before its first step
        conn.abort()

    gc.collect()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        testing.simulate(main, seed=1, hosts={"server": echo})
    assert gc.collect() < 50
    assert not seen


def test_killed_program_runs_its_finally_blocks_before_simulate_ends() -> None:
    """The exception that the test keeps refers to the program's task."""
    ended: list[str] = []

    async def program() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            try:
                ended.append("first")
                await asyncio.sleep(1)
            finally:
                asyncio.get_running_loop().call_soon(ended.append, "never")
                ended.append("second")

    async def main(world: testing.World) -> None:
        asyncio.get_running_loop().call_later(1, world.host("client").kill)
        await world.host("client").run(program)

    with pytest.raises(testing.KilledError) as caught:
        testing.simulate(main, seed=1)
    assert ended == ["first", "second"]
    del caught
    gc.collect()


def objects_of_aiordma() -> Counter[type]:
    """Count live objects by aiordma class, without the statistics, which outlive simulations."""
    gc.collect()
    types = Counter(map(type, gc.get_objects()))
    for kept in (Statistics, _Event):
        del types[kept]
    return Counter({it: types[it] for it in types if str(it.__module__).startswith("aiordma")})


def test_simulation_leaks_no_objects_or_file_descriptors() -> None:
    """This includes hosts that were killed in the middle of an operation."""

    async def main(world: testing.World) -> None:
        conn = await aiordma.connect("server", PORT)
        sending = asyncio.ensure_future(conn.send(bytes(1 << 20)))
        await asyncio.sleep(30e-6)
        assert not sending.done()
        world.host("server").kill()
        with pytest.raises(aiordma.ConnectionBrokenError):
            await sending
        world.host("server").boot()
        await asyncio.sleep(0.001)
        await ask(64)

    left = []
    for seed in range(4):
        testing.simulate(main, seed=seed, hosts={"server": echo})
        left.append((objects_of_aiordma(), len(os.listdir("/proc/self/fd"))))
    assert left[1] == left[2] == left[3]


# ---- the clock and chance ------------------------------------------------------------------------


def time_and_random_values() -> dict[str, Any]:
    """Call each function that uses a clock or randomness, and return the results by name."""
    by_name: dict[str, Callable[[], Any]] = {
        **{name: getattr(time, name) for name in ("gmtime", "localtime", "ctime", "asctime")},
        **{name: getattr(time, f"{name}_ns") for name in process.CLOCKS},
        "time": time.time,
        "taken before": taken_before,
        "clock_gettime": lambda: time.clock_gettime(time.CLOCK_MONOTONIC),
        "clock_gettime_ns": lambda: time.clock_gettime_ns(time.CLOCK_REALTIME),
        "strftime": lambda: time.strftime("%X"),
        "date.today": datetime.date.today,
        "random": random.random,
        "Random()": lambda: random.Random().random(),
        "seed()": lambda: (random.seed(), random.random()),
        "SystemRandom": lambda: random.SystemRandom().random(),
        "token_hex": secrets.token_hex,
        "uuid1": uuid.uuid1,
        "uuid4": uuid.uuid4,
        "urandom": lambda: os.urandom(8),
        "getrandom": lambda: os.getrandom(8),
        "RAND_bytes": lambda: ssl.RAND_bytes(8),
        "mktemp": tempfile.mktemp,
        "numpy": np.random.rand,
        "default_rng": lambda: np.random.default_rng().random(),
    }
    return {name: function() for name, function in by_name.items()}


def test_time_and_random_values_are_determined_by_the_seed() -> None:
    async def main(_: testing.World) -> dict[str, Any]:
        await asyncio.sleep(1.5)
        return {
            **time_and_random_values(),
            "a task": asyncio.ensure_future(asyncio.sleep(0)).get_name(),
        }

    first, again, other = (testing.simulate(main, seed=seed) for seed in (1, 1, 2))
    assert first == again
    of_clock = {*list(first)[: list(first).index("random")], "a task"}
    assert {name for name in first if first[name] == other[name]} <= of_clock
    assert first["taken before"] == first["time"] == pytest.approx(1_800_001_001.5, abs=0.01)
    assert not {name for name, it in time_and_random_values().items() if it == first[name]} - {
        "date.today"
    }


def test_reading_the_clock_does_not_change_simulation_results(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def client(look: Callable[[], object]) -> None:
        async with await aiordma.connect("server", PORT) as conn:
            for size in (64, 1 << 20):
                look()
                await conn.send(bytes(size))
                look()
                (await conn.recv()).release()

    names = "time", "monotonic_ns", "perf_counter", "ctime"
    plan = testing.FaultPlan(testing.Link(loss=0.02))
    plain = run(client, list, faults=plan)
    assert run(client, lambda: [getattr(time, name)() for name in names], faults=plan) == plain
    caplog.set_level(logging.DEBUG)
    assert run(client, lambda: logging.warning("now"), faults=plan) == plain
    assert len(caplog.messages) > 4


def test_busy_wait_for_the_clock_raises_stalled_error() -> None:
    async def main(_: testing.World) -> None:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            pass

    with pytest.raises(testing.StalledError, match=r"read the clock .* asyncio\.sleep"):
        testing.simulate(main, seed=1)


def test_threads_outside_the_simulation_use_the_real_clock() -> None:
    with ThreadPoolExecutor() as pool:
        pool.submit(int).result()  # start the thread

        async def main(_: testing.World) -> float:
            return pool.submit(time.monotonic).result()

        assert time.monotonic() <= testing.simulate(main, seed=1) <= time.monotonic()


def test_patched_functions_are_restored_after_a_failed_simulation() -> None:
    def now() -> list[Any]:
        rows = [
            getattr(place, name)
            for place, name, _ in (*process.REPLACED, *process.imported_copies())
        ]
        return [*rows, taken_before, dict(os.environ), random.getstate()]

    before = now()
    with pytest.raises(ZeroDivisionError):
        testing.simulate(fails, seed=1)
    assert before == now()


def test_simulated_functions_use_real_time_after_the_simulation() -> None:
    """A module first imported in a simulation keeps the functions that it finds there.

    They are virtual again in the next simulation.
    """

    async def main(_: testing.World) -> Callable[[], float]:
        return time.monotonic

    async def sleeps(_: testing.World) -> float:
        begun = taken()
        await asyncio.sleep(3600)
        return taken() - begun

    taken = testing.simulate(main, seed=1)
    assert time.monotonic() <= taken() <= time.monotonic()
    assert testing.simulate(sleeps, seed=1) >= 3600


def test_closed_connection_leaves_no_pending_timer() -> None:
    async def main(_: testing.World) -> None:
        async with await aiordma.listen(port=7) as listener:
            connecting = asyncio.create_task(aiordma.connect("localhost", 7))
            async with await listener.accept(), await connecting:
                pass
        await asyncio.get_running_loop().create_future()

    with pytest.raises(testing.StalledError):
        testing.simulate(main, limit=12)  # the device answers retransmissions for 10 s


def test_patched_standard_library_functions_remain_usable() -> None:
    async def program() -> None:
        random.seed(a=5, version=2)
        assert len(os.getrandom(4, flags=0)) == 4
        assert socket.getfqdn() == "client"
        assert platform.processor() == before
        here, there = socket.socketpair()
        with here, there, socket.socket() as simulated:
            assert isinstance(here, socket.socket)
            assert simulated.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
        # Debuggers replace and restore the SIGINT handler like this.
        signal.signal(signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))

    before = platform.processor()
    testing.simulate(lambda world: world.host("client").run(program))
