"""The compiled parts of the package; everything else is in pyproject.toml.

cffi sets the limited API for its extension by itself; the wheel's abi3 tag is the bdist_wheel
setting in pyproject.toml. `_fast` is written by hand: types for the hot part (docs/design.md). The
third one is no Python module but a plain shared library for LD_PRELOAD, which setuptools builds and
ships in the same way (see native/preload.c).
"""

import os
import shlex
from pathlib import Path

from setuptools import Extension, setup

HEADERS = sorted(map(str, Path("native").rglob("*.h")))
CFLAGS = [
    "-std=gnu11",
    "-O2",
    "-fvisibility=hidden",
    *shlex.split(os.environ.get("AIORDMA_CFLAGS", "")),
]
LDFLAGS = shlex.split(os.environ.get("AIORDMA_LDFLAGS", ""))


def sources(*patterns: str) -> list[str]:
    return sorted(str(path) for pattern in patterns for path in Path("native").glob(pattern))


fast = Extension(
    "aiordma._native._fast",
    sources=sources("fast/*.c", "post_send.c"),
    depends=HEADERS,
    include_dirs=["native"],
    define_macros=[("Py_LIMITED_API", "0x030b0000")],
    extra_compile_args=CFLAGS,
    extra_link_args=LDFLAGS,
    py_limited_api=True,
)

preload = Extension(
    "aiordma._native._preload",
    sources=sources("preload.c", "soft/*.c"),
    depends=HEADERS,
    include_dirs=["native"],
    define_macros=[("AIORDMA_PRELOAD", "1")],
    libraries=["dl", "pthread"],
    extra_compile_args=CFLAGS,
    # Its own calls are to stay in it, whatever else the process has loaded; and it is complete.
    extra_link_args=["-Wl,-Bsymbolic", "-Wl,-z,defs", *LDFLAGS],
    py_limited_api=True,
)

setup(cffi_modules=["aiordma/_native/build.py:ffibuilder"], ext_modules=[fast, preload])
