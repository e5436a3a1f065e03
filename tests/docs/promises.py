"""The errors that the docstrings of the public names document.

The rule: an exception that the docstring of a function, method or property names is one that it
raises; one that the docstring of a class names is one that some method of it raises.
"""

from __future__ import annotations

import asyncio
import builtins
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiordma.errors

from .names import Member, is_described, members, own_doc, public

_NAMED = re.compile(r"(?<![\w.])(?:asyncio\.)?([A-Z]\w*(?:Error|Exception))\b")


def exception(name: str) -> type[BaseException] | None:
    """The exception of that name, of aiordma or built in."""
    for module in (aiordma.errors, builtins, asyncio):
        value = getattr(module, name, None)
        if isinstance(value, type) and issubclass(value, BaseException):
            return value
    return None


def named_in(doc: str) -> list[type[BaseException]]:
    """The exceptions that a docstring names, once each, in its order."""
    found = (exception(match[1]) for match in _NAMED.finditer(doc))
    return list(dict.fromkeys(error for error in found if error))


@dataclass(frozen=True)
class Promise:
    """``key`` is the place of definition; ``function`` or one of ``callables`` raises
    ``errors``."""

    key: str
    errors: tuple[type[BaseException], ...]
    callables: tuple[Member, ...] = ()
    function: Callable[..., Any] | None = None

    def kept_by(self, raised: BaseException) -> str | None:
        """The name of the documented error that matches: the nearest class."""
        for kind in type(raised).__mro__:
            if kind in self.errors:
                return kind.__name__
        return None


@functools.cache
def promises() -> dict[str, Promise]:
    """All documented errors, by key."""
    return {promise.key: promise for promise in _promises() if promise.errors}


def _promises() -> Iterator[Promise]:
    names = public()
    offered = {name.value for name in names if isinstance(name.value, type)}
    for name in names:
        if name.is_exception or not is_described(name.value):
            continue
        errors = tuple(named_in(name.doc))
        if not isinstance(name.value, type):
            yield Promise(name.key, errors, function=name.value)
            continue
        every = tuple(members(name.value, offered))
        made = vars(name.value).get("__init__")
        constructor = (Member("__init__", made, name.value),) if made else ()
        yield Promise(name.key, errors, callables=(*constructor, *every))
        for member in every:
            yield Promise(member.key, tuple(named_in(own_doc(member.value))), callables=(member,))
