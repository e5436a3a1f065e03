"""The parts of a connection. `aiordma.transport` is their public interface."""

from typing import TYPE_CHECKING

from .._core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .connection import Connection as Connection
    from .sharing import Sharing as Sharing
else:  # lazy, for annotations in modules that these two import
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__, {".connection": "Connection", ".sharing": "Sharing"}
    )
