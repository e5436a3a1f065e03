"""Tests of finalizers during the interpreter's shutdown, when module globals are None."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import cast
from unittest.mock import MagicMock

import pytest

import aiordma
from aiordma import blocking, dmabuf, mr_pool, testing
from aiordma._core.finalizers import finalizer
from aiordma._event_loop.shutdown import EndsWhenDropped, LoopEnd
from aiordma._event_loop.time_share import Timed
from aiordma._memory import registration_cache
from aiordma._transport.connection import Connection
from aiordma._transport.lifecycle import ConnectionLifecycle
from aiordma._transport.remote_memory import RemoteRegion
from aiordma._transport.shares import HandedOver
from tests.processes import run_python

PACKAGE = Path(str(aiordma.__file__)).parent

FINALIZERS: dict[str, Callable[..., None]] = {
    "EndsWhenDropped": EndsWhenDropped.__del__,
    "LoopEnd": LoopEnd.__del__,
    "Timed": Timed.__del__,
    "Connection": Connection.__del__,
    "ConnectionLifecycle": ConnectionLifecycle.__del__,
    "RemoteRegion": RemoteRegion.__del__,
    "HandedOver": HandedOver.__del__,
    "Stream": blocking.Stream.__del__,
    "DmabufRegion": dmabuf.DmabufRegion.__del__,
    "Buffer": mr_pool.Buffer.__del__,
    "Region": mr_pool.Region.__del__,
    "_RegistrationUse": registration_cache._RegistrationUse._retire,
    "Registration": mr_pool.Registration._retire,
    "DmabufRegistration": dmabuf.DmabufRegistration._retire,
    "_Block": testing._Block.__del__,
}


def aiordma_modules() -> list[ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == "aiordma"]
    return [it for name in names if (it := sys.modules[name]) is not None]


@contextmanager
def shut_down() -> Iterator[None]:
    """Set the globals of all package modules to None, as the interpreter does at shutdown."""
    saved = [(vars(module), dict(vars(module))) for module in aiordma_modules()]
    try:
        for names, _ in saved:
            names.update(dict.fromkeys(names))
        yield
    finally:
        for names, before in saved:
            names.update(before)


@pytest.mark.any_device
def test_every_class_with_a_finalizer_is_tested() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names = {it.name for it in node.body if isinstance(it, ast.FunctionDef)}
                found |= {node.name} if names & {"__del__", "_retire"} else set()
    assert found == {*FINALIZERS, "Resource"}


@pytest.mark.any_device
@pytest.mark.parametrize("name", FINALIZERS)
def test_finalizers_do_nothing_after_module_globals_are_cleared(name: str) -> None:
    thing = MagicMock()
    with shut_down():
        FINALIZERS[name](thing)
    assert thing.mock_calls == []


@pytest.mark.any_device
def test_finalizer_does_nothing_while_the_interpreter_is_finalizing() -> None:
    calls: list[int] = []

    @finalizer
    def guarded(number: int) -> None:
        calls.append(number)

    guarded(1)
    assert calls == [1]
    function = cast("FunctionType", guarded)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells["is_finalizing"].cell_contents = lambda: True
    guarded(2)
    assert calls == [1]


async def test_closed_connection_finalizer_tolerates_cleared_module_globals(
    device_name: str,
) -> None:
    async with testing.connected_pair(device=device_name) as (conn, _):
        pass
    for module in aiordma_modules():
        saved = dict(vars(module))
        names = vars(module)
        try:
            names.update(dict.fromkeys(names))
            EndsWhenDropped.__del__(conn)
        finally:
            names.update(saved)


PROGRAM = """
import asyncio, sys, types
keeper = sys.modules["keeper"] = types.ModuleType("keeper")  # cleared after those of aiordma
import aiordma
from aiordma import blocking, rpc, testing, verbs

device, host, end, where, kept = sys.argv[1:]

async def main(things):
    listener = await aiordma.listen(host, device=device)
    ends = []
    for _ in range(3):
        connecting = aiordma.connect(host, listener.port, device=device)
        ends.append(await asyncio.gather(listener.accept(), connecting))
    (closed, its_peer), (here, there), (sending, receiving) = ends
    await asyncio.gather(closed.close(), its_peer.close())
    buffer = here.alloc(4096)
    region = here.register(bytearray(4096))
    with_buffer = here.share(buffer)
    things += [listener, ends, buffer, region, with_buffer]
    things.append(await there.request_region(4096))
    await sending.send(b"kept")
    things += [await anext(aiter(receiving)), here.recv(), here.send(b"never awaited")]
    waiting = here.recv()
    things += [waiting, waiting.send(None)]

things = []
loop = asyncio.new_event_loop()
loop.run_until_complete(main(things))
context = verbs.open_device(device)
things += [context, context.alloc_pd(), context.create_cq(4)]
if end == "closed loop":
    loop.close()
things.append(loop)
keeper.things = things
keeper.itself = keeper
if where != "sys.modules":
    del sys.modules["keeper"]
elif kept == "all":
    sys.kept = list(sys.modules.values())  # their globals become None
del keeper, things, context
"""


@pytest.mark.parametrize(
    ("where", "kept"), [("sys.modules", "all"), ("sys.modules", "no"), ("cycle", "no")]
)
@pytest.mark.parametrize("end", ["closed loop", "open loop"])
def test_interpreter_exit_with_open_objects_prints_no_errors(
    where: str, kept: str, end: str, device_name: str, host: str
) -> None:
    done = run_python("-W", "ignore", "-c", PROGRAM, device_name, host, end, where, kept)
    assert (done.returncode, done.stderr) == (0, "")
