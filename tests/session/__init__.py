"""Tests of the transport without a device, on a `Pair` in virtual time."""
