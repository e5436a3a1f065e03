"""Readers for the traces of the embedded device. `aiordma.trace` exports their public names."""
