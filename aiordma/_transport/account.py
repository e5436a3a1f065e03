"""The credits of a connection, with their numbers where C finds them."""

from __future__ import annotations

from .._core.credits import Credits
from .._native import Account as Numbers


class Account(Credits, Numbers):
    """The rules are `Credits`'; of frames with messages that keep to them C takes care itself."""

    __slots__ = ()
