"""Detection of ctypes types that contain addresses.

The buffer format does not always reveal them. For a union, or a structure with `_pack_`, the format
is just "B".
"""

from __future__ import annotations

import ctypes
from typing import Any

# The `_type_` codes of py_object, c_void_p, c_char_p and c_wchar_p.
_ADDRESS_CODES = frozenset("OPzZ")


def has_addresses(kind: Any) -> bool:
    """Return whether objects of this type contain pointers or Python objects."""
    if issubclass(kind, ctypes.Array):
        return has_addresses(kind._type_)
    if issubclass(kind, ctypes.Structure | ctypes.Union):
        fields = [field for base in kind.__mro__ for field in vars(base).get("_fields_", ())]
        return any(has_addresses(field_type) for _, field_type, *_ in fields)
    if issubclass(kind, ctypes._SimpleCData):
        return kind._type_ in _ADDRESS_CODES
    return True  # a pointer or function type
