"""A model's own prediction layers (MTP) as its draft model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from gguf import GGUFReader

from serve_app.engine.backends.base import GUESSED, MemoryUse, Row
from serve_app.engine.backends.draft_model import N_CTX, LlamaDraft, context_options
from serve_app.engine.options import EngineOptions
from serve_app.errors import ConfigError
from serve_app.llama.model import Model
from serve_app.llama.own_layers.context import OwnLayersContext
from serve_app.llama.own_layers.hidden_states import HiddenStates, States
from serve_app.llama.threads import Threads

# Architectures that take back tokens, whose prediction layers llama.cpp computes, and which tell the hidden
# states of all rows. llama.cpp ends the process where a file of the first ones has several layers.
_SINGLE = frozenset({"cohere2moe", "deepseek2", "deepseek32", "glm-dsa", "glm4moe"})
_SEVERAL = frozenset({"hy_v3"})
_NONE = "engine.draft.own_layers: {} has no prediction layers of its own."
_PROJECTION = "nextn.eh_proj.weight"


def slot_bytes(target: Model, n_ctx: int) -> int:
    """The bytes of one slot: cells of one layer, and the hidden states of half as many tokens."""
    cells = sum(target.cache_elements) // max(1, target.n_cache_layers) * n_ctx
    return 2 * cells + 4 * target.n_embd * n_ctx // 2


class OwnLayers(LlamaDraft):
    """The first of a model's own prediction layers. It is fed the model's hidden states: those of the last
    tokens that it computed."""

    own_layers = True

    def __init__(self, target: Model, options: EngineOptions, threads: Threads) -> None:
        """Raises ConfigError if that has none that could be used."""
        check_own_layers(target)
        if not _has_projection(target):
            raise ConfigError(_NONE.format(target.path.name))
        sizes = replace(context_options(options), tells_hidden=True)
        self._context: OwnLayersContext = OwnLayersContext(target, sizes)
        self._guessed: dict[int, States] = {}
        """The states that go with the next tokens that it guesses itself, by sequence."""
        self._n_slots = options.n_slots
        self.states = HiddenStates(options.n_slots, N_CTX // 2, target.n_embd)
        super().__init__(target, self._context, target.n_vocab, options, threads)

    def first_fed(self, seq_id: int) -> int:
        return self.states.first_fed(seq_id)

    def decode(self, rows: Sequence[Row], places: Sequence[int]) -> None:
        fed = [
            self._guessed[row[2]] if place == GUESSED else self.states.before(row[2], place)
            for row, place in zip(rows, places, strict=True)
        ]
        self._context.decode(rows, np.stack(fed))
        states = self._context.hidden(len(rows))
        for (*_, seq_id, wants_logits), state in zip(rows, states, strict=True):
            if wants_logits:
                self._guessed[seq_id] = state.copy()

    @property
    def memory(self) -> MemoryUse:
        """The memory of context and states: the weights are the model's."""
        of_slot = self.states.n_bytes // self._n_slots
        held = super().memory
        return replace(
            held,
            weights_bytes=0,
            cache_bytes=held.cache_bytes + self.states.n_bytes,
            cache_bytes_per_slot=held.cache_bytes_per_slot + of_slot,
        )


def check_own_layers(target: Model) -> None:
    """Raises ConfigError if a model has no prediction layers of its own that could propose for it, by its
    metadata. The vocabulary is enough."""
    name, architecture = target.path.name, target.meta("general.architecture")
    if not target.n_own_layers:
        raise ConfigError(_NONE.format(name))
    if not target.can_rewind:
        raise ConfigError(
            f"engine.draft.own_layers: {name} cannot take back tokens that were wrong, as its layers are "
            "recurrent. Leave out the draft."
        )
    if architecture not in _SEVERAL | _SINGLE:
        raise ConfigError(
            f"engine.draft.own_layers: llama.cpp does not compute the prediction layers of {name}: it does "
            f"so for the architectures {', '.join(sorted(_SEVERAL | _SINGLE))}."
        )
    if target.n_own_layers > 1 and architecture in _SINGLE:
        raise ConfigError(
            f"engine.draft.own_layers: {name} has {target.n_own_layers} prediction layers, of which "
            f"llama.cpp computes one for the architecture {architecture}."
        )


def _has_projection(target: Model) -> bool:
    """Some files' metadata tell of layers that were left out, without which llama.cpp would end the
    process."""
    return any(
        tensor.name.endswith(_PROJECTION)
        for path in target.files
        for tensor in GGUFReader(path).tensors
    )
