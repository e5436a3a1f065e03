"""This side's half of a connection whose endpoints travel by whatever channel there is."""

from __future__ import annotations

from .._core.handshake import Endpoint
from ..config import Config
from ..driver import Driver
from ..errors import ProtocolError
from ..mr_pool import REMOTE_RIGHTS
from .connection import Connection
from .life import Address
from .security import Security
from .side import RETRIES, Side


def make_side(driver: Driver, config: Config, security: Security) -> Side:
    side = Side(driver, config, authenticates=security.auth is not None)
    try:
        side.create_qp(lambda cq, caps: driver.pd.create_qp(cq, cq, caps, reserved=True))
    except BaseException:
        side.close()
        raise
    return side


def make_connection(driver: Driver, config: Config, security: Security) -> tuple[Side, Connection]:
    side = make_side(driver, config, security)
    try:
        return side, Connection(side, config, security)
    except BaseException:
        side.close()
        raise


def local_endpoint(side: Side, address: Address | None) -> Endpoint:
    """The endpoint by the GID of the address that the socket uses, else the best GID there is."""
    assert side.qp is not None
    context = side.driver.context
    try:
        gid = context.find_gid(address[0].partition("%")[0]) if address else context.choose_gid()
    except ValueError:
        gid = context.choose_gid()
    return side.qp.endpoint(
        gid, max_rd_atomic=side.max_rd_atomic, max_dest_rd_atomic=side.max_dest_rd_atomic
    )


def connect_qp(side: Side, connection: Connection, local: Endpoint, remote: Endpoint) -> None:
    """Ready to send and receive; the peer must not send before it is told."""
    assert side.qp is not None
    try:
        side.qp.connect(local, remote, access=REMOTE_RIGHTS, retry_cnt=RETRIES)
    except ValueError as error:
        raise ProtocolError(f"the peer's queue pair does not fit: {error}") from error
    connection._post_receives()
