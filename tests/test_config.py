"""Tests of `Config` and `LoopConfig`: conversions, and errors that name the invalid setting."""

from __future__ import annotations

import pickle
import re
from dataclasses import Field, fields, replace
from typing import Any

import numpy as np
import pytest

from aiordma import Config, LoopConfig

pytestmark = pytest.mark.any_device


Kind = type[Config] | type[LoopConfig]
FIELDS = [(kind, field) for kind in (Config, LoopConfig) for field in fields(kind)]
NUMBERS = [(kind, field) for kind, field in FIELDS if str(field.type).startswith(("int", "float"))]


def by_field(cases: list[tuple[Kind, Field[Any]]]) -> pytest.MarkDecorator:
    """Run a test with each field, and name it after the class and the field."""
    ids = [f"{kind.__name__}.{field.name}" for kind, field in cases]
    return pytest.mark.parametrize(("kind", "field"), cases, ids=ids)


@by_field(FIELDS)
def test_settings_report_the_field_with_the_wrong_type(kind: Kind, field: Field[Any]) -> None:
    converted, optional = str(field.type).removesuffix(" | None"), "None" in str(field.type)
    wanted = {"int": "an int", "float": "a number of seconds", "bool": "True or False"}
    wanted["Rights"] = "a member of Rights"
    said = f"{kind.__name__}.{field.name} must be {wanted[converted]}"
    wrong = ["8GiB", 1j, *(() if optional else (None,))]
    if converted != "bool":
        wrong.append(True)
    for value in wrong:
        with pytest.raises(TypeError, match=re.escape(said)):
            kind(**{field.name: value})


@by_field(NUMBERS)
def test_settings_convert_numpy_numbers(kind: Kind, field: Field[Any]) -> None:
    """They become Python's own types, so that later code never handles numpy's."""
    convert: Any
    convert, value = (np.int64, 9) if str(field.type).startswith("int") else (np.float32, 0.5)
    value = {"path_mtu": 1024, "max_eager_size": 2048, "eager_size": 2048, "pool_limit": 1 << 30,
             "retry_count": 5, "max_rails": 5}.get(field.name, value)  # fmt: skip
    taken = getattr(kind(**{field.name: convert(value)}), field.name)
    assert (type(taken), taken) == (type(value), value)
    if convert is np.float32:
        wrong: Any
        for wrong in (np.inf, np.nan):
            text = f"{kind.__name__}.{field.name} must be a finite non-negative number"
            with pytest.raises(ValueError, match=text):
                kind(**{field.name: wrong})


@pytest.mark.parametrize("name", [field.name for field in fields(LoopConfig)])
def test_config_limits_the_settings_of_the_loop_as_loop_config_does(name: str) -> None:
    assert getattr(Config(), name) is None
    low, high = LoopConfig.__dataclass_fields__[name].metadata.get("range", (None, None))
    for kind in (Config, LoopConfig):
        for value in (low, high):
            if value is not None:
                assert getattr(kind(**{name: value}), name) == value
                over: Any = value - 1 if value == low else value + 1
                with pytest.raises(ValueError, match=rf"{kind.__name__}\.{name} (must|is)"):
                    kind(**{name: over})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (Config(), "Config()"),
        (Config(polling=0, max_rails=2), "Config(polling=0.0, max_rails=2)"),
        (Config(polling=LoopConfig().polling), "Config(polling=0.0002)"),
        (LoopConfig(), "LoopConfig()"),
        (LoopConfig(huge_pages=True), "LoopConfig(huge_pages=True)"),
    ],
)
def test_settings_survive_repr_replace_and_pickle(settings: Config | LoopConfig, text: str) -> None:
    assert repr(settings) == text
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert replace(settings, polling=0.5).polling == 0.5
    assert replace(settings) == settings


def test_config_converts_booleans_and_whole_seconds() -> None:
    numbers: dict[str, Any] = {"huge_pages": np.True_, "in_band": 0, "keep_alive": 1}
    config = Config(**numbers)
    assert (config.huge_pages, config.in_band, config.keep_alive) == (True, False, 1.0)


@pytest.mark.parametrize("number", [14, np.int64(14)])
def test_encoded_ack_timeout_error_shows_the_value_in_seconds(number: Any) -> None:
    with pytest.raises(ValueError, match=r"Config.ack_timeout of 14: .*\(14\), which is 0.0671 s"):
        Config(ack_timeout=number)
