"""Explanations for work requests rejected by a device.

Devices report EINVAL regardless of the reason. This module determines the actual reason afterwards,
from the request and the queue pair's limits and state, so it does not slow down posting.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from aiordma.errors import PostError, QueueFullError

from .._device.enums import QPState, SendFlags
from .work_request import ReceiveWorkRequest, SendWorkRequest

# The maximum message length in bytes (IBTA volume 1, clause 9.7.8).
MAX_MESSAGE_LENGTH = 1 << 31


def state_reason(state: QPState, *, sends: bool) -> str:
    """Return why posting is not allowed in this state, or an empty string if it is allowed."""
    if sends and state in (QPState.RESET, QPState.INIT, QPState.RTR):
        return (
            f"the queue pair is in state {state.name}, but sends can be posted only from RTS on; "
            "call connect() or to_rts() first"
        )
    if not sends and state is QPState.RESET:
        return (
            "the queue pair is in state RESET, but receives can be posted only from INIT on; "
            "call connect() or to_init() first"
        )
    return ""


def request_reason(
    requests: Sequence[SendWorkRequest | ReceiveWorkRequest],
    max_sges: int,
    limit_name: str,
    max_inline: int = 0,
) -> str:
    """Describe the first request that exceeds a limit, or return an empty string.

    Args:
        requests: The requests to be posted.
        max_sges: The maximum number of scatter/gather elements.
        limit_name: The name of the limit on scatter/gather elements.
        max_inline: The maximum number of inline bytes.
    """
    for wr in requests:
        sge_count, length = len(wr.sges), sum(sge[1] for sge in wr.sges)
        inline = isinstance(wr, SendWorkRequest) and wr.send_flags & SendFlags.INLINE
        if inline and length > max_inline:
            return f"too much inline data: {length} bytes (max_inline_data is {max_inline})"
        if not inline and sge_count > max_sges:
            return f"too many scatter/gather elements: {sge_count} ({limit_name} is {max_sges})"
        if length > MAX_MESSAGE_LENGTH:
            return f"message too long: {length} bytes (maximum {MAX_MESSAGE_LENGTH})"
    return ""


def post_error(
    verb: str, code: int, bad_index: int, queue: str, *, reason: str = "", full_reason: str = ""
) -> PostError:
    """Create the exception for a failed attempt to post requests.

    Args:
        verb: The name of the C function that failed.
        code: The error code returned by the function.
        bad_index: The index of the first request that was not posted.
        queue: The queue's name.
        reason: The reason, if known.
        full_reason: The explanation to use if the queue is full.
    """
    # If a reason is known, the queue is not full. Some providers also return ENOMEM for too many
    # elements.
    if code == errno.ENOMEM and not reason:
        return QueueFullError(verb, bad_index, f"{full_reason}; {queue}" if full_reason else queue)
    # ibv_post_send(3) returns an errno value, but some providers return -1 without setting errno.
    detail = f"{reason}; {queue}" if reason else queue
    return PostError(code if code > 0 else errno.EINVAL, verb, bad_index, detail)
