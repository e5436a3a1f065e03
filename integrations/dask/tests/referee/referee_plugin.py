"""The referee's pytest plugin: distributed's fixtures and options, and the results as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask.optimization
import distributed.shuffle
import pytest
from distributed.comm import core
from distributed.utils_test import *  # noqa: F403 - fixtures for distributed's tests

# test_client.py imports these names, which Dask has removed. Only a few tests use them.
for module, name in (
    (dask.optimization, "SubgraphCallable"),
    (distributed.shuffle, "check_minimal_arrow_version"),
):
    setattr(module, name, getattr(module, name, None))

pytest_plugins = ["distributed.pytest_resourceleaks"]

_results: dict[str, str] = {}
_schemes: set[str] = set()  # used by the current test in this process


class _Registry:
    """A backend registry that records the schemes used for listening and connecting."""

    @staticmethod
    def get_backend(scheme: str) -> Any:
        _schemes.add(scheme)
        return registry.get_backend(scheme)


registry, core.registry = core.registry, _Registry


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    _schemes.clear()
    return (yield)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runslow", action="store_true", help="run slow tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "slow" in item.keywords and not config.getoption("--runslow"):
            item.add_marker(pytest.mark.skip(reason="need --runslow option to run"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid.split("site-packages/")[-1]
    worst = _results.get(name)
    if report.failed:
        _results[name] = "failed over inproc" if _schemes == {"inproc"} else "failed"
    elif worst is None or (worst == "passed" and report.skipped):
        _results[name] = "passed" if report.passed else "skipped"


def pytest_sessionfinish() -> None:
    Path(os.environ["REFEREE_RESULTS"]).write_text(json.dumps(_results, indent=1))
