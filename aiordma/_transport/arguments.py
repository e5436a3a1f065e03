"""Arguments of a wrong type, refused with a text that says what belongs there.

Types say the same before the program runs; this is for programs that no type checker reads.
"""

from __future__ import annotations

from operator import index
from typing import TypeVar

from ..mr_pool import LocalMemory

T = TypeVar("T")


def kind(value: object) -> str:
    return type(value).__name__


def check_host(host: object) -> None:
    if not isinstance(host, str):
        raise TypeError(f"host is a str, as '192.0.2.1' or 'server.example', not {kind(host)}")


def check_port(port: object) -> None:
    try:
        index(port)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        raise TypeError(f"port is an int from 0 to 65535, not {kind(port)} {port!r:.40}") from None


def check_source(source: object) -> None:
    match source:
        case None | (str(), int()):
            pass
        case _:
            raise TypeError(
                f"source is a local (host, port), as ('192.0.2.1', 0), not {kind(source)} "
                f"{source!r:.40}"
            )


def remote_memory(memory: object, wanted: type[T]) -> T:
    """The memory, if it is the peer's; else TypeError."""
    if isinstance(memory, wanted):
        return memory
    what = "memory of this side" if isinstance(memory, LocalMemory) else kind(memory)
    raise TypeError(
        f"the peer's memory is a RemoteRegion (recv_region, request_region, open_region) or a "
        f"slice of one, not {what}" + (f": {memory!r}" if isinstance(memory, LocalMemory) else "")
    )
