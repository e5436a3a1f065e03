"""The settings of a device in an event loop, and the rule that decides them.

`configure_loop` decides the settings of every device that the loop opens. If it has not been
called, each device gets the settings in the Config of the connection that opens it, with defaults
for the settings that are None. They apply until the device is closed. A connection that asks for
other settings in the meantime causes a warning.
"""

from __future__ import annotations

import asyncio
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import lru_cache
from typing import NamedTuple, Self

from .._core.arguments import instance
from ..config import Config, LoopConfig
from .per_loop_resource import PerLoopResource

SETTINGS = tuple(it.name for it in fields(LoopConfig))

_configured: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopConfig] = (
    weakref.WeakKeyDictionary()
)
"""The LoopConfig of each loop for which `configure_loop` was called."""

# Cached, because most connections have the same Config.
_loop_config = lru_cache(maxsize=16)(LoopConfig)


class Choice(NamedTuple):
    """The settings of a device, and a description of what chose them."""

    settings: LoopConfig
    chosen_by: str


def choose(config: Config, opener: str) -> Choice:
    """Return the settings for a device that the running loop opens for a connection.

    Args:
        config: The connection's settings.
        opener: A description of the connection, or of the listener that accepts it.
    """
    loop_config = _configured.get(asyncio.get_running_loop())
    if loop_config is not None:
        return Choice(loop_config, "configure_loop()")
    given = {name: value for name in SETTINGS if (value := getattr(config, name)) is not None}
    return Choice(_loop_config(**given), f"{opener}, which opened the device")


class ConfiguredResource(PerLoopResource):
    """An open device, with the settings that apply until it is closed."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, key: object, device: str, choice: Choice
    ) -> None:
        super().__init__(loop, key)
        self._device = device
        self._choice = choice

    @classmethod
    def _acquire_configured(
        cls,
        key: object,
        config: Config,
        opener: str,
        make: Callable[[asyncio.AbstractEventLoop, Choice], Self],
    ) -> Self:
        """Add a user as `_acquire` does, and let `make` create the resource with its settings.

        `config` and `opener` are the arguments of `choose`.
        """
        choice = choose(config, opener)
        return cls._acquire(key, lambda loop: make(loop, choice), choice.settings)

    def _conflicts(self, wanted: Config | LoopConfig) -> Iterator[tuple[str, str]]:
        """Yield each setting in `wanted` that is not in effect, and the reason."""
        for name in SETTINGS:
            value, current = getattr(wanted, name), getattr(self._choice.settings, name)
            if value is not None and value != current:
                yield (
                    f"{type(wanted).__name__}.{name}={value!r}",
                    f"{self._device} uses {name}={current!r}, chosen by {self._choice.chosen_by}",
                )

    def warn_of_ignored_settings(self, config: Config) -> None:
        """Warn if a connection on this device has other settings than those in effect."""
        for setting, reason in self._conflicts(config):
            warnings.warn(f"{setting} has no effect: {reason}", RuntimeWarning, stacklevel=1)


def configure_loop(config: LoopConfig) -> None:
    """Choose the settings of all devices that the running event loop opens.

    Call this before the loop's first connection. A later call replaces the settings. They apply to
    the loop until it ends, and take precedence over the same settings in a connection's `Config`.

    Args:
        config: The settings.

    Raises:
        RuntimeError: If there is no running event loop, or if the loop is already using a device
            with other settings.
    """
    loop = asyncio.get_running_loop()
    instance("config", config, LoopConfig, "an aiordma.LoopConfig, such as LoopConfig(polling=0)")
    for resource in ConfiguredResource.all():
        if resource.loop is loop and resource._users:
            for setting, reason in resource._conflicts(config):
                raise RuntimeError(
                    f"{setting} is too late: {reason}; call configure_loop() before the event "
                    "loop's first connection"
                )
    _configured[loop] = config
