"""Options of the matrix of RDMA software, and the collection of its results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from softdev.tests.programs.ports import chosen_port, fixed_port

from . import results
from .rows import Command, Row


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="the part for CI, without figures")
    parser.addoption("--no-figures", action="store_true", help="only whether each row works")


def row_of(item: pytest.Item) -> Row | None:
    """Return the row that a test runs, or None for a test without a row."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("row") if callspec else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--quick"):
        return
    keep = [it for it in items if (row := row_of(it)) is None or row.quick]
    config.hook.pytest_deselected(items=[it for it in items if it not in keep])
    items[:] = keep


@dataclass
class Found:
    """The results of the rows in this run."""

    versions: dict[str, str] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    over_tcp: dict[Command, float] = field(default_factory=dict)

    def row(self, row: Row, link: str, version: str) -> dict[str, Any]:
        """Return a row's result on a link. A new result is marked as not working."""
        self.versions[row.software] = version
        return self.rows.setdefault(row.id, {}).setdefault(link, {"works": False})  # type: ignore[no-any-return]


COLLECTED = Found()


@pytest.fixture
def port(row: Row) -> Iterator[int]:
    """Reserve a port for the row's server, so that no other test uses it in the meantime."""
    with fixed_port(row.port) if row.port else chosen_port() as number:
        yield number


@pytest.fixture
def found(request: pytest.FixtureRequest) -> Iterator[Found]:
    """Provide the results, and write the page after each row in case a long run is interrupted."""
    yield COLLECTED
    if not request.config.getoption("--quick"):
        results.store(COLLECTED.versions, COLLECTED.rows)
