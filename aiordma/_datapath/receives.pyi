"""Types of receives.pyx: the receives of a connection."""

from typing import final

from .channel import Config, Memory, MessageChannel

RETRY_AFTER: float

@final
class ReceiveQueue:
    def __init__(self, channel: MessageChannel, memory: Memory, config: Config) -> None: ...
    def post_all(self) -> None: ...
    def on_memory(self) -> None: ...
    def end(self) -> None: ...
