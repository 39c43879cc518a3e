"""Loads and unloads LoRA adapters while the engine serves others, and chooses the adapters of each step.

llama.cpp applies adapters to a whole batch. So a step is for those sequences that have the same ones, and
steps take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path

from serve_app.engine.core.command_queue import Command
from serve_app.engine.core.engine_core import EngineCore
from serve_app.engine.core.scheduler.scheduler import Turns
from serve_app.engine.core.sequence import Sequence
from serve_app.errors import ConfigError, InvalidRequestError
from serve_app.types import Adapters

# The part of a turn that a switch may take: turns of several steps, if one step is shorter than that.
_SWITCH_SHARE = 0.05
# How fast the price follows what switches take.
_LEARNING = 0.2
# The price is measured in turns of two steps or more: in the first ones, and then in one of so many.
_TRIALS, _AGAIN = 4, 16
# How long such a turn is at most: two steps, unless they are very short.
_TRIAL_S = 0.1


class AdapterTurns(Turns):
    """Chooses the adapters of each step: those whose turn it is have one step, or as many as make the price
    of the switch small, and then those go on that have waited longest for a step."""

    def __init__(self, max_stall_s: float | None) -> None:
        self._max_stall_s = max_stall_s
        self._served_at: dict[Adapters, float] = {}
        """When the last step of those that run began."""
        self._current: Adapters = ()
        self._since = 0.0
        """When their turn began."""
        self._n_turns = 0
        self._first: tuple[int, float] | None = None
        """Rows and seconds of the last batch, if it was the first one after a switch."""
        self._n_measured = 0
        self._extra_s = 0.0

    @property
    def switch_s(self) -> float:
        """The additional time of a batch if the one before had other adapters."""
        return max(0.0, self._extra_s)

    def choose(self, sequences: SequenceOf[Sequence], now: float) -> list[Sequence]:
        """The sequences of one turn: all, if all have the same adapters. `now` is on the clock of
        `Trace.submitted`."""
        sets: dict[Adapters, list[Sequence]] = {}
        for sequence in sequences:
            sets.setdefault(sequence.request.adapters, []).append(sequence)
        self._served_at = {one: at for one, at in self._served_at.items() if one in sets}
        if not sets:
            return []
        # Since when each waits: since its last step, or since the first of its sequences came.
        since = {
            adapters: self._served_at.get(adapters, min(seq.trace.submitted for seq in waiting))
            for adapters, waiting in sets.items()
        }
        chosen = self._current
        if chosen not in sets or now - self._since >= self._turn_s(len(sets)):
            chosen = min(sets, key=since.__getitem__)
            self._since = now
            self._n_turns += chosen != self._current
        self._current = chosen
        self._served_at[chosen] = now
        return sets[chosen]

    def _turn_s(self, n_sets: int) -> float:
        """All others together wait no longer than a stream may, as far as the price allows it."""
        if n_sets == 1:
            return float("inf")
        is_trial = self._n_measured < _TRIALS or self._n_turns % _AGAIN == 0
        turn_s = _TRIAL_S if is_trial else self.switch_s / _SWITCH_SHARE
        if self._max_stall_s is not None:
            turn_s = min(turn_s, self._max_stall_s / (n_sets - 1))
        return turn_s

    def price_s(self, before: Adapters) -> float:
        """The additional cost of the step that was chosen last, if the one before had those
        adapters."""
        return self.switch_s if before != self._current else 0.0

    def observe(self, n_rows: int, seconds: float, *, switched: bool) -> None:
        """A batch took so long; whether it had other adapters than the one before. The price is what it
        took longer than the next one of as many rows: a forecast knows nothing of adapters."""
        if switched:
            self._first = n_rows, seconds
            return
        if self._first is not None and self._first[0] == n_rows:
            extra_s = self._first[1] - seconds
            learning = max(_LEARNING, 1 / (1 + self._n_measured))
            self._extra_s += learning * (extra_s - self._extra_s)
            self._n_measured += 1
        self._first = None


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
        loaded = () if self._adapters is None else self._adapters.loaded
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
