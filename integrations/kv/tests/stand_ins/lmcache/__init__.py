"""A stand-in for the part of LMCache's interface that aiordma_kv.lmcache uses.

The tests use it if LMCache is not installed. If LMCache is installed, a test compares both.
"""

__version__ = "0.5.6"
