"""The checked calls of single providers' own libraries: :mod:`.calls` for what is optional."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .calls import Convention, checked, failure

if TYPE_CHECKING:
    from . import handles as h

PROVIDER_CONVENTIONS: Mapping[str, Convention] = MappingProxyType(
    {
        "efadv_query_device": Convention.ERRNO,
        "efadv_create_qp_ex": Convention.POINTER,
        "mlx5dv_create_qp": Convention.POINTER,
        "mlx5dv_qp_ex_from_ibv_qp_ex": Convention.PLAIN,
    }
)
"""How each says that it failed: efadv_*(3), mlx5dv_*(3)."""


def _missing(verb: str) -> Callable[..., Any]:
    library = f"lib{verb.partition('dv_')[0]}.so.1"

    def missing(*arguments: object) -> None:
        raise failure(verb, errno.ENOSYS, f"{verb}: {library} is not there, or too old to have it")

    return missing


class ProviderCalls:
    """Each raises :class:`VerbsError`; UnsupportedError where the library or the call is missing,
    or the device is another provider's.
    """

    efadv_query_device: Callable[[h.ContextPointer, h.EFADeviceAttr, int], None]
    efadv_create_qp_ex: Callable[
        [h.ContextPointer, h.QPInitAttrEx, h.EFAQPInitAttr, int], h.QPPointer
    ]
    mlx5dv_create_qp: Callable[[h.ContextPointer, h.QPInitAttrEx, h.Mlx5QPInitAttr], h.QPPointer]
    mlx5dv_qp_ex_from_ibv_qp_ex: Callable[[h.QPExPointer], h.Mlx5QPExPointer]

    def __init__(self, table: h.ProviderCallsPointer) -> None:
        for verb, convention in PROVIDER_CONVENTIONS.items():
            call = getattr(table, verb)
            setattr(self, verb, checked(verb, call, convention) if call else _missing(verb))
