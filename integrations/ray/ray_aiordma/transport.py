"""Ray transports for torch tensors and numpy arrays."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray

from aiordma import RDMAError, blocking, rpc
from aiordma.verbs import bytes_of

from .endpoint import Address, Endpoint

logger: logging.Logger = logging.getLogger("ray_aiordma")

TESTED_RELEASE = "2.60.0"
"""The oldest Ray release tested with this package.

All later releases have been tested as well.
"""

try:
    from ray.exceptions import RayDirectTransportError
    from ray.experimental import (
        CommunicatorMetadata,
        TensorTransportManager,
        TensorTransportMetadata,
        register_tensor_transport,
    )
    from ray.experimental.rdt.tensor_transport_manager import FetchRequest
except ImportError as error:
    raise ImportError(
        f"ray_aiordma does not support the transport interface of Ray {ray.__version__} ({error}); "
        f"it has been tested with {TESTED_RELEASE}"
    ) from error

_endpoint = Endpoint()


@dataclass(kw_only=True)
class Metadata(TensorTransportMetadata):
    """The metadata that Ray passes to an object's receivers.

    The metadata contains the type and shape of each array, and the address of the process that
    offers the arrays.
    """

    address: Address = field(repr=False)  # keeps the key out of logs and errors


@dataclass
class Fetch(FetchRequest):
    """A fetch request with the task that reads its arrays.

    The task runs in `aiordma.blocking`'s event loop.
    """

    task: asyncio.Task[None] | None = None

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Module globals may be None while the interpreter shuts down.
        if not _is_finalizing() and self.task is not None and not self.task.done():
            with suppress(RuntimeError):  # the loop is closed
                self.task.get_loop().call_soon_threadsafe(self.task.cancel)


def _memory(arrays: Sequence[Any]) -> list[memoryview]:
    """Return views of the bytes of all non-empty arrays.

    An array is copied only if it is not in C order, or if it is a lazily conjugated or negated
    tensor.
    """
    flat = []
    for array in arrays:
        if not isinstance(array, np.ndarray) and array.layout is not sys.modules["torch"].strided:
            raise ValueError(
                f"cannot send a tensor with layout {array.layout}; instead, return its components "
                "(indices(), values() ...) or tensor.to_dense()"
            )
        if not array.nbytes:
            continue
        if isinstance(array, np.ndarray):
            if array.dtype.hasobject:
                raise TypeError(
                    f"cannot send an array with dtype {array.dtype}, because it contains Python "
                    "objects; return the array from a method without tensor_transport"
                )
            flat.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        elif array.device.type != "cpu":
            raise ValueError(
                f"cannot send a tensor on {array.device}, because it is not in CPU memory; "
                f"return tensor.cpu() instead"
            )
        else:
            tensor = array.detach().resolve_conj().resolve_neg().contiguous()
            flat.append(tensor.reshape(-1).view(sys.modules["torch"].uint8))
    return [bytes_of(it) for it in flat]


def _empty(shape: Sequence[int], dtype: Any) -> Any:
    """Return an uninitialized array or tensor.

    A tensor's memory also comes from numpy, because numpy requests huge pages from the kernel. The
    kernel clears huge pages three times as fast as ordinary pages.
    """
    if isinstance(dtype, np.dtype):
        return np.empty(shape, dtype)
    torch = sys.modules["torch"]
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    memory = torch.from_numpy(np.empty(math.prod(shape) * dtype.itemsize, np.uint8))
    return memory.view(dtype).reshape(shape)


class Transport(TensorTransportManager):
    """A Ray transport that lets an object's receivers read its arrays over RDMA.

    Ray uses this transport for tensors. In a process that has also used "aiordma_numpy", Ray may
    pass numpy arrays to this transport, too.
    """

    name = "AIORDMA"

    def tensor_transport_backend(self) -> str:
        return self.name

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: object) -> bool:
        return True

    # ---- sending side ----

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> Metadata:
        address = _endpoint.offer(obj_id, _memory(rdt_object))
        described = [(it.shape, it.dtype) for it in rdt_object]
        return Metadata(described, "cpu", address=address)

    def garbage_collect(self, obj_id: str, *_: object) -> None:
        _endpoint.withdraw(obj_id)

    def send_multiple_tensors(self, *_: object) -> None:
        raise NotImplementedError("one-sided transports do not send data: the receiver reads it")

    # ---- receiving side ----

    def get_communicator_metadata(
        self, src_actor: object, dst_actor: object, backend: str | None = None
    ) -> CommunicatorMetadata:
        # Log a warning instead of raising an exception. Ray may call this method in code where an
        # exception would end the process.
        if not getattr(dst_actor, "_ray_enable_tensor_transport", True):
            logger.warning(
                "%r receives an object through %s, but its class does not enable this: the call "
                "may time out after a minute; write @ray.remote(enable_tensor_transport=True)",
                dst_actor,
                self.name,
            )
        return CommunicatorMetadata()

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: object,
        target_buffers: list[Any] | None = None,
    ) -> Fetch:
        assert isinstance(tensor_transport_metadata, Metadata)
        described = tensor_transport_metadata.tensor_meta
        fetch = Fetch(obj_id, target_buffers or [_empty(*one) for one in described])
        reading = _endpoint.read(tensor_transport_metadata.address, obj_id, _memory(fetch.tensors))

        def start() -> None:
            fetch.task = asyncio.create_task(reading, name=obj_id)

        blocking.call(start)
        return fetch

    def wait_fetch_complete(self, fetch_request: FetchRequest, timeout: float = -1) -> list[Any]:
        assert isinstance(fetch_request, Fetch)
        assert fetch_request.task is not None
        task = fetch_request.task

        async def wait() -> None:
            async with asyncio.timeout(timeout if timeout >= 0 else None):
                await asyncio.shield(task)

        try:
            blocking.call(wait)
        except TimeoutError:
            raise TimeoutError(
                f"timed out after {timeout:g} s while reading object {fetch_request.obj_id}"
            ) from None
        except (RDMAError, rpc.CallError, OSError, CancelledError) as error:
            raise RayDirectTransportError(
                f"cannot read object {fetch_request.obj_id} from its actor, which may have died: "
                f"{str(error) or type(error).__name__}"
            ) from error
        return fetch_request.tensors

    def recv_multiple_tensors(self, *arguments: Any, **named: Any) -> list[Any]:
        return self.wait_fetch_complete(self.fetch_multiple_tensors(*arguments, **named))

    def abort_transport(self, obj_id: str, communicator_metadata: object) -> None:
        def cancel() -> None:
            for task in asyncio.all_tasks():
                if task.get_name() == obj_id:
                    task.cancel()

        blocking.call(cancel)


class NumpyTransport(Transport):
    """A Ray transport for numpy arrays.

    This class differs from `Transport` only in its `name`.
    """

    name = "AIORDMA_NUMPY"


_parameters = [*inspect.signature(register_tensor_transport).parameters]
if inspect.isabstract(Transport) or len(_parameters) != 4:
    raise ImportError(
        f"ray_aiordma does not support the transport interface of Ray {ray.__version__} "
        f"(methods not implemented: {sorted(Transport.__abstractmethods__)}; parameters of "
        f"register_tensor_transport: {_parameters}); it has been tested with {TESTED_RELEASE}"
    )


def register() -> None:
    """Register the transports "aiordma" for torch tensors and "aiordma_numpy" for numpy arrays."""
    kinds: list[tuple[type[Transport], type]] = [(NumpyTransport, np.ndarray)]
    with suppress(ImportError):
        torch = importlib.import_module("torch")
        kinds.append((Transport, torch.Tensor))
    for transport, kind in kinds:
        with suppress(ValueError):  # already registered
            register_tensor_transport(transport.name, ["cpu"], transport, kind)
