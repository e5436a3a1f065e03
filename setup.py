"""The compiled parts of the package; everything else is in pyproject.toml.

cffi sets the limited API for its extension by itself; the wheel's abi3 tag is the bdist_wheel
setting in pyproject.toml. The second one is no Python module but a plain shared library for
LD_PRELOAD, which setuptools builds and ships in the same way (see native/preload.c). Both compile
native/soft, one after the other.
"""

import os
import shlex
from pathlib import Path

from setuptools import Extension, setup

preload = Extension(
    "aiordma._native._preload",
    sources=["native/preload.c", *sorted(map(str, Path("native/soft").glob("*.c")))],
    depends=sorted(map(str, Path("native").rglob("*.h"))),
    include_dirs=["native"],
    define_macros=[("AIORDMA_PRELOAD", "1")],
    libraries=["dl", "pthread"],
    extra_compile_args=[
        "-std=gnu11",
        "-O2",
        "-fvisibility=hidden",
        *shlex.split(os.environ.get("AIORDMA_CFLAGS", "")),
    ],
    # Its own calls are to stay in it, whatever else the process has loaded; and it is complete.
    extra_link_args=[
        "-Wl,-Bsymbolic",
        "-Wl,-z,defs",
        *shlex.split(os.environ.get("AIORDMA_LDFLAGS", "")),
    ],
    py_limited_api=True,
)

setup(cffi_modules=["aiordma/_native/build.py:ffibuilder"], ext_modules=[preload])
