"""Tests that every example does what its docstring says, in separate processes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pytest

import aiordma
from aiordma import arrays

from ..interrupt import interrupt

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def environment(device_name: str) -> dict[str, str]:
    """Provide an environment that selects the device and reports unclosed objects on stderr.

    Examples import the package under test, whether it is installed or not.
    """
    return {
        **os.environ,
        "AIORDMA_DEVICE": device_name,
        "PYTHONPATH": str(Path(aiordma.__file__).parents[1]),
        "PYTHONWARNINGS": "error",
    }


def command(name: str, *arguments: str) -> list[str]:
    return [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]


def ended(
    environment: dict[str, str], name: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(name, *arguments), env=environment, capture_output=True, text=True, check=False
    )


def run_example(environment: dict[str, str], name: str, *arguments: str) -> str:
    done = ended(environment, name, *arguments)
    assert (done.stderr, done.returncode) == ("", 0)
    return done.stdout


def failed(environment: dict[str, str], name: str, *arguments: str) -> str:
    """Run an example that must fail with status 1. Return its standard error."""
    done = ended(environment, name, *arguments)
    assert (done.stdout, done.returncode) == ("", 1)
    return done.stderr


class Server(NamedTuple):
    output: IO[str]
    port: str


@contextmanager
def serving(environment: dict[str, str], name: str, *arguments: str) -> Iterator[Server]:
    """Run a server that prints its device and port. It must exit silently on Ctrl-C."""
    with subprocess.Popen(
        command(name, *arguments),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            device = environment["AIORDMA_DEVICE"]
            line = process.stdout.readline()
            listening = re.fullmatch(rf"\w+( \w+)? on {device}, port (\d+)\n", line)
            assert listening is not None, line
            yield Server(process.stdout, listening[2])
        finally:
            status = interrupt(process)
            out, err = process.communicate()
    assert (out, err, status) == ("", "", 0)


@pytest.mark.any_device
def test_echo_example_echoes_to_several_clients(
    environment: dict[str, str], device_name: str, host: str
) -> None:
    with serving(environment, "echo_server", host, "0") as server:
        for _ in range(2):
            assert run_example(environment, "echo_client", host, server.port) == (
                f"connected over {device_name} to {host}\n"
                "0 bytes: echo matches\n"
                "1 bytes: echo matches\n"
                "1000 bytes: echo matches\n"
                "1000000 bytes: echo matches\n"
                "10000000 bytes: echo matches\n"
            )
            assert server.output.readline().startswith("connected: ")
            assert server.output.readline().startswith("closed: ")


def test_tensors_example_lists_and_fetches_tensors(
    environment: dict[str, str], host: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    weights = {"sevens": np.full((3, 4), 7, np.float32), "steps": np.arange(5)}
    file.write_bytes(b"".join(bytes(buffer) for buffer in arrays.pack(weights)))
    with serving(environment, "tensors", "serve", str(file), host, "0") as server:
        at = host, server.port
        assert run_example(environment, "tensors", "list", *at) == (
            "steps: I64 [5]\nsevens: F32 [3, 4]\n"
        )
        assert run_example(environment, "tensors", "fetch", *at, "sevens", "steps") == (
            "sevens: 12 values, mean 7\nsteps: 5 values, mean 2\n"
        )
        assert failed(environment, "tensors", "fetch", *at, "eights") == (
            "tensors: no tensor eights in the file\n"
        )


@pytest.mark.any_device
def test_rpc_example_shows_results_errors_and_cancellation(
    environment: dict[str, str], host: str
) -> None:
    with serving(environment, "rpc", "serve", host, "0") as server:
        assert run_example(environment, "rpc", "call", host, server.port) == (
            "squares: [0, 1, 4, 9, 16]\n"
            "wait: no response within 1 second\n"
            "square: TypeError: can't multiply sequence by non-int of type 'str'\n"
        )
        assert server.output.readline() == "the server cancelled the call\n"


def test_key_value_example_prints_stored_values(environment: dict[str, str]) -> None:
    assert run_example(environment, "key_value") == "short 7\nlong 1048576\n"


def test_cache_example_sets_and_gets(environment: dict[str, str], host: str) -> None:
    with serving(environment, "cache", "serve", host, "0") as server:
        at = host, server.port
        assert run_example(environment, "cache", "get", *at, "a") == "a: not in the cache\n"
        assert run_example(environment, "cache", "set", *at, "a", "a value") == "stored\n"
        assert run_example(environment, "cache", "get", *at, "a") == "a: a value\n"
        assert failed(environment, "cache", "set", *at, "a", 1016 * "v") == (
            "cache: key and value together must not exceed 1016 bytes\n"
        )


def loaded(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """Load an example as a module. Without arguments it must exit with its usage message."""
    monkeypatch.setattr(sys, "argv", [name])
    spec = importlib.util.spec_from_file_location(f"{name}_example", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.raises(SystemExit, match=f"{name}.py serve"):
        spec.loader.exec_module(module)
    return module


def test_partially_overwritten_cache_entry_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader may see parts of the old and of the new entry. The checksum detects this."""
    cache = loaded(monkeypatch, "cache")
    before, after = cache.pack(b"key", b"one value"), cache.pack(b"key", b"another value")
    assert cache.unpack(after) == (b"key", b"another value")
    for at in range(1, 8 + 3 + 13):
        mixed = after[:at] + before[at:]
        if mixed not in (before, after):
            assert cache.unpack(mixed) is None


@pytest.mark.any_device
def test_parameter_server_example_converges(environment: dict[str, str], host: str) -> None:
    assert run_example(environment, "parameter_server", host) == (
        "after 1600 steps of 4 workers: w = 2.00, b = 1.00\n"
    )


@pytest.mark.any_device
@pytest.mark.parametrize(
    ("said", "lines"),
    [
        (  # no server
            r"[\w ]+: .+\n",
            [
                "echo_client HOST 1", "tensors fetch HOST 1 1", "rpc call HOST 1",
                "cache get HOST 1 key", "parameter_server HOST 1 1",
            ],
        ),
        (  # usage errors
            r"(?s).*python examples/NAME\.py .*",
            [
                "echo_client", "echo_client HOST 1 2", "echo_server HOST 1 2", "lent_memory HOST 1",
                "parameter_server HOST 1", "rpc call HOST", "rpc reply", "cache get HOST",
                "tensors fetch HOST 1",
            ],
        ),
        (  # invalid ports
            r"[\w ]+: .*(99999|'port').*\n",
            [
                "echo_client HOST 99999", "echo_server HOST port", "parameter_server HOST port 1",
                "rpc call HOST 99999", "cache get HOST port key", "tensors fetch HOST port 1",
            ],
        ),
    ],
)  # fmt: skip
def test_examples_report_errors_without_a_traceback(
    environment: dict[str, str], host: str, said: str, lines: list[str]
) -> None:
    for line in lines:
        name, *arguments = line.replace("HOST", host).split()
        error = failed(environment, name, *arguments)
        assert re.fullmatch(said.replace("NAME", name), error), (line, error)


@pytest.mark.any_device
def test_lent_memory_example_prints_the_written_bytes(
    environment: dict[str, str], host: str
) -> None:
    assert run_example(environment, "lent_memory", host) == (
        "the client left 00 00 00 00 01 01 01 01\n"
    )


def test_every_example_is_tested() -> None:
    text = "".join(tests.read_text() for tests in Path(__file__).parent.glob("test_*.py"))
    for example in EXAMPLES.glob("*.py"):
        assert re.search(rf'"{example.stem}(\.py)?"', text), example
