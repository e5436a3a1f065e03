"""Tests of objects sent between actors of a real cluster by "aiordma" and "aiordma_numpy"."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import ray_aiordma
import torch
from ray.exceptions import GetTimeoutError, RayDirectTransportError, RayTaskError
from ray.experimental import set_target_for_ref, wait_tensor_freed
from ray.experimental.rdt.util import get_tensor_transport_manager, get_transport_data_type
from ray_aiordma import transport

import aiordma
from aiordma import blocking, rpc

MIB = 1 << 20

# Actors import this module, so this call also registers the transports in each actor.
ray_aiordma.register()


class Objects:
    """An actor that offers objects and receives objects from other actors."""

    def pid(self) -> int:
        return os.getpid()

    @ray.method(tensor_transport="aiordma")
    def give(self, value: Any) -> Any:
        """Return `value` over RDMA. Ray does not use a tensor transport for the argument."""
        return value

    @ray.method(tensor_transport="aiordma_numpy")
    def give_arrays(self, value: Any) -> Any:
        return value

    @ray.method(tensor_transport="aiordma")
    def give_ones(self, size: int) -> torch.Tensor:
        self.kept = torch.ones(size, dtype=torch.uint8)
        return self.kept

    @ray.method(tensor_transport="aiordma")
    def give_odd(self) -> dict[str, Any]:
        return odd()

    @ray.method(tensor_transport="aiordma")
    def give_every_type(self) -> list[torch.Tensor]:
        return of_every_type()

    def wait_freed(self) -> tuple[int, int]:
        """Wait until Ray has freed the result of `give_ones`, and then return `state()`."""
        wait_tensor_freed(self.kept, timeout=60)
        del self.kept
        return self.state()

    def state(self) -> tuple[int, int]:
        with open("/proc/self/statm") as statm:
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return len(transport._endpoint._offered), resident

    def contents(self, value: Any) -> list[Any]:
        return contents(value)

    def size(self, value: Any) -> int:
        return int(value.sum())

    def get_size(self, refs: list[Any]) -> int:
        return int(ray.get(refs[0]).sum())

    def put(self, size: int) -> list[Any]:
        return [ray.put(torch.ones(size), _tensor_transport="aiordma")]


def contents(value: Any) -> list[Any]:
    """Return each array's type, shape and bytes as plain values that Ray can pickle."""
    found = []
    for array in value.values() if isinstance(value, dict) else value:
        if isinstance(array, torch.Tensor):
            flat = array.detach().resolve_conj().contiguous().reshape(-1)
            plain = flat.view(torch.uint8).numpy() if len(flat) else np.empty(0)
        else:
            plain = array
        found.append((str(array.dtype), tuple(array.shape), plain.tobytes()))
    return found


def of_every_type() -> list[torch.Tensor]:
    """Return a tensor of random bytes for each dtype, including types that cannot be pickled."""
    names = r"torch\.(bool|u?int(8|16|32|64)|b?float\w+|complex\w+)"
    types = {it for it in vars(torch).values() if isinstance(it, torch.dtype)}
    chosen = sorted((it for it in types if re.fullmatch(names, str(it))), key=str)
    chance = np.random.default_rng(7)
    tensors = []
    for one in chosen:
        plain = chance.integers(0, 2 if one is torch.bool else 256, 960, dtype=np.uint8)
        tensors.append(torch.from_numpy(plain).view(one).reshape(2, -1))
    return tensors


def odd() -> dict[str, Any]:
    """Return tensors with unusual shapes, strides or attributes."""
    numbers = torch.arange(24.0).reshape(4, 6)
    return {
        "0-d": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "empty, of numpy": torch.from_numpy(np.empty(0)),
        "transposed": numbers.T,
        "sliced": numbers[::2, 1::2],
        "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "with a gradient": torch.ones(3, requires_grad=True),
        "a view": numbers[1],
    }


class Plain:
    """An actor whose class does not enable tensor transports."""


remote: Any = ray.remote  # its type hints do not cover tensor transports
Actor: Any = remote(enable_tensor_transport=True)(Objects)


@pytest.fixture(scope="module")
def source() -> Any:
    return Actor.remote()


@pytest.fixture(scope="module")
def sink() -> Any:
    return Actor.remote()


@pytest.fixture
def doomed() -> Iterator[tuple[Any, int]]:
    """Provide an actor and its process ID. The test can stop or kill the process."""
    actor = Actor.remote()
    pid = ray.get(actor.pid.remote())
    yield actor, pid
    ray.kill(actor)


def test_tensors_of_every_dtype_are_transferred(source: Any, sink: Any) -> None:
    expected = contents(of_every_type())
    names = {name for name, _, _ in expected}
    assert names > {"torch.bool", "torch.bfloat16", "torch.float8_e4m3fn", "torch.complex128"}
    assert ray.get(sink.contents.remote(source.give_every_type.remote())) == expected


def test_tensors_with_unusual_shapes_and_strides_are_transferred(source: Any, sink: Any) -> None:
    assert ray.get(sink.contents.remote(source.give_odd.remote())) == contents(odd())
    assert contents(ray.get(source.give_odd.remote())) == contents(odd())


def test_numpy_arrays_are_transferred_unchanged(source: Any, sink: Any) -> None:
    arrays = [
        np.arange(1000, dtype=">i4"),
        np.array("2026-11-26", "M8[D]"),
        np.array([(1, 2.5), (3, 4.5)], [("a", "i4"), ("b", "f8")]),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.arange(10)[::-3],
        np.empty((0, 2)),
        np.array(["text", "more"]),
    ]
    assert ray.get(sink.contents.remote(source.give_arrays.remote(arrays))) == contents(arrays)
    # Once a process has used both transports, each of them transfers both tensors and arrays. Both
    # actors have done so by now.
    both = [torch.arange(5), np.arange(5)]
    assert ray.get(sink.contents.remote(source.give.remote(both))) == contents(both)


def test_arrays_of_objects_are_rejected(source: Any) -> None:
    with pytest.raises(
        RayTaskError, match=r"an array with dtype object, .* method without tensor_transport"
    ):
        ray.get(source.give_arrays.remote(np.array([1, None])))


def test_object_with_a_thousand_tensors_is_transferred(source: Any, sink: Any) -> None:
    tensors = [torch.full((i,), i) for i in range(1000)]
    assert ray.get(sink.contents.remote(source.give.remote(tensors))) == contents(tensors)
    refs = [source.give_ones.remote(i) for i in range(100)]
    assert [len(it) for it in ray.get(refs)] == [*range(100)]
    assert sum(ray.get([sink.size.remote(it) for it in refs])) == sum(range(100))


def test_get_fills_the_tensor_set_as_target(source: Any) -> None:
    ref = source.give_ones.remote(3 * MIB)
    target = torch.zeros(3 * MIB, dtype=torch.uint8)
    set_target_for_ref(ref, [target])
    assert ray.get(ref).data_ptr() == target.data_ptr()
    assert target.sum() == 3 * MIB


def test_receiver_of_a_reference_reads_from_the_owner(source: Any, sink: Any) -> None:
    """A process that receives a reference reads the object from the process that put it."""
    here = [ray.put(torch.ones(1000), _tensor_transport="aiordma")]
    assert ray.get(sink.get_size.remote(here)) == 1000
    there = ray.get(source.put.remote(2000))
    assert ray.get(there[0]).sum() == 2000
    assert ray.get(sink.get_size.remote(there)) == 2000


def test_releasing_an_object_frees_its_memory(source: Any, sink: Any) -> None:
    resident = []
    for _ in range(6):
        ref = source.give_ones.remote(64 * MIB)
        assert ray.get(sink.size.remote(ref)) == 64 * MIB
        del ref
        offered, size = ray.get(source.wait_freed.remote())
        assert offered == 0
        resident.append((size, ray.get(sink.state.remote())[1]))
    for first, last in zip(resident[1], resident[-1], strict=True):
        assert last - first < 64 * MIB


@contextmanager
def reading(ref: Any) -> Iterator[Future[Any]]:
    """Run `ray.get(ref)` in a thread, and yield its future once the read has started."""

    async def begun() -> bool:
        return any(it.get_name() == ref.hex() for it in asyncio.all_tasks())

    with ThreadPoolExecutor(1) as pool:
        getting = pool.submit(lambda: ray.get(ref))
        deadline = time.monotonic() + 60
        while not blocking.call(begun):
            assert not getting.done(), getting.result()
            assert time.monotonic() < deadline
        yield getting


def offered_by(actor: Any, size: int) -> Any:
    """Create an object in the actor, wait until the actor offers it, and return its reference."""
    ref = actor.give_ones.remote(size)
    assert ray.wait([ref], timeout=60, fetch_local=False)[0]
    assert metadata(ref)
    return ref


def metadata(ref: Any) -> Any:
    """Wait for the object's metadata, which may arrive after the object, and return it."""
    manager: Any = ray._private.worker.global_worker.rdt_manager
    return manager.wait_for_tensor_transport_metadata(ref.hex(), 60)


def test_killed_actor_fails_pending_reads(doomed: tuple[Any, int], sink: Any) -> None:
    actor, pid = doomed
    ref = offered_by(actor, MIB)
    os.kill(pid, signal.SIGSTOP)
    with reading(ref) as getting:
        taking = sink.size.remote(ref)
        os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(
            RayDirectTransportError, match=f"cannot read object {ref.hex()} .*broke"
        ):
            getting.result()
    with pytest.raises(RayTaskError, match=r"cannot read object \w+ from its actor"):
        ray.get(taking)
    print(f"errors {time.monotonic() - start:.3f} s after the kill")
    # Without an error from the device, only the keep-alive would detect the failure, after 45 s.
    assert time.monotonic() - start < 20
    # A new connection fails, but the receiver keeps working.
    with pytest.raises(RayDirectTransportError):
        ray.get(ref)
    assert ray.get(sink.state.remote())


def test_pending_get_fails_on_timeout_or_abort(doomed: tuple[Any, int]) -> None:
    actor, pid = doomed
    ref, another = offered_by(actor, MIB), offered_by(actor, MIB)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(GetTimeoutError):
        ray.get(another, timeout=0.2)
    with reading(ref) as getting:
        transport.Transport().abort_transport(ref.hex(), None)
        with pytest.raises(RayDirectTransportError, match="CancelledError"):
            getting.result()
    os.kill(pid, signal.SIGCONT)
    assert [it.sum() for it in ray.get([ref, another])] == [MIB, MIB]


def test_object_can_be_opened_only_with_its_owners_key(source: Any) -> None:
    ref = offered_by(source, 1)
    address = metadata(ref).address
    assert repr(address.key) not in repr(metadata(ref))

    async def call(key: bytes, name: str) -> Any:
        async with await rpc.connect(address.host, address.port, via="tcp", auth=key) as client:
            return await client.call("open", name)

    with pytest.raises(aiordma.RDMAError, match="key"):
        blocking.call(call, bytes(32), ref.hex())
    with pytest.raises(rpc.CallError, match="KeyError"):
        blocking.call(call, address.key, "of no object")
    assert len(blocking.call(call, address.key, ref.hex())) == 1


def test_unsupported_tensors_are_rejected_with_advice() -> None:
    with pytest.raises(ValueError, match=r"a tensor on meta, .* return tensor.cpu"):
        transport.Transport().extract_tensor_transport_metadata("", [torch.ones(3, device="meta")])
    with pytest.raises(ValueError, match=r"layout torch.sparse_coo; .* tensor.to_dense"):
        transport.Transport().extract_tensor_transport_metadata("", [torch.eye(3).to_sparse()])


def test_register_can_be_called_twice() -> None:
    kinds = {transport.Transport: torch.Tensor, transport.NumpyTransport: np.ndarray}
    before = [get_tensor_transport_manager(kind.name) for kind in kinds]
    ray_aiordma.register()
    assert [get_tensor_transport_manager(kind.name) for kind in kinds] == before
    assert [type(manager) for manager in before] == [*kinds]
    assert [get_transport_data_type(kind.name) for kind in kinds] == [*kinds.values()]


def test_warning_is_logged_when_an_actor_lacks_tensor_transport(
    source: Any, sink: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for actor, advice in [(sink, []), (remote(Plain).remote(), ["enable_tensor_transport=True"])]:
        caplog.clear()
        transport.Transport().get_communicator_metadata(source, actor)
        assert [it for it in advice if it in caplog.text] == advice
        assert bool(caplog.records) == bool(advice)


def test_readme_example_prints_the_documented_output(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "README.md").read_text()
    program, output = re.findall(r"^```(?:python|text)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout == output


OTHER_RAY = {
    "del experimental.register_tensor_transport": "cannot import name .register_tensor_transport.",
    "experimental.register_tensor_transport = lambda name, kind: None": "parameters",
    """
class More(experimental.TensorTransportManager):
    @abc.abstractmethod
    def another(self): ...
experimental.TensorTransportManager = More
""": "another",
}


@pytest.mark.parametrize("change", OTHER_RAY)
def test_unsupported_ray_raises_import_error(change: str) -> None:
    program = f"import abc\nfrom ray import experimental\n{change}\nimport ray_aiordma"
    done = subprocess.run(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=False
    )
    last = done.stderr.splitlines()[-1]
    assert re.search(
        f"ImportError: .*{OTHER_RAY[change]}.*it has been tested with {transport.TESTED_RELEASE}",
        last,
    )


@pytest.mark.long
def test_one_gibibyte_tensor_is_transferred(source: Any, sink: Any) -> None:
    assert ray.get(sink.size.remote(source.give_ones.remote(1024 * MIB))) == 1024 * MIB
