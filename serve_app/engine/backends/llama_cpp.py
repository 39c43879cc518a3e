"""The real backend: llama.cpp."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from serve_app.base import progress
from serve_app.base.engine_options import EngineOptions
from serve_app.base.errors import ConfigError, DecodeError
from serve_app.base.formats import Row, State
from serve_app.base.progress import Report, Stage
from serve_app.base.sampling import SamplingParams
from serve_app.base.values.adapters import Adapters
from serve_app.engine.backends.base import CacheTraits, EmbeddingShape, MemoryUse
from serve_app.engine.backends.draft_model import OwnLayersDraft, draft_for, open_draft
from serve_app.engine.backends.state_layout import Layout, convert_state
from serve_app.engine.choice.caches import choose_cache
from serve_app.engine.choice.plan import LLAMA_CPP_PLAN, CachePlan, Mode, Plan
from serve_app.engine.core.scheduler.scheduler import MAX_SCORED_ROWS
from serve_app.engine.costs.cost_model import Profile
from serve_app.engine.guests.drafts.drafting import MAX_DRAFTED_ROWS
from serve_app.kernels.llama import library
from serve_app.kernels.llama.context import Adapter, Context, ContextOptions
from serve_app.kernels.llama.grammars.constraint import Constraint
from serve_app.kernels.llama.hidden_states import HiddenStates
from serve_app.kernels.llama.model import Model
from serve_app.kernels.llama.sampler import SequenceSampler
from serve_app.kernels.llama.vision.positions import Positions, Tile
from serve_app.prompt.chat_template import delimiters

if TYPE_CHECKING:
    from serve_app.kernels.llama.vision.projector import MtmdProjector

logger = logging.getLogger("corral.engine")

# Texts in one batch of embeddings, at most.
_TEXTS_AT_ONCE = 64
# Rows that llama.cpp computes at once, at least, where long contexts lack flash attention.
_LEAST_UBATCH = 64
# llama.cpp keeps the logits of all rows of such a batch. Bytes that these may take, and the number of rows
# that is enough for speed.
_LOGITS_BYTES, _ENOUGH_ROWS = 2**27, 64
# Past states of recurrent layers: for the longest draft, and where they cost time.
_LONGEST_DRAFT, _FEW_STATES = MAX_DRAFTED_ROWS - 1, 3


class LlamaAdapters:
    """LoRA adapters of one model. `use` has the context compute with adapters and their scales."""

    def __init__(
        self,
        model: Model,
        options: EngineOptions,
        use: Callable[[list[tuple[Adapter, float]]], None],
    ) -> None:
        self._model, self._use = model, use
        self.loaded_keys = {one.id: Adapter(model, one.path) for one in options.adapters}
        configured = [(one.id, self.loaded_keys[one.id].fingerprint) for one in options.adapters]
        self.fingerprints = tuple(sorted(configured))
        """The configured adapters by name; loaded adapters have their fingerprints in their keys."""

    @property
    def n_bytes(self) -> int:
        return sum(adapter.n_bytes for adapter in self.loaded_keys.values())

    def use(self, adapters: Adapters) -> None:
        try:
            self._use([(self.loaded_keys[one.key], one.scale) for one in adapters])
        except KeyError as error:
            raise DecodeError(f"The adapter {error} is not loaded any more.") from None

    def load(self, key: str, path: Path) -> None:
        if key not in self.loaded_keys:
            self.loaded_keys[key] = Adapter(self._model, path)

    def free(self, key: str) -> None:
        adapter = self.loaded_keys.pop(key, None)
        if adapter is not None:
            adapter.free()


class LlamaPictures:
    """A projector beside a context. `positions` learn where pictures stand."""

    def __init__(
        self,
        projector: MtmdProjector,
        context: Context,
        positions: Positions,
        vectors: LlamaEmbeddings,
    ) -> None:
        self.projector, self.embed = projector, vectors.embed_tile
        self.decode = partial(_decode_tile, context, positions)


def _decode_tile(
    context: Context,
    positions: Positions,
    rows: Sequence[Row],
    embeddings: NDArray[np.float32],
    tile: Tile,
    first: int,
) -> None:
    _, index, seq_id, _ = rows[0]
    places = positions.take(seq_id, index - first, tile, first, len(rows))
    context.decode_tile(seq_id, embeddings, places, causal=tile.causal)


class LlamaEmbeddings:
    """Vectors of texts, from a second context on the model's weights. It is made at the first call, and
    made anew at the first text that is longer than a slot's share.

    Sequence 0 keeps what it was fed until a row at position 0 begins another text there; all others are
    empty again after every batch.
    """

    def __init__(
        self, model: Model, options: EngineOptions, plan: Plan, *, flash_attn: bool
    ) -> None:
        self._model, self._options, self._plan = model, options, plan
        self._flash_attn = flash_attn
        self._context: Context | None = None
        self._positions = Positions(several=model.n_dimensions > 1)

    @property
    def shape(self) -> EmbeddingShape:
        model, options = self._model, self._options
        rows = max(_ENOUGH_ROWS, _LOGITS_BYTES // (4 * model.n_vocab))
        n_text = model.most_tokens(options.n_ctx_slot)
        # All of an encoder's text goes into one batch; a long one is alone in it.
        n_rows = min(rows, options.n_batch) if model.is_causal else min(options.n_ctx_share, n_text)
        # Each sequence of recurrent layers takes memory of its own.
        n_seq_max = _TEXTS_AT_ONCE if not model.is_recurrent else options.n_slots
        pooling = model.pooling_with(options.embedding_pooling)
        if pooling == "rank" != model.pooling and len(model.labels) < 2:
            # Without a classifier, llama.cpp finds the scores of several texts in the wrong places.
            n_seq_max = 1
        return EmbeddingShape(
            n_rows=n_rows,
            n_seq_max=min(n_rows, n_seq_max),  # llama.cpp has an output for each sequence
            n_text=n_text,
            pooling=pooling,
            causal=model.is_causal,
        )

    def embed(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        context, seq_ids = self._context_for(rows), [seq_id for _, _, seq_id, _ in rows]
        try:
            context.decode(self._positions.place(rows))
            if self.shape.pooling == "rank":
                outputs = {seq_id: context.class_outputs(seq_id) for seq_id in set(seq_ids)}
                return np.stack([outputs[seq_id] for seq_id in seq_ids])
            return context.embeddings(len(rows)).copy()
        finally:
            for seq_id in set(seq_ids) - {0}:
                context.truncate(seq_id, 0)

    def embed_tile(
        self, rows: Sequence[Row], embeddings: NDArray[np.float32], tile: Tile, first: int
    ) -> NDArray[np.float32]:
        """Vectors of a picture's rows in sequence 0: see `PictureSupport.embed`."""
        context = self._context_for(rows)
        _decode_tile(context, self._positions, rows, embeddings, tile, first)
        return context.embeddings(len(rows)).copy()

    def _context_for(self, rows: Sequence[Row]) -> Context:
        """The context, in which sequence 0 is empty if these rows begin another text there."""
        n_text = max(position for _, position, _, _ in rows) + 1
        if self._context is None or n_text > self._context.n_ctx_slot:
            self._context = self._open(n_text)
        if any(position == 0 and seq_id == 0 for _, position, seq_id, _ in rows):
            self._context.truncate(0, 0)
            self._positions.cut(0, 0)
        return self._context

    def _open(self, n_text: int) -> Context:
        """A context for a text of so many tokens, with what sequence 0 has in the present one, which is
        closed first. Raises ConfigError."""
        shape, state = self.shape, None if self._context is None else self._context.save(0)
        self.close()
        longest = shape.n_text
        if shape.causal and n_text <= self._options.n_ctx_share:
            longest = self._options.n_ctx_share
        n_rows = shape.n_rows if shape.causal else longest
        context = Context(
            self._model,
            ContextOptions(
                n_seq_max=shape.n_seq_max,
                n_ctx_slot=longest,
                n_batch=n_rows,
                n_outputs=n_rows,
                threads=self._options.threads,
                flash_attn=self._flash_attn,
                kv_unified=True,
                n_ctx=longest + n_rows,
                pooling="rank" if shape.pooling == "rank" else "none",
                stored_from=self._plan.kernels.many_from,
            ),
        )
        if state is not None:
            context.restore(0, state)
        return context

    def close(self) -> None:
        if self._context is not None:
            self._context.close()
        self._context = None


class LlamaStates:
    """Saved slots of one context. Pictures' positions are a part of a state."""

    def __init__(self, backend: LlamaBackend, context: Context, positions: Positions) -> None:
        self._backend, self._context, self._positions = backend, context, positions

    def save(self, seq_id: int, *, cancellable: bool = False) -> State:
        return self._context.save(seq_id, self._positions.pack(seq_id), cancellable=cancellable)

    def whole(self, state: State) -> State:
        return state

    def restore(self, seq_id: int, state: State) -> None:
        self._backend.hidden_states.forget(seq_id)
        state, tiles = self._positions.split(state)
        if self._context.portable:
            try:
                state = convert_state(state, self._layout)
            except ValueError as error:
                raise DecodeError(f"The saved state cannot be used: {error}") from error
        self._context.restore(seq_id, state)
        self._positions.put(seq_id, tiles)

    def checkpoint(self, seq_id: int) -> State:
        return self._context.checkpoint(seq_id)

    def rewind(self, seq_id: int, checkpoint: State, n_past: int) -> None:
        self._backend.hidden_states.forget(seq_id)
        self._context.rewind(seq_id, checkpoint, self._positions.of(seq_id, n_past))
        self._positions.cut(seq_id, n_past)

    @property
    def _layout(self) -> Layout:
        """The layout of the states that the cache takes."""
        backend, mode = self._backend, self._backend.cache_plan.mode
        n_streams = 1 if mode.kv_unified else backend.n_sequences
        several = backend.vocabulary.n_dimensions > 1
        return Layout(n_streams, transposed=not mode.flash_attn, several_dimensions=several)

    @property
    def key(self) -> bytes:
        backend = self._backend
        parts: list[object] = [library.version(), *backend.cache_types]
        parts += backend.adapters.fingerprints
        if backend.pictures is not None:
            parts.append(backend.pictures.projector.fingerprint)
        if not self._context.portable:
            parts += [self._layout.n_streams, backend.cache_plan.mode.flash_attn]
        return hashlib.blake2b(backend.vocabulary.fingerprint() + repr(parts).encode()).digest()


class LlamaModes:
    """The kind of cache that the context does not have now. The next start finds the choice."""

    def __init__(self, backend: LlamaBackend) -> None:
        self._backend = backend
        self.change_s = backend.opened_s

    def change(self, reason: str, learned: Profile) -> None:
        began, backend = time.perf_counter(), self._backend
        present = replace(backend.cache_plan, profile=learned)
        if present.other is None:
            raise ValueError("There is no other mode.")
        mode, profile = present.other
        plan = CachePlan(mode, reason, profile, (present.mode, learned))
        try:
            backend.remake_cache(plan.mode)
        except ConfigError:
            backend.remake_cache(present.mode)
            logger.exception("The cache stays as it is.")
            plan = replace(present, other=None)
            backend.modes = None
        backend.cache_plan = plan
        self.change_s = time.perf_counter() - began
        backend.keep(plan.profile)


class LlamaBackend:
    """A GGUF model and one context over it. Raises ConfigError if it cannot be loaded."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: EngineOptions,
        report: Report = progress.nowhere,
        plan: Plan = LLAMA_CPP_PLAN,
    ) -> None:
        if options.computing_cpus is not None:  # OpenMP's threads inherit it from this one
            os.sched_setaffinity(0, options.computing_cpus)
        if options.numa:
            library.init_numa(options.numa)
        self.vocabulary = model = Model(
            path,
            load_mode=options.load_mode,
            repack=plan.kernels.repack,
            delimiters=delimiters,
            on_loaded=lambda part: report(Stage("loading", part)),
            own_layers=options.own_layers,
        )
        self.options, self.plan = options, plan
        self._n_past_states = _n_past_states(model, options)
        draft = draft_for(model, options)
        self.n_sequences = options.n_slots + len(options.pinned)
        self.cache_types = (options.cache_type_k, options.cache_type_v)
        self.adapters = LlamaAdapters(
            model, options, lambda adapters: self._context.use_adapters(adapters)
        )
        self._projector = projector = _open_projector(model, options)
        self._positions = Positions(several=model.n_dimensions > 1)
        try:
            self.cache_plan = cache = choose_cache(plan, model, options, self._open, report)
            began, n_ctx = time.perf_counter(), options.n_ctx
            if n_ctx is not None:
                n_ctx += sum(map(len, options.pinned))
            self._context = self._open(cache.mode, options.n_ctx_slot, n_ctx)
            self.opened_s = time.perf_counter() - began
            self.draft = open_draft(model, draft, options)
            self.hidden_states = HiddenStates(0, 1, 0)
            """The hidden states of the slots; none unless a draft wants them."""
            if isinstance(self.draft, OwnLayersDraft):
                self.hidden_states = self.draft.states
        except DecodeError as error:
            raise ConfigError(f"{path} cannot be decoded: {error}") from error
        self.states = LlamaStates(self, self._context, self._positions)
        self.embeddings = LlamaEmbeddings(model, options, plan, flash_attn=cache.mode.flash_attn)
        self.pictures = (
            None
            if projector is None
            else LlamaPictures(projector, self._context, self._positions, self.embeddings)
        )
        self.modes = None if cache.other is None else LlamaModes(self)

    # -- opening ----------------------------------------------------------------------------------

    def _open(self, mode: Mode, n_ctx_slot: int, n_ctx: int | None, n_more: int = 0) -> Context:
        options = self.options
        n_decoding = options.n_slots + MAX_DRAFTED_ROWS
        # Layers with a window keep a batch's cells; pictures that are not causal go into one.
        at_once = self.vocabulary.window or (self._projector and not self._projector.causal)
        n_ubatch = max(options.n_batch, n_decoding) if at_once else None
        if options.is_pooled and options.flash_attn is False and not at_once:
            # Attention's buffer has a number for each head, row and cell: no more than in a split cache.
            n_ubatch = max(_LEAST_UBATCH, options.n_batch // options.n_slots)
        context = Context(
            self.vocabulary,
            ContextOptions(
                n_seq_max=self.n_sequences + n_more,
                n_ctx_slot=n_ctx_slot,
                n_ctx_share=min(n_ctx_slot, options.n_ctx_share),
                n_batch=options.n_batch + n_decoding,
                n_ubatch=n_ubatch,
                n_outputs=n_decoding + MAX_SCORED_ROWS,
                threads=options.threads,
                threads_batch=options.threads_batch,
                flash_attn=mode.flash_attn,
                kv_unified=mode.kv_unified,
                n_ctx=n_ctx,
                cache_type_k=options.cache_type_k,
                cache_type_v=options.cache_type_v,
                tells_hidden=options.own_layers,
                n_rs_seq=self._n_past_states,
                stored_from=self.plan.kernels.many_from,
            ),
        )
        context.warm_up()
        return context

    def remake_cache(self, mode: Mode) -> None:
        """Free the cache, and make one of that mode. Raises ConfigError if there is no memory for it."""
        self._context.become(flash_attn=mode.flash_attn, kv_unified=mode.kv_unified)
        self._positions.clear()
        self._context.warm_up()
        for seq_id in range(self.options.n_slots):
            self.hidden_states.forget(seq_id)

    # -- running ----------------------------------------------------------------------------------

    @property
    def traits(self) -> CacheTraits:
        model, context = self.vocabulary, self._context
        consecutive = not (self.cache_plan.mode.kv_unified or context.window)
        return CacheTraits(
            n_rewind=context.n_rewind,
            can_shift=context.can_shift,
            fills_gaps=consecutive and not model.is_recurrent,
            forgets=context.forgets,
        )

    def decode(self, rows: Sequence[Row]) -> None:
        self._context.decode(self._positions.place(rows))
        if self.options.own_layers:
            self.hidden_states.add(rows, self._context.hidden(len(rows)))

    def cancel(self, cancelled: bool) -> None:
        """Recurrent layers could not forget half of a pass: theirs are computed."""
        self._context.cancel(cancelled and not self.vocabulary.is_recurrent)

    def sampler(
        self, params: SamplingParams, prompt: Sequence[int], constraint: Constraint | None
    ) -> SequenceSampler:
        words = [token for token in prompt if token >= 0] if self._projector else prompt
        return SequenceSampler(self._context, params, words, constraint)

    def truncate(self, seq_id: int, n_past: int) -> None:
        self._context.truncate(seq_id, self._positions.of(seq_id, n_past))
        self._positions.cut(seq_id, n_past)
        self.hidden_states.cut(seq_id, n_past)

    def can_cut(self, seq_id: int, n_past: int) -> bool:
        if self._positions.divides(seq_id, n_past):
            return False
        return self._context.can_cut(seq_id, self._positions.of(seq_id, n_past))

    @property
    def slots_with_pending_copy(self) -> Set[int]:
        return self._context.slots_with_pending_copy

    def copy(self, source: int, target: int) -> None:
        self.hidden_states.forget(target)
        self._context.copy(source, target)
        self._positions.copy(source, target)

    def shift(self, seq_id: int, cuts: Sequence[tuple[int, int]]) -> None:
        if not self._context.can_shift:
            raise DecodeError("This model's positions cannot be shifted.")
        self.hidden_states.forget(seq_id)
        if self.cache_plan.mode.kv_unified:  # other slots may share cells, and must not see this
            self._context.restore(seq_id, self._context.save(seq_id))
        for n_keep, n_discard in cuts:
            self._context.shift(seq_id, n_keep, n_discard)

    @property
    def memory(self) -> MemoryUse:
        context = self._context
        draft = self.draft.memory if self.draft else MemoryUse(0, 0, 0, 0, 0)
        return MemoryUse(
            weights_bytes=self.vocabulary.n_bytes
            + (self.vocabulary.stored.n_bytes if self.vocabulary.stored else 0)
            + self.adapters.n_bytes
            + (self._projector.n_bytes if self._projector else 0)
            + draft.weights_bytes,
            cache_bytes=context.layout.cache_bytes + draft.cache_bytes,
            cache_bytes_per_slot=context.cache_bytes_per_seq + draft.cache_bytes_per_slot,
            cache_bytes_per_token=context.layout.per_token,
            compute_bytes=context.compute_bytes + draft.compute_bytes,
            window=context.window,
            window_bytes_per_token=context.layout.per_window_token,
            recurrent_bytes=context.layout.per_sequence,
            rewind_bytes=context.layout.rewind_bytes,
        )

    def keep(self, profile: Profile) -> None:
        self.cache_plan = replace(self.cache_plan, profile=profile)
        self.plan.keep(self.options.profile_folder, self.cache_plan)

    def close(self) -> None:
        self._context.close()
        if self.draft is not None:
            self.draft.close()
        self.embeddings.close()


def _n_past_states(model: Model, options: EngineOptions) -> int:
    """The past states of recurrent layers that each slot keeps, for drafts of so many tokens to be taken
    back. Half of the memory for checkpoints has room for them. Where they slow every batch down, they are
    few, and only for a draft that is configured."""
    has_draft = options.own_layers or options.draft is not None
    may_look_up = options.speculate and model.rolls_back_freely
    if not model.can_roll_back or not (has_draft or may_look_up):
        return 0
    most = _LONGEST_DRAFT if model.rolls_back_freely else _FEW_STATES
    sizes = Model(model.path, vocab_only=True).cache_sizes
    of_one = (sizes.recurrent_bytes if sizes else 0) * (options.n_slots + len(options.pinned))
    n_states = min(most, options.checkpoint_ram_bytes // 2 // of_one) if of_one else most
    return max(n_states, 1 if has_draft else 0)


def _open_projector(model: Model, options: EngineOptions) -> MtmdProjector | None:
    if options.projector is None:
        return None
    from serve_app.kernels.llama.vision.projector import MtmdProjector  # its library takes memory

    return MtmdProjector(model, options.projector, options.threads)
