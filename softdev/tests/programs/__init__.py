"""Tests of unmodified verbs programs on the embedded device, run by `aiordma run`."""
