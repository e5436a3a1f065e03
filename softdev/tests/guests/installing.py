"""Install the Debian packages of a row, and its PyPI packages into build/guests/venv."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .rows import Software
from .running import HERE
from .table import SOFTWARE

ROOT = Path(__file__).parents[3]
BUILD = ROOT / "build" / "guests"
INSTALL = "apt-get -qq -o DPkg::Lock::Timeout=300 install --no-install-recommends -y"
LIMIT = 900


def call(*words: str) -> str:
    """Run a command and return its output, or fail the test with the output."""
    done = subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        check=False,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
    )
    if done.returncode:
        pytest.fail(
            f"`{' '.join(words)}` ended with {done.returncode}:\n{done.stdout}", pytrace=False
        )
    return done.stdout


def debian_version(package: str) -> str:
    """Return the version of an installed package, or an empty string."""
    query = ["dpkg-query", "--show", "--showformat=${db:Status-Abbrev}${Version}", package]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.removeprefix("ii ") if done.stdout.startswith("ii ") else ""


def environment(software: Software) -> Path:
    """Return the path of the virtual environment for PyPI packages."""
    return BUILD / "venv" / software.name.lower().replace(" ", "-")


@functools.cache
def install(name: str) -> Software:
    """Install the missing packages of a program, and build it if necessary."""
    (software,) = (it for it in SOFTWARE if it.name == name)
    missing = [package for package in software.apt if not debian_version(package)]
    if missing:
        if os.getuid():
            pytest.fail(f"as root: {INSTALL} {' '.join(missing)}", pytrace=False)
        call(*INSTALL.split(), *missing)
    if software.pip:
        folder = environment(software)
        # The file `installed` is created last. If it is missing, the installation starts again in
        # an empty folder, because commands such as `mkdir` fail when they are repeated. An
        # environment cannot be created elsewhere and then renamed, because its programs contain its
        # path.
        if not (folder / "installed").exists():
            shutil.rmtree(folder, ignore_errors=True)
            call(sys.executable, "-m", "venv", str(folder))
            call(str(folder / "bin" / "pip"), "install", "--quiet", *software.pip)
            for words in software.then:
                call(*shlex.split(words.format(venv=folder)))
            (folder / "installed").touch()
    if software.build:
        call(*shlex.split(software.build.format(here=HERE)))
    return software


def version(software: Software) -> str:
    """Return the name, version and source of a program's package, as shown on the page."""
    if software.tells:
        told = re.search(r"v=([\d.]+)", call(*shlex.split(software.tells.format(here=HERE))))
        assert told is not None
        return f"{software.package} {told[1]} (built from Debian's source package)"
    if found := debian_version(software.package):
        return f"{software.package} {found} (Debian)"
    python = environment(software) / "bin" / "python"
    code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    return f"{software.package} {call(str(python), '-c', code, software.package).strip()} (PyPI)"
