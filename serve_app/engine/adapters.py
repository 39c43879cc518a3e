"""Loads and unloads LoRA adapters while the engine serves others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from serve_app.base.errors import ConfigError, InvalidRequestError
from serve_app.base.values.adapters import Adapters
from serve_app.engine.core.command_queue import Command
from serve_app.engine.core.engine_core import EngineCore


class EngineAdapters:
    """The adapters that come and go. Any thread but the decoder's; `load` and `free` wait for it.

    `run_between_steps` gives a command to the decoder thread. Raises what the engine refuses commands with.
    """

    def __init__(self, core: EngineCore, run_between_steps: Callable[[Command], None]) -> None:
        self._core = core
        self._adapters = core.backend.adapters
        self._run_between_steps = run_between_steps
        self._hidden = set[str]()

    def check(self, adapters: Adapters) -> None:
        """Raises InvalidRequestError for adapters that are not loaded, or hidden."""
        loaded = () if self._adapters is None else self._adapters.loaded_keys
        for adapter in adapters:
            if adapter.key not in loaded or adapter.key in self._hidden:
                raise InvalidRequestError(f"There is no adapter {adapter.id!r} here.", "lora")

    def load(self, key: str, path: Path) -> None:
        """Load an adapter from a file under this key; nothing happens if there is one. Streams wait
        while it is copied. Raises ConfigError for a file that cannot be used."""
        backend = self._adapters
        if backend is None:
            raise ConfigError("A model with engine.backend: openvino takes no adapters.")
        command = Command(lambda _: backend.load(key, path))
        self._run_between_steps(command)
        command.future.result()
        self._hidden.discard(key)

    def hide(self, key: str) -> None:
        """Refuse new requests with it. Idempotent."""
        self._hidden.add(key)

    def is_hidden(self, key: str) -> bool:
        """Whether the adapter is to be freed."""
        return key in self._hidden

    def free(self, key: str) -> bool:
        """Give its memory back, unless requests use it: False then. It must be hidden. Idempotent."""
        command = Command(lambda _: self._free(key))
        self._run_between_steps(command)
        return bool(command.future.result())

    def _free(self, key: str) -> bool:
        requests = (sequence.request for sequence in self._core.live)
        if any(key == adapter.key for request in requests for adapter in request.adapters):
            return False
        self._core.runner.use_adapters(())
        if self._adapters is not None:
            self._adapters.free(key)
        self._hidden.discard(key)
        return True
