"""Attributes of devices as values of JSON, and GUIDs and flags as text."""

from __future__ import annotations

from enum import IntEnum, IntFlag

from aiordma import verbs


def guid_text(guid: int) -> str:
    """As ibv_devinfo(1) writes it: 0200:00ff:feec:db70."""
    digits = f"{guid:016x}"
    return ":".join(digits[at : at + 4] for at in range(0, 16, 4))


def flag_names(flags: IntFlag) -> list[str]:
    """The names of the bits that are set; unnamed bits as one number."""
    known = list(flags)
    rest = int(flags) & ~sum(int(flag) for flag in known)
    return [str(flag.name) for flag in known] + ([f"{rest:#x}"] if rest else [])


def json_value(value: object) -> object:
    """A value for JSON: enumerations and flags by name, an MTU in bytes, GUIDs as text."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {
            name: guid_text(found) if name.endswith("_guid") else json_value(found)
            for name, found in value._asdict().items()
        }
    if isinstance(value, IntFlag):
        return flag_names(value)
    if isinstance(value, verbs.MTU):
        return value.bytes
    if isinstance(value, IntEnum):
        return value.name
    if isinstance(value, frozenset):
        return sorted(str(json_value(each)) for each in value)
    return value
