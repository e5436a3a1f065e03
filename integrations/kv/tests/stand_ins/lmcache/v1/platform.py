import os
from contextlib import suppress


class EventNotifier:
    """A descriptor that is readable from `notify` until `consume`."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._descriptor

    def notify(self) -> None:
        os.eventfd_write(self._descriptor, 1)

    def consume(self) -> None:
        consume_fd(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def create_event_notifier() -> EventNotifier:
    return EventNotifier()


def consume_fd(fd: int) -> None:
    with suppress(BlockingIOError):
        os.eventfd_read(fd)
