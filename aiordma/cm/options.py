"""Calls on an id that name it when they fail, and its options: rdma_set_option(3)."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING

from aiordma._core.arguments import choice, integer, truth
from aiordma._native import Library, failure, ffi
from aiordma.errors import VerbsError
from aiordma.verbs._device.resource import Resource
from aiordma.verbs._qp.timers import encode_ack_timeout

if TYPE_CHECKING:
    from aiordma._native import handles as h  # noqa: F401 - in the base class


class Option(IntEnum):
    """An option of an id, by its number at level RDMA_OPTION_ID; see rdma_set_option(3)."""

    TOS = 0
    REUSEADDR = 1
    AFONLY = 2
    ACK_TIMEOUT = 3


_LEVEL = 0  # RDMA_OPTION_ID
_INT_OPTIONS = (Option.REUSEADDR, Option.AFONLY)  # the others are uint8_t


class Options(Resource["h.IdPointer"]):
    """Setting options. The connection manager has no call that reads them."""

    library: Library

    def _call(self, call: Callable[..., object], *arguments: object) -> None:
        """Calls the connection manager for this id, which the text of a failure then names."""
        try:
            call(self.pointer, *arguments)
        except VerbsError as error:
            raise failure(error.verb, error.errno or 0, repr(self)) from None

    def set_option(self, option: Option, value: int) -> None:
        """Set an option by its raw value. ValueError when it does not fit the option's field."""
        option, value = choice("option", option, Option), integer("value", value, None, None)
        try:
            if option in _INT_OPTIONS:
                data, size = ffi.new("int *", value), ffi.sizeof("int")
            else:
                data, size = ffi.new("uint8_t *", value), 1
        except OverflowError as error:
            raise ValueError(f"option {option.name} cannot be {value}: {error}") from None
        self._call(self.library.calls.rdma_set_option, _LEVEL, option.value, data, size)

    def set_tos(self, tos: int) -> None:
        """Type of service of the packets, 0 to 255; before connecting or listening."""
        self.set_option(Option.TOS, tos)

    def set_reuseaddr(self, enabled: bool) -> None:
        """Allow binding to an address that is still in use, as SO_REUSEADDR does.

        Before binding; VerbsError (EINVAL) when it is taken back after that.
        """
        self.set_option(Option.REUSEADDR, int(truth("enabled", enabled)))

    def set_afonly(self, enabled: bool) -> None:
        """Keep a listener on ``::`` to IPv6, as IPV6_V6ONLY does.

        Before listening; VerbsError (EINVAL) later.
        """
        self.set_option(Option.AFONLY, int(truth("enabled", enabled)))

    def set_ack_timeout(self, seconds: float) -> None:
        """Seconds that the queue pair waits for an acknowledgement before it retransmits.

        0.0000082 to 8796 seconds, rounded up to the next step (4.096 us times a power of 2).
        Before connecting or accepting. ValueError out of that range.
        """
        self.set_option(Option.ACK_TIMEOUT, encode_ack_timeout(seconds))
