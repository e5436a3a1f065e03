"""`rdma://` for Dask: the protocol of a cluster whose messages travel by RDMA.

    with LocalCluster(protocol="rdma://") as cluster, Client(cluster) as client: ...

Nothing has to be imported for that: `distributed` finds the backend by its entry point.  `Security`
is for clusters with a key.
"""

from .security import Security

__all__ = ["Security"]
