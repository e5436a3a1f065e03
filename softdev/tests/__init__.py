"""The tests of the device."""
