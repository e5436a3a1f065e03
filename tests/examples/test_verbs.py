"""Tests that each program of examples/verbs prints what its page shows, on any device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import aiordma
from tests.docs.example_programs import EXAMPLES, outputs

OUTPUTS = outputs()
# The commands of the server and the client, and the output of the client. None stands for the
# output on the page.
PAIRS: dict[str, tuple[str, str, str | None]] = {
    "cm_server": ("cm_server HOST 0", "cm_client HOST PORT", None),
    "pingpong": (
        "pingpong serve 0",
        "pingpong connect HOST PORT",
        "1000 round trips; the last message was b'pong'\n",
    ),
}
ALONE = sorted(OUTPUTS.keys() - {*PAIRS, "cm_client"})


@contextmanager
def start(device: str, name: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    package = str(Path(aiordma.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), *arguments],
        env=os.environ | {"PYTHONPATH": package, "AIORDMA_DEVICE": device},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()  # still running only if the test has failed


def test_every_verbs_program_has_an_expected_output() -> None:
    assert sorted(OUTPUTS) == sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", ALONE)
def test_verbs_program_prints_the_expected_output(name: str, device_name: str) -> None:
    with start(device_name, name) as process:
        out, err = process.communicate()
    assert (out, err, process.returncode) == (OUTPUTS[name], "", 0)


@pytest.mark.parametrize("name", PAIRS)
def test_verbs_server_and_client_print_the_expected_output(
    name: str, device_name: str, host: str
) -> None:
    serve, connect, said = PAIRS[name]
    first, rest = OUTPUTS[name].split("\n", 1)
    with start(device_name, *serve.replace("HOST", host).split()) as server:
        assert server.stdout is not None
        *words, port = server.stdout.readline().split()
        assert words == first.split()[:-1]
        where = connect.replace("HOST", host).replace("PORT", port)
        with start(device_name, *where.split()) as client:
            out, err = client.communicate()
        assert (out, err, client.returncode) == (said or OUTPUTS["cm_client"], "", 0)
        out, err = server.communicate()
    assert (out, err, server.returncode) == (rest, "", 0)
