"""Tests of the parts of a connection that follow its rails."""

from __future__ import annotations

import re
from typing import Any

import pytest

from aiordma import ConnectionBrokenError
from aiordma._datapath.rail import SendQueue
from aiordma._datapath.work_queue import RailObserver
from aiordma._transport import lifecycle
from aiordma._transport.failover import rail_observers
from aiordma._transport.keep_alive import Probe
from aiordma.verbs import QPState
from tests.docs.pages import DOCS
from tests.transport.connection_factory import check_alive
from tests.transport.marks import by_tcp, one_loop

from .joining import joined, until_rails

Call = tuple[str, str, int]
"""The name of an observer, the event, and the number of the rail."""

EVENTS = [("rail_up", 1), ("rail_removed", 0), ("lead_changed", 1)]
"""The events of a connection with two rails whose lead breaks."""


class Recorder(RailObserver):
    """An observer that records each event before the observer that it replaces gets it."""

    def __init__(self, observer: RailObserver, calls: list[Call]) -> None:
        self.observer, self.calls = observer, calls

    def rail_up(self, rail: SendQueue) -> None:
        self._record("rail_up", rail)
        self.observer.rail_up(rail)

    def rail_removed(self, rail: SendQueue) -> None:
        assert rail.qp.state is QPState.ERR  # otherwise, the peer's READs find closed windows
        self._record("rail_removed", rail)
        self.observer.rail_removed(rail)

    def lead_changed(self, lead: SendQueue) -> None:
        # The Resume is the first frame on the lead. Only the probe of an idle rail is allowed.
        assert all(isinstance(work, Probe) for work in lead.outstanding_work())
        self._record("lead_changed", lead)
        self.observer.lead_changed(lead)

    def _record(self, event: str, rail: SendQueue) -> None:
        self.calls.append((type(self.observer).__name__, event, rail.number))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[list[Call]]:
    """The calls of the observers of each connection, in the order in which they were opened."""
    recorded: list[list[Call]] = []

    def recording(*parts: Any) -> tuple[RailObserver, ...]:
        calls: list[Call] = []
        recorded.append(calls)
        return tuple(Recorder(each, calls) for each in rail_observers(*parts))

    monkeypatch.setattr(lifecycle, "rail_observers", recording)
    return recorded


def documented() -> dict[str, set[str]]:
    """Return the events that each part handles, in the order of the table in docs/design.md."""
    page = (DOCS / "design.md").read_text()
    _, table = page.split(
        "| part | `rail_up` | `rail_removed` | `lead_changed` |\n|---|---|---|---|\n"
    )
    row = r"^\| `(\w+)` \(`[\w.]+`\) \|(.*)\|(.*)\|(.*)\|$"
    rows = re.findall(row, table.split("\n\n")[0], re.MULTILINE)
    events = "rail_up", "rail_removed", "lead_changed"
    return {
        name: {event for event, text in zip(events, cells, strict=True) if text.strip()}
        for name, *cells in rows
    }


@by_tcp
@one_loop
async def test_table_in_design_page_lists_the_events_that_each_part_handles() -> None:
    async with joined("tcp") as (conn, _):
        assert conn._rails is not None
        events = "rail_up", "rail_removed", "lead_changed"
        handled = {
            type(observer).__name__: {
                event
                for event in events
                if getattr(type(observer), event) is not getattr(RailObserver, event)
            }
            for observer in conn._rails.observers
        }
        assert handled == documented()


@by_tcp
@one_loop
async def test_each_observer_gets_each_event_once_in_the_documented_order(
    recorded: list[list[Call]],
) -> None:
    names = list(documented())
    async with joined("tcp") as conns:
        await until_rails(conns)
        conns[0]._queue.rail_broke(ConnectionBrokenError("its cable was cut"))
        await until_rails(conns, ["down", "lead"])
        for calls in recorded:
            assert calls == [(name, *event) for event in EVENTS for name in names]
        await check_alive(*conns)
