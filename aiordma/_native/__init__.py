"""The boundary to C: the only package that imports the cffi module.

Code above it sees no return codes and no errno. :mod:`.calls` turns every failure into an
exception, and :mod:`.records` packs and unpacks arrays of requests and completions. Other packages
use `ffi` for memory and `lib` for the data path.
"""

from ._lib import ffi as ffi
from ._lib import lib as lib
from .calls import Calls as Calls
from .calls import ProviderCalls as ProviderCalls
from .calls import errno_of as errno_of
from .calls import explained as explained
from .calls import failure as failure
from .conventions import Convention as Convention
from .conventions import convention_of as convention_of
from .library import Library as Library
from .library import embedded as embedded
from .library import system as system
from .records import COMPLETION as COMPLETION
from .records import MORE as MORE
from .records import RECV as RECV
from .records import SEND as SEND
from .records import SGE as SGE
from .records import CompletionArray as CompletionArray
from .records import More as More
from .records import Record as Record
from .records import RequestArray as RequestArray
from .records import copy_of as copy_of
from .text import to_c as to_c
