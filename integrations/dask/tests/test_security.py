"""Tests of keys, encryption and certificates, from Dask's `Security` and its configuration."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import dask
import distributed
import numpy as np
import pytest
from cryptography import x509
from dask_aiordma import Security
from dask_aiordma.backend import RDMAListener
from dask_aiordma.settings import connection_arguments
from distributed.comm.core import FatalCommClosedError, connect
from distributed.protocol.serialize import to_serialize

from aiordma import errors
from conftest import connected, echo

Serve = Callable[..., Awaitable[RDMAListener]]
KEY = bytes(range(32))
SETTINGS = "distributed.comm.rdma"


def arguments(security: distributed.Security) -> tuple[dict[str, Any], dict[str, Any]]:
    return security.get_listen_args("scheduler"), security.get_connection_args("worker")


@pytest.mark.parametrize("encrypt", [False, True])
async def test_comm_with_a_key_transfers_arrays(encrypt: bool) -> None:
    ours, theirs = await connected(*arguments(Security(auth=KEY, encrypt=encrypt)))
    await ours.write({"x": to_serialize(np.arange(1 << 17))})
    assert np.array_equal((await theirs.read())["x"], np.arange(1 << 17))
    await ours.close()
    await theirs.close()


@pytest.mark.parametrize(
    "other",
    [
        Security(auth=KEY[::-1]),
        Security(auth=KEY, encrypt=True),
        distributed.Security(require_encryption=False),
    ],
    ids=["another key", "encrypts", "no key"],
)
async def test_connect_fails_immediately_when_security_settings_differ(
    serve: Serve, other: distributed.Security
) -> None:
    listener = await serve(echo, **Security(auth=KEY).get_listen_args("scheduler"))
    with pytest.raises(FatalCommClosedError, match="security settings"):
        await connect(listener.contact_address, timeout=100, **other.get_connection_args("worker"))


async def test_comm_uses_the_key_file_from_the_configuration(tmp_path: Path, serve: Serve) -> None:
    file = tmp_path / "key"
    file.write_bytes(KEY)
    with dask.config.set({f"{SETTINGS}.auth-file": str(file), f"{SETTINGS}.encrypt": True}):
        required = distributed.Security(require_encryption=True)
        ours, theirs = await connected(*arguments(required))
        await ours.close()
        await theirs.close()
        listener = await serve(echo)
    with pytest.raises(FatalCommClosedError):
        await connect(listener.contact_address)


def names_of(security: Any) -> list[str]:
    """Return the DNS names in the scheduler's certificate."""
    certificate = x509.load_pem_x509_certificate(security.tls_scheduler_cert.encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert all(isinstance(name, x509.DNSName) for name in names)
    return [str(name.value) for name in names]


def encrypts(security: distributed.Security) -> list[bool]:
    return [connection_arguments("", each)["encrypt"] for each in arguments(security)]


def test_configured_encryption_applies_unless_security_overrides_it() -> None:
    """The configured value applies unless `Security` sets `encrypt` itself."""
    assert encrypts(Security(auth=KEY)) == [False, False]
    assert encrypts(Security(auth=KEY, encrypt=True)) == [True, True]
    with dask.config.set({f"{SETTINGS}.encrypt": True}):
        assert encrypts(Security(auth=KEY)) == [True, True]
        assert encrypts(Security(auth=KEY, require_encryption=True)) == [True, True]
        assert encrypts(Security(auth=KEY, encrypt=False)) == [False, False]
        with pytest.raises(RuntimeError, match="would not be encrypted"):
            encrypts(Security(auth=KEY, encrypt=False, require_encryption=True))


async def test_certificates_protect_the_bootstrap(serve: Serve) -> None:
    """Certificates must come from the same authority, but need not name 127.0.0.1."""
    security = distributed.Security.temporary()
    assert names_of(security) == ["dask-internal"]
    security.require_encryption = False
    ours, theirs = await connected(*arguments(security))
    await ours.write("hello")
    assert await theirs.read() == "hello"
    await ours.close()
    await theirs.close()

    listener = await serve(echo, **security.get_listen_args("scheduler"))
    other = distributed.Security.temporary()
    other.require_encryption = False
    with pytest.raises(FatalCommClosedError):
        await connect(listener.contact_address, timeout=100, **other.get_connection_args("worker"))


async def test_certificates_alone_do_not_satisfy_required_encryption(serve: Serve) -> None:
    security = distributed.Security.temporary()
    with pytest.raises(RuntimeError, match=r"dask_aiordma\.Security\(auth=key, encrypt=True\)"):
        await serve(echo, **security.get_listen_args("scheduler"))
    with pytest.raises(RuntimeError, match=r"rdma://127\.0\.0\.1:1 would not be encrypted"):
        await connect("rdma://127.0.0.1:1", **security.get_connection_args("worker"))


@pytest.mark.parametrize(
    ("setting", "value", "problem"),
    [
        ("auth-file", "short", "at least 16 random bytes, not 8 bytes"),
        ("auth-file", "none", r"auth-file: .*none: No such file"),
        ("options", "polling", "options must be a mapping .*, not 'polling'"),
        ("options", {"eager-sise": 1}, "unknown aiordma.Config settings: eager_sise"),
        ("device", "no_such_device", "no_such_device"),
        ("devise", "embedded0", r"unknown settings: devise \(valid settings are device, via"),
        ("via", "quic", "quic"),
    ],
)
async def test_invalid_settings_raise_and_are_logged_on_both_sides(
    setting: str,
    value: Any,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    serve: Serve,
) -> None:
    """Logging is needed because Dask's own error only says that a process failed to start."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_bytes(b"password")
    wrong = (ValueError, FatalCommClosedError, errors.DeviceNotFoundError)
    with dask.config.set({f"{SETTINGS}.{setting}": value}):
        for side in serve(echo), connect("rdma://127.0.0.1:1", timeout=100):
            caplog.clear()
            with pytest.raises(wrong, match=problem) as caught:
                await side
            assert "security settings" not in str(caught.value)
            assert re.search(problem, caplog.text)


async def test_scheduler_sni_is_rejected() -> None:
    with pytest.raises(ValueError, match="scheduler_sni: the TLS server name is always the"):
        await connect("rdma://127.0.0.1:1", server_hostname="example.org")


async def test_configured_options_are_applied_to_the_connection() -> None:
    with dask.config.set({f"{SETTINGS}.options": None}):  # the result of a YAML key without a value
        config = connection_arguments("", {})["config"]
    assert config == connection_arguments("", {})["config"]
    with dask.config.set({f"{SETTINGS}.options": {"max-message": 1 << 20}}):
        ours, theirs = await connected({}, {})
    assert ours._conn is not None
    assert ours._conn.max_message == 1 << 20
    with pytest.raises(Exception, match="1048576"):
        await ours.write({"x": to_serialize(np.ones(1 << 20))})
    assert ours.closed()
    theirs.abort()


def test_security_hides_its_key_and_can_be_pickled() -> None:
    security = Security(auth=KEY, encrypt=True)
    assert security.require_encryption
    assert not Security(auth=KEY, encrypt=True, require_encryption=False).require_encryption
    assert not Security(auth=KEY).require_encryption
    assert KEY.hex() not in repr(security)
    assert repr(KEY) not in repr(security)
    copied = pickle.loads(pickle.dumps(security))
    assert copied.get_listen_args("worker")["auth"] == KEY
    with pytest.raises(ValueError, match="at least 16"):
        Security(auth=b"short")
    with pytest.raises(TypeError, match="str"):
        Security(auth="a password of a person")  # type: ignore[arg-type]


FIRST_USE = """
import dask, distributed
with dask.config.set({"distributed.comm.rdma.options": {}}):
    from dask_aiordma.settings import connection_arguments
assert connection_arguments("rdma://", {})["via"] == "tcp"
"""


def test_defaults_apply_when_options_are_set_before_the_first_import() -> None:
    subprocess.run([sys.executable, "-c", FIRST_USE], check=True)
