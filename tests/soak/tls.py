"""The certificates of a soak: written by the main process, read by all processes."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme

NAME = "server.soak.example"


def write_certificates(folder: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))
    authority.issue_cert(NAME).private_key_and_cert_chain_pem.write_to_path(
        str(folder / "server.pem")
    )


def serving(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "server.pem")
    return context


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "authority.pem"))
