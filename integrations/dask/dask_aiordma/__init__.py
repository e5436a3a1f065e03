"""The protocol `rdma://` for Dask, which sends a cluster's messages over RDMA.

    with LocalCluster(protocol="rdma://") as cluster, Client(cluster) as client: ...

You do not have to import this package, because `distributed` finds it through its entry point.
Import it only to use `Security`, for clusters with a key.
"""

from .security import Security

__all__ = ["Security"]
