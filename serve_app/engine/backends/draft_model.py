"""The draft models of llama.cpp's backend: another GGUF file, or layers that read hidden states."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from serve_app.engine.autotune import profile_cache
from serve_app.engine.autotune.clocks import Clocks
from serve_app.engine.autotune.cost_model import Profile
from serve_app.engine.autotune.profiler import Profiler, in_turns
from serve_app.engine.backends.base import GUESSED, MemoryUse, Row
from serve_app.engine.choice.apart import apart
from serve_app.engine.drafts.drafting import MAX_DRAFTED_ROWS
from serve_app.engine.options import EngineOptions
from serve_app.errors import ConfigError, DecodeError, EngineFailedError
from serve_app.llama import library
from serve_app.llama.context import Context, ContextOptions
from serve_app.llama.formats import Threads
from serve_app.llama.hidden_states import (
    BlockContext,
    EagleContext,
    GuessingContext,
    HiddenStates,
    OwnLayersContext,
    States,
)
from serve_app.llama.model import Model

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

    reads_states, n_block = False, 0

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
        folder, name = options.profile_folder, _kept_as(options, *self._models())
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

    def _models(self) -> tuple[Model, ...]:
        return (self._model,)

    def first_fed(self, seq_id: int) -> int:
        return 0

    def decode(self, rows: Sequence[Row], places: Sequence[int], n_guessed: int) -> None:
        self._context.decode(rows)

    def most_likely(self, row: int, n_guessed: int) -> list[int]:
        return [self._best(row)]

    def _best(self, row: int) -> int:
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


def _kept_as(options: EngineOptions, *models: Model) -> str:
    """The name of the profile of a draft that depends on these models."""
    return profile_cache.key(
        options,
        draft="".join(model.fingerprint().hex() for model in models),
        own_layers=options.own_layers,
        llama_cpp=library.version(),
    )


def open_draft(
    target: Model, model: Model | None, options: EngineOptions, threads: Threads
) -> LlamaDraft | None:
    """Make the draft that the options name, which `hidden_layers` found able. `model` is that of another
    file."""
    if options.own_layers:
        sizes = replace(_context_options(options), hidden_layers=(target.n_layer,))
        return GuessingDraft(target, target, OwnLayersContext(target, sizes), options, threads)
    if model is None:
        return None
    if model.is_head:
        # The engine's context may be remade, so another one lends the target's embeddings and output.
        lender = Context(target, _FEW_ROWS)
        sizes = replace(_context_options(options), hidden_layers=(model.n_layer,), other=lender)
        if model.n_block:
            sizes = replace(sizes, n_outputs=options.n_slots + MAX_DRAFTED_ROWS)
            return BlockDraft(target, model, BlockContext(model, sizes), options, threads)
        return GuessingDraft(target, model, EagleContext(model, sizes), options, threads)
    context = Context(model, _context_options(options))
    return LlamaDraft(model, context, min(target.n_vocab, model.n_vocab), options, threads)


def hidden_layers(target: Model, model: Model | None, options: EngineOptions) -> tuple[int, ...]:
    """The layers of the target whose input its draft reads; see `ContextOptions`. Raises ConfigError if the
    draft cannot propose for the target."""
    check_target(target)
    if options.own_layers:
        check_own_layers(target)
        _check_states(target, target, options)
        return (target.n_layer,)
    if model is None:
        return ()
    check_draft(target, model)
    n_ctx, _ = _sizes(options)
    if 0 < model.window < n_ctx:
        raise ConfigError(
            f"engine.draft: {model.path.name} looks back on {model.window} tokens only, and could not take "
            "back what it proposed."
        )
    if model.is_head:
        _check_states(target, model, options)
    return model.target_layers


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


def check_target(target: Model) -> None:
    """Raises ConfigError if that is a head for another model. The vocabulary is enough."""
    if target.is_head:
        raise ConfigError(
            f"{target.path.name} is a draft for another model. Name it in engine.draft."
        )


def check_draft(target: Model, draft: Model) -> None:
    """Raises ConfigError if the draft cannot propose for the target. Vocabularies are enough."""
    able = (
        (target, target.can_roll_back, "tokens that were wrong"),
        (draft, False, "what it proposed"),
    )
    for model, can_roll_back, lack in able:
        sees_all = not (model.is_causal or model.is_head)
        if (model.is_recurrent and not can_roll_back) or sees_all:
            raise ConfigError(
                f"engine.draft: {model.path.name} cannot take back {lack}, as its layers are recurrent "
                "or it makes embeddings only. Leave out the draft."
            )
    width = draft.meta_int("target_hidden_size", draft.n_embd)
    if draft.is_head and width != target.n_embd:
        raise ConfigError(
            f"engine.draft: {draft.path.name} reads hidden states of {width} numbers, and those of "
            f"{target.path.name} have {target.n_embd}."
        )
    if draft.n_block and draft.mask is None:
        raise ConfigError(f"engine.draft: {draft.path.name} does not name its mask token.")
    if draft.n_block and draft.meta_int("selector_top_k", 0):
        raise ConfigError(
            f"engine.draft: {draft.path.name} has a selector of tokens (DFlash2), which is not supported."
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


# -- layers that read the model's hidden states ----------------------------------------------------

_N_STATES = N_CTX // 2
"""The last tokens of each slot whose hidden states are there."""


def slot_bytes(target: Model, n_ctx: int) -> int:
    """The bytes of one slot: cells of one layer, and the hidden states of half as many tokens."""
    cells = sum(target.cache_elements) // max(1, target.n_cache_layers) * n_ctx
    return 2 * cells + states_bytes(target, 1)


def states_bytes(target: Model, n_layers: int) -> int:
    """The bytes of one slot's hidden states, of so many layers."""
    return 4 * target.n_embd * n_layers * _N_STATES


class GuessingDraft(LlamaDraft):
    """Layers that are fed a model's hidden states of the last tokens that it computed, and their own states
    behind a guess: the model's own prediction layers, of which the first guesses, or an EAGLE-3 head."""

    reads_states = True

    def __init__(
        self,
        target: Model,
        model: Model,
        context: GuessingContext,
        options: EngineOptions,
        threads: Threads,
    ) -> None:
        self._context: GuessingContext = context
        self._guessed: dict[int, States] = {}
        self._n_slots, self._target, self.n_block = options.n_slots, target, model.n_block
        width = context.n_hidden
        if model is not target:
            width = len(model.target_layers) * target.n_embd
        self.states = HiddenStates(options.n_slots, _N_STATES, width)
        super().__init__(model, context, target.n_vocab, options, threads)

    def _models(self) -> tuple[Model, ...]:
        return (self._target, self._model)

    def first_fed(self, seq_id: int) -> int:
        return self.states.first_fed(seq_id)

    def decode(self, rows: Sequence[Row], places: Sequence[int], n_guessed: int) -> None:
        known = [i for i, place in enumerate(places) if place != GUESSED]
        fed = np.empty((len(rows), self._context.n_hidden), np.float32)
        if known:
            states = np.stack([self.states.before(rows[i][2], places[i]) for i in known])
            fed[known] = self._context.encoded(states)
        for i, (row, place) in enumerate(zip(rows, places, strict=True)):
            if place == GUESSED:
                fed[i] = self._guessed[row[2]]
        self._context.decode(rows, fed)
        for i, (*_, seq_id, wants_logits) in enumerate(rows):
            if wants_logits:
                self._guessed[seq_id] = self._context.state(i).copy()

    @property
    def memory(self) -> MemoryUse:
        """The memory of context and states, and of weights that are not the model's."""
        of_slot = self.states.n_bytes // self._n_slots
        held = super().memory
        return replace(
            held,
            weights_bytes=0 if self._model is self._target else held.weights_bytes,
            cache_bytes=held.cache_bytes + self.states.n_bytes,
            cache_bytes_per_slot=held.cache_bytes_per_slot + of_slot,
        )


class BlockDraft(GuessingDraft):
    """A DFlash draft. It is fed the states of a text's tokens, and one pass guesses several tokens: its
    rows are the text's last token, whose state is not known yet, and a mask for each guess."""

    _context: BlockContext

    def decode(self, rows: Sequence[Row], places: Sequence[int], n_guessed: int) -> None:
        mask, n_before = self._model.mask or 0, int(self._model.guesses_from_anchor)
        made, known = list[Row](), dict[int, States]()
        self._first_guess: dict[int, int] = {}
        for i, (row, place) in enumerate(zip(rows, places, strict=True)):
            _, position, seq_id, wants_logits = row
            if not wants_logits:
                known[len(made)] = self.states.before(seq_id, place + 1)
            made.append(row)
            if wants_logits:
                self._first_guess[i] = len(made) - n_before
                masks = range(position + 1, position + 1 + n_guessed - n_before)
                made += [(mask, at, seq_id, True) for at in masks]
        fed = np.empty((len(made), self._context.n_hidden), np.float32)
        if known:
            fed[[*known]] = self._context.encoded(np.stack([*known.values()]))
        self._context.decode(made, fed)

    def most_likely(self, row: int, n_guessed: int) -> list[int]:
        first = self._first_guess[row]
        return [self._best(first + i) for i in range(n_guessed)]


_FEW_ROWS = ContextOptions(
    n_seq_max=1, n_ctx_slot=3, n_batch=3, n_outputs=3, threads=1, flash_attn=True
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


def _check_states(target: Model, model: Model, options: EngineOptions) -> None:
    """Raises ConfigError if llama.cpp does not compute layers that read hidden states. Some graphs end the
    process where a file lacks tensors or has several layers, or do not tell the states. So another process
    tries, unless there is a profile of an earlier start."""
    kept_as = _kept_as(options, target, model)
    if profile_cache.load(options.profile_folder, kept_as, Profile) is not None:
        return
    draft = None if model is target else model.path
    try:
        guesses = apart(guesses_by_states, target.path, draft)
    except EngineFailedError:  # the log of that process says why
        guesses = False
    if guesses:
        return
    name, build = target.path.name, f"llama.cpp of llama-cpp-python {library.version()}"
    if draft is None:
        raise ConfigError(
            f"engine.draft.own_layers: {build} does not compute the prediction layers of {name}: the file "
            f"lacks them, or has layers that the architecture {target.architecture} does not use. Leave "
            "out the draft."
        )
    raise ConfigError(
        f"engine.draft: {build} does not tell the hidden states that {draft.name} reads of {name}. Leave "
        "out the draft."
    )


def guesses_by_states(path: Path, draft: Path | None) -> bool:
    """Whether a model's own prediction layers, or the head in the file `draft`, compute rows, and logits
    depend on the hidden states of the last ones that are fed. Ends the process where llama.cpp does."""
    target = Model(path, repack=False, own_layers=draft is None)
    model = target if draft is None else Model(draft, repack=False)
    layers = (target.n_layer,) if draft is None else model.target_layers
    source = Context(target, replace(_FEW_ROWS, hidden_layers=layers))
    sizes = replace(_FEW_ROWS, hidden_layers=(model.n_layer,), other=source)
    kind = OwnLayersContext if draft is None else BlockContext if model.n_block else EagleContext
    context, logits = kind(model, sizes), []
    try:
        source.decode([(i, i, 0, True) for i in range(3)])
        states = source.hidden(3).copy()
        for _ in range(2):
            context.decode([(i, i, 0, i == 2) for i in range(3)], context.encoded(states))
            logits.append(context.logits(2).copy())
            context.truncate(0, 0)
            states[1:] = 1 - states[1:]
    except DecodeError:
        return False
    return bool(np.isfinite(logits).all() and (logits[0] != logits[1]).any())
