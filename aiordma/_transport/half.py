"""This side's half of a connection whose endpoints travel by whatever channel there is."""

from __future__ import annotations

from .._core.handshake import Endpoint
from .._loop.driver import Driver
from ..config import Config
from ..errors import ProtocolError
from ..mr_pool import REMOTE_RIGHTS
from .connection import Connection
from .lifecycle import Address, Link
from .security import Security
from .side import RETRIES, Side


class Half:
    """First its `endpoint` is there, and can be told; then `make` it, and `connect` it.

    Whoever does not go on with it has to `give_up`.
    """

    def __init__(
        self,
        driver: Driver,
        config: Config,
        security: Security,
        address: Address | None,
        *,
        takes_asks: bool = False,
    ) -> None:
        """Takes over one use of `driver`.

        To be reached by the GID of `address`, or the best one if there is none of it.
        """
        side = Side(driver, config, authenticates=security.auth is not None, takes_asks=takes_asks)
        context = driver.context
        try:
            qp = side.create_qp(lambda cq, caps: driver.pd.create_qp(cq, cq, caps, reserved=True))
            try:
                host = address[0].partition("%")[0] if address else ""
                gid = context.find_gid(host) if host else context.choose_gid()
            except ValueError:
                gid = context.choose_gid()
            self.endpoint: Endpoint = qp.endpoint(
                gid, max_rd_atomic=side.max_rd_atomic, max_dest_rd_atomic=side.max_dest_rd_atomic
            )
        except BaseException:
            side.close()
            raise
        self.hello = side.hello
        self._side = side
        self._qp = qp
        self._config = config
        self._security = security
        self._connection: Connection | None = None

    def make(self) -> Connection:
        """The connection: all of it that needs not know the peer."""
        self._connection = Connection(self._side, self._config, self._security)
        return self._connection

    def connect(self, remote: Endpoint) -> None:
        """Ready to send and receive; the peer must not send before it is told."""
        assert self._connection is not None
        try:
            self._qp.connect(self.endpoint, remote, access=REMOTE_RIGHTS, retry_cnt=RETRIES)
        except ValueError as error:
            raise ProtocolError(f"the peer's queue pair does not fit: {error}") from error
        self._connection._post_receives()

    def give_up(self, link: Link, error: BaseException) -> None:
        """All of it goes, and `link` with it."""
        if self._connection is not None:
            self._connection._give_up(link, error)
        else:
            self._side.close()
            link.release()
