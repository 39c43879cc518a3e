"""Fixtures of the engine's tests."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from serve_app.engine.core.command_queue import CommandQueue


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], threading.Event]:
    """`after("abort")` is an event that is set once that command is in the command queue."""

    def watch(command: str) -> threading.Event:
        given_in = threading.Event()
        original = getattr(CommandQueue, command)

        def watched(command_queue: CommandQueue, argument: object) -> None:
            original(command_queue, argument)
            given_in.set()

        monkeypatch.setattr(CommandQueue, command, watched)
        return given_in

    return watch
