"""A connection class for valkey-py: ``ConnectionPool(connection_class=RDMAConnection, ...)``."""

from valkey.asyncio.connection import Connection

from .connection import OverRDMA


class RDMAConnection(OverRDMA, Connection):
    """A valkey-py connection to a Valkey server's RDMA port; see ``OverRDMA``."""
