"""Test what counts as memory, and how long it is held."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

import numpy as np
import pytest

from aiordma import verbs
from aiordma.errors import UnsupportedError
from aiordma.verbs import bytes_of
from aiordma.verbs._memory.buffers import require_data
from aiordma.verbs._memory.dlpack import OPAQUE
from tests import fake_torch
from tests.dlpack import BFLOAT, CUDA, CUDA_HOST, OwnTensor
from tests.processes import run_python

DATA = bytes(range(64))


def mapped_memory() -> mmap.mmap:
    memory = mmap.mmap(-1, 64)
    memory[:] = DATA
    return memory


class Record(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int32), ("rest", ctypes.c_ubyte * 60))


KINDS: dict[str, Callable[[], Any]] = {
    "bytes": lambda: DATA,
    "bytearray": lambda: bytearray(DATA),
    "memoryview": lambda: memoryview(bytearray(DATA)),
    "part": lambda: memoryview(b"x" + DATA + b"y")[1:-1],
    "cast": lambda: memoryview(bytearray(DATA)).cast("Q"),
    "planes": lambda: memoryview(bytearray(DATA)).cast("B", (4, 4, 4)),
    "array": lambda: array.array("d", DATA),
    "mmap": mapped_memory,
    "ctypes": lambda: (ctypes.c_uint32 * 16).from_buffer_copy(DATA),
    "record": lambda: Record.from_buffer_copy(DATA),
    "numpy": lambda: np.frombuffer(DATA, np.float32).reshape(4, 2, 2),
    "other byte order": lambda: np.frombuffer(DATA, ">i4").copy(),
    "numbers of a union": lambda: (Numbers * 8).from_buffer_copy(DATA),
    "records": lambda: np.frombuffer(DATA, [("a", "i4"), ("b", "f8"), ("c", "i4")]).copy(),
    "rows": lambda: np.frombuffer(b"x" * 16 + DATA, np.uint8).reshape(5, 16)[1:],
    "tensor": lambda: OwnTensor(bytearray(DATA), (64,)),
    "bfloat16": lambda: OwnTensor(bytearray(DATA), (4, 8), code=BFLOAT, bits=16),
    "strides": lambda: OwnTensor(bytearray(DATA), (2, 1, 8), strides=(8, 99, 1), bits=32),
    "part of a tensor": lambda: OwnTensor(bytearray(b"xy" + DATA), (64,), byte_offset=2),
    "without versions": lambda: OwnTensor(bytearray(DATA), (64,), version=None),
    "later version": lambda: OwnTensor(bytearray(DATA), (64,), version=(1, 7)),
    "host memory of a GPU": lambda: OwnTensor(bytearray(DATA), (64,), device=CUDA_HOST),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_bytes_of_returns_a_byte_view_for_every_kind_of_memory(make: Callable[[], Any]) -> None:
    memory = make()
    view = bytes_of(memory)
    assert (view.format, view.ndim, view.nbytes) == ("B", 1, 64)
    assert bytes(view) == DATA
    if not view.readonly:
        view[:8] = b"new here"
        assert bytes(bytes_of(memory)[:8]) == b"new here"


@pytest.mark.parametrize(
    ("memory", "readonly"),
    [
        (DATA, True),
        (bytearray(DATA), False),
        (memoryview(bytearray(DATA)).toreadonly(), True),
        (np.frombuffer(DATA, ">i4"), True),
        (np.frombuffer(bytearray(DATA), ">i4"), False),
        (OwnTensor(bytearray(DATA), (64,)), False),
        (OwnTensor(bytearray(DATA), (64,), read_only=True), True),
    ],
)
def test_bytes_of_preserves_the_readonly_flag(memory: Any, readonly: bool) -> None:
    assert bytes_of(memory).readonly is readonly


@pytest.mark.parametrize(
    "memory",
    [b"", bytearray(), np.zeros((3, 0)), np.zeros(0, ">i4"), OwnTensor(bytearray(8), (3, 0))],
)
def test_bytes_of_returns_empty_view_for_empty_memory(memory: Any) -> None:
    assert bytes(bytes_of(memory)) == b""


@pytest.mark.parametrize(
    "memory",
    [
        memoryview(bytearray(DATA))[::2],
        np.zeros((4, 4)).T,
        np.zeros((4, 4), order="F"),
        np.zeros((4, 4))[:, 1:3],
        np.zeros(8)[::-1],
        OwnTensor(bytearray(DATA), (4, 4), strides=(1, 4)),
        OwnTensor(bytearray(DATA), (4, 2), strides=(4, 2)),
    ],
)
def test_bytes_of_rejects_noncontiguous_memory(memory: Any) -> None:
    with pytest.raises(BufferError, match="contiguous"):
        bytes_of(memory)


def test_bytes_of_rejects_objects_without_memory() -> None:
    for nothing in ("text", 5, None, object(), [1, 2]):
        with pytest.raises(TypeError, match="neither the buffer protocol nor DLPack"):
            bytes_of(nothing)  # type: ignore[arg-type]


class Union(ctypes.Union):
    _fields_ = (("number", ctypes.c_int32), ("object", ctypes.py_object))


class Packed(ctypes.Structure):
    _pack_ = 1
    _fields_: ClassVar[Any] = (("flag", ctypes.c_char), ("text", ctypes.c_char_p))


class Inherited(Packed):
    _fields_ = (("more", ctypes.c_int32),)


class Around(ctypes.Structure):
    _fields_ = (("size", ctypes.c_int32), ("unions", Union * 2))


class Numbers(ctypes.Union):
    _fields_ = (("OP", ctypes.c_int32), ("real", ctypes.c_double))


class Exporter:
    def __buffer__(self, flags: int) -> memoryview:
        return memoryview((ctypes.c_char_p * 4)())


RECORD = np.dtype([("key", "O"), ("value", "<i8")])
OBJECTS: Any = np.array([1, "a", None, ()], object)
RECORDS: Any = np.zeros(2, RECORD)
ADDRESSES: dict[str, Any] = {
    "objects": OBJECTS,
    "no objects": np.zeros((0, 3), object),
    "objects apart": np.zeros((4, 4), object)[:, 1],
    "records": RECORDS,
    "a record": RECORDS[0],
    "sub-arrays": np.zeros(2, [("first", "i4"), ("rest", "O", (2,))]),
    "records in records": np.zeros(2, [("inner", RECORD), ("last", "i4")]),
    "records beside moments": np.zeros(2, [("when", "M8[s]"), ("what", "O")]),
    "strings of numpy": np.array(["a"], "T") if np.lib.NumpyVersion(np.__version__) >= "2.0.0"
    else OBJECTS,
    "view": memoryview(OBJECTS),
    "cast": memoryview(OBJECTS).cast("B"),
    "part of a cast": memoryview(RECORDS).cast("B")[3:5],
    "objects of ctypes": (ctypes.py_object * 4)(),
    "pointers": (ctypes.c_void_p * 4)(),
    "texts": (ctypes.c_wchar_p * 4)(),
    "pointers to numbers": (ctypes.POINTER(ctypes.c_int32) * 4)(),
    "functions": (ctypes.CFUNCTYPE(None) * 4)(),
    "union": Union(),
    "unions": (Union * 2)(),
    "packed": Packed(),
    "inherited": Inherited(),
    "around": Around(),
    "cast of ctypes": memoryview((Packed * 2)()).cast("B"),
    "of a class in Python": Exporter() if sys.version_info >= (3, 12) else OBJECTS,
    "handles of DLPack": OwnTensor(bytearray(DATA), (8,), code=OPAQUE, bits=64),
}  # fmt: skip


@pytest.mark.parametrize("memory", ADDRESSES.values(), ids=ADDRESSES)
def test_memory_containing_pointers_is_rejected(pd: verbs.ProtectionDomain, memory: Any) -> None:
    """Bytes that a peer writes in place of an address would be followed as a pointer.

    This error comes before any other defect of the memory.
    """
    for use in bytes_of, verbs.address_of, pd.reg_mr:
        with pytest.raises(TypeError, match="addresses in this process") as caught:
            use(memory)
    assert "json.dumps" in str(caught.value)
    gc.collect()
    assert getattr(memory, "out", 0) == 0


@pytest.mark.parametrize(
    "memory",
    [
        np.zeros(2, [("O", "i4"), ("P&X{", "f8")]),
        np.zeros(2, "c16"),
        memoryview(bytearray(16)).cast("P"),
        (Numbers * 2)(),
    ],
)
def test_formats_without_pointers_are_accepted(memory: Any) -> None:
    assert bytes(bytes_of(memory)) == bytes(memoryview(memory).nbytes)
    assert require_data(memory) is memory


def test_require_data_accepts_noncontiguous_memory() -> None:
    apart = memoryview(bytes(8))[::2]
    assert require_data(apart) is apart
    with pytest.raises(TypeError, match="addresses in this process"):
        require_data(memoryview(OBJECTS)[::2])


def test_bytes_of_advises_array_view_for_datetime_elements() -> None:
    moments = np.zeros(4, "M8[s]")
    with pytest.raises(BufferError, match=r"pass array\.view"):
        bytes_of(moments)
    assert len(bytes_of(moments.view("u1"))) == 32


class Elsewhere:
    """An object with the interface of a CuPy or Numba array."""

    __cuda_array_interface__: ClassVar[dict[str, object]] = {}


@pytest.mark.parametrize(
    ("memory", "which"),
    [
        (OwnTensor(bytearray(DATA), (64,), device=CUDA), "DLPack device 2:0"),
        (Elsewhere(), "__cuda_array_interface__"),
    ],
)
def test_gpu_memory_error_advises_register_dmabuf(
    pd: verbs.ProtectionDomain, memory: Any, which: str
) -> None:
    for use in (bytes_of, pd.reg_mr):
        with pytest.raises(UnsupportedError, match=r"register_dmabuf") as caught:
            use(memory)
        assert str(caught.value).count(which) == 1


def test_bytes_of_rejects_dlpack_capsules_that_contradict_the_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The capsule has a different device than the tensor reported, or is not a capsule."""
    tensor = OwnTensor(bytearray(DATA), (64,))
    tensor._managed.tensor.device_type = CUDA
    with pytest.raises(UnsupportedError, match="DLPack device 2:0"):
        bytes_of(tensor)
    assert tensor.out == 0
    monkeypatch.setattr(OwnTensor, "__dlpack__", lambda self, **_: b"bytes")
    with pytest.raises(BufferError, match="must return a DLPack capsule"):
        bytes_of(tensor)


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (OwnTensor(bytearray(DATA), (64,), version=(2, 0)), "DLPack version 2"),
        (OwnTensor(bytearray(DATA), (7,), bits=4), "28 bits"),
    ],
)
def test_bytes_of_rejects_unsupported_tensors(tensor: OwnTensor, text: str) -> None:
    with pytest.raises(BufferError, match=text):
        bytes_of(tensor)
    gc.collect()
    assert tensor.out == 0


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_views_and_regions_keep_the_tensor_alive(
    pd: verbs.ProtectionDomain, version: tuple[int, int] | None
) -> None:
    tensor = OwnTensor(bytearray(DATA), (64,), version=version)
    view = bytes_of(tensor)
    part = view[10:20]
    del view
    assert tensor.out == 1
    assert part == DATA[10:20]
    del part
    assert tensor.out == 0
    with pd.reg_mr(tensor) as mr:
        assert bytes(mr.buf) == DATA
        assert mr.addr == verbs.address_of(tensor)
        assert tensor.out == 1
    assert tensor.out == 0
    with pytest.raises(ValueError, match="read-only"):
        pd.reg_mr(OwnTensor(bytearray(DATA), (64,), read_only=True), verbs.AccessFlags.LOCAL_WRITE)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch.module)


@pytest.mark.usefixtures("torch")
def test_region_keeps_the_tensor_storage_alive(pd: verbs.ProtectionDomain) -> None:
    """The region must not hold the tensor, which may get another storage.

    torch does not resize a storage that is held.
    """
    tensor = fake_torch.Tensor(bytearray(b"xy" + DATA))
    storage = tensor.untyped_storage()
    tensor.set_(storage, 2, (64,))
    with pd.reg_mr(tensor) as mr:
        address = mr.addr
        with pytest.raises(RuntimeError, match="not resizable"):
            storage.resize_(0)
        with pytest.raises(RuntimeError, match="share_memory_ would move"):
            storage.share_memory_()
        tensor.set_(fake_torch.Storage(bytearray(64)), 0, (64,))
        assert mr.addr == address == storage.data_ptr() + 2
        assert bytes(mr.buf) == DATA
        del storage
        gc.collect()
        assert bytes(mr.buf) == DATA
        mr.buf[:3] = b"new"
    assert bytes(bytes_of(tensor)) == bytes(64)
    tensor.untyped_storage().share_memory_()  # can move the memory again
    with pd.reg_mr(tensor):
        tensor.untyped_storage().share_memory_()  # does not move the memory
    assert bytes(bytes_of(fake_torch.Tensor())) == b""


def raises_runtime_error() -> NoReturn:
    raise RuntimeError("Numpy is not available")


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize(
    ("different", "kind", "text"),
    [
        ({"device": SimpleNamespace(type="cuda")}, UnsupportedError, "register_dmabuf"),
        ({"device": SimpleNamespace(type="meta")}, BufferError, "has no memory"),
        ({"layout": "sparse_coo"}, BufferError, "sparse_coo; pass its parts"),
        ({"is_nested": True}, BufferError, "unbind"),
        ({"is_quantized": True}, BufferError, "int_repr"),
        ({"requires_grad": True}, BufferError, r"tensor.detach\(\)"),
        ({"is_conj": lambda: True}, BufferError, "resolve_conj"),
        ({"is_neg": lambda: True}, BufferError, "resolve_neg"),
        ({"is_contiguous": lambda: False}, BufferError, "contiguous"),
        (
            {"untyped_storage": lambda: fake_torch.Storage(bytearray())},
            BufferError,
            "storage has only 0",
        ),
        ({"untyped_storage": raises_runtime_error}, BufferError, "no memory of its own"),
    ],
)
def test_bytes_of_rejects_tensors_that_need_conversion(
    different: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        bytes_of(fake_torch.Tensor(bytearray(DATA), **different))


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize(
    ("different", "text"),
    [
        ({"device": SimpleNamespace(type="cuda")}, "use host memory and copy the data from it"),
        ({"is_quantized": True}, "use another tensor and copy the data from it"),
        ({"is_conj": lambda: True}, "use another tensor and copy the data from it"),
        ({"is_contiguous": lambda: False}, "use contiguous memory and copy the data from it"),
    ],
)
def test_bytes_of_target_error_advises_copying_from_other_memory(
    different: dict[str, Any], text: str
) -> None:
    with pytest.raises((BufferError, UnsupportedError), match=text):
        bytes_of(fake_torch.Tensor(bytearray(DATA), **different), target=True)


@pytest.mark.usefixtures("torch")
def test_bytes_of_advises_installing_numpy_for_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_torch.Tensor, "numpy", lambda _: raises_runtime_error())
    with pytest.raises(BufferError, match="install numpy"):
        bytes_of(fake_torch.Tensor(bytearray(DATA)))


@pytest.mark.parametrize("part", [slice(None), slice(100, None)])
def test_registered_array_cannot_be_resized(pd: verbs.ProtectionDomain, part: slice) -> None:
    """The exported buffer must prevent this even when numpy is told not to check references."""
    memory = np.zeros(10_000)
    with pd.reg_mr(memory[part]), pytest.raises(ValueError, match="resize"):
        memory.resize(1_000_000, refcheck=False)
    memory.resize(1_000_000, refcheck=False)


def test_bytes_of_accepts_numpy_arrays_through_dlpack() -> None:
    """This tests another library's DLPack exporter. The class `Only` hides the buffer protocol."""

    class Only:
        def __init__(self, array: np.ndarray[Any, Any]) -> None:
            self.array = array

        def __dlpack__(self, **keywords: Any) -> object:
            return self.array.__dlpack__(**keywords)

        def __dlpack_device__(self) -> tuple[Any, int]:
            return self.array.__dlpack_device__()

    numbers = np.arange(12, dtype=np.complex64).reshape(3, 4)
    view = bytes_of(Only(numbers))
    assert bytes(view) == numbers.tobytes()
    view[:8] = bytes(8)
    assert numbers[0, 0] == 0
    with pytest.raises(BufferError, match="contiguous"):
        bytes_of(Only(numbers.T))
    numbers.flags.writeable = False
    assert bytes_of(Only(numbers)).readonly


FORGOTTEN = """
import gc
import numpy as np
from aiordma import verbs

for make in (
    lambda: np.arange(10).astype(">i4"),
    lambda: np.zeros(10, [("a", "i4"), ("b", "f8")]),
    lambda: memoryview(np.arange(10).astype(">i4")),
    lambda: memoryview(np.arange(10).astype(">i4"))[2:8],
):
    memory = make()
    assert verbs.bytes_of(memory) == memory.tobytes()
    for cycle in [verbs.bytes_of(memory)], [verbs.bytes_of(memory), memory]:
        cycle.append(cycle)
    del memory, cycle
    gc.collect()
print("collected")
"""


def test_buffer_views_in_reference_cycles_are_garbage_collected() -> None:
    """This includes views of formats that a memoryview cannot cast.

    A mistake would crash the process, so the test runs in a separate one.
    """
    done = run_python("-W", "error", "-c", FORGOTTEN)
    assert (done.returncode, done.stdout, done.stderr) == (0, "collected\n", "")


def test_bytes_of_pins_arrays_that_memoryview_cannot_cast() -> None:
    records = np.zeros(10, [("a", "i4"), ("b", "f8")])
    before = sys.getrefcount(records)
    view = bytes_of(records)
    with pytest.raises(ValueError, match="resize"):
        records.resize(20)
    del view
    # A resize could fail here, because coverage tracers also hold references.
    assert sys.getrefcount(records) == before
