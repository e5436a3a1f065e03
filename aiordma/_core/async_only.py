"""Errors for statements that lack `async`."""

from __future__ import annotations

from typing import NoReturn


class AsyncContext:
    """A base class whose objects reject `with` and suggest `async with`."""

    __slots__ = ()

    def __enter__(self) -> NoReturn:
        raise TypeError(f"{self!r} is an asynchronous context manager; use 'async with'")

    def __exit__(self, *_: object) -> None:
        raise NotImplementedError


class AsyncIteration:
    """A base class whose objects reject `for` and suggest `async for`."""

    __slots__ = ()

    def __iter__(self) -> NoReturn:
        raise TypeError(f"{self!r} is an asynchronous iterable; use 'async for'")
