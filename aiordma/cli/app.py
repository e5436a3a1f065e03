"""The commands, by name."""

from __future__ import annotations

import click

import aiordma

from .devinfo import devinfo
from .doctor import doctor
from .echo import echo
from .echo_server import echo_server
from .perf import perf
from .run import run
from .top import top
from .trace import trace


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(aiordma.__version__, prog_name="aiordma")
def app() -> None:
    """RDMA for asyncio, with or without a card."""


app.add_command(devinfo)
app.add_command(doctor)
app.add_command(echo)
app.add_command(echo_server)
app.add_command(perf)
app.add_command(run)
app.add_command(top)
app.add_command(trace)
