"""Connection ID options (see rdma_set_option(3)), and error messages that describe the ID."""

from __future__ import annotations

import errno
from collections.abc import Callable
from enum import IntEnum

from aiordma._core.arguments import choice, integer, truth
from aiordma._core.timers import encode_ack_timeout
from aiordma._native import Library, explained, ffi
from aiordma._native import handles as h
from aiordma.errors import VerbsError
from aiordma.verbs._device.resource import Resource


class Option(IntEnum):
    """A connection ID option at level RDMA_OPTION_ID. See rdma_set_option(3)."""

    TOS = 0
    REUSEADDR = 1
    AFONLY = 2
    ACK_TIMEOUT = 3


_LEVEL = 0  # RDMA_OPTION_ID
_INT_OPTIONS = (Option.REUSEADDR, Option.AFONLY)  # all other options are uint8_t


# The preconditions of each call, from the manual pages. Error messages include them, because the
# connection manager reports only an errno.
_RESPOND = "accept() or reject() must be called once, on the ID of a CONNECT_REQUEST event"
_PRECONDITIONS = {
    "rdma_bind_addr": "bind_addr() must be called once, before any other call",
    "rdma_resolve_addr": "resolve_addr() must be called once, on an ID that is new or bound",
    "rdma_resolve_route": "resolve_route() must be called after ADDR_RESOLVED (resolve_addr)",
    "rdma_connect": "connect() must be called once, after ROUTE_RESOLVED (resolve_route) and"
    " create_qp(); if the ID does not own the queue pair, set ConnectionParameters.qp_num",
    "rdma_listen": "listen() must be called once, on an ID that is new or bound",
    "rdma_accept": _RESPOND,
    "rdma_reject": _RESPOND,
    "rdma_reject_ece": _RESPOND,
    "rdma_establish": "establish() must be called after CONNECT_RESPONSE, on an ID that does not"
    " own a queue pair",
    "rdma_disconnect": "disconnect() must be called after ESTABLISHED or accept()",
    "rdma_set_option": "tos and ack_timeout must be set before connect() or accept(), reuseaddr"
    " before bind_addr(), and afonly before listen()",
    "rdma_join_multicast": "join_multicast() requires an ID of PortSpace.UDP or IPOIB that is bound"
    " to a device",
    "rdma_set_local_ece": "set_local_ece() requires an ID that does not own a queue pair",
    "rdma_get_remote_ece": "get_remote_ece() requires an ID that does not own a queue pair, after"
    " CONNECT_REQUEST or CONNECT_RESPONSE",
}
_WRONG_STATE = frozenset({errno.EINVAL, errno.ENOTCONN, errno.EISCONN, errno.EALREADY})


class Options(Resource[h.rdma_cm_id]):
    """Connection ID options, which can be set but not read.

    This is the base class of :class:`ConnectionId`.
    """

    library: Library
    _history: tuple[str, ...] = ()
    """The most recent calls and events, for error messages."""

    def _call(self, function: Callable[..., object], *arguments: object, step: str = "") -> None:
        """Call a connection manager function for this ID, and describe the ID in any error.

        If the call succeeds, `step` is added to the history.
        """
        try:
            function(self.pointer, *arguments)
        except VerbsError as error:
            raise explained(error, self._describe(error)) from None
        if step:
            self._note(step)

    def _note(self, step: str) -> None:
        """Append a call or event to the history, which keeps the six most recent entries."""
        self._history = (*self._history[-5:], step)

    def _describe(self, error: VerbsError) -> str:
        """Describe the ID for an error message.

        If the call may have failed because of the ID's state, add the call's preconditions and the
        ID's history.
        """
        preconditions = self._preconditions(error)
        return f"{self!r}: {preconditions}" if preconditions else repr(self)

    def _preconditions(self, error: VerbsError) -> str:
        """Return what the call requires, or "" if the ID's state did not make it fail."""
        preconditions = _PRECONDITIONS.get(error.verb.removesuffix("_ex"), "")
        if not preconditions or error.errno not in _WRONG_STATE:
            return ""
        return f"{preconditions}; calls and events so far: {', '.join(self._history) or 'none'}"

    def set_option(self, option: Option, value: int) -> None:
        """Set a connection ID option.

        Raises:
            ValueError: If the value is out of range for the option.
        """
        option, value = choice("option", option, Option), integer("value", value, None, None)
        try:
            if option in _INT_OPTIONS:
                data, size = ffi.new("int *", value), ffi.sizeof("int")
            else:
                data, size = ffi.new("uint8_t *", value), 1
        except OverflowError as error:
            raise ValueError(f"invalid value {value} for option {option.name}: {error}") from None
        self._call(self.library.calls.rdma_set_option, _LEVEL, option.value, data, size)

    def set_tos(self, tos: int) -> None:
        """Set the type of service (TOS) for packets, from 0 to 255.

        Call this method before connecting or listening.
        """
        self.set_option(Option.TOS, tos)

    def set_reuseaddr(self, enabled: bool) -> None:
        """Set whether the ID can bind to an address that is still in use.

        The option corresponds to SO_REUSEADDR. Call this method before binding.

        Raises:
            VerbsError: With EINVAL, if you turn off the option after binding.
        """
        self.set_option(Option.REUSEADDR, int(truth("enabled", enabled)))

    def set_afonly(self, enabled: bool) -> None:
        """Set whether a listener on ``::`` accepts only IPv6 connections.

        The option corresponds to IPV6_V6ONLY. Call this method before listening.

        Raises:
            VerbsError: With EINVAL, if the ID is already listening.
        """
        self.set_option(Option.AFONLY, int(truth("enabled", enabled)))

    def set_ack_timeout(self, seconds: float) -> None:
        """Set how long the queue pair waits for an acknowledgement before retransmitting a packet.

        Call this method before connecting or accepting.

        Args:
            seconds: The timeout, from 0.0000082 to 8796 seconds. It is rounded up to 4.096
                microseconds times a power of 2.

        Raises:
            ValueError: If the timeout is out of range.
        """
        self.set_option(Option.ACK_TIMEOUT, encode_ack_timeout(seconds))
