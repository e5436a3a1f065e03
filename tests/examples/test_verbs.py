"""examples/verbs: each program prints what its page says; on any device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import aiordma
from tests.docs.example_programs import EXAMPLES, outputs

OUTPUTS = outputs()
ALONE = sorted(OUTPUTS.keys() - {"cm_server", "cm_client"})


def start(name: str, *arguments: str) -> subprocess.Popen[str]:
    package = str(Path(aiordma.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), *arguments],
        env=os.environ | {"PYTHONPATH": package},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_every_program_has_an_output() -> None:
    assert sorted(OUTPUTS) == sorted(path.stem for path in EXAMPLES.glob("*.py"))


def test_a_program_is_short() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 80, path


@pytest.mark.parametrize("name", ALONE)
def test_what_it_prints(name: str, device_name: str) -> None:
    with start(name, device_name) as process:
        out, err = process.communicate()
    assert (out, err, process.returncode) == (OUTPUTS[name], "", 0)


def test_a_client_and_a_server(device_name: str, host: str) -> None:
    with start("cm_server", host, "0", device_name) as server:
        assert server.stdout is not None
        first = server.stdout.readline()
        port = first.split()[-1]
        assert first == OUTPUTS["cm_server"].splitlines(keepends=True)[0].replace("7474", port)
        with start("cm_client", host, port, device_name) as client:
            out, err = client.communicate()
        assert (out, err, client.returncode) == (OUTPUTS["cm_client"], "", 0)
        out, err = server.communicate()
    assert (first.replace(port, "7474") + out, err) == (OUTPUTS["cm_server"], "")
    assert server.returncode == 0
