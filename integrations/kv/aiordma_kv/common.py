"""Limits, checks and connection settings that both sides use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiordma
from aiordma.verbs import ProtectionDomain

MAX_KEYS = 4096  # keys in one call
MAX_KEY_SIZE = 256
MAX_SIZE = 1 << 62
MAX_MESSAGE = 2 << 20  # longer than a message with MAX_KEYS keys
MAX_ENCRYPTED_BLOCK = 32 << 20
MIN_AUTH_SIZE = 16  # bytes of a pre-shared key, a limit of aiordma


def max_calls(encrypt: bool) -> int:
    """Return how many calls of one client can be in progress.

    With encryption, each call can need memory for a block on both sides.
    """
    return 4 if encrypt else 16


def make_config(encrypt: bool, **options: Any) -> aiordma.Config:
    """Return the settings of a connection, with further `options`."""
    length = MAX_MESSAGE + (MAX_ENCRYPTED_BLOCK if encrypt else 0)
    return aiordma.Config(max_message=length, max_rails=1, lend_quota=0, **options)


def disable_polling() -> None:
    """Let the running loop sleep while it waits, because the engine needs the processor."""
    aiordma.configure_loop(aiordma.LoopConfig(polling=0.0))


def parse_address(text: str, min_port: int = 1) -> tuple[str, int]:
    """Return the host and port of an address given as HOST:PORT or [HOST]:PORT."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not min_port <= int(port) < 1 << 16:
        raise ValueError(f"invalid address {text!r}: expected HOST:PORT")
    return host, int(port)


def read_key(path: str | Path | None) -> bytes | None:
    """Return the pre-shared key in a file, or None without a path."""
    if path is None:
        return None
    key = Path(path).read_bytes()
    if len(key) < MIN_AUTH_SIZE:
        raise ValueError(
            f"invalid key file {path}: expected at least {MIN_AUTH_SIZE} bytes, got {len(key)}"
        )
    return key


def check_keys(keys: Sequence[object]) -> list[bytes]:
    """Return the keys as a list, or raise ValueError if one of them is invalid."""
    checked = [key for key in keys if isinstance(key, bytes) and 0 < len(key) <= MAX_KEY_SIZE]
    if len(checked) != len(keys):
        raise ValueError(f"invalid key: expected 1 to {MAX_KEY_SIZE} bytes")
    return checked


class RegisteredMemory:
    """Memory that is registered once with each device, because pinning it takes long.

    A device that is opened again, for example after a fatal error, has another protection domain,
    for which the memory is registered again.
    """

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._regions: dict[ProtectionDomain, aiordma.Region] = {}

    def region(self, conn: aiordma.Connection) -> aiordma.Region:
        """Return the memory as a region that this connection can use."""
        domain = conn.queue_pair.pd
        if domain not in self._regions:
            self._regions[domain] = conn.register(self._memory)
        return self._regions[domain]

    def close(self) -> None:
        """Unregister the memory."""
        for region in self._regions.values():
            region.close()
        self._regions.clear()
