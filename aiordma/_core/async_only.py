"""Errors for statements that lack `async`."""

from __future__ import annotations

from typing import NoReturn


class AsyncContext:
    """A mix-in for asynchronous context managers that rejects `with` and suggests `async with`."""

    __slots__ = ()

    def __enter__(self) -> NoReturn:
        raise TypeError(f"{self!r} is an asynchronous context manager; use 'async with'")

    def __exit__(self, *_: object) -> None:
        raise NotImplementedError


class AsyncIteration:
    """A mix-in for asynchronous iterables that rejects `for` and suggests `async for`."""

    __slots__ = ()

    def __iter__(self) -> NoReturn:
        raise TypeError(f"{self!r} is an asynchronous iterable; use 'async for'")
