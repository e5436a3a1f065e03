"""Tests that any input of a decoder gives a result or a documented error, within bounds."""

from __future__ import annotations

import ast
import inspect
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aiordma._core
import aiordma._trace

from .decoders import DECODERS, NO_DECODERS, Decoder

FUZZ = settings(
    max_examples=60,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


# In these formats, each value has only one encoding, apart from trailing zeros.
EXACT = {"hello", "private data of the connection manager", "endpoint", "challenge", "region token"}


def functions_with_byte_input() -> Iterator[str]:
    """Yield the functions that take bytes or are named like decoders."""
    folders = [Path(inspect.getfile(package)).parent for package in (aiordma._core, aiordma._trace)]
    for path in sorted(path for folder in folders for path in folder.glob("*.py")):
        for node, name in functions(ast.parse(path.read_text()), path.stem):
            arguments = (*node.args.args, *node.args.kwonlyargs)
            types = {ast.unparse(each.annotation) for each in arguments if each.annotation}
            reads = node.name.startswith(("unpack", "decode", "parse", "read", "from_"))
            if reads or any("bytes" in one or "memoryview" in one for one in types):
                yield name


def functions(inside: ast.AST, prefix: str) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Yield the public functions and methods, except those of protocols."""
    for node in ast.iter_child_nodes(inside):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            name = f"{prefix}.{node.name}"
            if isinstance(node, ast.FunctionDef):
                yield node, name
            elif "Protocol" not in map(ast.unparse, node.bases):
                yield from functions(node, name)


def test_every_decoder_of_the_core_is_covered() -> None:
    covered = [name for decoder in DECODERS.values() for name in decoder.covers]
    assert sorted([*covered, *NO_DECODERS]) == sorted(functions_with_byte_input())


def mutated(valid: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Return a strategy for valid inputs with bytes changed, cut, doubled, added or swapped."""

    @st.composite
    def make(draw: st.DrawFn) -> bytes:
        data = bytearray(draw(valid))
        for _ in range(draw(st.integers(1, 3))):
            start = draw(st.integers(0, len(data)))
            stop = draw(st.integers(start, min(len(data), start + 8)))
            match draw(st.sampled_from(["change", "cut", "double", "add", "swap"])):
                case "change" if data:
                    data[start % len(data)] = draw(st.integers(0, 255))
                case "cut":
                    del data[start:stop]
                case "double":
                    data[start:start] = data[start:stop]
                case "add":
                    data[start:start] = draw(st.binary(max_size=9))
                case _:
                    data[start:stop] = data[start:stop][::-1]
        return bytes(data)

    return make()


def inputs(decoder: Decoder) -> st.SearchStrategy[bytes]:
    return st.one_of(st.binary(max_size=300), decoder.valid, mutated(decoder.valid))


def same(one: object, other: object) -> bool:
    return one == other or repr(one) == repr(other)  # for NaN


@pytest.mark.parametrize("name", DECODERS)
@FUZZ
@given(st.data())
def test_decoders_return_a_result_or_raise_a_documented_error(
    name: str, data: st.DataObject
) -> None:
    decoder = DECODERS[name]
    content = data.draw(inputs(decoder))
    try:
        result = decoder.decode(content)
    except decoder.errors as error:
        text = str(error)
        assert text
        assert len(text) <= 400 + 8 * len(content)
        return
    if decoder.again is not None:
        again = decoder.again(result)
        assert same(decoder.decode(again), result)
        if name in EXACT:
            assert content.startswith(again)
            assert not any(content[len(again) :])


@pytest.mark.parametrize("name", [name for name in DECODERS if not name.startswith("field")])
@settings(FUZZ, max_examples=25)
@given(st.data())
def test_valid_input_is_decoded_and_truncated_input_rejected(
    name: str, data: st.DataObject
) -> None:
    """Without valid input, the test with any input might only see errors."""
    decoder = DECODERS[name]
    content = data.draw(decoder.valid)
    result = decoder.decode(content)
    if decoder.again is not None:
        assert same(decoder.decode(decoder.again(result)), result)
    for length in range(len(content) if decoder.whole else 0):
        with pytest.raises(decoder.errors):
            decoder.decode(content[:length])


# ---- bounded memory and time ---------------------------------------------------------------------


@dataclass
class Cost:
    lines: int = 0
    memory: int = 0


@contextmanager
def measured() -> Iterator[Cost]:
    """Measure the number of executed Python lines and the peak of allocated memory in bytes."""
    cost = Cost()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        cost.lines += event == "line"
        return trace

    before = sys.gettrace()
    tracemalloc.start()
    sys.settrace(trace)
    try:
        yield cost
    finally:
        sys.settrace(before)
        cost.memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


CLAIMS = {
    "nothing": b"",
    "zeros": bytes(1 << 16),
    "ones": b"\xff" * (1 << 16),
    "array of 2^32": b"\xdd\xff\xff\xff\xff",
    "text of 2^32": b"\xdb\xff\xff\xff\xff",
    "bytes of 2^32": b"\xc6\xff\xff\xff\xff",
    "map of 2^32": b"\xdf\xff\xff\xff\xff",
    "nested arrays": b"\x91" * 500,
    "nested lists": b"[" * 100_000,
    "nested objects": b'{"a":' * 20_000,
    "a long number": b'{"type":"end","t":' + b"9" * 60_000 + b"}",
    "a long name": b'{"type":"' + b"x" * 60_000 + b'"}',
    "empty lines": b"\n" * 5_000,
}


BEGINNINGS = (b"", b"AIOT\x01\0", b"AIOR\x01\0", b"AIOE\x01\0")


@pytest.mark.parametrize("name", [name for name, one in DECODERS.items() if one.covers])
def test_decoding_cost_is_bounded_by_the_input(name: str) -> None:
    """The cost does not depend on lengths that the input claims."""
    decoder = DECODERS[name]
    for claim, content in CLAIMS.items():
        for data in (beginning + content for beginning in BEGINNINGS):
            with measured() as cost, suppress(*decoder.errors):
                decoder.decode(data)
            assert cost.memory <= (256 << 10) + 64 * len(data), claim
            assert cost.lines <= 2_000 + 20 * len(data), claim
