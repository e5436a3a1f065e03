"""Access to Valkey over RDMA, for asyncio.

``valkey_aiordma.valkey.RDMAConnection`` is a connection class for valkey-py, and
``valkey_aiordma.redis.RDMAConnection`` is one for redis-py. ``open_connection`` returns a stream
reader and a stream writer, as ``asyncio.open_connection`` does.
"""

from .stream import ValkeyTransport, open_connection

__all__ = ["ValkeyTransport", "open_connection"]
