"""Errors for statements that lack their `async`."""

from __future__ import annotations

from typing import NoReturn


class AsyncContext:
    """Refuses `with`, and says that it is `async with`."""

    __slots__ = ()

    def __enter__(self) -> NoReturn:
        raise TypeError(f"{self!r} is an asynchronous context manager: write 'async with'")

    def __exit__(self, *_: object) -> None:
        raise NotImplementedError


class AsyncIteration:
    """Refuses `for`, and says that it is `async for`."""

    __slots__ = ()

    def __iter__(self) -> NoReturn:
        raise TypeError(f"{self!r} is an asynchronous iterable: write 'async for'")
