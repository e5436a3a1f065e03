"""Tests of the settings of an event loop's devices: which apply, and who learns of the others.

Warnings are errors in tests, so a test also fails if it causes a warning that it does not expect.
"""

from __future__ import annotations

import asyncio
import gc
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import pytest

from aiordma import Config, LoopConfig, configure_loop
from aiordma._event_loop import loop_settings
from aiordma._event_loop.loop_settings import Choice, ConfiguredResource

pytestmark = pytest.mark.any_device

DEFAULTS = LoopConfig()
OTHERS: dict[str, Any] = {
    "pool_limit": 64 << 20,
    "huge_pages": True,
    "cached_registrations": 0,
    "polling": 0.0,
}
"""A value of each setting that differs from its default."""
OTHER = LoopConfig(**OTHERS)


def test_each_setting_has_another_value_for_the_tests() -> None:
    for field in fields(LoopConfig):
        assert OTHERS[field.name] != field.default


@contextmanager
def warned(*texts: str) -> Iterator[None]:
    """Expect exactly these warnings, without their beginnings and in any order."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    given = sorted(str(each.message) for each in caught)
    assert given == sorted(texts)
    assert all(each.category is RuntimeWarning for each in caught)


def ignored(name: str, value: object, device: str, current: object, chosen_by: str) -> str:
    return (
        f"Config.{name}={value!r} has no effect: {device} uses {name}={current!r}, chosen by "
        f"{chosen_by}"
    )


# ---- the rule, with devices that do nothing ------------------------------------------------------


class FakeDevice(ConfiguredResource):
    has_idle_timeout = True

    @classmethod
    def open(cls, config: Config, opener: str, device: str = "fake0") -> FakeDevice:
        """Use the device for a connection with these settings."""

        def make(loop: asyncio.AbstractEventLoop, choice: Choice) -> FakeDevice:
            return cls(loop, device, device, choice)

        found = cls._acquire_configured(device, config, opener, make)
        found.warn_of_ignored_settings(config)
        return found

    @property
    def settings(self) -> LoopConfig:
        return self._choice.settings

    def _close(self) -> None:
        """Do nothing."""


A, B = "the connection to a:1", "the listener on b:2"
BY_A = f"{A}, which opened the device"


async def test_device_uses_the_defaults_if_nothing_chooses_the_settings() -> None:
    first = FakeDevice.open(Config(), A)
    assert first.settings == DEFAULTS
    assert FakeDevice.open(Config(), B) is first


@pytest.mark.parametrize("name", OTHERS)
async def test_first_connection_chooses_a_setting(name: str) -> None:
    config = Config(**{name: OTHERS[name]})
    first = FakeDevice.open(config, A)
    assert first.settings == replace(DEFAULTS, **{name: OTHERS[name]})
    # Neither the same value nor None causes a warning.
    for again in (config, Config(), replace(config, max_rails=2)):
        assert FakeDevice.open(again, B) is first


@pytest.mark.parametrize("name", OTHERS)
async def test_second_connection_is_warned_if_its_setting_has_no_effect(name: str) -> None:
    default, other = getattr(DEFAULTS, name), OTHERS[name]
    first = FakeDevice.open(Config(**{name: other}), A)
    with warned(ignored(name, default, "fake0", other, BY_A)):
        assert FakeDevice.open(Config(**{name: default}), B) is first
    assert getattr(first.settings, name) == other


async def test_connection_is_warned_of_each_of_its_settings_without_effect() -> None:
    first = FakeDevice.open(Config(), A)
    texts = [
        ignored(name, value, "fake0", getattr(DEFAULTS, name), BY_A)
        for name, value in OTHERS.items()
    ]
    with warned(*texts):
        FakeDevice.open(Config(**OTHERS), B)
    assert first.settings == DEFAULTS


async def test_loop_config_takes_precedence_over_the_first_connection() -> None:
    configure_loop(OTHER)
    first = FakeDevice.open(Config(polling=OTHER.polling), A)
    assert first.settings == OTHER
    FakeDevice.open(Config(**OTHERS), B)
    for opener, device in ((A, "fake0"), (B, "fake0"), (B, "fake1")):
        with warned(ignored("polling", 0.5, device, 0.0, "configure_loop()")):
            assert FakeDevice.open(Config(polling=0.5), opener, device).settings == OTHER


@pytest.mark.parametrize("name", OTHERS)
async def test_loop_cannot_be_configured_differently_while_it_uses_a_device(name: str) -> None:
    FakeDevice.open(Config(), A)
    value, current = OTHERS[name], getattr(DEFAULTS, name)
    text = (
        f"LoopConfig.{name}={value!r} is too late: fake0 uses {name}={current!r}, chosen by "
        f"{BY_A}; call configure_loop() before the event loop's first connection"
    )
    with pytest.raises(RuntimeError, match=re.escape(text)):
        configure_loop(LoopConfig(**{name: value}))
    # The failed call has no effect.
    FakeDevice.open(Config(**{name: value}), A, "fake1")
    with pytest.raises(RuntimeError, match="fake1 uses"):
        configure_loop(DEFAULTS)


async def test_loop_can_be_configured_with_the_settings_in_effect() -> None:
    FakeDevice.open(Config(polling=0.5), A)
    configure_loop(LoopConfig(polling=0.5))
    assert FakeDevice.open(Config(), B, "fake1").settings.polling == 0.5
    with pytest.raises(RuntimeError, match=r"polling=0\.0002 is too late: fake"):
        configure_loop(DEFAULTS)


async def test_latest_configuration_of_the_loop_applies() -> None:
    configure_loop(DEFAULTS)
    configure_loop(OTHER)
    assert FakeDevice.open(Config(), A).settings == OTHER


async def test_idle_device_is_opened_again_for_other_settings() -> None:
    first = FakeDevice.open(Config(), A)
    first.release()
    same = FakeDevice.open(Config(polling=DEFAULTS.polling), B)
    assert same is first
    first.release()
    second = FakeDevice.open(Config(cached_registrations=3), B)
    assert second is not first
    assert first._closed
    assert second.settings == replace(DEFAULTS, cached_registrations=3)
    with warned(ignored("cached_registrations", 64, "fake0", 3, f"{B}, which opened the device")):
        FakeDevice.open(Config(cached_registrations=64), A)


async def test_loop_can_be_configured_while_its_devices_are_idle() -> None:
    first = FakeDevice.open(Config(), A)
    first.release()
    configure_loop(OTHER)
    assert FakeDevice.open(Config(), A).settings == OTHER
    assert first._closed


async def test_first_connection_on_each_device_chooses_its_settings() -> None:
    FakeDevice.open(Config(polling=0.1), A, "fake0")
    FakeDevice.open(Config(polling=0.2), B, "fake1")
    with warned(
        ignored("polling", 0.3, "fake0", 0.1, BY_A),
        ignored("polling", 0.3, "fake1", 0.2, f"{B}, which opened the device"),
    ):
        for device in ("fake0", "fake1"):
            FakeDevice.open(Config(polling=0.3), A, device)


async def test_loops_of_several_threads_have_their_own_settings() -> None:
    async def other_loop(config: LoopConfig | None, polling: float) -> LoopConfig:
        if config is not None:
            configure_loop(config)
        return FakeDevice.open(Config(polling=polling), A).settings

    configure_loop(DEFAULTS)
    FakeDevice.open(Config(), A)
    for config in (LoopConfig(polling=0.1), None):
        chosen = await asyncio.to_thread(asyncio.run, other_loop(config, 0.1))
        assert chosen == LoopConfig(polling=0.1)


async def test_closed_loop_is_not_kept_alive_by_its_settings() -> None:
    async def main() -> None:
        configure_loop(OTHER)

    before = len(loop_settings._configured)
    await asyncio.to_thread(asyncio.run, main())
    gc.collect()
    assert len(loop_settings._configured) == before


def test_configure_loop_needs_a_running_loop() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        configure_loop(OTHER)


async def test_configure_loop_refuses_a_config() -> None:
    wrong: Any
    for wrong in (Config(), {"polling": 0}, None):
        with pytest.raises(TypeError, match=r"config must be an aiordma.LoopConfig, such as"):
            configure_loop(wrong)
