"""A Dask `Security` object with a key, for authentication and encryption over rdma://."""

from __future__ import annotations

from typing import Any

from distributed.security import Security as _Security


class Security(_Security):
    """A `distributed.Security` object with a key for connections over `rdma://`.

    The client, the scheduler and the workers must all use the same key. A `LocalCluster` passes the
    object to its processes. The object's `repr` and `str` do not include the key.

    Args:
        require_encryption: Whether to refuse unencrypted connections, as in `distributed.Security`.
            The default is True if `encrypt` is True, so that Dask also refuses connections over
            unencrypted protocols such as `tcp://`.
        auth: A key of at least 16 random bytes. Each side of a connection proves that it knows the
            key without sending it.
        encrypt: Whether to encrypt all messages. Encryption requires the extra
            `dask-aiordma[encrypt]`. If `encrypt` is None, each process uses its setting
            `distributed.comm.rdma.encrypt`.
        kwargs: The remaining arguments of `distributed.Security`. If they contain certificates, TLS
            protects the exchange that sets up an RDMA connection.

    Raises:
        TypeError: If `auth` is not a bytes object.
        ValueError: If `auth` is too short.
    """

    # Do not define __slots__. The base class treats `self.__slots__` as the list of its settings.

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
            raise ValueError(f"auth must contain at least 16 random bytes, not {len(auth)} bytes")
        if require_encryption is None and encrypt:
            require_encryption = True
        super().__init__(require_encryption, **kwargs)
        self.auth = auth
        self.encrypt = encrypt

    def get_connection_args(self, role: str) -> dict[str, Any]:
        """Return the arguments for a new connection. `role` is the type of Dask process."""
        return self._with_key(super().get_connection_args(role))

    def get_listen_args(self, role: str) -> dict[str, Any]:
        """Return the arguments for a listener. `role` is the type of Dask process."""
        return self._with_key(super().get_listen_args(role))

    def _with_key(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {**arguments, "auth": self.auth, "encrypt": self.encrypt}
