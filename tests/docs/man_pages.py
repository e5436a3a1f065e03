"""Generate the manual pages of `aiordma` and its commands in docs/man from `--help`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

from aiordma.cli.app import app
from tests.package import PYPROJECT

MAN = Path(__file__).parents[2] / "docs/man"


def pages() -> dict[Path, str]:
    """Return the text of each page by path. The page of `perf` includes its subcommands."""
    top = click.Context(app, info_name="aiordma", **app.context_settings)
    every = [top, *_inner(top)]
    return {
        MAN / f"{_name(it)}.1": "".join(f"{line}\n" for line in _page(it, every)) for it in every
    }


def _inner(context: click.Context) -> list[click.Context]:
    """Return the visible commands of a group."""
    command = context.command
    if not isinstance(command, click.Group):
        return []
    # Use the sorted order, since the load order depends on earlier tests.
    every = [command.get_command(context, name) for name in command.list_commands(context)]
    each = [it for it in every if it and not it.hidden]
    return [click.Context(it, info_name=it.name, parent=context) for it in each]


def _name(context: click.Context) -> str:
    return context.command_path.replace(" ", "-")


def _page(context: click.Context, every: list[click.Context]) -> Iterator[str]:
    version = PYPROJECT["project"]["version"]
    brief = context.command.get_short_help_str(200)
    yield f'.TH {_name(context).upper()} 1 "" "aiordma {version}" "User Commands"'
    yield from (".SH NAME", f"{_text(_name(context))} \\- {_text(brief.rstrip('.'))}")
    yield from (".SH SYNOPSIS", *_command(context, ".SH DESCRIPTION", ".SH OPTIONS"))
    if context is every[0]:
        yield ".SH COMMANDS"
        for it in every[1:]:
            yield from (".TP", f"\\fB{_text(_name(it))}\\fR(1)")
            yield _text(it.command.get_short_help_str(200))
    else:
        for it in _inner(context):
            yield from (f".SH {str(it.info_name).upper()}", *_command(it, ".PP"))
    others = [f"\\fB{_text(_name(it))}\\fR(1)" for it in every if it is not context]
    yield from (".SH SEE ALSO", ",\n".join(others))


def _command(context: click.Context, description: str, options: str = "") -> Iterator[str]:
    pieces = " ".join(context.command.collect_usage_pieces(context))
    yield f"\\fB{_text(context.command_path)}\\fR {_text(pieces)}"
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(context.command.help or ""))
    yield from (description, "\n.PP\n".join(_text(" ".join(it.split())) for it in paragraphs))
    if options:
        yield options
    for parameter in context.command.get_params(context):
        record = parameter.get_help_record(context)
        if record and isinstance(parameter, click.Option):
            yield from (".TP", f"\\fB{_text(record[0])}\\fR", _text(record[1]))


def _text(plain: str) -> str:
    """Format text for roff. Make `code` bold, and escape hyphens and leading control characters."""
    escaped = plain.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^(?=[.'])", r"\\&", re.sub(r"`([^`]+)`", r"\\fB\1\\fR", escaped))
