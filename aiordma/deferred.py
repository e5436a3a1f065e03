"""Names of a package that are loaded when they are first used (PEP 562).

::

    if TYPE_CHECKING:
        from .device import Device as Device     # what type checkers and editors see
    else:
        __all__, __getattr__, __dir__ = deferred(__name__, {".device": "Device"})

So `import aiordma` takes hardly any time, and a program pays for what it names, when it first
names it. Both halves of the `if` say the same; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from sys import modules
from typing import Any


def deferred(
    package: str, names: Mapping[str, str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """``__all__``, ``__getattr__`` and ``__dir__`` of a package.

    ``names`` has for each module, as after ``from``, the names that it gives, with spaces between.
    The modules of the package itself can be reached by their own names too, as if they had been
    imported, also one that gives no names. A name may not be that of a module of the package:
    importing that would hide it.
    """
    place = {name: module for module, listed in names.items() for name in listed.split()}
    inner = {name[1:] for name in names if name.startswith(".") and "." not in name[1:]}

    def load(name: str) -> Any:
        if name in place:
            value = getattr(import_module(place[name], package), name)
        elif name in inner:
            value = import_module(f".{name}", package)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # Next time it is found without asking here.
        setattr(modules[package], name, value)
        return value

    def offered() -> list[str]:
        return sorted({*vars(modules[package]), *place, *inner})

    return sorted(place), load, offered
