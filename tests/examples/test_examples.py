"""Every example does what its docstring says, in separate processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import aiordma

from ..interrupt import interrupt

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def environment(device_name: str) -> dict[str, str]:
    """The device is chosen as a person would; whatever is not closed shows on stderr.

    The package is the one under test, installed or not.
    """
    return {
        **os.environ,
        "AIORDMA_DEVICE": device_name,
        "PYTHONPATH": str(Path(aiordma.__file__).parents[1]),
        "PYTHONWARNINGS": "error",
    }


def command(name: str, *arguments: str) -> list[str]:
    return [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]


def run_example(environment: dict[str, str], name: str, *arguments: str) -> str:
    done = subprocess.run(
        command(name, *arguments), env=environment, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout


@pytest.mark.any_device
def test_echo(environment: dict[str, str], device_name: str, host: str) -> None:
    with subprocess.Popen(
        command("echo_server", host, "0"),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            listening = re.fullmatch(
                rf"echo server on {device_name}, port (\d+)\n", server.stdout.readline()
            )
            assert listening is not None
            for _ in range(2):
                assert run_example(environment, "echo_client", host, listening[1]) == (
                    f"connected over {device_name} to {host}\n"
                    "0 bytes: the same came back\n"
                    "1 bytes: the same came back\n"
                    "1000 bytes: the same came back\n"
                    "1000000 bytes: the same came back\n"
                    "10000000 bytes: the same came back\n"
                )
                assert server.stdout.readline().startswith("connected: ")
                assert server.stdout.readline().startswith("closed: ")
        finally:
            status = interrupt(server)
            out, err = server.communicate()
    assert (out, err, status) == ("", "", 0)


def test_one_sided(environment: dict[str, str], host: str) -> None:
    assert run_example(environment, "one_sided", host) == (
        "client: I have read 00 01 02 03 04 05 06 07\n"
        "server: my memory is now 04 05 06 07 04 05 06 07\n"
    )


@pytest.mark.any_device
def test_one_sided_without_numpy(environment: dict[str, str], host: str, tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('numpy', name='numpy')")
    without = {**environment, "PYTHONPATH": f"{tmp_path}:{environment['PYTHONPATH']}"}
    assert "04 05 06 07 04 05 06 07" in run_example(without, "one_sided", host)


@pytest.mark.any_device
def test_shared_counter(environment: dict[str, str], host: str) -> None:
    assert run_example(environment, "shared_counter", host) == (
        "the last client found 400\nthe counter is 0\n"
    )


@pytest.mark.any_device
def test_lent_memory(environment: dict[str, str], host: str) -> None:
    assert run_example(environment, "lent_memory", host) == (
        "the client left 00 00 00 00 01 01 01 01\n"
    )


def test_every_example_is_run_here() -> None:
    text = Path(__file__).read_text()
    for example in EXAMPLES.glob("*.py"):
        assert f'"{example.stem}"' in text
