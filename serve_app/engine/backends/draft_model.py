"""The draft models of the real backend: another GGUF file, or the model's own prediction layers (MTP)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGUFReader

from serve_app.engine.autotune import profile_cache
from serve_app.engine.autotune.clocks import Clocks
from serve_app.engine.autotune.cost_model import Profile
from serve_app.engine.autotune.profiler import Profiler, in_turns
from serve_app.engine.backends.base import GUESSED, MemoryUse, Row
from serve_app.engine.drafts.drafting import MAX_DRAFTED_ROWS
from serve_app.engine.options import EngineOptions
from serve_app.errors import ConfigError
from serve_app.llama import library
from serve_app.llama.context import Context, ContextOptions
from serve_app.llama.formats import Threads
from serve_app.llama.model import Model
from serve_app.llama.own_layers import HiddenStates, OwnLayersContext, States

logger = logging.getLogger("corral.engine")

N_CTX = 512
"""Tokens that each slot of a draft model holds, if the engine's hold more."""
_LEAST_CTX = 64
_N_BATCH = 256
# The part of the time for profiling that it gets, and seconds that are enough.
_PROFILING, _ENOUGH_S = 0.15, 3.0
# llama.cpp's own bound: files of one family are padded to sizes that differ a little.
_MOST_PADDED = 128


class LlamaDraft:
    """Proposes tokens by a context of its own."""

    own_layers = False

    def __init__(
        self, model: Model, context: Context, n_vocab: int, options: EngineOptions, threads: Threads
    ) -> None:
        """`n_vocab` are the tokens that it may propose. Measures its passes."""
        self.n_ctx, self.n_batch = _sizes(options)
        self._model, self._context = model, context
        self._n_vocab = n_vocab
        self.truncate, self.close = context.truncate, context.close
        context.use_threads(threads)
        context.warm_up()
        self.profile = self._measure(options, threads)

    def _measure(self, options: EngineOptions, threads: Threads) -> Profile:
        if options.profile_limit_s <= 0:
            return Profile()
        folder = options.profile_folder
        name = profile_cache.key(
            options,
            draft=self._model.fingerprint().hex(),
            own_layers=self.own_layers,
            llama_cpp=library.version(),
        )
        kept = profile_cache.load(folder, name, Profile)
        if kept is not None:
            return kept
        limit_s = min(_ENOUGH_S, _PROFILING * options.profile_limit_s)
        profiler = Profiler(
            self._context,
            n_slots=options.n_slots,
            n_ctx_slot=self.n_ctx,
            n_batch=self.n_batch,
            clocks=Clocks(threads),
        )
        in_turns([profiler], limit_s / 2)
        profiler.rest(limit_s / 2)
        if profile_cache.is_worth_keeping([profiler.profile]):
            profile_cache.save(folder, name, profiler.profile)
        logger.info("Measured the draft model %s.", self._model.path.name)
        return profiler.profile

    def first_fed(self, seq_id: int) -> int:
        return 0

    def decode(self, rows: Sequence[Row], places: Sequence[int]) -> None:
        self._context.decode(rows)

    def most_likely(self, row: int) -> int:
        return int(self._context.logits(row)[: self._n_vocab].argmax())

    @property
    def memory(self) -> MemoryUse:
        """The memory that it holds, beside the other model."""
        context = self._context
        return MemoryUse(
            weights_bytes=self._model.n_bytes,
            cache_bytes=context.layout.cache_bytes,
            cache_bytes_per_slot=context.cache_bytes_per_seq,
            cache_bytes_per_token=context.layout.per_token,
            compute_bytes=context.compute_bytes,
        )


def open_draft(target: Model, path: Path, options: EngineOptions, threads: Threads) -> LlamaDraft:
    """A model of another file. Raises ConfigError if it cannot be loaded, or propose for that one."""
    model = Model(path, load_mode=options.load_mode)
    check_draft(target, model)
    n_ctx, _ = _sizes(options)
    if 0 < model.window < n_ctx:
        raise ConfigError(
            f"engine.draft: {path.name} looks back on {model.window} tokens only, and could not take "
            "back what it proposed."
        )
    context = Context(model, _context_options(options))
    return LlamaDraft(model, context, min(target.n_vocab, model.n_vocab), options, threads)


def _context_options(options: EngineOptions) -> ContextOptions:
    n_ctx, n_batch = _sizes(options)
    return ContextOptions(
        n_seq_max=options.n_slots,
        n_ctx_slot=n_ctx,
        n_batch=n_batch,
        n_outputs=max(options.n_slots, MAX_DRAFTED_ROWS),
        threads=options.threads,
        threads_batch=options.threads_batch,
        flash_attn=True,
        kv_unified=True,
    )


def _sizes(options: EngineOptions) -> tuple[int, int]:
    return max(_LEAST_CTX, min(N_CTX, options.n_ctx_slot)), max(_N_BATCH, options.n_slots)


def check_draft(target: Model, draft: Model) -> None:
    """Raises ConfigError if the draft cannot propose for the target. Vocabularies are enough."""
    able = (
        (target, target.can_roll_back, "tokens that were wrong"),
        (draft, False, "what it proposed"),
    )
    for model, can_roll_back, lack in able:
        if (model.is_recurrent and not can_roll_back) or not model.is_causal:
            raise ConfigError(
                f"engine.draft: {model.path.name} cannot take back {lack}, as its layers are recurrent "
                "or it makes embeddings only. Leave out the draft."
            )
    if target.vocabulary_key == draft.vocabulary_key:
        return
    reason = f"it has {draft.n_vocab} tokens, and {target.path.name} {target.n_vocab}"
    if abs(target.n_vocab - draft.n_vocab) <= _MOST_PADDED:
        n_shared = min(target.n_vocab, draft.n_vocab)
        i = next((i for i in range(n_shared) if target.text_of(i) != draft.text_of(i)), None)
        if i is None:
            return
        texts = f"{draft.text_of(i)!r}, that of {target.path.name} {target.text_of(i)!r}"
        reason = f"its token {i} is {texts}"
    raise ConfigError(
        f"engine.draft: {draft.path.name} has another vocabulary: {reason}. A draft is a smaller model "
        "of the same family."
    )


# -- the model's own prediction layers ------------------------------------------------------------

# Architectures that take back tokens, whose prediction layers llama.cpp computes, and which tell the hidden
# states of all rows. llama.cpp ends the process where a file of the first ones has several layers.
_SINGLE = frozenset(
    {"cohere2moe", "deepseek2", "deepseek32", "glm-dsa", "glm4moe", "qwen35", "qwen35moe"}
)
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
        sizes = replace(_context_options(options), tells_hidden=True)
        self._context: OwnLayersContext = OwnLayersContext(target, sizes)
        self._guessed: dict[int, States] = {}
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
    name, architecture = target.path.name, target.architecture
    if not target.n_own_layers:
        raise ConfigError(_NONE.format(name))
    if target.is_recurrent and not target.can_roll_back:
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
    """Some files tell of layers that were left out, without which llama.cpp would end the process."""
    return any(
        tensor.name.endswith(_PROJECTION)
        for path in target.files
        for tensor in GGUFReader(path).tensors
    )
