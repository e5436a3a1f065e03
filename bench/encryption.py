"""Messages on connections that encrypt, beside the same in clear."""

from __future__ import annotations

from collections.abc import Iterator

from .lanes import (
    Comparison,
    Contenders,
    Data,
    Lane,
    Options,
    Requirement,
    at_least,
    ratio,
    seconds,
    size_name,
    take_turns,
)

NOTE = (
    "A message there and back, one at a time, and messages one way, several under way: on a "
    "connection with `encrypt=True`, and on one without. Each message is encrypted and decrypted "
    "by AES-256-GCM of the package `cryptography`, in the thread of the event loop. A core each."
)

CLEAR, SEALED = "aiordma", "aiordma, encrypted"
# Bytes; messages in a turn there and back, and one way, and how many of these are under way.
SIZES = {64: (500, 8000, 64), 64 << 10: (200, 8192, 16), 1 << 20: (40, 512, 4)}
# Of the speed in clear, by judgement.  In clear a long message is copied once, at up to 30 GB/s
# where it stays in the cache; here it is encrypted, copied and decrypted, each at up to 20.
ASKED = {64: (0.5, 0.5), 64 << 10: (0.25, 0.2), 1 << 20: (0.15, 0.15)}


def works(size: int) -> tuple[str, str]:
    return f"{size_name(size)}, there and back", f"{size_name(size)}, one way"


def lanes(contenders: Contenders, options: Options) -> Iterator[Lane]:
    for size in (size for size in SIZES if size <= options.most):
        echoes, count, window = SIZES[size]
        there_and_back, one_way = works(size)
        for who, way in ((CLEAR, "aiordma"), (SEALED, "aiordma encrypted")):
            contender = contenders.python(way)
            numbers = {"size": size, "count": options.count(echoes)}
            yield Lane.of(contender, there_and_back, who, "echo", **numbers)
            numbers = {"size": size, "count": options.count(count, window), "window": window}
            yield Lane.of(contender, one_way, who, "send_many", **numbers)


def measure(options: Options) -> Data:
    with Contenders() as contenders:
        return take_turns(list(lanes(contenders, options)), options)


def requirements(data: Data) -> Iterator[Requirement]:
    for size, asked in ASKED.items():
        for work, least in zip(works(size), asked, strict=True):
            clear = seconds(data, work, CLEAR)
            if clear:
                found = ratio(clear, seconds(data, work, SEALED))
                yield at_least(f"{work}: encrypted, of the speed in clear", least, found)


COMPARISON = Comparison(
    "Encryption",
    NOTE,
    measure,
    requirements,
    style="as for the echo, and for one way",
)
