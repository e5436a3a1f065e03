"""`aiordma port`: bring an embedded device's port in another process down or up."""

from __future__ import annotations

import os

import click

from aiordma.monitoring_socket import VARIABLE, ask, directories, sockets

from .top import TIMEOUT


@click.command()
@click.argument("pid", type=int)
@click.argument("device")
@click.argument("state", type=click.Choice(["down", "up"]))
def port(pid: int, device: str, state: str) -> None:
    """Take down or bring up the port of an embedded device in another process.

    Use this command to see how a program handles the failure of a device. PID is the ID of the
    process, which must belong to this user and have been started with AIORDMA_MONITOR=1 in its
    environment. `aiordma top` lists these processes.
    """
    try:
        socket_directories = directories(os.environ.get(VARIABLE) or "1")
        socket_paths = [path for each in socket_directories for path in sockets(each, pid)]
        if not socket_paths:
            raise click.ClickException(
                f"process {pid} not found, or it was started without {VARIABLE}=1"
            )
        failure = ask(socket_paths[0], TIMEOUT, f"port {state} {device}").decode()
    except ConnectionRefusedError:
        raise click.ClickException(f"process {pid} has exited") from None
    except (OSError, ValueError) as error:
        raise click.ClickException(f"cannot reach process {pid}: {error}") from None
    if failure:
        raise click.ClickException(failure)
