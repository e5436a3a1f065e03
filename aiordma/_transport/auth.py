"""The security requirements of a connection, and the tickets of its handshake.

The requirements are the key, encryption, TLS for the TCP bootstrap, and the use of messages or of a
stream.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config import Encrypt

NOT_THE_SAME_KEY = "the peer reports that it has a different key"

if TYPE_CHECKING:
    from .._core.admission import TicketValidator


@dataclass(frozen=True, slots=True)
class Security:
    """The security requirements of one side.

    `auth` is the pre-shared key or None. `tls` is the context for the TCP bootstrap or None.
    `encrypt` is True, False, or "messages", which allows unencrypted operations on memory.
    """

    auth: bytes | None = None
    tls: ssl.SSLContext | None = None
    hostname: str | None = None
    """The name that the connecting side expects in the certificate."""
    encrypt: Encrypt = False
    stream: bool = False
    """Whether both sides are byte streams (aiordma.streams)."""
    inspects: bool = False
    """Whether this side is a listener whose application inspects requests (inspection.py)."""

    def __post_init__(self) -> None:
        if self.auth is not None:
            from .._core.authentication import check_key  # noqa: PLC0415 - it loads OpenSSL

            check_key(self.auth)
        self._check_encrypt()
        if self.tls is not None and not isinstance(self.tls, ssl.SSLContext):
            raise TypeError(f"ssl must be an ssl.SSLContext, not {type(self.tls).__name__}")

    def _check_encrypt(self) -> None:
        if self.encrypt not in (False, True, "messages"):
            raise ValueError(f'encrypt must be True, False or "messages", not {self.encrypt!r}')
        if not self.encrypt:
            return
        if self.auth is None:
            raise ValueError("encrypt= needs auth=, a key that both sides share")
        try:
            from . import encryption  # noqa: F401, PLC0415 - it needs a package
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"encrypt= requires the {error.name} package: pip install 'aiordma[encrypt]'",
                name=error.name,
            ) from error

    @property
    def memory_in_clear(self) -> bool:
        """Whether unencrypted operations on memory are allowed on an encrypted connection."""
        return self.encrypt == "messages"


NO_SECURITY = Security()


def new_ticket(
    key: bytes, challenge: bytes, offer: bytes, random: Callable[[int], bytes] = os.urandom
) -> bytes:
    """Return a client's ticket for `offer`. Raises ProtocolError if the challenge is invalid."""
    from .._core import admission  # noqa: PLC0415 - it loads OpenSSL

    unpacked = admission.Challenge.unpack(challenge)
    return admission.ticket(key, unpacked, offer, random(admission.SALT_SIZE))


def new_ticket_validator(
    key: bytes, random: Callable[[int], bytes] = os.urandom
) -> TicketValidator:
    """Create the challenge and ticket validator of a listener or of a single TCP socket."""
    from .._core import admission  # noqa: PLC0415 - it loads OpenSSL

    return admission.TicketValidator(key, random)
