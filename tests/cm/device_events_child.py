"""Child of test_device_events: triggers an event of a device, and prints the events it receives."""

from __future__ import annotations

import select
import subprocess
import sys

from aiordma import cm, verbs
from aiordma._native import lib

# How to trigger each event on this process's embedded device, or on rxe9 with iproute2.
EMBEDDED = {"removal": verbs.EventType.DEVICE_FATAL, "address": verbs.EventType.LID_CHANGE}
COMMANDS = {
    "removal": ["rdma", "link", "delete", "rxe9"],
    "address": ["ip", "link", "set", "dummy9", "address", "02:00:00:00:00:09"],
}


def happen(name: str, what: str) -> None:
    """Trigger the event. A removal completes only when everything on the device is closed."""
    if name.startswith("embedded"):
        assert lib.aiordma_embedded_raise(EMBEDDED[what]) == 0
    else:
        subprocess.Popen(COMMANDS[what])


def main() -> None:
    name, host, what, timeout = sys.argv[1:]
    library = verbs.find_device(name).library
    with cm.EventChannel(library) as channel, channel.create_id() as id:
        id.bind_addr((host, 0))
        id.listen()
        happen(name, what)
        while (event := channel.get_event()) is None:
            if not select.select([channel.fd], [], [], float(timeout))[0]:
                print("nothing")
                return
        print(event.type.name, "of the listener" if event.id is id else event.id)
        print(event.error())


main()
