"""A connection class for redis-py: ``ConnectionPool(connection_class=RDMAConnection, ...)``."""

from redis.asyncio.connection import Connection

from .connection import OverRDMA


class RDMAConnection(OverRDMA, Connection):
    """A redis-py connection to a Valkey server's RDMA port; see ``OverRDMA``."""
