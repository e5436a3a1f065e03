"""The base classes for all objects that represent a resource on a device.

The object visible to the user (a :class:`Resource`) refers to a :class:`Node`. The node holds the C
pointer, the function that destroys the C object, and the nodes created from it. Nodes have strong
references to their children and weak references to their parents, and a resource keeps its parents
alive. This avoids reference cycles, so an object is freed as soon as its last reference is dropped.
Closing a parent also closes children whose Python object no longer exists. Memory pinned by a node,
such as memory registered by the user, stays pinned until the device has released it.

Finalizers only issue warnings. They do not close anything, because a C call may block, and because
other modules may be unusable during interpreter shutdown. If a root is dropped without being
closed, it is deliberately leaked together with all nodes below it, and its memory stays pinned. The
exiting interpreter still frees this memory, in arbitrary order, while the device's threads are
running. All open queue pairs are therefore reset before that happens.
"""

from __future__ import annotations

import atexit
import errno
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Generic, Self, TypeVar

from aiordma._native import ffi, fork
from aiordma.errors import BufferStateError

P = TypeVar("P")

# For each class, a list with one element per open object. Appending to a list and popping from it
# are atomic. A counter would need a lock, and a finalizer would deadlock if its own thread already
# held that lock.
_open_markers: dict[str, list[None]] = {}
_roots: weakref.WeakSet[Node[Any]] = weakref.WeakSet()
_abandoned: list[Node[Any]] = []
_halted = False  # whether `_halt_all` has started
_remember_creation_stacks = sys.flags.dev_mode


def live() -> dict[str, int]:
    """Return the number of open objects of each class, to check for leaks.

    An object dropped without being closed is also counted, because it still exists on the device.
    """
    return {kind: len(markers) for kind, markers in sorted(_open_markers.items()) if markers}


def remember_places(enabled: bool) -> None:
    """Choose whether warnings about unclosed resources show where those resources were created.

    This records the call stack whenever an object is created. It is enabled by default in Python's
    development mode (``-X dev``).
    """
    global _remember_creation_stacks  # noqa: PLW0603 - a process-wide debugging option
    _remember_creation_stacks = enabled


class Node(Generic[P]):
    """The owner of a C object, with its destructor and the nodes created from it."""

    __slots__ = (
        "__weakref__", "_destroy", "_parents", "children", "closed_reason", "counted", "halt",
        "kind", "on_destroyed", "pin", "pointer",
    )  # fmt: skip

    def __init__(
        self,
        kind: str,
        pointer: P,
        destroy: Callable[[P], object],
        parents: Sequence[Node[Any]] = (),
        pin: object = None,
        *,
        counted: bool = True,
    ) -> None:
        """Take ownership of a C object.

        Args:
            kind: The class of the resource.
            pointer: The C pointer.
            destroy: The function that destroys the C object.
            parents: The nodes from which the object was created. They destroy it when they close.
            pin: An object to keep alive until the device has released the memory.
            counted: Whether `live` counts the object.
        """
        self.kind: str = kind
        self.pointer: P | None = pointer
        self.pin: object = pin
        self.counted: bool = counted
        self.children: dict[Node[Any], None] = {}
        self.on_destroyed: Callable[[], None] | None = None  # called after destruction
        # A function that stops the device from accessing memory through the C object. It is called
        # at interpreter exit instead of destroying the object.
        self.halt: Callable[[P], object] | None = None
        self.closed_reason: str = ""
        self._destroy = destroy
        self._parents = [weakref.ref(parent) for parent in parents]
        for parent in parents:
            parent.children[self] = None
        if not parents:
            _roots.add(self)
        if counted:
            _open_markers.setdefault(kind, []).append(None)
        # `_halt_all` has missed this node, so the device may use the memory until the process ends.
        if _halted and pin is not None:
            _leak(pin)

    def close(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Destroy the node's children in reverse order, and then the node itself.

        A node that cannot be destroyed stays open.
        """
        if _is_finalizing():  # after `_halt_all`; the module's globals may be None by now
            return
        if self.children:
            with ExitStack() as child_closers:  # close every child, even if one raises
                for child in self.children:
                    child_closers.callback(child.close)
        if (pointer := self.pointer) is None:
            return
        self.pointer = None
        if _halted:  # `_halt_all` sets this before reading pointers, so check it last
            _leak(self)
            self.halt_device(pointer)
            return
        try:
            self._destroy(pointer)
        except BaseException as error:
            # EIO means that the device was removed and the kernel has already released the object
            # (ibv_open_device(3)).
            if getattr(error, "errno", None) != errno.EIO:
                self.pointer = pointer
                raise
        self._set_closed("is closed")

    def halt_device(self, pointer: P) -> None:
        """Stop the device from accessing memory through the C object, without destroying it."""
        if self.halt is not None:
            with suppress(OSError):  # the device has failed or was removed
                self.halt(pointer)

    def move(self, old: Node[Any], new: Node[Any]) -> None:
        """Move this node from the parent ``old`` to the parent ``new``."""
        old.children.pop(self, None)
        new.children[self] = None
        self._parents = [
            weakref.ref(new) if parent() is old else parent for parent in self._parents
        ]

    def disown(self) -> None:
        """Discard the C pointers of this node and its descendants in a forked child process.

        The C objects belong to the parent process, which must destroy them.
        """
        self.pointer = None
        self.closed_reason = "was made before fork() and belongs to the parent process"
        for child in self.children:
            child.disown()

    def descendants(self) -> Iterator[Node[Any]]:
        """Yield this node and all its descendants.

        A node with two parents may be yielded twice.
        """
        yield self
        for child in list(self.children):
            yield from child.descendants()

    def _set_closed(self, reason: str) -> None:
        """Release what the node holds, now that the C object has been destroyed."""
        self.closed_reason = reason
        self.pin = None
        for parent in self._parents:
            if (node := parent()) is not None:
                node.children.pop(self, None)
        if self.counted and (markers := _open_markers.get(self.kind)):
            markers.pop()
        if self.on_destroyed is not None:
            self.on_destroyed()


def _after_fork_in_child() -> None:
    # A child process must not use objects of its parent process (ibv_fork_init(3)).
    _open_markers.clear()
    for node in [*_roots, *_abandoned]:
        node.disown()


fork.reset_in_child(_after_fork_in_child)


def _leak(value: object) -> None:
    """Keep an object alive until the process ends, even while the interpreter shuts down."""
    import ctypes  # noqa: PLC0415 - rarely needed

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


@atexit.register
def _halt_all() -> None:
    """Stop the devices from accessing memory before the exiting interpreter frees it.

    The C objects are not destroyed, because daemon threads may be using them. Daemon threads, and
    exit handlers that run after this one, can still create objects. The memory of those objects is
    never released.
    """
    global _halted  # noqa: PLW0603 - set once per process
    _halted = True
    while True:
        try:
            roots = [*_roots, *_abandoned]
            break
        except RuntimeError:  # a daemon thread changed the set during iteration
            continue
    for node in {node: None for root in roots for node in root.descendants()}:
        if (pointer := node.pointer) is not None:
            node.halt_device(pointer)


class Resource(Generic[P]):
    """An object on the device. Call ``close()`` when you are done, or use a ``with`` statement.

    Only one thread at a time may use the object.
    """

    _creation_stack: str = ""

    def __init__(self, node: Node[P]) -> None:
        self.node: Node[P] = node
        """The node that owns the C object, for internal use."""
        if _remember_creation_stacks:
            self._creation_stack = "".join(traceback.format_stack(sys._getframe(2), limit=12))

    @property
    def pointer(self) -> P:
        """A pointer to the C structure, such as ``struct ibv_qp``, for :mod:`aiordma.verbs.raw`.

        This object still owns the structure. Raises BufferStateError if the object is closed.
        """
        if (pointer := self.node.pointer) is None:
            raise self.closed_error()
        return pointer

    @property
    def raw_handle(self) -> int:
        """The address of the C structure, such as ``struct ibv_qp``, for your own C code.

        This object still owns the structure. The address is valid until this object, or one it was
        created from, is closed. After that, accessing this attribute raises BufferStateError. See
        docs/raw-handles.md.
        """
        return int(ffi.cast("uintptr_t", self.pointer))

    @property
    def closed(self) -> bool:
        """Whether this object, or one it was created from, is closed."""
        return self.node.pointer is None

    def closed_error(self) -> BufferStateError:
        """Return the exception for using this object after it has been closed."""
        return BufferStateError(f"{self._label()} {self.node.closed_reason}")

    def close(self) -> None:
        """Destroy this object and everything created from it, children first.

        Does nothing if the object is already closed.

        Raises:
            VerbsError: If the device cannot destroy an object. This object then stays open, and you
                can call ``close()`` again.
        """
        self.node.close()

    def __enter__(self) -> Self:
        if self.closed:
            raise self.closed_error()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _label(self) -> str:
        """Return the class and name for messages. Overrides must also work after ``close()``."""
        return type(self).__name__

    def _details(self) -> str:
        """Return additional text for the repr of an open object."""
        return ""

    def __repr__(self) -> str:
        details = "closed" if self.closed else self._details()
        return f"<{self._label()} {details}>" if details else f"<{self._label()}>"

    def __del__(
        self,
        _warn: Callable[..., None] = warnings.warn,
        _leaked_nodes: list[Node[Any]] = _abandoned,
        _is_finalizing: Callable[[], bool] = sys.is_finalizing,
    ) -> None:
        # The default arguments replace globals, which may be None during interpreter shutdown.
        node = getattr(self, "node", None)
        if node is None or node.pointer is None:
            return
        # A borrowed context, which is not counted, only needs to be leaked if it has children.
        if not node._parents and (node.counted or node.children):
            _leaked_nodes.append(node)
        if node.counted:
            creation = f", created at\n{self._creation_stack}" if self._creation_stack else ""
            description = (
                f"<{type(self).__name__}>" if _is_finalizing() or ffi is None else repr(self)
            )
            _warn(f"unclosed {description}{creation}", ResourceWarning, source=self)
