"""The boundary to C: the only importer of the cffi module.

Above it there are no return codes and no errno: :mod:`.calls` turns every failure into an
exception, and :mod:`.records` packs and unpacks arrays of requests and completions. Packages above
use `ffi` for memory and `lib` for the data path.
"""

from ._lib import ffi, lib
from .calls import CONVENTIONS, EXTENDED, Calls, Convention, errno_of, explained, failure
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
    Record,
    RequestArray,
)

__all__ = [
    "COMPLETION",
    "CONVENTIONS",
    "EXTENDED",
    "MORE",
    "PROVIDER_CONVENTIONS",
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
    "embedded",
    "errno_of",
    "explained",
    "failure",
    "ffi",
    "lib",
    "system",
]
