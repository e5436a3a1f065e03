"""Valkey over RDMA for asyncio.

``valkey_aiordma.valkey.RDMAConnection`` is a connection class for valkey-py, that of
``valkey_aiordma.redis`` one for redis-py; ``open_connection`` gives a pair of asyncio streams.
"""

from .stream import ValkeyTransport, open_connection

__all__ = ["ValkeyTransport", "open_connection"]
