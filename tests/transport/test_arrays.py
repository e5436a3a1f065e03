"""Test `aiordma.arrays`.

numpy is the reference for indexing, and the safetensors library for the layout.
"""

from __future__ import annotations

import asyncio
import json
import operator
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from aiordma import Rights, arrays
from aiordma._core.region import TOKEN_SIZE
from aiordma.arrays import RemoteArray
from aiordma.errors import ProtocolError, RemoteRangeError

from .connection_factory import ConnectionFactory, ends

SAMPLES: dict[str, Any] = {
    "matrix": np.arange(12.0).reshape(3, 4),
    "flags": np.array([True, False, True]),
    "number": np.array(3, np.float32),
    "nothing": np.empty((0, 3)),
    "transposed": np.arange(12, dtype=np.int16).reshape(3, 4).T,
    "backwards": np.arange(9, dtype=np.uint8)[::-2],
    "complex": np.array([1 + 2j], np.complex64),
    "half": np.array([[0.5]], np.float16),
    "\u00fc": np.arange(3, dtype=np.uint32),
}
OF_ML_DTYPES: dict[str, Any] = {
    "half": np.arange(4).astype(ml_dtypes.bfloat16).reshape(2, 2),
    "quarter": np.array(4, ml_dtypes.float8_e4m3fn),
    "exponent": np.ones(3, ml_dtypes.float8_e8m0fnu),
}


def check(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
        assert np.array_equal(found[name], array)


async def test_arrays_round_trip_in_a_message(factory: ConnectionFactory) -> None:
    long = {f"{i}": np.full(3000 + i, i) for i in range(300)}
    async with factory.pair() as (client, server):
        for sent, metadata in (
            (SAMPLES, {"step": "7"}),
            (long, None),
            ({}, None),
            (OF_ML_DTYPES, None),
        ):
            receiving = asyncio.create_task(arrays.recv(server))
            await arrays.send(client, sent, metadata)
            found = await receiving
            check(found, sent)
            assert found.metadata == (metadata or {})
            for array in found.values():
                assert array.flags.aligned
                assert array.flags.writeable


async def test_arrays_are_compatible_with_safetensors_files(factory: ConnectionFactory) -> None:
    """The contents of a file are a valid message, and a message is a valid file."""
    contents = safetensors.numpy.save({n: a.copy(order="C") for n, a in SAMPLES.items()})
    check(safetensors.numpy.load(b"".join(arrays.pack(SAMPLES, {"a": "b"}))), SAMPLES)
    async with factory.pair() as (client, server):
        receiving = asyncio.create_task(arrays.recv(server))
        await client.send(contents)
        check(await receiving, SAMPLES)
        with client.register(contents) as region:
            await client.send_region(region, lease=None)
            remote = await arrays.open_file(server, await server.recv_region())
            check({name: await array for name, array in remote.items()}, SAMPLES)
            assert np.array_equal(await remote["matrix"][1:, ::2], SAMPLES["matrix"][1:, ::2])


def test_pack_reports_name_of_array_with_unsupported_type() -> None:
    """The remedy that the error suggests must work."""
    array: Any
    for array, why in (
        (np.array([object()]), "Python objects .*send other values as metadata"),
        ({"weight": np.zeros(2)}, "Python objects .*as 'layer.weight'"),
        (None, "Python objects"),
        (np.zeros(2, "f4,O"), "Python objects"),
        (np.array(["x"], np.dtypes.StringDType()), "Python objects"),
        (np.zeros(2, ">f4"), "byte order"),
        (np.ma.array([1, 2], mask=[False, True]), "masked"),
    ):
        with pytest.raises(TypeError, match=f"array 'x' .*{why}"):
            arrays.pack({"x": array})
    for array in (
        np.array(["x"]),
        np.array(b"x"),
        np.zeros(2, "M8[s]"),
        np.zeros((2, 2), complex).T,
        np.zeros(2, ">f4,i2"),
    ):
        with pytest.raises(TypeError, match=r"array 'x' has type .*bytes: x\.reshape\(-1\)\.view"):
            arrays.pack({"x": array})
        arrays.pack({"x": array.reshape(-1).view("u1")})
    with pytest.raises(ValueError, match=r"array 'x': .*inhomogeneous"):
        arrays.pack({"x": [[1, 2], [3]]})


def test_unpack_suggests_installing_ml_dtypes_when_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = b"".join(arrays.pack(OF_ML_DTYPES))
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(TypeError, match="install or update ml_dtypes"):
        arrays.unpack(packed)


def test_pack_rejects_invalid_names_and_metadata() -> None:
    array: Any = np.zeros(1)
    with pytest.raises(ValueError, match="__metadata__"):
        arrays.pack({"__metadata__": array})
    with pytest.raises(ValueError, match=r"2097\d{3} bytes \(maximum 2097152\); send several"):
        arrays.pack({"x" * (2 << 20): array})
    wrong: list[tuple[Any, Any]] = [
        ({1: array}, {}),
        ({"x": array}, {"n": 1}),
        ({"x": array}, {1: "n"}),
        ([array], {}),
        (None, {}),
    ]
    for sent, metadata in wrong:
        with pytest.raises(TypeError, match="strings"):
            arrays.pack(sent, metadata)
    with pytest.raises(ValueError, match="must be valid Unicode"):
        arrays.pack({"\ud800": array})
    with pytest.raises(ValueError, match="kind must be"):
        arrays.unpack(header(entry(), bytes(4)), "tensor")  # type: ignore[arg-type]


def header(entries: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


NO_FILES = {
    "empty": b"",
    "endless": header({}, length=(1 << 64) - 1),
    "long": header(b"{}" + b" " * (2 << 20)),
    "no JSON": header(b"{"),
    "deep": header(b"[" * 100_000),
    "a list": header([]),
    "white space": header(b" {}"),
    "a byte order mark": header(b"\xef\xbb\xbf{}"),
    "no UTF-8": header(b'{"__metadata__":{"x":"\xff"}}'),
    "half a pair": header(b'{"__metadata__":{"x":"\\ud800"}}'),
    "no number": header(b'{"x":{"y":NaN,' + json.dumps(entry()["x"]).encode()[1:] + b"}", bytes(4)),
    "a name twice": header(b'{"__metadata__":{},"__metadata__":{}}'),
    "metadata": header({"__metadata__": {"x": 1}}),
    "no entry": header({"x": 5}),
    "type": header(entry(dtype="OBJ"), bytes(4)),
    "shape": header(entry(shape=[5]), bytes(4)),
    "shape of names": header(entry(shape={}, offsets=[0, 1]), bytes(1)),
    "negative": header(entry(shape=[-2, -2]), bytes(4)),
    "bool": header(entry(shape=[4, True]), bytes(4)),
    "float": header(entry(shape=[4.0]), bytes(4)),
    "no bytes of many": header(entry(shape=[0, 1 << 62, 1 << 62], offsets=[0, 0])),
    "many": header(entry(shape=[1] * 65 + [4]), bytes(4)),
    "beyond": header(entry(), bytes(3)),
    "behind": header(entry(), bytes(5)),
    "before": header(entry(offsets=[-4, 0])),
    "a gap": header(entry(offsets=[1, 5]), bytes(5)),
    "twice": header({**entry(), "y": entry()["x"]}, bytes(8)),
}


@pytest.mark.parametrize("what", NO_FILES)
async def test_unpack_rejects_invalid_safetensors_data(
    factory: ConnectionFactory, what: str
) -> None:
    with pytest.raises(ValueError, match="invalid safetensors data"):
        arrays.unpack(NO_FILES[what])
    async with factory.pair() as (client, server):
        receiving = asyncio.create_task(arrays.recv(server))
        await client.send(NO_FILES[what])
        await ends(receiving, ValueError)
        with client.register(bytearray(NO_FILES[what] or b"1234567")) as region:
            await client.send_region(region, lease=None)
            remote = await server.recv_region()
            error = await ends(arrays.open_file(server, remote), ValueError)
            assert "invalid safetensors data" in str(error)
        check(arrays.unpack(header(entry(), b"abcd")), {"x": np.frombuffer(b"abcd", np.uint8)})


def some_key(chance: random.Random, shape: tuple[int, ...]) -> Any:
    """Return a random numpy index for an array of this shape."""
    keys: list[Any] = []
    for count in shape[: chance.randrange(len(shape) + 1)]:
        if chance.random() < 0.4 and count:
            keys.append(chance.randrange(-count, count))
        else:
            start, stop = (chance.choice([None, chance.randrange(-9, 9)]) for _ in range(2))
            keys.append(slice(start, stop, chance.choice([None, 1, 2, -1, -3])))
    if chance.random() < 0.3:
        keys.append(...)
    return keys[0] if len(keys) == 1 else tuple(keys)


async def test_remote_array_parts_match_numpy(factory: ConnectionFactory) -> None:
    chance = random.Random(5)
    rights = Rights.READ | Rights.WRITE
    whole = np.arange(8 * 9 * 700).reshape(8, 9, 700)
    async with factory.pair() as (client, server):
        brain = np.zeros((8, 6), ml_dtypes.bfloat16)
        for array in (
            whole,
            whole.T,
            whole[::2, ::-1, 5::3],
            np.zeros((3, 0)),
            np.array(7),
            brain,
            brain[:, 1::2],
        ):
            with arrays.share(server, array, access=rights) as shared:
                remote = arrays.open_array(client, shared.token)
                assert (remote.shape, remote.dtype) == (array.shape, array.dtype)
                assert (remote.ndim, remote.nbytes) == (array.ndim, array.nbytes)
                for _ in range(12):
                    key = some_key(chance, array.shape)
                    part = remote[key]
                    assert isinstance(part, RemoteArray)
                    assert np.array_equal(await part, array[key]), key
                    further = some_key(chance, part.shape)
                    assert np.array_equal(await part[further], array[key][further]), (key, further)
                    wanted = array.copy()
                    values = np.asarray(chance.randrange(1000))
                    other = some_key(chance, array.shape)
                    wanted[other] = values
                    await remote[other].write(values)
                    assert np.array_equal(array, wanted), other


async def test_remote_array_transfers_gaps_through_bounded_buffers(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pieces are moved in groups, with one buffer of limited size per group.

    Empty arrays move nothing, however large their other dimensions are.
    """
    monkeypatch.setattr(arrays, "_MAX_RUNS", 16)
    monkeypatch.setattr(arrays, "_MAX_READ_WITH_GAPS", 1000)
    monkeypatch.setattr(arrays, "_MAX_GAP", 60)
    long = []
    empty = np.empty

    def counted(shape: Any, dtype: Any) -> Any:
        long.append(shape)
        return empty(shape, dtype)

    monkeypatch.setattr(np, "empty", counted)
    array = np.arange(3 * 50 * 7 * 2, dtype=np.uint16).reshape(3, 50, 7, 2)
    async with factory.pair() as (client, server):
        with arrays.share(server, array, access=Rights.READ | Rights.WRITE) as shared:
            remote = arrays.open_array(client, shared.token)
            keys: list[Any] = [(..., 0), (..., slice(None, None, 5), 0), (1, slice(None, None, -3))]
            for key in keys:
                assert np.array_equal(await remote[key], array[key])
                wanted = array.copy()
                wanted[key] = wanted[key][::-1]
                await remote[key].write(array[key][::-1].copy())
                assert np.array_equal(array, wanted)
            assert max(it for it in long if isinstance(it, int)) <= 1000
            assert np.array_equal(await remote[:, :, :: 1 << 62], array[:, :, :: 1 << 62])
            token = shared.token[:TOKEN_SIZE] + b'["F32", [1099511627776, 0], [16, 4], 0]'
            nothing = arrays.open_array(client, token)
            assert (await nothing).size == 0
            await nothing.write(1)


def add_in_place(remote: Any) -> None:
    remote[0] += 1


# Operations that need the values of elements, which only an `await` can fetch.
TAKES_ELEMENTS: list[Callable[[Any], object]] = [
    *(iter, reversed, bytes, bool, round, np.asarray, lambda it: int(it[0, 0]), lambda it: 1 in it),
    *(lambda it: it @ it, lambda it: divmod(1, it), lambda it: it != 1, lambda it: it > 1),
    *(lambda it: np.zeros(4) + it[0], partial(operator.add, 1)),
    *(add_in_place, lambda it: operator.delitem(it, 0)),
]


async def test_remote_array_rejects_invalid_keys_and_buffers(factory: ConnectionFactory) -> None:
    array = np.zeros((3, 4), np.float32)
    async with factory.pair() as (client, server):
        with arrays.share(server, array) as shared:
            remote = arrays.open_array(client, shared.token)
            for key in (3, (0, 4), (0, 0, 0), (..., ...), (-4,)):
                with pytest.raises(IndexError, match=r"out of bounds|too many"):
                    remote[key]
            some: Any
            for some in ("x", 1.5, None, True, [0, 1], array > 0, slice("x")):
                with pytest.raises(IndexError, match="invalid index"):
                    remote[some]
            for take in TAKES_ELEMENTS:
                with pytest.raises(TypeError, match=r"is in the peer's memory; await it.*write"):
                    take(remote)
            assert hash(remote)
            with pytest.raises(TypeError):
                len(remote[0, 0])
            no_memory: Any
            for no_memory in (remote, shared):
                await ends(client.send(no_memory), TypeError)
            await ends(remote.write(1), RemoteRangeError)
            wide = await ends(remote.read(np.zeros((3, 4))), ValueError)
            assert str(wide) == "invalid target: got float64 (3, 4), expected float32 (3, 4)"
            values: Any
            for values in (np.zeros((4, 3)), np.zeros((2, 3, 4))):
                told = str(await ends(remote.write(values), ValueError))
                assert (
                    told == f"invalid values: got float32 {values.shape}, expected float32 (3, 4)"
                )
            for values in ([[1], [2, 3]], "x", {"x": 1}):
                told = str(await ends(remote.write(values), ValueError, TypeError))
                assert told.startswith("values: ")
            with pytest.raises(ValueError, match="belongs to this side"):
                arrays.open_array(server, shared.token)
            await ends(remote.read(np.zeros((4, 3), np.float32).T), BufferError)
            await ends(remote[0].read([0.0] * 4), TypeError)
            target = np.ones((4,), np.float32)
            assert await remote[:, 1].read(target[:3]) is not None
            assert target.tolist() == [0, 0, 0, 1]
        await ends(remote[0].read(), Exception)


async def test_array_share_accepts_any_layout_without_overlapping_elements(
    factory: ConnectionFactory,
) -> None:
    """An array stays registered as long as it is shared, so its owner cannot be resized."""
    async with factory.pair() as (client, server):
        refused: list[tuple[Any, type[Exception]]] = [
            ([1, 2], TypeError),
            (np.broadcast_to(np.arange(3), (2, 3)), ValueError),
            (np.lib.stride_tricks.sliding_window_view(np.arange(6), 3), ValueError),
        ]
        for array, error in refused:
            with pytest.raises(error, match=r"must be an array|overlapping elements"):
                arrays.share(server, array)
        of_any_order = np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2).copy(order="K")
        assert not of_any_order.flags.forc
        owner = np.arange(24)
        for array in (of_any_order[:, ::-1], owner[::-2]):
            with arrays.share(server, array, lease=None) as shared:
                assert np.array_equal(await arrays.open_array(client, shared.token), array)
        with arrays.share(server, owner[::2], lease=None) as shared:
            await arrays.open_array(client, shared.token)
            with pytest.raises(ValueError, match="cannot resize"):
                owner.resize(1, refcheck=False)
        owner.resize(1, refcheck=False)


@pytest.mark.parametrize(
    "description",
    [
        b"",
        b"[",
        b"[" * 100_000,
        b"{}",
        b'["F32", [3], [4]]',
        b'["XXX", [3], [4], 0]',
        b'["F32", [3], [4, 4], 0]',
        b'["F32", [-3], [4], 0]',
        b'["F32", [3], [0], 0]',
        b'["F32", [2, 2], [4, 4], 0]',
        b'["F32", [4], [4], 0]',
        b'["F32", [3], [4], 1]',
        b'["F32", [3], [-4], 0]',
        b'["F32", [3], [-4], 9]',
        b'["F32", [3.0], [4], 0]',
        b'["F32", [true], [4], 0]',
        b'["F32", [4611686018427387904], [0], 0]',
        b'["F32", [3], [1208925819614629174706176], 0]',
        b'["F32", [0, 4611686018427387904], [4, 4], 0]',
        b'["F32", [3], [4], 0' + b" " * 4096 + b"]",
    ],
)
async def test_open_array_rejects_malformed_tokens(
    factory: ConnectionFactory, description: bytes
) -> None:
    """The peer's description of an array must not reach any byte outside the memory it shares."""
    async with factory.pair() as (client, server):
        with arrays.share(server, np.zeros(3, np.float32)) as shared:
            with pytest.raises(ValueError, match="invalid array token"):
                arrays.open_array(client, shared.token[:TOKEN_SIZE] + description)
            with pytest.raises(ProtocolError):
                arrays.open_array(client, b"no token")
            assert len(await arrays.open_array(client, shared.token)) == 3


async def test_torch_tensors_can_be_sent_and_shared(factory: ConnectionFactory) -> None:
    """This test runs only where torch is installed, as in `make ray`."""
    torch: Any = pytest.importorskip("torch")
    whole = torch.arange(12.0).reshape(3, 4)
    names = {name for _, name in arrays._TYPES.values()} - {"bool", "float8_e8m0fnu"}
    sent = {name: whole.to(getattr(torch, name)) for name in names}
    sent |= {"T": whole.T, "0-d": torch.tensor(7), "none": torch.empty(0, 3), "bool": whole > 5}
    async with factory.pair() as (client, server):
        receiving = asyncio.create_task(arrays.recv(server, "torch"))
        await arrays.send(client, sent)
        for name, tensor in (await receiving).items():
            assert (tensor.dtype, tensor.shape) == (sent[name].dtype, sent[name].shape)
            found, wanted = (it.reshape(-1).view(torch.uint8) for it in (tensor, sent[name]))
            assert torch.equal(found, wanted)
        read_only = b"".join(bytes(memory) for memory in arrays.pack({"x": np.ones(3)}))
        arrays.unpack(read_only, "torch")["x"].zero_()
        assert arrays.unpack(read_only)["x"].tolist() == [1, 1, 1]
        with arrays.share(server, sent["bfloat16"], access=Rights.READ | Rights.WRITE) as shared:
            remote = arrays.open_array(client, shared.token, "torch")
            await remote[:, 1].write([7, 8, 9])
            await remote[::-1, 2].write(5)
            await remote[0, ::3].write(torch.ones(4, dtype=torch.bfloat16)[::2])
            assert sent["bfloat16"].tolist() == [[1, 7, 5, 1], [4, 8, 5, 7], [8, 9, 5, 11]]
            assert torch.equal(await remote[1:, ::2], sent["bfloat16"][1:, ::2])
            await ends(remote[0].write(whole[0]), ValueError)
        for tensor in (whole.to_sparse(), torch.ones(2, requires_grad=True), whole.to("meta")):
            with pytest.raises(BufferError):
                arrays.share(server, tensor)
            await ends(arrays.send(client, {"x": tensor}), BufferError)
