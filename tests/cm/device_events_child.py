"""Child of test_device_events: lets something happen to a device, and prints what it is told."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aiordma import cm, verbs
from aiordma._native import lib
from aiordma.cm import ConnectionEvent

HOST = "10.9.8.1"


def raise_event(kind: verbs.EventType) -> None:
    """On the embedded device of this process."""
    assert lib.aiordma_embedded_raise(kind) == 0


def command(*words: str) -> None:
    subprocess.run(words, check=True)


@dataclass(frozen=True)
class Place:
    """A device, an address of it, and what can happen to it."""

    device: verbs.Device
    host: str
    remove: Callable[[], None]
    move: Callable[[], None]


@contextmanager
def embedded() -> Iterator[Place]:
    yield Place(
        verbs.find_device("embedded0"),
        "127.0.0.1",
        lambda: raise_event(verbs.EventType.DEVICE_FATAL),
        lambda: raise_event(verbs.EventType.LID_CHANGE),
    )


@contextmanager
def rxe() -> Iterator[Place]:
    """Another one than the tests', since it does not come back (rdma-link(8))."""
    command("ip", "link", "add", "dummy9", "type", "dummy")
    command("ip", "addr", "add", f"{HOST}/24", "dev", "dummy9")
    command("ip", "link", "set", "dummy9", "up")
    command("rdma", "link", "add", "rxe9", "type", "rxe", "netdev", "dummy9")
    removing: list[subprocess.Popen[bytes]] = []

    def remove() -> None:  # it waits until everything on the device is closed
        removing.append(subprocess.Popen(["rdma", "link", "delete", "rxe9"]))

    def move() -> None:
        command("ip", "link", "set", "dummy9", "address", "02:00:00:00:00:09")

    try:
        yield Place(verbs.find_device("rxe9"), HOST, remove, move)
        assert [process.wait(30) for process in removing] in ([], [0])
    finally:
        command("ip", "link", "delete", "dummy9")


def listen(place: Place, happen: Callable[[], None], timeout: float) -> ConnectionEvent | None:
    """What a listener is told of what happens then."""
    with cm.EventChannel(place.device.library) as channel, channel.create_id() as id:
        id.bind_addr((place.host, 0))
        id.listen()
        happen()
        while (event := channel.get_event()) is None:
            if not select.select([channel.fd], [], [], timeout)[0]:
                print("nothing")
                return None
        print(event.type.name, "of the listener" if event.id is id else event.id)
        return event


def main() -> None:
    name, what = sys.argv[1:]
    with {"embedded": embedded, "rxe": rxe}[name.rstrip("0123456789")]() as place:
        if what == "address":
            listen(place, place.move, 1)
        else:
            event = listen(place, place.remove, 30)
            print(event and event.error())
    print("gone")


main()
