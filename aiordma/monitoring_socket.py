"""The monitoring socket for `aiordma top`, created on import if AIORDMA_MONITOR is set.

A thread serves requests on a Unix socket. For `aiordma top`, the thread sends a `snapshot` as JSON.
For `aiordma port`, the thread sets the port state of an embedded device. The thread does not depend
on event loops, so it responds even if a loop is stuck.

Only processes owned by the same user get a response. The directory belongs to the user and is
inaccessible to others, the socket has mode 0600, and the kernel reports each peer's user
(SO_PEERCRED, unix(7)). Processes in different PID namespaces can share the directory, so each
socket's name contains a random part. Peers are served one at a time, for up to RESPONSE_TIMEOUT
each.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import socket
import stat
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path

from ._native import fork, softdev, to_c
from ._native.service_thread import ServiceThread
from ._private_files import check_private
from .monitoring import open_connections, refresh_wires, snapshot
from .verbs import EventType

logger: logging.Logger = logging.getLogger("aiordma.monitoring")

VARIABLE = "AIORDMA_MONITOR"

# How long a peer can block other peers, in seconds.
RESPONSE_TIMEOUT = 1.0
# How long to wait for event loops to update the `wire` of their connections, in seconds.
WIRE_TIMEOUT = 0.1
# The pause before accept() is retried when descriptors or memory are exhausted, in seconds.
ACCEPT_RETRY_DELAY = 1.0
# The maximum size of a response in bytes, enough for about 200,000 connections.
MAX_RESPONSE = 100 << 20
MAX_REQUEST = 256

# The parent directory for users without a runtime directory. Every user can create directories in
# /tmp, but only a directory's owner can rename or remove it.
SHARED_DIRECTORY = Path("/tmp")

# The maximum length of the directory's path in bytes. A socket's path can have 107 bytes (unix(7)),
# and a PID has at most seven digits.
MAX_DIRECTORY_PATH = 107 - len("/4194304-00000000.sock")

UCRED = struct.Struct("3i")  # pid, uid and gid: unix(7)


def directory(setting: str) -> Path:
    """Return the directory for monitoring sockets, creating it if it does not exist.

    Args:
        setting: The value of AIORDMA_MONITOR: "1", or the path of the directory.

    Raises:
        OSError: If the directory cannot be created, belongs to another user or is accessible to
            others.
        ValueError: If the value is not "1" or an absolute path, or if the path is too long.
    """
    if setting != "1":
        if not os.path.isabs(setting):
            raise ValueError("AIORDMA_MONITOR must be 1 or the absolute path of a directory")
        return private_directory(Path(setting))
    failures: list[OSError] = []
    for path in default_directories():
        try:
            return private_directory(path)
        except OSError as error:
            failures.append(error)
    raise failures[-1]


def private_directory(path: Path) -> Path:
    """Return a directory that only this user can access, creating it if it does not exist.

    Raises the same exceptions as `directory`.
    """
    if (size := len(os.fsencode(path))) > MAX_DIRECTORY_PATH:
        raise ValueError(
            f"the path {path} is too long for a socket directory: {size} bytes (maximum "
            f"{MAX_DIRECTORY_PATH}); choose a shorter path"
        )
    with suppress(FileExistsError):
        path.mkdir(0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{path} is not a directory")
    check_private(path, found)
    return path


def default_directories() -> list[Path]:
    """Return the candidate directories for AIORDMA_MONITOR=1.

    A process uses the first of these directories that it can create or already owns. The last
    candidate is a directory in /tmp for services. Services usually run without XDG_RUNTIME_DIR, and
    a user's directory in /run/user does not exist until the user logs in.
    """
    user = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{user}"
    return [
        *(Path(path, "aiordma") for path in runtime if path),
        SHARED_DIRECTORY / f"aiordma-{user}",
    ]


def directories(setting: str) -> list[Path]:
    """Return the directories that may contain the sockets of processes with this `setting`.

    For "1", the list includes the directories of processes that run without XDG_RUNTIME_DIR.
    """
    found = {directory(setting): None}
    for path in default_directories() if setting == "1" else ():
        if path.is_dir():
            with suppress(OSError):  # belongs to another user
                found[private_directory(path)] = None
    return list(found)


def sockets(where: Path, pid: int | None = None) -> list[Path]:
    """Return the sockets of all other processes, or only of processes with this PID.

    PIDs are unique only within a PID namespace, so several processes can have the same PID.
    """
    mine = _server.path if _server is not None else None
    found = where.glob("*.sock" if pid is None else f"{pid}-*.sock")
    return sorted(path for path in found if path != mine)


def remove_dead(where: Path, pid: int) -> None:
    """Remove sockets that a killed process with this PID left behind."""
    for path in sockets(where, pid):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                pass  # the process is alive and busy


class _Server:
    def __init__(self, where: Path) -> None:
        remove_dead(where, os.getpid())
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.path = where / f"{name}.sock"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Give the socket its final name only once it is listening. Otherwise, clients could mistake
        # it for the socket of a dead process.
        unready_path = where / f"{name}.new"
        try:
            self._listener.bind(str(unready_path))
            unready_path.chmod(0o600)
            self._listener.listen(8)
            unready_path.replace(self.path)
        except BaseException:
            self._listener.close()
            unready_path.unlink(missing_ok=True)
            raise
        # A forked child must not keep the socket listening after this process has ended.
        fork.register_socket(self._listener.fileno())
        self._pid = os.getpid()
        atexit.register(self._remove)
        ServiceThread(self._serve, "aiordma.monitoring").start()

    def _remove(self) -> None:
        if os.getpid() == self._pid:
            with suppress(OSError):
                self.path.unlink()

    def _serve(self) -> None:
        pause = threading.Event()
        while True:
            try:
                peer, _ = self._listener.accept()
            except (OSError, MemoryError) as error:
                logger.warning("cannot respond to `aiordma top`: %r", error)
                pause.wait(ACCEPT_RETRY_DELAY)
                continue
            try:
                with peer:
                    serve_request(peer)
            except OSError as error:
                logger.debug("`aiordma top` disconnected: %s", error)
            except BaseException:  # an error with one peer must not affect others
                logger.exception("failed to respond to `aiordma top`")


def set_port(state: str, device: str) -> str:
    """Set the port state of an embedded device.

    Returns an error message, or an empty string on success.
    """
    event = {"down": EventType.PORT_ERR, "up": EventType.PORT_ACTIVE}[state]
    try:
        name = to_c("device", device)
    except ValueError as error:
        return str(error)
    code = softdev.raise_on(name, event)
    return f"{device}: no such embedded device is open in this process" if code else ""


def serve_request(peer: socket.socket) -> None:
    """Serve one request from a process owned by the same user. Ignore other users' requests."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size)
    _, uid, _ = UCRED.unpack(credentials)
    if uid != os.geteuid():
        logger.warning("rejected a monitoring request from user %d", uid)
        return
    peer.settimeout(RESPONSE_TIMEOUT)
    request, *names = peer.recv(MAX_REQUEST).decode(errors="replace").split(" ", 2)
    if request == "port":
        peer.sendall(set_port(*names).encode())
        return
    # A connection's medium ("roce", "shared memory", ...) can only be looked up in its own event
    # loop. The snapshot contains the value of the last lookup.
    refresh_wires(open_connections(), WIRE_TIMEOUT)
    peer.sendall(json.dumps(snapshot()).encode())


_server: _Server | None = None


def start() -> None:
    """Start listening if AIORDMA_MONITOR is set. Errors are logged. A second call has no effect."""
    global _server  # noqa: PLW0603 - one per process
    setting = os.environ.get(VARIABLE)
    if _server is not None or not setting or setting == "0":
        return
    try:
        _server = _Server(directory(setting))
    except (OSError, ValueError, RuntimeError) as error:
        logger.warning(
            "%s is %r, but `aiordma top` cannot show this process: %s", VARIABLE, setting, error
        )


def _restart_after_fork() -> None:
    """Create a new socket in a forked child, which cannot use the inherited socket."""
    global _server  # noqa: PLW0603 - as above
    if _server is not None:
        _server = None
        start()


fork.reset_in_child(_restart_after_fork)


def ask(path: Path, seconds: float, what: str = "snapshot") -> bytes:
    """Send a request to the process listening on a socket, and return its response.

    The response to "snapshot" is JSON. The response to a request such as "port down embedded1" is
    an error message, or an empty string on success.

    Args:
        path: The path of the socket.
        seconds: The maximum time to wait for the response.
        what: The request.

    Raises:
        ConnectionRefusedError: If the process has ended.
        OSError: If no complete response arrives in time.
    """
    deadline = time.monotonic() + seconds
    parts = []
    size = 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(seconds)
        client.connect(str(path))
        client.sendall(what.encode())
        while part := client.recv(1 << 16):
            parts.append(part)
            size += len(part)
            if size > MAX_RESPONSE:
                raise OSError(f"the response from {path} exceeds {MAX_RESPONSE} bytes")
            if (remaining := deadline - time.monotonic()) <= 0:
                raise TimeoutError(f"no complete response from {path} within {seconds:g} s")
            client.settimeout(remaining)
    return b"".join(parts)
