"""Tests of reading the lines of a trace as records.

Every record that a writer writes is read back unchanged, and nothing else is accepted.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma._trace.records import TYPES, Record, parse

from .model import header, line

VALUES: dict[str, st.SearchStrategy[object]] = {
    "int": st.integers(0, 2**64 - 1),
    "str": st.text(),
    "bool": st.booleans(),
    "tuple[str, ...]": st.lists(st.text()).map(tuple),
}


@st.composite
def records(draw: st.DrawFn) -> Record:
    """Draw any record, with or without its optional fields."""
    cls = draw(st.sampled_from(sorted(TYPES.values(), key=lambda cls: cls.TYPE)))
    values = {}
    for each in fields(cls):
        if each.default is MISSING or draw(st.booleans()):
            values[each.name] = draw(VALUES[str(each.type).removesuffix(" | None")])
    return cls(**values)  # type: ignore[arg-type]


@given(records())
def test_trace_records_round_trip(record: Record) -> None:
    assert parse(line(record)) == record


@given(records(), st.dictionaries(st.text().map("new_{}".format), st.integers()))
def test_parse_ignores_additional_fields(record: Record, more: dict[str, int]) -> None:
    assert parse(json.dumps({**json.loads(line(record)), **more})) == record


@given(records(), st.data())
def test_parse_rejects_records_with_a_missing_field(record: Record, data: st.DataObject) -> None:
    values = json.loads(line(record))
    needed = [each.name for each in fields(record) if each.default is MISSING]
    missing = data.draw(st.sampled_from(needed))
    del values[missing]
    with pytest.raises(ValueError, match=f"^missing field {missing}$"):
        parse(json.dumps(values))


@given(records(), st.data())
def test_parse_rejects_fields_with_invalid_values(record: Record, data: st.DataObject) -> None:
    values = json.loads(line(record))
    name = data.draw(st.sampled_from([each.name for each in fields(record)]))
    values[name] = data.draw(st.sampled_from([None, -1, 2**64, 1.5, {}, [1], [[]]]))
    with pytest.raises(ValueError, match=f"^{name} must be .*, not "):
        parse(json.dumps(values))


@given(st.text())
def test_parse_rejects_arbitrary_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"^(invalid JSON|not a JSON object|unknown record type)"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "invalid JSON: "),
        ("[]", "not a JSON object"),
        ("{}", "unknown record type None"),
        ('{"type": "nothing", "t": 1}', "unknown record type 'nothing'"),
        ('{"type": [], "t": 1}', r"unknown record type \[\]"),
        ("[" * 100_000, "invalid JSON: "),
    ],
)
def test_parse_error_explains_why_the_text_is_invalid(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse(text)


def test_parse_rejects_booleans_as_numbers() -> None:
    with pytest.raises(ValueError, match="pid must be a number of at most 64 bits, not True"):
        parse(line(header()).replace('"pid": 7', '"pid": true'))
