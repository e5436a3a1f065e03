"""Tests of `Config`: conversions, and errors that name a setting of the wrong type."""

from __future__ import annotations

import re
from dataclasses import Field, fields
from typing import Any

import numpy as np
import pytest

from aiordma import Config

pytestmark = pytest.mark.any_device


@pytest.mark.parametrize("field", fields(Config), ids=lambda field: field.name)
def test_config_reports_the_setting_with_the_wrong_type(field: Field[Any]) -> None:
    optional = str(field.type).endswith(" | None")
    wanted = {"int": "an int", "float": "a number of seconds", "bool": "True or False"}
    wanted["Rights"] = "a member of Rights"
    said = f"Config.{field.name} must be {wanted[str(field.type).removesuffix(' | None')]}"
    wrong = ["8GiB", 1j, *(() if optional else (None,))]
    if field.type != "bool":
        wrong.append(True)
    for value in wrong:
        with pytest.raises(TypeError, match=re.escape(said)):
            Config(**{field.name: value})


NUMBERS = [field for field in fields(Config) if str(field.type).startswith(("int", "float"))]


@pytest.mark.parametrize("field", NUMBERS, ids=lambda field: field.name)
def test_config_converts_numpy_numbers(field: Field[Any]) -> None:
    """They become Python's own types, so that later code never handles numpy's."""
    kind: Any
    kind, value = (np.int64, 9) if str(field.type).startswith("int") else (np.float32, 0.5)
    value = {"path_mtu": 1024, "max_eager_size": 2048, "eager_size": 2048, "pool_limit": 1 << 30,
             "retry_count": 5, "max_rails": 5}.get(field.name, value)  # fmt: skip
    taken = getattr(Config(**{field.name: kind(value)}), field.name)
    assert (type(taken), taken) == (type(value), value)
    if kind is np.float32:
        wrong: Any
        for wrong in (np.inf, np.nan):
            text = f"Config.{field.name} must be a finite non-negative number"
            with pytest.raises(ValueError, match=text):
                Config(**{field.name: wrong})


def test_config_converts_booleans_and_whole_seconds() -> None:
    numbers: dict[str, Any] = {"huge_pages": np.True_, "in_band": 0, "keep_alive": 1}
    config = Config(**numbers)
    assert (config.huge_pages, config.in_band, config.keep_alive) == (True, False, 1.0)


@pytest.mark.parametrize("number", [14, np.int64(14)])
def test_encoded_ack_timeout_error_shows_the_value_in_seconds(number: Any) -> None:
    with pytest.raises(ValueError, match=r"Config.ack_timeout of 14: .*\(14\), which is 0.0671 s"):
        Config(ack_timeout=number)
