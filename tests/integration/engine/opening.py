"""Engines that tests open for a while."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from serve_app.engine import Engine, EngineOptions


def opener(options: EngineOptions) -> Callable[..., AbstractAsyncContextManager[Engine]]:
    """What opens a model's file with these options, but for those that it is given."""

    @asynccontextmanager
    async def opened(path: Path, **changed: Any) -> AsyncIterator[Engine]:
        engine = Engine.load(path, replace(options, **changed))
        try:
            yield engine
        finally:
            engine.close()

    return opened
