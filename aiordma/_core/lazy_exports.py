"""Package exports that are imported on first use (PEP 562).

::

    if TYPE_CHECKING:
        from aiordma._exports.verbs import *     # a stub, which the build makes of the table below
    else:
        __all__, __getattr__, __dir__ = lazy_exports(__name__, {".device": "Device"})

As a result, `import aiordma` takes hardly any time, and a program only pays for a name when it
first uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from sys import modules
from typing import Any


def lazy_exports(
    package: str, names: Mapping[str, str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` for a package.

    ``names`` maps each module, as it is written after ``from``, to a space-separated list of its
    exports. Submodules are accessible as attributes as well, even if they export nothing. An
    export must not have the name of a submodule, because importing that submodule would hide it.
    """
    module_of = {name: module for module, exports in names.items() for name in exports.split()}
    submodules = {
        module[1:] for module in names if module.startswith(".") and "." not in module[1:]
    }

    def load(name: str) -> Any:
        if name in module_of:
            value = getattr(import_module(module_of[name], package), name)
        elif name in submodules:
            value = import_module(f".{name}", package)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # Store the attribute in the package, so that later accesses bypass `__getattr__`.
        setattr(modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted({*vars(modules[package]), *module_of, *submodules})

    return sorted(module_of), load, listed
