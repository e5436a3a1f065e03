"""`aiordma echo-server`: run the server process of `aiordma echo`."""

from __future__ import annotations

import asyncio
import sys

import click

import aiordma

from .options import Via, connection_options, loop_factory


@click.command(hidden=True)
@connection_options
def echo_server(device: str | None, via: Via, host: str | None, loop: str) -> None:
    """Print the address and port on one line, and echo messages until standard input ends."""
    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        try:
            runner.run(serve(device, via, host or ""))
        except (aiordma.RDMAError, OSError) as error:
            raise click.ClickException(f"echo server: {error}") from error


async def serve(device: str | None, via: Via, host: str) -> None:
    server = await aiordma.start_server(echo_messages, host, device=device, via=via)
    async with server:
        print(server.host, server.port, flush=True)
        await end_of_input()


async def echo_messages(conn: aiordma.Connection) -> None:
    async for message in conn:
        with message:
            await conn.send(message, imm=message.imm)


async def end_of_input() -> None:
    """Wait for end-of-file on standard input.

    Standard input is a pipe from the parent process. End-of-file also occurs if the parent is
    killed.
    """
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    try:
        while await reader.read(1 << 10):
            pass
    finally:
        transport.close()
