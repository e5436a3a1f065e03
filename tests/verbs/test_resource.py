"""Test ownership: which objects close together, what is kept alive, what finalizers do not do."""

from __future__ import annotations

import errno
import gc
import os
import sys
import warnings
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma import verbs
from aiordma._native import ffi
from aiordma.errors import BufferStateError, VerbsError
from aiordma.verbs._device import context as device_context
from aiordma.verbs._device import resource
from aiordma.verbs._device.resource import Node, Resource
from tests.processes import run_python


def test_closing_a_context_closes_all_its_resources(device: verbs.Device) -> None:
    before = verbs.live()
    context = device.open()
    pd = context.alloc_pd()
    channel = context.create_comp_channel()
    cq, other = context.create_cq(16, channel), context.create_cq(16)
    qp = pd.create_qp(cq, other)
    mr = pd.reg_mr(4096)
    assert verbs.live() != before
    context.close()
    assert verbs.live() == before
    for thing in (context, pd, channel, cq, other, qp, mr):
        assert thing.closed
        assert repr(thing).endswith("closed>")
        thing.close()


def test_closed_child_is_removed_from_all_parents(
    context: verbs.Context, pd: verbs.ProtectionDomain
) -> None:
    """Here closing the channel of one completion queue also closes the queue pair."""
    channel = context.create_comp_channel()
    send_cq, recv_cq = context.create_cq(16, channel), context.create_cq(16)
    qp = pd.create_qp(send_cq, recv_cq)
    channel.close()
    assert qp.closed
    assert send_cq.closed
    assert not pd.closed
    assert not recv_cq.node.children
    assert not pd.node.children
    recv_cq.close()


def test_resources_form_no_reference_cycles(device: verbs.Device) -> None:
    gc.collect()
    gc.disable()
    try:
        context = device.open()
        pd = context.alloc_pd()
        channel = context.create_comp_channel()
        cq = context.create_cq(16, channel)
        qp, mr = pd.create_qp(cq), pd.reg_mr(64)
        things: list[Resource[Any]] = [context, pd, channel, cq, qp, mr]
        references = [weakref.ref(thing) for thing in things]
        context.close()
        things.clear()
        del context
        assert references[0]() is pd.context  # a child keeps its parent
        del pd, channel, cq, qp, mr
        assert [reference() for reference in references] == [None] * 6
    finally:
        gc.enable()


def test_dropped_child_warns_and_is_closed_with_its_parent(context: verbs.Context) -> None:
    before = verbs.live()
    pd = context.alloc_pd()
    data = bytearray(64)
    with pytest.warns(ResourceWarning, match=r"unclosed <MemoryRegion 0x[0-9a-f]+\+64 lkey"):
        pd.reg_mr(data)
    assert verbs.live()["MemoryRegion"] == before.get("MemoryRegion", 0) + 1
    with pytest.raises(BufferError):  # the device may still write there
        data.extend(b"x")
    pd.close()
    data.extend(b"x")
    assert verbs.live() == before


def test_resource_warning_includes_the_creation_traceback(context: verbs.Context) -> None:
    pd = context.alloc_pd()
    verbs.remember_places(True)
    try:
        with pytest.warns(ResourceWarning, match=r"created at\n(?s:.*)test_resource.py"):
            pd.reg_mr(64)
    finally:
        verbs.remember_places(sys.flags.dev_mode)
    pd.close()


def test_dropped_context_is_leaked_with_its_children(device: verbs.Device) -> None:
    abandoned = len(resource._abandoned)
    with pytest.warns(ResourceWarning, match=f"unclosed <Context {device.name}"):
        device.open()
    assert len(resource._abandoned) == abandoned + 1
    resource._abandoned.pop().close()
    data = bytearray(64)
    with warnings.catch_warnings():  # a recorded warning would refer to its object
        warnings.simplefilter("ignore", ResourceWarning)
        device.open().alloc_pd().reg_mr(data)
    assert len(resource._abandoned) == abandoned + 1
    with pytest.raises(BufferError):  # the device may still write there
        data.extend(b"x")
    resource._abandoned.pop().close()


class Broken(Resource[str]):
    pass


def test_resource_stays_open_when_the_device_refuses_to_destroy_it() -> None:
    refusals = [VerbsError(16, "ibv_destroy_test")]

    def destroy(pointer: str) -> None:
        if refusals:
            raise refusals.pop()

    broken = Broken(Node("Broken", "pointer", destroy))
    with pytest.raises(VerbsError, match="ibv_destroy_test"):
        broken.close()
    assert not broken.closed
    assert broken.pointer == "pointer"
    assert verbs.live()["Broken"] == 1
    broken.close()
    assert broken.closed
    assert "Broken" not in verbs.live()


def test_resource_is_closed_when_destroy_fails_with_eio() -> None:
    def destroy(pointer: str) -> None:
        raise VerbsError(errno.EIO, "ibv_destroy_test")

    gone = Broken(Node("Broken", "pointer", destroy))
    gone.close()
    assert gone.closed
    assert "Broken" not in verbs.live()


def test_forked_child_cannot_use_resources_of_the_parent(
    context: verbs.Context, pd: verbs.ProtectionDomain
) -> None:
    mr = pd.reg_mr(64)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert verbs.live() == {}
            assert mr.closed
            for thing in (mr, pd, context):
                thing.close()  # does nothing
            try:
                context.query_port()
            except BufferStateError as error:
                os.write(writer, str(error).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader, "rb") as file:
        told = file.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    assert told == (
        f"Context {context.name} was made before fork() and belongs to the parent process"
    )
    mr.buf[0] = 1
    mr.close()


def test_reentrant_borrow_returns_the_same_context(
    context: verbs.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A destructor may borrow the same context in the middle of the call."""
    borrow = partial(verbs.Context.borrow, context.library, context.pointer)
    name = ffi.string
    inner: list[verbs.Context] = []

    def string(raw: Any) -> Any:
        monkeypatch.undo()
        inner.append(borrow())
        return name(raw)

    monkeypatch.setattr(device_context, "ffi", SimpleNamespace(string=string, cast=ffi.cast))
    assert borrow() is inner[0]
    assert borrow() is inner[0]
    inner.clear()


# The interpreter must exit without a hang, crash or error, although everything is still open.
_EXIT = """
import sys
from aiordma import verbs
context = verbs.open_device(sys.argv[1])
pd = context.alloc_pd()
channel = context.create_comp_channel()
cq = context.create_cq(16, channel)
cq.req_notify()
qp = pd.create_qp(cq)
mr = pd.reg_mr(bytearray(64))
"""


@pytest.mark.parametrize("flags", [["-W", "ignore"], ["-X", "dev"]])
def test_interpreter_exits_cleanly_with_open_resources(
    device: verbs.Device, flags: list[str]
) -> None:
    done = run_python(*flags, "-c", _EXIT, device.name, check=True)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.any_device
def test_live_count_is_correct_when_a_finalizer_closes_objects(pd: verbs.ProtectionDomain) -> None:
    """A finalizer of the application may close an object at any point of `live`."""

    class Owner:
        def __init__(self) -> None:
            self.mr = pd.reg_mr(8)
            self.cycle = self

        def __del__(self) -> None:
            self.mr.close()

    before = verbs.live()
    thresholds = gc.get_threshold()
    try:
        for allocations in range(1, 30):
            gc.collect()
            Owner()
            gc.set_threshold(gc.get_count()[0] + allocations)
            verbs.live()
            gc.set_threshold(*thresholds)
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert verbs.live() == before
