"""A click type for options and arguments that specify a file or folder."""

from __future__ import annotations

import os
from typing import Any

import click


class FilePath(click.Path):
    """A click path type that rejects empty paths.

    click.Path would treat an empty path as the current directory.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not os.fspath(value):
            self.fail("the path must not be empty", param, ctx)
        return super().convert(value, param, ctx)
