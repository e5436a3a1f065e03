"""Who waits: what the fast path asks of a future."""

from __future__ import annotations

from typing import Protocol


class Waiter(Protocol):
    """A future, a Promise, or what does as one."""

    def done(self) -> bool: ...

    def set_result(self, result: None, /) -> None: ...

    def set_exception(self, error: BaseException, /) -> None: ...

    def cancel(self) -> bool: ...
