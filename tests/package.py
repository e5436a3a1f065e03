"""Make the sdist of this commit and its wheels in dist/, and try them.

    python -m tests.package [PYTHON ...]              a wheel with this machine's compiler
    python -m tests.package --manylinux [PYTHON ...]  wheels for every distribution and machine
    python -m tests.package --try [PYTHON ...]        only tries the wheels in dist/
    python -m tests.package --twice [PYTHON ...]      makes all again in a clone: the same bytes

A wheel is made for each interpreter, by default for that of .venv (``--manylinux``: for each one on
the PATH that has C headers). Each wheel is checked. A wheel for this machine is also tried in an
environment without a compiler, which installs it and runs the echo and the README's first program.
The packages of ``integrations`` have no compiled code, so there is one wheel of each. They are
installed beside aiordma and imported.

``--manylinux`` compiles with zig, which has the C libraries of all distributions. For Python, this
is a cross build on either machine: the names and headers come from a description of Python that
this program makes. The headers of one machine also serve the other, because both have the same
sizes of types.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOP = ROOT / "build/package"
DIST = ROOT / "dist"
SOURCE = TOP / "source"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Maps each package in `integrations` to its folder, the extras for its trial installation, and a
# program that imports it.
INTEGRATIONS = {
    "aiordma_kv": ("kv", "", "import aiordma_kv.cli"),
    "dask_aiordma": (
        "dask",
        "",
        "from distributed.comm.registry import get_backend; get_backend('rdma')",
    ),
    "ray_aiordma": ("ray", "", "import ray_aiordma; ray_aiordma.register()"),
    "valkey_aiordma": (
        "valkey",
        "[redis,valkey]",
        "import valkey_aiordma.redis, valkey_aiordma.valkey",
    ),
}
GLIBC = "2.28"  # the first version with statx(2), which `aiordma run` intercepts
MACHINES = {"x86_64": 62, "aarch64": 183}  # elf(5): e_machine
MINORS = range(11, 15)

NEEDED = [
    "py.typed",
    "_native/_lib.pyi",
    "_native/_lib.abi3.so",
    "_native/preload/bin/rdma",
    "_native/preload/libibverbs.so.1",
    "_native/preload/tree/1/dev/infiniband/rdma_cm",
]
NOT_FOR_USERS = re.compile(r"\.(pyx|pxd|c|h|map|pyc)$|/meson\.build$")
README_PROGRAM = re.compile(
    r"^```python\n(.*?)^```\n\nThe program prints `(.*?)`", re.DOTALL | re.MULTILINE
)

DESCRIBE = """
import importlib, json, sys, sysconfig
described = importlib.import_module(sysconfig._get_sysconfigdata_name()).build_time_vars
print(json.dumps({
    "tag": "cp%d%d" % sys.version_info[:2],
    "variables": described,
    "include": sysconfig.get_path("include"),
}))
"""
BUILD = """
import mesonpy, sys
mesonpy.build_wheel(sys.argv[1], {"setup-args": sys.argv[2:]})
"""
CROSS = """
[binaries]
c = ['{here}', '-m', 'ziglang', 'cc', '-target', '{machine}-linux-gnu.{GLIBC}']
ar = ['{here}', '-m', 'ziglang', 'ar']
python = '{inside}'
[built-in options]
c_args = ['-g0'] # else zig adds what debuggers want, twice as much as the rest
c_link_args = ['-g0', '-Wl,--strip-debug'] # that of zig's own objects names folders of this build
[host_machine]
system = 'linux'
cpu_family = '{machine}'
cpu = '{machine}'
endian = 'little'
"""
PRELOADED = """
import ctypes, os
ctypes.CDLL("librdmacm.so").ibv_open_device
os.listdir("/dev/infiniband")
"""


def run(*command: str | Path, **more: str) -> str:
    """Run a command and return its output, or exit if it fails. `more` extends the environment."""
    cwd = more.pop("cwd", str(ROOT))
    done = subprocess.run(
        command,
        env={**os.environ, **more},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit status {done.returncode}\n{done.stdout}")
    return done.stdout


def environment(python: str, folder: Path, *packages: str) -> Path:
    """Create a virtual environment with these packages and return its interpreter."""
    run(python, "-m", "venv", "--clear", folder)
    inside = folder / "bin/python"
    if packages:
        run(inside, "-m", "pip", "install", "--quiet", *packages)
    return inside


# ---- sdist --------------------------------------------------------------------------------------


def make_sdist() -> Path:
    """Build the sdist. It contains exactly the commit's files, so it builds like a clone."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    run(sys.executable, "-c", "import mesonpy; mesonpy.build_sdist('dist')")
    (sdist,) = DIST.iterdir()
    run("tar", "-xf", sdist, "-C", TOP)  # tarfile filters need Python 3.11.4
    (TOP / sdist.name.removesuffix(".tar.gz")).rename(SOURCE)
    commit = {}
    for line in run("git", "ls-tree", "-r", "-z", "HEAD").split("\0")[:-1]:
        fields, name = line.split("\t")
        commit[name] = fields.split()[2]
    names = sorted(
        str(it.relative_to(SOURCE)) for it in SOURCE.rglob("*") if it.is_symlink() or it.is_file()
    )
    names.remove("PKG-INFO")
    same = run("git", "hash-object", "--no-filters", *names, cwd=str(SOURCE)).split()
    there = dict(zip(names, same, strict=True))
    if there != commit:
        different = sorted({name for name, _ in there.items() ^ commit.items()})
        sys.exit(f"{sdist.name} differs from the commit: {', '.join(different)}")
    return sdist


# ---- wheels -------------------------------------------------------------------------------------


def make_wheel(python: str, sdist: Path) -> Path:
    """Build a wheel for this machine and distribution."""
    inside, made = environment(python, TOP / "build"), TOP / "made"
    run(inside, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", made, sdist)
    (wheel,) = made.iterdir()
    return Path(shutil.move(wheel, DIST))


def make_manylinux(python: str, machines: list[str]) -> list[Path]:
    """Build a manylinux wheel for each machine."""
    requires = PYPROJECT["build-system"]["requires"]
    inside = environment(python, TOP / "build", *requires, "ninja")
    described = json.loads(run(inside, "-c", DESCRIBE))
    theirs = Path(described["include"])
    ours = TOP / "include" / theirs.name
    shutil.copytree(theirs, ours, dirs_exist_ok=True)
    # On Debian, pyconfig.h only includes a machine-specific header from another folder. Replace
    # pyconfig.h with that header.
    real = theirs.parent / described["variables"].get("MULTIARCH", "") / theirs.name / "pyconfig.h"
    if real.exists():
        shutil.copy(real, ours)
    return [compile_manylinux(inside, described["variables"], ours, it) for it in machines]


def compile_manylinux(inside: Path, variables: dict[str, object], include: Path, to: str) -> Path:
    """Build a wheel for the machine `to`. auditwheel checks that it supports old distributions."""
    top = TOP / to
    shutil.rmtree(top, ignore_errors=True)
    (top / "made").mkdir(parents=True)
    of_target = {
        name: re.sub("|".join(MACHINES), to, value) if isinstance(value, str) else value
        for name, value in variables.items()
    } | {"INCLUDEPY": str(include)}
    (top / "_sysconfigdata_target.py").write_text(f"build_time_vars = {of_target!r}\n")
    cross = top / "cross.ini"
    cross.write_text(CROSS.format(here=sys.executable, machine=to, GLIBC=GLIBC, inside=inside))
    run(
        *(inside, "-c", BUILD, top / "made", f"--cross-file={cross}"),
        cwd=str(SOURCE),
        PATH=f"{inside.parent}:{os.environ['PATH']}",
        PYTHONPATH=str(top),
        _PYTHON_SYSCONFIGDATA_NAME="_sysconfigdata_target",
        _PYTHON_HOST_PLATFORM=f"linux-{to}",
        ZIG_GLOBAL_CACHE_DIR=str(ROOT / "build/zig"),
        ZIG_LOCAL_CACHE_DIR=str(ROOT / "build/zig"),
    )
    (made,) = (top / "made").glob("*.whl")
    shown = " ".join(run(sys.executable, "-m", "auditwheel", "show", made).split())
    found = re.search(rf'platform tag: "(manylinux_2_(\d+)_{to})"', shown)
    if not found or int(found[2]) > int(GLIBC.removeprefix("2.")):
        sys.exit(f"{made.name} does not run with glibc {GLIBC}: {shown}")
    # `auditwheel repair` is not used, because it supports only this machine's platform tags.
    tagged = run(sys.executable, "-m", "wheel", "tags", "--platform-tag", found[1], made)
    return Path(shutil.move(made.with_name(tagged.split()[-1]), DIST))


def make_integration(package: str) -> Path:
    """Build the sdist of an integration, and a wheel from this sdist."""
    folder, _, _ = INTEGRATIONS[package]
    hatchling = (sys.executable, "-m", "hatchling", "build", "--directory", DIST, "--target")
    run(*hatchling, "sdist", cwd=str(SOURCE / "integrations" / folder))
    (sdist,) = DIST.glob(f"{package}-*.tar.gz")
    run("tar", "-xf", sdist, "-C", TOP)
    run(*hatchling, "wheel", cwd=str(TOP / sdist.name.removesuffix(".tar.gz")))
    (wheel,) = DIST.glob(f"{package}-*.whl")
    return wheel


# ---- checks -------------------------------------------------------------------------------------


def check(wheel: Path) -> None:
    """Check the files in the wheel, and that its libraries suit the machine in its name."""
    machine = next(it for it in MACHINES if it in wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        data = f"aiordma-{PYPROJECT['project']['version']}.data/data"
        manual = [f"{data}/share/man/man1/{it.name}" for it in (ROOT / "docs/man").iterdir()]
        needed = [*(f"aiordma/{it}" for it in NEEDED), *manual]
        missing = [it for it in needed if it not in names]
        too_much = [it for it in names if NOT_FOR_USERS.search(it)]
        libraries = [it for it in names if re.search(r"\.so(\.1)?$", it)]
        others = [
            it
            for it in libraries
            if int.from_bytes(archive.read(it)[18:20], "little") != MACHINES[machine]
            or ("cpython" in it and machine not in it)
        ]
    for what, which in {
        "lacks": missing,
        "has files that a user does not need": too_much,
        f"has files that are not for {machine}": others,
    }.items():
        if which:
            sys.exit(f"{wheel.name} {what}: {', '.join(which)}")


def check_integration(wheel: Path) -> None:
    """Check that an integration's wheel and its metadata match this release of aiordma."""
    aiordma = PYPROJECT["project"]
    package = wheel.name.partition("-")[0]
    told = f"{package}-{aiordma['version']}.dist-info"
    if not wheel.name.startswith(f"{package}-{aiordma['version']}-py3-none-any."):
        sys.exit(f"{wheel.name} is not for every Python, or not version {aiordma['version']}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = message_from_string(archive.read(f"{told}/METADATA").decode())
        licence = f"{told}/licenses/LICENSE"
        licensed = licence in names and archive.read(licence) == (ROOT / "LICENSE").read_bytes()
    needed = f"aiordma>={aiordma['version']}"
    wrong = {
        f"does not depend on {needed}": needed not in metadata.get_all("Requires-Dist", []),
        "has another licence": metadata["License-Expression"] != aiordma["license"],
        "lacks the text of the licence": not licensed,
        "is for other versions of Python": metadata["Requires-Python"]
        != aiordma["requires-python"],
        "lacks py.typed": f"{package}/py.typed" not in names,
        "has files of no package": not all(it.startswith((f"{package}/", told)) for it in names),
    }
    if any(wrong.values()):
        sys.exit(f"{wheel.name} {', '.join(what for what, it_is in wrong.items() if it_is)}")


def try_wheel(python: str) -> None:
    """Install this Python's wheel without a compiler, and run the README's first steps."""
    tag = json.loads(run(python, "-c", DESCRIBE))["tag"]
    (wheel,) = DIST.glob(f"*-{tag}-*{platform.machine()}.whl")
    inside = environment(python, TOP / "try")
    bare = {"PATH": str(inside.parent), "CC": "false", "CXX": "false", "cwd": "/"}
    install = ("install", "--quiet", "--only-binary", ":all:", f"{wheel}[cli]")
    run(inside, "-m", "pip", *install, **bare)
    found = README_PROGRAM.search((ROOT / "README.md").read_text())
    assert found
    program, output = found.groups()
    printed = run(inside, "-W", "error", "-c", program, **bare, AIORDMA_DEVICE="embedded0")
    if printed != f"{output}\n":
        sys.exit(f"the first program of the README printed {printed!r}, not {output}")
    aiordma = inside.parent / "aiordma"
    print(run(aiordma, "echo", **bare))
    run(aiordma, "run", inside, "-c", PRELOADED, **bare)
    print(f"{wheel.name}: installed without a compiler and tried")
    beside = [
        f"{made}{extras}"
        for package, (_, extras, _) in INTEGRATIONS.items()
        for made in DIST.glob(f"{package}-*.whl")
    ]
    run(inside, "-m", "pip", *install[:-1], "--no-compile", *beside, **bare)
    run(inside, "-m", "pip", "check", **bare)
    for _, _, program in INTEGRATIONS.values():
        run(inside, "-c", program, **bare)
    print(f"{', '.join(INTEGRATIONS)}: installed beside it and tried")


def make_again(commit: str, arguments: list[str]) -> None:
    """Build everything again from a clone in another folder. All files must be identical."""
    again = TOP / "again"
    run("git", "clone", "--quiet", ROOT, again)
    run("git", "checkout", "--quiet", commit, cwd=str(again))
    run(sys.executable, "-m", "tests.package", "--make", *arguments, cwd=str(again))
    first, second = (
        {it.name: hashlib.sha256(it.read_bytes()).hexdigest() for it in folder.iterdir()}
        for folder in (DIST, again / "dist")
    )
    if different := sorted({name for name, _ in first.items() ^ second.items()}):
        sys.exit(f"not the same when made again in {again}: {', '.join(different)}")
    print(f"made twice, in two folders, with the same bytes: {', '.join(sorted(first))}")


def usable() -> list[str]:
    """Return the interpreters on the PATH for which wheels can be built."""
    names = [f"python3.{minor}" for minor in MINORS]
    have_headers = "import sysconfig, os; os.stat(sysconfig.get_path('include') + '/Python.h')"
    found = [
        name
        for name in names
        if shutil.which(name)
        and not subprocess.run(
            [name, "-c", have_headers], capture_output=True, check=False
        ).returncode
    ]
    missing = [it for it in names if it not in found]
    print(f"wheels with {', '.join(found)}; without C headers here: {', '.join(missing) or 'none'}")
    return found


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m tests.package")
    options.add_argument("pythons", nargs="*", metavar="PYTHON")
    options.add_argument("--manylinux", action="store_true")
    options.add_argument("--machines", nargs="+", choices=MACHINES, default=list(MACHINES))
    parts = options.add_mutually_exclusive_group()
    parts.add_argument("--try", action="store_true", dest="only_try")
    parts.add_argument("--make", action="store_true", dest="only_make")
    parts.add_argument("--twice", action="store_true")
    arguments = options.parse_args()
    # Use the commit's time in archives and compiler output, so that builds are reproducible.
    commit, its_time = run("git", "log", "-1", "--format=%H %ct").split()
    os.environ.setdefault("SOURCE_DATE_EPOCH", its_time)
    pythons = arguments.pythons or (usable() if arguments.manylinux else [sys.executable])
    if not arguments.only_try:
        shutil.rmtree(TOP, ignore_errors=True)
        TOP.mkdir(parents=True)
        sdist = make_sdist()
        for python in pythons:
            if arguments.manylinux:
                wheels = make_manylinux(python, arguments.machines)
            else:
                wheels = [make_wheel(python, sdist)]
            for wheel in wheels:
                check(wheel)
        for package in INTEGRATIONS:
            check_integration(make_integration(package))
    if arguments.twice:
        make_again(commit, [it for it in sys.argv[1:] if it != "--twice"])
    for python in [] if arguments.only_make else pythons:
        try_wheel(python)
    for made in sorted(DIST.iterdir()):
        print(f"{made.stat().st_size / 1e6:5.1f} MB  {made.name}")


if __name__ == "__main__":
    main()
