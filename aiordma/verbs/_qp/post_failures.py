"""Why a device has refused a work request: it says EINVAL alone, whatever the reason.

The reason is looked for after the failure, in what was asked for, the limits and the state of the
queue pair; so it costs posting nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .._device.enums import QPState, SendFlags
from .work_request import ReceiveWorkRequest, SendWorkRequest

# IBTA volume 1, clause 9.7.8: the longest message.
LONGEST = 1 << 31


class Limits(NamedTuple):
    """Limits of a queue: pieces of a request and bytes inline, with the names of these limits."""

    pieces: int
    of_pieces: str
    inline: int = 0


class Refused(NamedTuple):
    """One request that the device may have refused."""

    limits: Limits
    pieces: int
    length: int
    inline: bool


_REASONS: tuple[tuple[Callable[[Refused], bool], Callable[[Refused], str]], ...] = (
    (
        lambda it: it.pieces > it.limits.pieces and not it.inline,
        lambda it: f"{it.pieces} pieces of memory; {it.limits.of_pieces} is {it.limits.pieces}",
    ),
    (
        lambda it: it.inline and it.length > it.limits.inline,
        lambda it: f"{it.length} bytes inline; max_inline_data is {it.limits.inline}",
    ),
    (
        lambda it: it.length > LONGEST,
        lambda it: f"{it.length} bytes; a message has {LONGEST} at most",
    ),
)

_SEND_BEFORE_RTS = "it is in {}: sends are posted from RTS on (connect(), to_rts())"
_OF_STATE: dict[tuple[bool, QPState], str] = {
    (True, QPState.RESET): _SEND_BEFORE_RTS,
    (True, QPState.INIT): _SEND_BEFORE_RTS,
    (True, QPState.RTR): _SEND_BEFORE_RTS,
    (False, QPState.RESET): "it is in {}: receives are posted from INIT on (connect(), to_init())",
}


def state_reason(state: QPState, *, sends: bool) -> str:
    """The reason why the queue pair's state forbids posting; empty if it does not."""
    return _OF_STATE.get((sends, state), "").format(state.name)


def request_reason(limits: Limits, requests: Sequence[SendWorkRequest | ReceiveWorkRequest]) -> str:
    """The fault of the first request that is beyond a limit; empty if none is."""
    for wr in requests:
        it = Refused(
            limits,
            len(wr.sges),
            sum(sge[1] for sge in wr.sges),
            isinstance(wr, SendWorkRequest) and bool(wr.send_flags & SendFlags.INLINE),
        )
        for applies, text in _REASONS:
            if applies(it):
                return text(it)
    return ""
