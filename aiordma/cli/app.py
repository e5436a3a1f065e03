"""The main command and its subcommands."""

from __future__ import annotations

import sys
from importlib import import_module

import click

import aiordma

COMMANDS = ("devinfo", "doctor", "echo", "echo-server", "perf", "port", "run", "top", "trace")


class Group(click.Group):
    """A command group whose help shows complete command summaries.

    By default, click truncates long summaries.
    """

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            command.short_help = command.get_short_help_str(sys.maxsize)
        return command


class Commands(Group):
    """A command group that imports each command's module on first use.

    Importing every module at startup would triple the startup time.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        for name in COMMANDS:
            self._load(name)
        return super().list_commands(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for each in args:
            if "\0" in each:  # from a caller in Python; a shell cannot pass one
                raise click.UsageError(f"argument {each!r} contains a null character", ctx)
        return super().parse_args(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            self._load(cmd_name)
        else:
            self.list_commands(ctx)  # so that click can suggest similar names
        return super().get_command(ctx, cmd_name)

    def _load(self, name: str) -> None:
        module = name.replace("-", "_")
        self.add_command(getattr(import_module(f".{module}", __package__), module))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(aiordma.__version__, prog_name="aiordma")
def app() -> None:
    """RDMA for asyncio, with or without a card."""
