"""A `Security` of Dask with a key, which clusters on rdma:// can authenticate and encrypt with."""

from __future__ import annotations

from typing import Any

from distributed.security import Security as _Security


class Security(_Security):
    """As `distributed.Security`, with a key for connections of the protocol `rdma://`.

    `auth` is a key of at least 16 random bytes: each side of a connection proves that it has it,
    without sending it.  `encrypt=True` encrypts all messages too, which needs the extra
    `dask-aiordma[encrypt]`, and sets `require_encryption` unless that is given, so that no other
    protocol is used in clear instead; None: as each process's `distributed.comm.rdma.encrypt` says,
    when it connects or listens.  All other arguments are those of `distributed.Security`; its
    certificates put TLS on the exchange before a connection.

    Client, scheduler and workers need the same one; a `LocalCluster` hands it to its processes.
    Neither `repr` nor `str` shows the key.  TypeError and ValueError for what is no key.
    """

    # No __slots__: the base class reads those of the instance as the names of its own settings.

    def __init__(
        self,
        require_encryption: bool | None = None,
        *,
        auth: bytes,
        encrypt: bool | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(auth, bytes):
            raise TypeError(f"auth must be a key of type bytes, not {type(auth).__name__}")
        if len(auth) < 16:
            raise ValueError(f"auth has {len(auth)} bytes; a key needs at least 16 random bytes")
        if require_encryption is None and encrypt:
            require_encryption = True
        super().__init__(require_encryption, **kwargs)
        self.auth = auth
        self.encrypt = encrypt

    def get_connection_args(self, role: str) -> dict[str, Any]:
        """The arguments of a connection that is made."""
        return self._with_key(super().get_connection_args(role))

    def get_listen_args(self, role: str) -> dict[str, Any]:
        """The arguments of a listener."""
        return self._with_key(super().get_listen_args(role))

    def _with_key(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {**arguments, "auth": self.auth, "encrypt": self.encrypt}
