"""Tests that annotations of the public interface can be evaluated at run time.

Frameworks evaluate them. A name whose import would be circular is written as an attribute of its
package, which loads it at its first use.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any, get_type_hints

import pytest

import aiordma
from aiordma import blocking, cm, mr_pool, prometheus, pytest_plugin, testing, verbs
from aiordma._native import ffi
from aiordma._transport.shares import Share
from aiordma._transport.sharing import Sharing
from aiordma.verbs import raw

CDATA: Any = getattr(ffi, "CData")  # noqa: B009 - the stub has a class for each structure


def public_modules() -> list[str]:
    names = ["aiordma", *(it.name for it in pkgutil.walk_packages(aiordma.__path__, "aiordma."))]
    return [name for name in names if "._" not in name and name != "aiordma.__main__"]


def functions(value: Any) -> list[Any]:
    """Return the functions behind a class attribute, which may be a descriptor."""
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, classmethod | staticmethod):
        return [value.__func__]
    return [value.func] if isinstance(value, cached_property) else [value]


def annotated(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the public functions and classes of a module, and the methods of each class."""
    for name in getattr(module, "__all__", None) or list(vars(module)):
        value = getattr(module, name)
        if isinstance(value, FunctionType) and value.__module__.startswith("aiordma"):
            yield f"{module.__name__}.{name}", value
        if not isinstance(value, type):
            continue
        for owner in value.__mro__:
            if owner.__module__.startswith("aiordma"):
                path = f"{owner.__module__}.{owner.__qualname__}"
                yield path, owner
                for key, attribute in vars(owner).items():
                    for function in functions(attribute):
                        if isinstance(function, FunctionType):
                            yield f"{path}.{key}", function


@pytest.mark.any_device
def test_public_annotations_can_be_evaluated() -> None:
    found = {path: it for name in public_modules() for path, it in annotated(import_module(name))}
    failed = {}
    for path, value in found.items():
        try:
            get_type_hints(value)
        except (NameError, TypeError, AttributeError) as error:
            failed[path] = error
    assert not failed
    assert len(found) > 2000
    for module in (aiordma, blocking, prometheus, pytest_plugin, testing, verbs):
        assert any(path.startswith(f"{module.__name__}.") for path in found)


@pytest.mark.any_device
@pytest.mark.parametrize(
    ("value", "name", "hint"),
    [
        (aiordma.connect, "return", aiordma.Connection),
        (aiordma.ConnectionChange, "connection", aiordma.Connection | None),
        (Share.__init__, "sharing", Sharing),
        (aiordma.AsyncQueuePair.send, "to", verbs.Destination | None),
        (blocking.connect, "return", blocking.Connection),
        (blocking.listen, "return", blocking.Listener),
        (blocking.open_stream, "return", blocking.Stream),
        (blocking.Connection.share, "return", Share),
        (blocking.Connection.register, "return", blocking.Region),
        (cm.ConnectionEvent, "id", cm.ConnectionId),
        (cm.ConnectionId.migrate, "channel", cm.EventChannel),
        (cm.ConnectionParameters.packed, "return", tuple[CDATA, object]),
        (mr_pool.Region.__init__, "mr", verbs.MemoryRegion),
        (pytest_plugin.rdma_faults, "return", testing.Faults),
        (
            verbs.AsyncEvent,
            "element",
            verbs.QueuePair | verbs.CompletionQueue | verbs.SharedReceiveQueue | None,
        ),
        (raw.ibv_post_send, "bad_wr", CDATA | None),
        (verbs.MemoryRegion.rereg, "pd", verbs.ProtectionDomain | None),
    ],
)
def test_type_hints_resolve_to_the_expected_classes(value: Any, name: str, hint: Any) -> None:
    assert get_type_hints(value)[name] == hint


@pytest.mark.any_device
def test_generated_blocking_methods_have_no_type_hints() -> None:
    assert get_type_hints(blocking.Connection.send) == {}
