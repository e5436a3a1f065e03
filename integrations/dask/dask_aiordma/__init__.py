"""`rdma://` for Dask: the protocol of a cluster whose messages are sent over RDMA.

    with LocalCluster(protocol="rdma://") as cluster, Client(cluster) as client: ...

Nothing has to be imported, because `distributed` finds the backend by its entry point. Import
`Security` for clusters with a key.
"""

from .security import Security

__all__ = ["Security"]
