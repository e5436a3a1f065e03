"""Ray's direct transport over RDMA: tensors and arrays move between actors in one copy.

ray_aiordma.register()

@ray.remote(enable_tensor_transport=True)
class Model:
    @ray.method(tensor_transport="aiordma")
    def weights(self): return torch.zeros(1000)
"""

from .transport import register

__all__ = ["register"]
