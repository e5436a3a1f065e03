"""`Config`: a setting of another type is refused by its name."""

from __future__ import annotations

import re
from dataclasses import Field, fields
from typing import Any

import numpy as np
import pytest

from aiordma import Config

pytestmark = pytest.mark.any_device


@pytest.mark.parametrize("field", fields(Config), ids=lambda field: field.name)
def test_a_setting_of_another_type(field: Field[Any]) -> None:
    optional = str(field.type).endswith(" | None")
    said = re.escape(f"Config.{field.name} is of type {field.type}, not ")
    for value in ("8GiB", 1j, *(() if optional else (None,))):
        with pytest.raises(TypeError, match=said):
            Config(**{field.name: value})


def test_numbers_of_numpy() -> None:
    numbers: dict[str, Any] = {"send_queue": np.int64(9), "polling": np.float32(0.5)}
    config = Config(**numbers, ack_timeout=1)
    assert (config.send_queue, config.polling) == (9, 0.5)
