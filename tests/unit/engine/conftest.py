"""Fixtures of the engine's tests."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from serve_app.engine.command_queue import Mailbox


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], threading.Event]:
    """`after("abort")` is an event that is set once that command is in the mailbox."""

    def watch(command: str) -> threading.Event:
        given_in = threading.Event()
        original = getattr(Mailbox, command)

        def watched(mailbox: Mailbox, argument: object) -> None:
            original(mailbox, argument)
            given_in.set()

        monkeypatch.setattr(Mailbox, command, watched)
        return given_in

    return watch
