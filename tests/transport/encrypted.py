"""Makes encrypted connections for tests, those of plain connections among them."""

from __future__ import annotations

from dataclasses import dataclass

from aiordma import Config, Connection, Listener
from aiordma.config import Encrypt
from aiordma.transport import connect, listen

from .connection_factory import SMALL, ConnectionFactory

KEY = b"sixteen or more random bytes"


@dataclass(frozen=True)
class EncryptedFactory(ConnectionFactory):
    encrypt: Encrypt = True

    async def listen(self, config: Config = SMALL, *, host: str | None = None) -> Listener:
        return await listen(
            self.host if host is None else host,
            0,
            device=self.device,
            via=self.via,
            config=config,
            auth=KEY,
            encrypt=self.encrypt,
        )

    async def connect(self, port: int, config: Config = SMALL) -> Connection:
        return await connect(
            self.host,
            port,
            device=self.device,
            via=self.via,
            config=config,
            auth=KEY,
            encrypt=self.encrypt,
        )
