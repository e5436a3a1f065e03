"""Creation of completion queues, which are extended if the device supports it."""

from __future__ import annotations

from aiordma import verbs
from aiordma._core.arguments import choice, instance, integer
from aiordma._native import ffi, lib
from aiordma._native import handles as h
from aiordma.errors import UnsupportedError

from .._device.attributes import is_rxe
from .._device.enums import CQFlags, WCFields
from .completion import CompletionChannel, CompletionQueue

# The fields that both classic and extended queues report.
STANDARD = WCFields(lib.IBV_WC_STANDARD_FLAGS)

_TIMESTAMPS = (WCFields.WITH_COMPLETION_TIMESTAMP, WCFields.WITH_COMPLETION_TIMESTAMP_WALLCLOCK)
_ALL_TIMESTAMPS = _TIMESTAMPS[0] | _TIMESTAMPS[1]


def create_cq(
    context: verbs.Context,
    cqe: int,
    channel: CompletionChannel | None = None,
    comp_vector: int = 0,
    *,
    extended: bool | None = None,
    fields: WCFields | None = None,
    flags: CQFlags = CQFlags.NONE,
) -> CompletionQueue:
    """Create a completion queue.

    Args:
        context: The device.
        cqe: The minimum size of the queue, as a number of completions.
        channel: The channel for the queue's events. See :meth:`CompletionQueue.req_notify`. Without
            a channel, the queue can only be polled.
        comp_vector: The completion vector that signals the queue's events. It must be less than
            ``num_comp_vectors``.
        extended: Whether to create an extended queue, which can report timestamps. By default, the
            queue is extended if the device supports it.
        fields: The fields an extended queue reports. Defaults to all fields supported by the
            device.
        flags: Options for an extended queue.

    Raises:
        ValueError: If a number is out of range.
        UnsupportedError: If the device does not support a feature. The message names the feature.
    """
    cqe, comp_vector = integer("cqe", cqe, None), integer("comp_vector", comp_vector, None)
    if channel is not None:
        instance(
            "channel", channel, CompletionChannel, "a CompletionChannel (from create_comp_channel)"
        )
    fields = None if fields is None else choice("fields", fields, WCFields)
    flags = choice("flags", flags, CQFlags)
    max_cqe = context.query_device().max_cqe
    if not 0 < cqe <= max_cqe:
        raise ValueError(f"cqe must be between 1 and {max_cqe} on {context.name}, not {cqe}")
    if not 0 <= comp_vector < context.num_comp_vectors:
        raise ValueError(
            f"comp_vector must be between 0 and {context.num_comp_vectors - 1} on {context.name},"
            f" not {comp_vector}"
        )
    if extended is None:
        extended = True if fields is not None or flags else context.cq_fields is not None
    if extended:
        if fields is None and (fields := context.cq_fields) is None:
            raise context._unsupported_error("extended completion queues", "ibv_create_cq_ex")
        pointer = _create_extended(context, cqe, channel, comp_vector, fields, flags)
        return CompletionQueue(context, pointer, channel, fields, flags)
    if fields is not None or flags:
        raise ValueError(
            "fields and flags require an extended completion queue; omit extended=False"
        )
    return CompletionQueue(
        context,
        context.library.calls.ibv_create_cq(
            context.pointer, cqe, ffi.NULL, channel.pointer if channel else ffi.NULL, comp_vector
        ),
        channel,
    )


def _create_extended(
    context: verbs.Context,
    cqe: int,
    channel: CompletionChannel | None,
    comp_vector: int,
    fields: WCFields,
    flags: CQFlags,
) -> h.ibv_cq:
    """Create an extended completion queue, or raise UnsupportedError."""
    attr = ffi.new("struct ibv_cq_init_attr_ex *")
    attr.cqe = cqe
    attr.cq_context = lib.aiordma_extended_cq_context()  # marks the queue as extended
    attr.channel = channel.pointer if channel else ffi.NULL
    attr.comp_vector = comp_vector
    attr.wc_flags = fields | WCFields.WITH_QP_NUM  # needed to find posted work
    if flags:
        attr.comp_mask = lib.IBV_CQ_INIT_ATTR_MASK_FLAGS
        attr.flags = flags
    extras = f" with {fields!r}" if fields & ~STANDARD else ""
    extras += f" and {flags!r}" if flags else ""
    with context._requires_capability(f"extended completion queues{extras}"):
        # rdma_rxe supports extended queues, but with rdma-core 44 its iterator loses its position
        # at the end of a queue. The next poll then returns completions that never existed (seen on
        # Linux 6.1).
        if is_rxe(context.query_device()):
            raise UnsupportedError("extended completion queues", verb="ibv_create_cq_ex")
        return ffi.cast(
            "struct ibv_cq *", context.library.calls.ibv_create_cq_ex(context.pointer, attr)
        )


def supported_fields(context: verbs.Context) -> WCFields | None:
    """Return all useful fields that extended queues on this device can report.

    The only way to find out which timestamps a device supports is to create a queue that reports
    them.

    Returns:
        The fields, or None if the device does not support extended queues.
    """
    timestamp_sets = (
        [_ALL_TIMESTAMPS, *_TIMESTAMPS]
        if context.query_device_ex().completion_timestamp_mask
        else []
    )
    for fields in (*(STANDARD | timestamps for timestamps in timestamp_sets), STANDARD):
        try:
            pointer = _create_extended(context, 1, None, 0, fields, CQFlags.NONE)
        except UnsupportedError:
            continue
        context.library.calls.ibv_destroy_cq(pointer)
        return fields
    return None
