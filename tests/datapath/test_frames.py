"""Tests of the compiled checks of bundles, compared with their model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiordma._core.frames import HEADER_SIZE, MAX_BUNDLE
from aiordma._datapath.frames import count_bundled
from aiordma.errors import InternalError, ProtocolError
from tests.model.frames import unpack_bundle
from tests.model.test_frames import entries, packed_bundle


def answer(call: object, *arguments: object) -> object:
    """Return the result of a call, or the class and text of its error."""
    assert callable(call)
    try:
        return call(*arguments)
    except (InternalError, ProtocolError) as error:
        return type(error), str(error)


def counted(content: bytes | bytearray) -> int:
    """Count the messages of a bundle with the model."""
    return len(list(unpack_bundle(memoryview(content))))


@settings(max_examples=500)
@given(entries, st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3))
def test_bundle_check_agrees_with_the_model(
    messages: list[tuple[bytes, int | None]], changes: list[tuple[int, int]]
) -> None:
    content = bytearray(HEADER_SIZE) + packed_bundle(*messages)
    assert count_bundled(content) == counted(content) == len(messages)
    for place, value in changes:
        if place < len(content) - HEADER_SIZE:
            content[HEADER_SIZE + place] = value
    assert answer(count_bundled, content) == answer(counted, content)


@given(st.binary(max_size=200))
def test_bundle_check_agrees_with_the_model_for_arbitrary_bytes(data: bytes) -> None:
    content = bytes(HEADER_SIZE) + data
    assert answer(count_bundled, content) == answer(counted, content)


@pytest.mark.parametrize("behind", [b"", bytes(4), bytes(8), bytes(16)])
def test_bundle_with_too_many_messages_is_rejected(behind: bytes) -> None:
    content = bytes(HEADER_SIZE) + packed_bundle(*[(b"", None)] * MAX_BUNDLE) + behind
    assert answer(count_bundled, content) == answer(counted, content)
    assert (answer(count_bundled, content) == MAX_BUNDLE) == (not behind)
