"""Errors that docstrings document and that no other test raises."""

from __future__ import annotations

import errno

import pytest

from aiordma import cm
from aiordma.cm import PortSpace
from aiordma.errors import UnsupportedError

from .conftest import refused

GROUP = ("239.7.7.7", 0)


@pytest.mark.needs("the UDP port space")
def test_connections_have_no_groups(events: cm.EventChannel, host: str) -> None:
    with events.create_id() as id:
        id.bind_addr((host, 0))
        refused(errno.EINVAL, lambda: id.join_multicast(GROUP))


@pytest.mark.needs("the UDP port space")
def test_leaving_where_one_never_was(events: cm.EventChannel, host: str) -> None:
    with events.create_id(PortSpace.UDP) as id:
        id.bind_addr((host, 0))
        refused(errno.EADDRNOTAVAIL, lambda: id.leave_multicast(GROUP))


def test_options_that_come_too_late(events: cm.EventChannel, host: str) -> None:
    with events.create_id() as id:
        id.set_reuseaddr(True)
        id.bind_addr((host, 0))
        id.listen()
        refused(errno.EINVAL, lambda: id.set_reuseaddr(False))
        refused(errno.EINVAL, lambda: id.set_afonly(True))


def test_port_spaces(events: cm.EventChannel) -> None:
    """A port space exists, or the error says that it does not."""
    lacks = {PortSpace.IPOIB} if events.library.name == "embedded" else set()
    for space in PortSpace:
        if space in lacks:
            with pytest.raises(UnsupportedError, match=space.name):
                events.create_id(space)
        else:
            events.create_id(space).close()
