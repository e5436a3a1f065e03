from abc import ABC, abstractmethod
from typing import Any


class MemoryObj(ABC):
    @abstractmethod
    def get_size(self) -> int: ...

    @property
    @abstractmethod
    def byte_array(self) -> Any: ...
