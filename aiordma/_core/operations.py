"""The kinds of operations that can be in flight."""

from __future__ import annotations

from enum import IntEnum


class OperationKind(IntEnum):
    """The kind of a work request, encoded in its ``wr_id`` (see _datapath/work_queue.pyx)."""

    RECV = 0
    SEND = 1
    WRITE = 2
    READ = 3
    COMPARE_AND_SWAP = 4
    FETCH_AND_ADD = 5
    BATCH = 6
    BIND = 7
    INVALIDATE = 8
    PROBE = 9

    @property
    def text(self) -> str:
        """The kind as text, such as ``"fetch and add"``."""
        return self.name.lower().replace("_", " ")
