"""Tests of connect and listen options: signatures show each one, unknown ones are refused."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

import aiordma
from aiordma import blocking

pytestmark = pytest.mark.any_device


async def handler(connection: aiordma.Connection) -> None:
    """A handler that does nothing."""


FUNCTIONS: dict[Callable[..., Any], tuple[object, ...]] = {
    aiordma.connect: ("localhost", 1),
    aiordma.listen: (),
    aiordma.start_server: (handler,),
    aiordma.prepare_connection: (),
    aiordma.reconnect: ("localhost", 1),
    aiordma.create_connection: (asyncio.Protocol, "localhost", 1),
    aiordma.open_connection: ("localhost", 1),
    aiordma.create_server: (asyncio.Protocol,),
    aiordma.start_stream_server: (handler,),
    blocking.connect: ("localhost", 1),
    blocking.listen: (),
    blocking.open_stream: ("localhost", 1),
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_public_signatures_list_the_common_options(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    assert parameters.keys() >= {"device", "config", "auth", "encrypt"}
    assert parameters["config"].default == aiordma.Config()
    assert not any(it.kind is it.VAR_KEYWORD for it in parameters.values())


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
@pytest.mark.parametrize("name", ["devise", "timeout", "close_timeout"])
def test_unknown_option_is_rejected_with_a_hint(function: Callable[..., Any], name: str) -> None:
    async def call() -> None:
        result = function(*FUNCTIONS[function], **{name: 1})
        await (anext(result) if function is aiordma.reconnect else result)

    called = "open_connection" if function is blocking.open_stream else function.__name__
    listens = "backlog" in inspect.signature(function).parameters
    hints = {
        "devise": "the options are .*device",
        "timeout": rf"pass .*\({'handshake' if listens else 'connect'}_timeout=",
        "close_timeout": r"pass .*\(close_timeout=",
    }
    text = rf"^{called}\(\) got an unexpected keyword argument '{name}'; {hints[name]}"
    with pytest.raises(TypeError, match=text):
        asyncio.run(call())
    blocking.stop()
