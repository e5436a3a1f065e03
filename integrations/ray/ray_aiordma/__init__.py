"""A direct transport for Ray that moves tensors and arrays between actors over RDMA.

ray_aiordma.register()

@ray.remote(enable_tensor_transport=True)
class Model:
    @ray.method(tensor_transport="aiordma")
    def weights(self): return torch.zeros(1000)
"""

from .transport import register

__all__ = ["register"]
