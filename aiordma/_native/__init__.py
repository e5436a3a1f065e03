"""The boundary to C: the only importer of the cffi module.

Above it there are no return codes and no errno: :mod:`.calls` turns every failure into an
exception, and :mod:`.records` packs and unpacks arrays of requests and completions. Packages above
use `ffi` for memory and `lib` for the data path.
"""

from ._lib import ffi, lib
from .calls import Calls, ProviderCalls, errno_of, explained, failure
from .conventions import Convention, convention_of
from .library import Library, embedded, system
from .records import (
    COMPLETION,
    MORE,
    RECV,
    SEND,
    SGE,
    CompletionArray,
    More,
    Record,
    RequestArray,
    copy_of,
)

__all__ = [
    "COMPLETION",
    "MORE",
    "RECV",
    "SEND",
    "SGE",
    "Calls",
    "CompletionArray",
    "Convention",
    "Library",
    "More",
    "ProviderCalls",
    "Record",
    "RequestArray",
    "convention_of",
    "copy_of",
    "embedded",
    "errno_of",
    "explained",
    "failure",
    "ffi",
    "lib",
    "system",
]
