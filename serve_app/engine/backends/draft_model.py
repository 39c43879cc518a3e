"""The draft models of llama.cpp's backend: another GGUF file, or the model's own prediction layers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from serve_app.base.engine_options import EngineOptions
from serve_app.base.errors import ConfigError, DecodeError, EngineFailedError
from serve_app.base.formats import Row
from serve_app.engine.backends.base import GUESSED, MemoryUse
from serve_app.engine.choice.apart import apart
from serve_app.engine.costs import profile_cache
from serve_app.engine.costs.clocks import Clocks
from serve_app.engine.costs.cost_model import Profile
from serve_app.engine.costs.profiler import Profiler, in_turns
from serve_app.engine.guests.drafts.drafting import MAX_DRAFTED_ROWS
from serve_app.kernels.llama import library
from serve_app.kernels.llama.context import Context, ContextOptions
from serve_app.kernels.llama.hidden_states import HiddenStates, OwnLayersContext, States
from serve_app.kernels.llama.model import Model

logger = logging.getLogger("corral.engine")

N_CTX = 512
"""Tokens that each slot of a draft model holds, if the engine's hold more."""
_LEAST_CTX = 64
_N_BATCH = 256
# The part of the time for profiling that it gets, and seconds that are enough.
_PROFILING, _ENOUGH_S = 0.15, 3.0
# llama.cpp's own bound: files of one family are padded to sizes that differ a little.
_MOST_PADDED = 128
# The last tokens of each slot whose hidden states are there, for own layers.
_N_STATES = N_CTX // 2
_FEW_ROWS = ContextOptions(
    n_seq_max=1, n_ctx_slot=3, n_batch=3, n_outputs=3, threads=1, flash_attn=True, tells_hidden=True
)


class LlamaDraft:
    """Proposes tokens by a context of its own."""

    reads_states = False

    def __init__(
        self, model: Model, context: Context, n_vocab: int, options: EngineOptions
    ) -> None:
        """`n_vocab` are the tokens that it may propose. Measures its passes."""
        self.n_ctx, self.n_batch = _sizes(options)
        self._model, self._context, self._n_vocab = model, context, n_vocab
        self.truncate, self.close = context.truncate, context.close
        context.warm_up()
        self.profile = self._measure(options)

    def _measure(self, options: EngineOptions) -> Profile:
        if options.profile_limit_s <= 0:
            return Profile()
        folder, name = options.profile_folder, _profile_key(options, self._model)
        kept = profile_cache.load(folder, name, Profile)
        if kept is not None and not (options.measures_again and profile_cache.is_disturbed([kept])):
            return kept
        limit_s = min(_ENOUGH_S, _PROFILING * options.profile_limit_s)
        profiler = Profiler(
            self._context,
            n_slots=options.n_slots,
            n_ctx_slot=self.n_ctx,
            n_batch=self.n_batch,
            clocks=Clocks(options.threads_of),
        )
        in_turns([profiler], limit_s / 2)
        profiler.rest(limit_s / 2)
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
        """The memory that it takes, beside the other model."""
        context = self._context
        return MemoryUse(
            weights_bytes=self._model.n_bytes,
            cache_bytes=context.layout.cache_bytes,
            cache_bytes_per_slot=context.cache_bytes_per_seq,
            cache_bytes_per_token=context.layout.per_token,
            compute_bytes=context.compute_bytes,
        )


class OwnLayersDraft(LlamaDraft):
    """The model's own prediction layers, of which the first guesses. It is fed the hidden states of the
    last tokens that the model computed, and its own states behind a guess."""

    reads_states = True

    def __init__(self, model: Model, options: EngineOptions) -> None:
        sizes = replace(_context_options(options), tells_hidden=True)
        self._layers = context = OwnLayersContext(model, sizes)
        self._guessed: dict[int, States] = {}
        self._n_slots = options.n_slots
        self.states = HiddenStates(options.n_slots, _N_STATES, context.n_hidden)
        super().__init__(model, context, model.n_vocab, options)

    def first_fed(self, seq_id: int) -> int:
        return self.states.first_fed(seq_id)

    def decode(self, rows: Sequence[Row], places: Sequence[int]) -> None:
        states = [
            self._guessed[row[2]] if place == GUESSED else self.states.before(row[2], place)
            for row, place in zip(rows, places, strict=True)
        ]
        self._layers.decode(rows, np.stack(states))
        for i, (*_, seq_id, wants_logits) in enumerate(rows):
            if wants_logits:
                self._guessed[seq_id] = self._layers.state(i).copy()

    @property
    def memory(self) -> MemoryUse:
        """The memory of context and states: the weights are the model's."""
        use, n_bytes = super().memory, self.states.n_bytes
        return replace(
            use,
            weights_bytes=0,
            cache_bytes=use.cache_bytes + n_bytes,
            cache_bytes_per_slot=use.cache_bytes_per_slot + n_bytes // self._n_slots,
        )


def draft_for(target: Model, options: EngineOptions) -> Model | None:
    """The model that proposes for the target by these options: another file's, the target itself for its
    own layers, or none. Raises ConfigError if it cannot propose."""
    if options.own_layers:
        check_own_layers(target)
        _check_states(target, options)
        return target
    if options.draft is None:
        return None
    model = Model(options.draft, load_mode=options.load_mode)
    check_draft(target, model)
    if 0 < model.window < _sizes(options)[0]:
        raise ConfigError(
            f"engine.draft: {model.path.name} looks back on {model.window} tokens only, and could not take "
            "back what it proposed."
        )
    return model


def open_draft(target: Model, model: Model | None, options: EngineOptions) -> LlamaDraft | None:
    """The draft by the model that `draft_for` found."""
    if model is None:
        return None
    if model is target:
        return OwnLayersDraft(model, options)
    context = Context(model, _context_options(options))
    return LlamaDraft(model, context, min(target.n_vocab, model.n_vocab), options)


def _profile_key(options: EngineOptions, model: Model) -> str:
    """The name of the profile of a draft."""
    return profile_cache.key(
        options,
        draft=model.fingerprint().hex(),
        own_layers=options.own_layers,
        llama_cpp=library.version(),
    )


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


def slot_bytes(target: Model) -> int:
    """The bytes of one slot of own layers: cells of one layer, and the hidden states."""
    return 2 * sum(target.layer_elements) * N_CTX + 4 * target.n_embd * _N_STATES


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


def check_own_layers(target: Model) -> None:
    """Raises ConfigError if a model has no prediction layers of its own that could propose for it, by its
    metadata. The vocabulary is enough."""
    name = target.path.name
    if not target.n_own_layers:
        raise ConfigError(f"engine.draft.own_layers: {name} has no prediction layers of its own.")
    if target.is_recurrent and not target.can_roll_back:
        raise ConfigError(
            f"engine.draft.own_layers: {name} cannot take back tokens that were wrong, as its layers are "
            "recurrent. Leave out the draft."
        )


def _check_states(target: Model, options: EngineOptions) -> None:
    """Raises ConfigError if llama.cpp does not compute the model's own layers. Some graphs end the process
    where a file lacks tensors or has several layers. So another process tries, unless there is a profile of
    an earlier start."""
    kept_as = _profile_key(options, target)
    if profile_cache.load(options.profile_folder, kept_as, Profile) is not None:
        return
    try:
        guesses = apart(guesses_by_states, target.path)
    except EngineFailedError:  # the log of that process says why
        guesses = False
    if not guesses:
        name = target.path.name
        raise ConfigError(
            f"engine.draft.own_layers: llama.cpp of llama-cpp-python {library.version()} does not compute "
            f"the prediction layers of {name}: the file lacks them, or has layers that the architecture "
            f"{target.architecture} does not use. Leave out the draft."
        )


def guesses_by_states(path: Path) -> bool:
    """Whether a model's own prediction layers compute rows, and logits depend on the hidden states of the
    last ones that are fed. Ends the process where llama.cpp does."""
    model = Model(path, repack=False, own_layers=True)
    source, logits = Context(model, _FEW_ROWS), []
    context = OwnLayersContext(model, _FEW_ROWS)
    try:
        source.decode([(i, i, 0, True) for i in range(3)])
        states = source.hidden(3).copy()
        for _ in range(2):
            context.decode([(i, i, 0, i == 2) for i in range(3)], states)
            logits.append(context.logits(2).copy())
            context.truncate(0, 0)
            states[1:] = 1 - states[1:]
    except DecodeError:
        return False
    return bool(np.isfinite(logits).all() and (logits[0] != logits[1]).any())
