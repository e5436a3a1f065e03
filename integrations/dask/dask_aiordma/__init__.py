"""The protocol `rdma://` for Dask, which sends the messages of a cluster over RDMA.

    with LocalCluster(protocol="rdma://") as cluster, Client(cluster) as client: ...

You need not import this package, because `distributed` finds it by its entry point. Import
`Security` only for clusters with a key.
"""

from .security import Security

__all__ = ["Security"]
