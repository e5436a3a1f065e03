"""Types of rendezvous.pyx: the memory of rendezvous messages that this side sends."""

from typing import final

from .channel import Memory

@final
class RendezvousMemory:
    def __init__(self, memory: Memory) -> None: ...

def count_fork() -> None: ...
