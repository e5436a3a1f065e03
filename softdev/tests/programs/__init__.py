"""Unmodified verbs programs on the embedded device, by `aiordma run`."""
