"""Write type stubs for the names that packages import lazily.

::

    python exports_stub.py FOLDER PACKAGE/__init__.py ...

meson runs this program. The names come from the package's `lazy_exports` call, and the stub is
aiordma/_exports/NAME.
"""

import ast
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def stub(source: str, package: str) -> Iterator[str]:
    """Yield an import statement for each name that the source of a package exports lazily."""
    yield '"""Written by native/exports_stub.py."""\n'
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "lazy_exports":
            for module, names in ast.literal_eval(node.args[1]).items():
                full = package + module if module.startswith(".") else module
                for name in names.split():
                    yield f"from {full} import {name} as {name}"


folder, files = Path(sys.argv[1]), [Path(it).resolve() for it in sys.argv[2:]]
for path in files:
    root = next(it for it in path.parents if it.name == "aiordma")
    package = ".".join(path.parent.relative_to(root.parent).parts)
    text = "\n".join([*stub(path.read_text(), package), ""])
    (folder / f"{path.parent.name}.pyi").write_text(text)
    # In a checkout, type checkers look for stubs next to the sources, not in the build folder.
    if (root.parent / ".git").exists():
        with suppress(OSError):  # the checkout may be read-only
            (root / "_exports").mkdir(exist_ok=True)
            (root / "_exports" / f"{path.parent.name}.pyi").write_text(text)
