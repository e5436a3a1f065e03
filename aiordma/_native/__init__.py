"""The boundary to C: the only importer of the compiled module.

Above it there are no return codes and no errno: :mod:`.calls` turns every failure into an
exception, and :mod:`.records` packs and unpacks what crosses in numbers. What is left to the rooms
above is `ffi` for memory and `lib` for the data path.
"""

from ._fast import EARLIER, TRANSFER_SIZE, Local, Pinned, Remote, Run
from ._lib import ffi, lib
from .calls import CONVENTIONS, EXTENDED, Calls, Convention, failure
from .library import Library, embedded, system
from .provider_calls import PROVIDER_CONVENTIONS, ProviderCalls
from .records import (
    COMPLETION,
    MORE,
    RECV,
    SEND,
    SGE,
    CompletionArray,
    More,
    MoreArray,
    Record,
    RequestArray,
)

__all__ = [
    "COMPLETION",
    "CONVENTIONS",
    "EARLIER",
    "EXTENDED",
    "MORE",
    "PROVIDER_CONVENTIONS",
    "RECV",
    "SEND",
    "SGE",
    "TRANSFER_SIZE",
    "Calls",
    "CompletionArray",
    "Convention",
    "Library",
    "Local",
    "More",
    "MoreArray",
    "Pinned",
    "ProviderCalls",
    "Record",
    "Remote",
    "RequestArray",
    "Run",
    "embedded",
    "failure",
    "ffi",
    "lib",
    "system",
]
