"""Channels are tested in both kinds of event loop: Ray takes uvloop's where it is installed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop

from tests.unit.channel.harness import Wire


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """pytest-asyncio's hook."""
    return {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    one = Wire()
    yield one
    one.channel.close()
    one.peer.close()
