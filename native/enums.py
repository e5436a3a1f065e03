"""Write aiordma/verbs/_device/enums.py from enums.py.in and the declarations parsed by cffi.

lib_source.py imports this module.
"""

import re
from collections.abc import Iterator

from cffi import FFI


def enums(ffi: FFI, template: str) -> Iterator[str]:
    """Yield the lines of enums.py, adding each enumeration's members to the template.

    A line with a prefix and `*` stands for all constants with this prefix. If the docstring of the
    class names a C enumeration, only its constants count.
    """
    everything: dict[str, int] = ffi._parser._int_constants
    base, constants = "", everything
    for line in template.splitlines():
        if head := re.match(r"class \w+\((\w+)\)", line):
            base, constants = head[1], everything
        elif named := re.search(r"``(enum \w+)``", line):
            kind, _ = ffi._parser._declarations[named[1]]
            constants = dict(zip(kind.enumerators, kind.enumvalues, strict=True))
        if prefix := re.fullmatch(r"    (\w+)\*", line):
            for name, value in constants.items():
                if name.startswith(prefix[1]):
                    text = f"1 << {value.bit_length() - 1}" if base == "IntFlag" else value
                    yield f"    {name.removeprefix(prefix[1])} = {text}\n"
        else:
            yield f"{line}\n"
