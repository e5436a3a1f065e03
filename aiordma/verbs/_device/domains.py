"""Thread domains and parent domains, which let the device's library skip locking."""

from __future__ import annotations

from typing import Any

from aiordma import verbs
from aiordma._core.arguments import instance
from aiordma._native import ffi
from aiordma._native import handles as h

from .protection_domain import ProtectionDomain
from .resource import Node, Resource


class ThreadDomain(Resource[h.ibv_td]):
    """A promise to use the objects created in this domain from only one thread at a time.

    See ibv_alloc_td(3).
    """

    def __init__(self, context: verbs.Context) -> None:
        calls = context.library.calls
        attr = ffi.new("struct ibv_td_init_attr *")
        with context._requires_capability("thread domains"):
            pointer = calls.ibv_alloc_td(context.pointer, attr)
        self.context = context
        super().__init__(Node("ThreadDomain", pointer, calls.ibv_dealloc_td, [context.node]))


class ParentDomain(ProtectionDomain):
    """A protection domain that combines the protection domain ``pd`` with a thread domain.

    Objects created in a parent domain belong to ``pd``. Its queue pairs can use ``pd``'s memory
    regions. See ibv_alloc_parent_domain(3).
    """

    def __init__(self, pd: ProtectionDomain, td: ThreadDomain | None) -> None:
        instance("pd", pd, ProtectionDomain, "a ProtectionDomain (from Context.alloc_pd)")
        attr = ffi.new("struct ibv_parent_domain_init_attr *")
        attr.pd = pd.pointer
        attr.td = td.pointer if td else ffi.NULL
        context = pd.context
        with context._requires_capability("parent domains"):
            pointer = context.library.calls.ibv_alloc_parent_domain(context.pointer, attr)
        self.pd = pd
        self.td = td
        parents: list[Node[Any]] = [pd.node] if td is None else [pd.node, td.node]
        super().__init__(context, pointer, parents)

    def _label(self) -> str:
        return f"ParentDomain of {self.context.name}"
