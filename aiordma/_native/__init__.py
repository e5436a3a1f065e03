"""The boundary to C: the only importer of the compiled modules.

Above it there are no return codes and no errno: :mod:`.calls` turns every failure into an
exception, and :mod:`.records` packs and unpacks arrays of requests and completions. Packages above
use `ffi` for memory and `lib` for the data path.
"""

from ._fast import (
    EARLIER,
    OFFER_ROOM,
    TRANSFER_SIZE,
    Account,
    Arrivals,
    Batch,
    Block,
    Counts,
    Fetch,
    Frame,
    Inbox,
    Incoming,
    Local,
    Message,
    Offers,
    Outgoing,
    Pinned,
    Promise,
    Queue,
    Remote,
    Run,
    Shelf,
    Table,
    Traffic,
    Work,
    connect,
)
from ._lib import ffi, lib
from .calls import CONVENTIONS, EXTENDED, Calls, Convention, errno_of, explained, failure
from .handles import Waiter
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
    WrongCompletion,
)

# The compiled modules know nothing of each other.
connect(int(ffi.cast("uintptr_t", ffi.addressof(lib, "aiordma_drain"))))

__all__ = [
    "COMPLETION",
    "CONVENTIONS",
    "EARLIER",
    "EXTENDED",
    "MORE",
    "OFFER_ROOM",
    "PROVIDER_CONVENTIONS",
    "RECV",
    "SEND",
    "SGE",
    "TRANSFER_SIZE",
    "Account",
    "Arrivals",
    "Batch",
    "Block",
    "Calls",
    "CompletionArray",
    "Convention",
    "Counts",
    "Fetch",
    "Frame",
    "Inbox",
    "Incoming",
    "Library",
    "Local",
    "Message",
    "More",
    "MoreArray",
    "Offers",
    "Outgoing",
    "Pinned",
    "Promise",
    "ProviderCalls",
    "Queue",
    "Record",
    "Remote",
    "RequestArray",
    "Run",
    "Shelf",
    "Table",
    "Traffic",
    "Waiter",
    "Work",
    "WrongCompletion",
    "embedded",
    "errno_of",
    "explained",
    "failure",
    "ffi",
    "lib",
    "system",
]
