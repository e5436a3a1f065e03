"""Tests that every public name is documented."""

from __future__ import annotations

import pytest

from aiordma._transport.remote_memory import RemoteRegion, RemoteSlice
from tests.docs.names import Name, is_described, member_doc, members, on_pages, public, value_doc

NAMES = public()
OFFERED = {name.value for name in NAMES if isinstance(name.value, type)}


def test_every_public_name_has_a_docstring() -> None:
    def doc(name: Name) -> str:
        return name.doc if is_described(name.value) else value_doc(name)

    bare = [name.key for name in NAMES if not doc(name)]
    for cls in OFFERED:
        bare += [member.key for member in members(cls, OFFERED) if not member_doc(member)]
    assert not bare, f"without a docstring: {', '.join(bare)}"


@pytest.mark.parametrize("cls", [RemoteRegion, RemoteSlice])
def test_remote_memory_classes_have_no_undocumented_attributes(cls: type) -> None:
    """Users see these names, for example in a debugger.

    Internal names must begin with an underscore.
    """
    described = {member.name for member in members(cls, OFFERED) if member_doc(member)}
    described |= {each for each in dir(cls) if f"`{each}`" in (cls.__doc__ or "")}
    assert {each for each in dir(cls) if not each.startswith("_")} <= described


def test_every_public_name_is_on_exactly_one_reference_page() -> None:
    """docs/reference has a page for each subject, which docs/_extensions fills for the site."""
    modules, names = on_pages()
    assert sorted(names) == sorted(f"{name.module}.{name.name}" for name in NAMES)
    assert sorted(module for module, _ in modules) == sorted({name.module for name in NAMES})
