"""Types of frames.pyx: frames and credits."""

from typing import Self, final

from typing_extensions import Buffer

def count_bundled(frame: Buffer) -> int: ...

@final
class Credits:
    def __new__(
        cls,
        data_receives: int,
        control_receives: int,
        peer_data_receives: int,
        peer_control_receives: int,
    ) -> Self: ...
    def sent(self, kind: int) -> tuple[int, int]: ...
    def arrived(self, kind: int, control: int, data: int) -> None: ...
    def posted(self, data: int, control: int) -> None: ...
    def may_send(self) -> tuple[bool, bool, bool]: ...
