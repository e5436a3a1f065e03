"""Tests of reports about environment variables that aiordma does not know."""

from __future__ import annotations

import pytest

from aiordma._core.environment import VARIABLES, unknown_variables

CLOSEST_NAMES = {
    "AIORDMA_EMBEDDED_FAULT": "AIORDMA_EMBEDDED_FAULTS",
    "AIORDMA_EMBEDED_LINKS": "AIORDMA_EMBEDDED_LINKS",
    "AIORDMA_FAULTS": "AIORDMA_EMBEDDED_FAULTS",
    "AIORDMA_SEEDS": "AIORDMA_SIMULATION_SEEDS",
    "AIORDMA_SIMULATION_SEED": "AIORDMA_SIMULATION_SEEDS",
    "AIORDMA_DEVICES": "AIORDMA_EMBEDDED_DEVICES",
    "AIORDMA_TRACES": "AIORDMA_TRACE",
    "aiordma_trace": "AIORDMA_TRACE",
    "AIORDMA_NO_DIRECT_WAKEUP": "AIORDMA_NO_DIRECT_WAKE",
}


@pytest.mark.parametrize(("name", "closest"), CLOSEST_NAMES.items())
def test_unknown_variable_report_suggests_the_closest_name(name: str, closest: str) -> None:
    report = f"unknown environment variable {name}: did you mean {closest}?"
    assert unknown_variables({name: "1"}) == {name: report}


def test_unknown_variable_report_cites_the_docs_without_a_close_match() -> None:
    assert unknown_variables({"AIORDMA_COLOUR": "1"}) == {
        "AIORDMA_COLOUR": "unknown environment variable AIORDMA_COLOUR: aiordma does not read it "
        "(docs/environment-variables.md lists the variables that it reads)"
    }


def test_known_and_unrelated_variables_are_not_reported() -> None:
    environment = dict.fromkeys((*VARIABLES, "PATH", "RDMAV_FORK_SAFE", "AIORDMA"), "1")
    assert unknown_variables({**environment, "AIORDMA_EMPTY": ""}) == {}


def test_kubernetes_service_variables_are_ignored_inside_a_pod() -> None:
    service = dict.fromkeys(
        (
            "AIORDMA_SERVICE_HOST",
            "AIORDMA_SERVICE_PORT",
            "AIORDMA_SERVICE_PORT_RDMA",
            "AIORDMA_PORT",
            "AIORDMA_PORT_7471_TCP",
            "AIORDMA_PORT_7471_TCP_ADDR",
            "AIORDMA_STORE_SERVICE_HOST",
        ),
        "1",
    )
    assert unknown_variables(service).keys() == service.keys()
    pod = {**service, "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert unknown_variables(pod) == {}
    assert [*unknown_variables({**pod, "AIORDMA_TRACES": "1"})] == ["AIORDMA_TRACES"]
