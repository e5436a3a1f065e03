"""Connection settings, taken from Dask's configuration and its `Security` object."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import dask
from dask.system import CPU_COUNT
from dask.utils import parse_bytes, parse_timedelta
from distributed.system import MEMORY_LIMIT

import aiordma

# A scheduler is connected to every worker and client, but most of its connections are idle. With
# eight data receives and four control receives, a connection needs 96 KiB of registered memory, a
# third of aiordma's default. While long messages arrive, the receives grow to 768 KiB in total.
DEFAULTS = {
    "data_receives": 8,
    "control_receives": 4,
    "max_eager_size": 64 << 10,
    # Polling would slow down computations. A cluster runs one thread per core, and the event loop
    # shares the GIL with the computing threads.
    "polling": 0.0,
    # Dask does not limit message sizes, so refuse only messages larger than the machine's memory.
    "max_message": MEMORY_LIMIT,
}

# The default settings in distributed.comm.rdma. Do not add them with `update_defaults`. If the
# backend were first used within a `dask.config.set` block, Dask would remove them after the block.
SETTINGS: dict[str, Any] = {
    "device": None,
    "via": "tcp",
    "auth-file": None,
    "encrypt": False,
    "options": {},
    "kept-memory": None,
}

# The default limit on kept memory, in bytes. It is an eighth of each core's share of the machine's
# memory, but at most 256 MiB.
MAX_KEPT_BYTES = min(256 << 20, MEMORY_LIMIT // (8 * CPU_COUNT))


def _setting(name: str) -> Any:
    return dask.config.get(f"distributed.comm.rdma.{name}", SETTINGS[name])


def _check_names() -> None:
    """Raise ValueError if the settings are not a mapping or contain an unknown name."""
    given = dask.config.get("distributed.comm.rdma", None) or {}
    if not isinstance(given, dict):
        raise ValueError(f"distributed.comm.rdma must be a mapping of settings, not {given!r}")
    if unknown := sorted(name for name in given if name.replace("_", "-") not in SETTINGS):
        raise ValueError(
            f"distributed.comm.rdma: unknown settings: {', '.join(unknown)} (valid settings are "
            f"{', '.join(SETTINGS)})"
        )


def connection_arguments(what: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments for `aiordma.connect` or `aiordma.listen`.

    Args:
        what: The address, for use in error messages.
        given: The keyword arguments that Dask passes to a connector or listener. Dask takes these
            arguments from its `Security` object.

    Raises:
        RuntimeError: If `Security` requires encryption, but the connection would not be encrypted.
        ValueError: If a setting is unknown or has an invalid value.
    """
    _check_names()
    auth = given.get("auth")
    if auth is None:
        auth = _key_of_file(_setting("auth-file"))
    encrypt = given.get("encrypt")
    if encrypt is None:
        encrypt = bool(_setting("encrypt"))
    if given.get("require_encryption") and not encrypt:
        raise RuntimeError(
            f"Dask's configuration requires encryption, but {what} would not be encrypted: TLS "
            "certificates protect only the exchange that sets up an RDMA connection. Use "
            "dask_aiordma.Security(auth=key, encrypt=True), or set distributed.comm.rdma.auth-file "
            "and distributed.comm.rdma.encrypt"
        )
    kept_memory()  # report an invalid value before connecting
    if given.get("server_hostname"):
        raise ValueError(
            f"{what}: rdma:// does not support scheduler_sni: the TLS server name is always the "
            "address's host, and the name in the certificate is not checked"
        )
    return {
        "device": _setting("device"),
        "via": _setting("via"),
        "config": _config(),
        "auth": auth,
        "encrypt": encrypt,
        "ssl": given.get("ssl_context"),
    }


def kept_memory() -> int:
    """Return the maximum number of bytes of unused memory to keep for future long frames."""
    given = _setting("kept-memory")
    if given is None:
        return MAX_KEPT_BYTES
    try:
        return int(parse_bytes(given))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"distributed.comm.rdma.kept-memory must be a size such as 64 MiB, not {given!r}"
        ) from error


def _key_of_file(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        key = Path(path).expanduser().read_bytes()
    except OSError as error:  # Dask would retry after an OSError
        raise ValueError(
            f"distributed.comm.rdma.auth-file: cannot read {path}: {error.strerror}"
        ) from error
    if len(key) < 16:
        raise ValueError(
            f"distributed.comm.rdma.auth-file: {path} must contain at least 16 random bytes, not "
            f"{len(key)} bytes"
        )
    return key


def _config() -> aiordma.Config:
    given = _setting("options") or {}
    if not isinstance(given, dict):
        raise ValueError(
            "distributed.comm.rdma.options must be a mapping of aiordma.Config settings, "
            f"not {given!r}"
        )
    options = {name.replace("-", "_"): value for name, value in given.items()}
    known = {field.name for field in dataclasses.fields(aiordma.Config)}
    if unknown := sorted(options.keys() - known):
        raise ValueError(
            f"distributed.comm.rdma.options: unknown aiordma.Config settings: {', '.join(unknown)}"
        )
    return aiordma.Config(**{**DEFAULTS, **_keep_alive(), **options})


def _keep_alive() -> dict[str, float]:
    """Return keep-alive settings that detect a dead peer within Dask's TCP timeout."""
    limit = float(parse_timedelta(dask.config.get("distributed.comm.timeouts.tcp"), "seconds"))
    idle = limit / 4
    return {"keep_alive": idle, "keep_alive_timeout": limit - idle}
