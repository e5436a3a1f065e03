"""Test the capabilities of a device beyond the basic ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiordma import verbs
from aiordma._native import ffi
from aiordma.errors import UnsupportedError
from aiordma.verbs import OdpCapability, OdpOperations, PciAtomicSizes, QPType

if TYPE_CHECKING:
    from aiordma._native import handles as h


def test_extended_attributes_include_the_basic_attributes(context: verbs.Context) -> None:
    extended = context.query_device_ex()
    assert extended.orig_attr == context.query_device()
    assert extended is context.query_device_ex()


@pytest.mark.needs("extended completion queues")
def test_device_clock_measures_elapsed_seconds(context: verbs.Context) -> None:
    before = context.query_rt_values_ex()
    extended = context.query_device_ex()
    assert extended.completion_timestamp_mask
    assert extended.hca_core_clock
    after = context.query_rt_values_ex()
    elapsed = (after - before) & extended.completion_timestamp_mask
    assert 0 <= extended.seconds(elapsed) < 60


def test_seconds_raises_value_error_when_clock_frequency_is_unknown(context: verbs.Context) -> None:
    attr = ffi.new("struct ibv_device_attr_ex *")
    with pytest.raises(ValueError, match="frequency"):
        verbs.ExtendedDeviceAttributes.read(attr).seconds(7)


def test_extended_attributes_are_empty_when_the_query_is_unsupported(
    context: verbs.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def older(pointer: h.ibv_context, attr: h.ibv_device_attr_ex) -> None:
        raise UnsupportedError("ibv_query_device_ex")

    monkeypatch.setattr(context.library.calls, "ibv_query_device_ex", older)
    extended = context.query_device_ex()
    assert extended.orig_attr == context.query_device()
    empty = verbs.ExtendedDeviceAttributes.read(ffi.new("struct ibv_device_attr_ex *"))
    assert extended.odp_caps == empty.odp_caps
    assert extended.cq_mod_caps == verbs.CQModerationCapabilities(0, 0)
    assert extended.max_dm_size == extended.completion_timestamp_mask == 0


def test_nested_device_capabilities_are_decoded() -> None:
    """Every member has a different number here.

    tests/native/test_records.py tests the members converted by `copy_of`.
    """
    attr = ffi.new("struct ibv_device_attr_ex *")
    attr.odp_caps.general_caps = 3
    attr.odp_caps.per_transport_caps.rc_odp_caps = 0b1
    attr.odp_caps.per_transport_caps.uc_odp_caps = 0b10
    attr.odp_caps.per_transport_caps.ud_odp_caps = 0b100
    attr.xrc_odp_caps = 0b1000
    attr.tso_caps.max_tso = 262144
    attr.tso_caps.supported_qpts = 1 << 8
    attr.rss_caps.supported_qpts = 1 << 8 | 1 << 4
    attr.packet_pacing_caps.supported_qpts = 1 << 2
    attr.tm_caps.max_sge = 13
    attr.cq_mod_caps.max_cq_period = 15
    attr.pci_atomic_caps.swap = 2
    attr.hca_core_clock = 156250
    got = verbs.ExtendedDeviceAttributes.read(attr)
    assert got.odp_caps == verbs.OdpCapabilities(
        OdpCapability.SUPPORT | OdpCapability.SUPPORT_IMPLICIT,
        OdpOperations.SUPPORT_SEND,
        OdpOperations.SUPPORT_RECV,
        OdpOperations.SUPPORT_WRITE,
        OdpOperations.SUPPORT_READ,
    )
    assert got.seconds(156_250_000) == 1
    assert got.tso_caps == verbs.TsoCapabilities(262144, frozenset({QPType.RAW_PACKET}))
    assert got.rss_caps.supported_qpts == {QPType.RAW_PACKET, QPType.UD}
    assert got.packet_pacing_caps.supported_qpts == {QPType.RC}
    assert got.tm_caps.max_sge == 13
    assert got.cq_mod_caps.max_cq_period == 15
    assert got.pci_atomic_caps.swap is PciAtomicSizes.OPERATION_8_BYTE_SIZE_SUP
