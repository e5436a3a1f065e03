"""The objects of the fast path (native/fast): numbers of requests, read without calling Python.

Of one event loop, not thread-safe.  The members are set by the subclasses; they are plain numbers
to the device, so a wrong one is refused there or is somebody else's memory.
"""

TRANSFER_SIZE: int
"""The longest single request."""

EARLIER: int
"""In a wr_id: not the last request of its run, so it completes only if it fails."""

class Pinned:
    """Memory; `_retire` of the subclass is called when it is neither leased nor pinned any more."""

    def pin(self) -> None:
        """A work request is about to use the memory."""

    def unpin(self) -> None:
        """The work request has been done."""

    def lease(self) -> None:
        """Somebody has it now."""

    def release(self) -> None:
        """The lease is over."""

class Local:
    """Registered memory of this process, or a slice of it.

    `pinned` and `gone` are those of the `root`, which is the object itself unless set; what is
    gone has a `_check` that raises why.
    """

    address: int
    length: int
    lkey: int
    writable: bool
    gone: bool
    pinned: Pinned
    @property
    def root(self) -> Local: ...
    @root.setter
    def root(self, memory: Local) -> None: ...
    def __len__(self) -> int: ...
    def pin(self) -> None:
        """A work request is about to use the memory; raises what `_check` does if it is gone."""

    def unpin(self) -> None:
        """The work request has been done."""

class Remote:
    """Memory of the peer, or a slice of it.  `usable` and `user` are those of the `root`."""

    address: int
    length: int
    rkey: int
    allowed: int
    usable: bool
    user: object
    @property
    def root(self) -> Remote: ...
    @root.setter
    def root(self, memory: Remote) -> None: ...
    def __len__(self) -> int: ...

class Run:
    """One-sided requests that are posted together; their memory is pinned until `release`.

    `user` is what the remote memory must be for.
    """

    user: object
    @property
    def posted(self) -> int:
        """How many of them the device has taken at the last `post_to`."""

    @property
    def lengths(self) -> list[int]:
        """Bytes of each."""

    def __len__(self) -> int: ...
    def write(self, local: object, remote: object, /) -> bool:
        """Adds a write; False, and nothing is added, if it is not plain, or not allowed."""

    def read(self, local: object, remote: object, /) -> bool:
        """The same for a read."""

    def put(
        self,
        opcode: int,
        pinned: Pinned,
        address: int,
        length: int,
        lkey: int,
        remote_address: int,
        rkey: int,
        imm: int,
        compare_add: int = 0,
        swap: int = 0,
        /,
    ) -> None:
        """Adds any request, unchecked."""

    def take(self, run: Run, count: int, /) -> None:
        """Moves the first `count` requests of another one into this one, which has none."""

    def post_to(self, qp: int, extended: int, wr_id: int, /) -> int:
        """By the addresses of the queue pair, and of its extended self or 0: an errno value."""

    def release(self) -> None:
        """The device has let go of all the memory.  Again does nothing."""
