"""The real backend: llama.cpp."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from serve_app import progress
from serve_app.engine.autotune import profile_cache
from serve_app.engine.autotune.modes import Mode
from serve_app.engine.backends.base import EmbeddingShape, MemoryUse, Row, State
from serve_app.engine.backends.draft_model import LlamaDraft, open_draft
from serve_app.engine.backends.mode_chooser import ModeChooser
from serve_app.engine.backends.own_layers import OwnLayers
from serve_app.engine.backends.state_layout import Layout, converted
from serve_app.engine.core.scheduler.scheduler import MAX_SCORED_ROWS
from serve_app.engine.drafts.drafting import MAX_DRAFTED_ROWS
from serve_app.engine.options import EngineOptions, KernelsName
from serve_app.errors import ConfigError, DecodeError, InvalidRequestError
from serve_app.llama import library
from serve_app.llama.context import Adapter, Context
from serve_app.llama.embedder import Embedder
from serve_app.llama.grammars.constraint import Constraint
from serve_app.llama.model import Model
from serve_app.llama.own_layers.hidden_states import HiddenStates
from serve_app.llama.sampler import SequenceSampler
from serve_app.llama.threads import Threads
from serve_app.llama.vision.positions import Positions
from serve_app.llama.vision.tiles import Tile
from serve_app.progress import Report, Stage
from serve_app.prompt.output_parser import DELIMITERS
from serve_app.sampling import SamplingParams
from serve_app.types import Adapters

if TYPE_CHECKING:
    from serve_app.llama.vision.projector import MtmdProjector

logger = logging.getLogger("corral.engine")

# Texts in one batch of embeddings, at most.
_TEXTS_AT_ONCE = 64
# llama.cpp keeps the logits of all rows of such a batch. Bytes that these may take, and the number of rows
# that is enough for speed.
_LOGITS_BYTES, _ENOUGH_ROWS = 2**27, 64


class LlamaBackend:
    """A GGUF model and one context over it. Raises ConfigError if it cannot be loaded.

    If the options leave flash attention or the kind of cache open, each kind is measured on this
    machine, now or at an earlier start.
    """

    name: KernelsName = "llama.cpp"
    backend_reason = "as configured"

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: EngineOptions,
        report: Report = progress.nowhere,
    ) -> None:
        if options.computing_cpus is not None:  # OpenMP's threads inherit it from this one
            os.sched_setaffinity(0, options.computing_cpus)
        if options.numa:
            library.init_numa(options.numa)
        self.vocabulary = Model(
            path,
            load_mode=options.load_mode,
            delimiters=DELIMITERS,
            on_loaded=lambda part: report(Stage("loading", part)),
            own_layers=options.own_layers,
        )
        self._options = options
        self._adapters = {one.id: Adapter(self.vocabulary, one.path) for one in options.adapters}
        self._hidden_adapters = set[str]()
        self.projector = _open_projector(self.vocabulary, options)
        self._positions = Positions(several=self.vocabulary.n_dimensions > 1)
        self._embedder: Embedder | None = None
        try:
            found = ModeChooser(self.vocabulary, options, self._open, report).choose()
            self.undisturbed, self._kept_as = found.undisturbed, found.kept_as
            choice = found.choice
            self.mode, self.mode_reason = choice.mode, choice.reason
            self.profile, self.other = choice.profile, choice.other
            self._choice = choice
            self.threads = choice.threads or Threads.alike(options.threads, options.threads_batch)
            began = time.perf_counter()
            self._context = self._open(self.mode, options.n_ctx_slot, self._n_ctx)
            self.change_s = time.perf_counter() - began
            self._context.use_threads(self.threads)
            self.draft = self._open_draft()
        except DecodeError as error:
            raise ConfigError(f"{path} cannot be decoded: {error}") from error
        self.can_rewind = self.vocabulary.can_rewind
        self.forgets, self.can_shift = self._context.forgets, self._context.can_shift
        self.fills_gaps = self.can_rewind and not (self.mode.kv_unified or self._context.window)
        logger.info("%s.", self.mode_reason)
        if choice.threads is not None:
            logger.info("Of %d threads, %s.", self.threads.many_rows, self.threads.reason)

    # -- opening ----------------------------------------------------------------------------------

    @property
    def _n_ctx(self) -> int | None:
        """Cells of a unified cache: those of the slots, and of what is pinned."""
        if self._options.n_ctx is None:
            return None
        return self._options.n_ctx + sum(len(tokens) for tokens in self._options.pinned)

    def _open(self, mode: Mode, n_ctx_slot: int, n_ctx: int | None, *, n_more: int = 0) -> Context:
        options = self._options
        n_decoding = options.n_slots + MAX_DRAFTED_ROWS
        # Layers with a window keep a batch's cells; pictures that are not causal go into one.
        at_once = self.vocabulary.window or (self.projector and not self.projector.causal)
        n_ubatch = max(options.n_batch, n_decoding) if at_once else None
        context = Context(
            self.vocabulary,
            n_seq_max=options.n_slots + len(options.pinned) + n_more,
            n_ctx_slot=n_ctx_slot,
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
        )
        context.warm_up()
        return context

    def _open_draft(self) -> LlamaDraft | None:
        options = self._options
        if options.own_layers:
            return OwnLayers(self.vocabulary, options, self.threads)
        if options.draft is not None:
            return open_draft(self.vocabulary, options.draft, options, self.threads)
        return None

    @property
    def _states(self) -> HiddenStates | None:
        """Of the slots, if the model's own layers want them."""
        return self.draft.states if isinstance(self.draft, OwnLayers) else None

    # -- changing ---------------------------------------------------------------------------------

    def change(self, reason: str) -> None:
        """See Backend.change. The next start finds the costs that were learned."""
        began = time.perf_counter()
        choice = self._choice.turned(reason)
        try:
            self._become(choice.mode)
        except ConfigError:
            self._become(self.mode)
            logger.exception("The cache stays as it is.")
            choice = replace(self._choice, other=None)
        self._choice, self.mode, self.mode_reason = choice, choice.mode, choice.reason
        self.profile, self.other = choice.profile, choice.other
        self.fills_gaps = not self.mode.kv_unified
        self.change_s = time.perf_counter() - began
        if self._options.profile_folder and self._kept_as:
            profile_cache.save(self._options.profile_folder, self._kept_as, choice)

    def _become(self, mode: Mode) -> None:
        self._context.become(flash_attn=mode.flash_attn, kv_unified=mode.kv_unified)
        self._positions.clear()
        self._context.use_threads(self.threads)
        self._context.warm_up()
        for seq_id in range(self._options.n_slots):
            self._moves(seq_id)

    # -- running ----------------------------------------------------------------------------------

    def check_adapters(self, adapters: Adapters) -> None:
        """See Backend.check_adapters."""
        for one in adapters:
            if one.key not in self._adapters or one.key in self._hidden_adapters:
                raise InvalidRequestError(f"There is no adapter {one.id!r} here.", "lora")

    def use_adapters(self, adapters: Adapters) -> None:
        """See Backend.use_adapters."""
        try:
            wanted = [(self._adapters[one.key], one.scale) for one in adapters]
        except KeyError as error:
            raise DecodeError(f"The adapter {error} is not loaded any more.") from None
        self._context.use_adapters(wanted)

    def load_adapter(self, key: str, path: Path) -> None:
        """See Backend.load_adapter."""
        if key not in self._adapters:
            self._adapters[key] = Adapter(self.vocabulary, path)
        self._hidden_adapters.discard(key)

    def hide_adapter(self, key: str) -> None:
        """See Backend.hide_adapter."""
        self._hidden_adapters.add(key)

    def hides_adapter(self, key: str) -> bool:
        """See Backend.hides_adapter."""
        return key in self._hidden_adapters

    def free_adapter(self, key: str) -> None:
        """See Backend.free_adapter."""
        self._hidden_adapters.discard(key)
        adapter = self._adapters.pop(key, None)
        if adapter is not None:
            adapter.free()

    def decode(self, rows: Sequence[Row]) -> None:
        """See Backend.decode."""
        self._context.decode(self._positions.placed(rows))
        if self._states:
            self._states.computed(rows, self._context.hidden(len(rows)))

    def decode_tile(
        self, rows: Sequence[Row], embeddings: NDArray[np.float32], tile: Tile, first: int
    ) -> None:
        """See Backend.decode_tile."""
        _, index, seq_id, _ = rows[0]
        positions = self._positions.take(seq_id, index - first, tile, first, len(rows))
        self._context.decode_tile(seq_id, embeddings, positions, causal=tile.causal)

    def cancel(self, cancelled: bool) -> None:
        """See Backend.cancel. Recurrent layers could not forget half of a pass: theirs are computed."""
        self._context.cancel(cancelled and self.can_rewind)

    def sampler(
        self, params: SamplingParams, prompt: Sequence[int], constraint: Constraint | None
    ) -> SequenceSampler:
        """A llama.cpp sampler chain."""
        words = [token for token in prompt if token >= 0] if self.projector else prompt
        return SequenceSampler(self._context, params, words, constraint)

    def truncate(self, seq_id: int, n_past: int) -> None:
        """See Backend.truncate."""
        self._context.truncate(seq_id, self._positions.of(seq_id, n_past))
        self._positions.cut(seq_id, n_past)
        if self._states:
            self._states.cut(seq_id, n_past)

    def can_cut(self, seq_id: int, n_past: int) -> bool:
        """See Backend.can_cut."""
        if self._positions.divides(seq_id, n_past):
            return False
        return self._context.can_cut(seq_id, self._positions.of(seq_id, n_past))

    def checkpoint(self, seq_id: int) -> State:
        """See Backend.checkpoint."""
        return self._context.checkpoint(seq_id)

    def rewind(self, seq_id: int, checkpoint: State, n_past: int) -> None:
        """See Backend.rewind."""
        self._moves(seq_id)
        self._context.rewind(seq_id, checkpoint, self._positions.of(seq_id, n_past))
        self._positions.cut(seq_id, n_past)

    @property
    def slots_with_pending_copy(self) -> Set[int]:
        """See Backend.slots_with_pending_copy."""
        return self._context.slots_with_pending_copy

    def copy(self, source: int, target: int) -> None:
        """See Backend.copy."""
        self._moves(target)
        self._context.copy(source, target)
        self._positions.copy(source, target)

    def _moves(self, seq_id: int) -> None:
        if self._states:
            self._states.moved(seq_id)

    def shift(self, seq_id: int, cuts: Sequence[tuple[int, int]]) -> None:
        """See Backend.shift."""
        if not self.can_shift:
            raise DecodeError("This model's positions cannot be shifted.")
        self._moves(seq_id)
        if self.mode.kv_unified:  # cells may be shared with other slots, which must not see this
            self._context.restore(seq_id, self._context.save(seq_id))
        for n_keep, n_discard in cuts:
            self._context.shift(seq_id, n_keep, n_discard)

    def save(self, seq_id: int, *, cancellable: bool = False) -> State:
        """See Backend.save."""
        return self._context.save(seq_id, self._positions.packed(seq_id), cancellable=cancellable)

    @property
    def _layout(self) -> Layout:
        """Of the states that the cache takes."""
        options, mode = self._options, self.mode
        n_streams = 1 if mode.kv_unified else options.n_slots + len(options.pinned)
        several = self.vocabulary.n_dimensions > 1
        return Layout(n_streams, transposed=not mode.flash_attn, several_dimensions=several)

    def restore(self, seq_id: int, state: State) -> None:
        """See Backend.restore."""
        self._moves(seq_id)
        state, tiles = self._positions.parted(state)
        if self._context.portable:
            try:
                state = converted(state, self._layout)
            except ValueError as error:
                raise DecodeError(f"The saved state cannot be used: {error}") from error
        self._context.restore(seq_id, state)
        self._positions.put(seq_id, tiles)

    @property
    def embedding(self) -> EmbeddingShape:
        """See Backend.embedding."""
        model, options = self.vocabulary, self._options
        rows = max(_ENOUGH_ROWS, _LOGITS_BYTES // (4 * model.n_vocab))
        n_text = options.n_ctx_slot
        if not model.is_causal:  # all of a text goes into one batch, and its positions are a table
            n_text = rows = min(n_text, model.n_ctx_train)
        n_rows = min(rows, options.n_batch) if model.is_causal else rows
        # Each sequence of recurrent layers takes memory of its own.
        n_seq_max = _TEXTS_AT_ONCE if model.can_rewind else options.n_slots
        pooling = model.pooling_with(options.embedding_pooling)
        if pooling == "rank" != model.pooling:
            n_seq_max = (
                1  # of several texts, llama.cpp finds the scores where a classifier would put them
            )
        return EmbeddingShape(
            n_rows=n_rows,
            n_seq_max=min(n_rows, n_seq_max),  # llama.cpp has an output for each sequence
            n_text=n_text,
            pooling=pooling,
            causal=model.is_causal,
        )

    def embed(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """See Backend.embed."""
        if self._embedder is None:
            shape = self.embedding
            self._embedder = Embedder(
                self.vocabulary,
                n_text=shape.n_text,
                n_rows=shape.n_rows,
                n_seq_max=shape.n_seq_max,
                threads=self._options.threads,
                flash_attn=self.mode.flash_attn,
                ranks=shape.pooling == "rank",
            )
        return self._embedder.run(rows)

    @property
    def state_key(self) -> bytes:
        """See Backend.state_key."""
        options = self._options
        types = (options.cache_type_k, options.cache_type_v)
        parts: tuple[object, ...] = (library.version(), types)
        if self.projector:
            parts += (self.projector.fingerprint,)
        configured = [(one.id, self._adapters[one.id].fingerprint) for one in options.adapters]
        parts += tuple(sorted(configured))  # the others have their fingerprints in their keys
        if not self._context.portable:
            parts += (self._layout.n_streams, self.mode.flash_attn)
        return hashlib.blake2b(self.vocabulary.fingerprint() + repr(parts).encode()).digest()

    @property
    def memory(self) -> MemoryUse:
        """See Backend.memory."""
        context = self._context
        draft = self.draft.memory if self.draft else MemoryUse(0, 0, 0, 0, 0)
        return MemoryUse(
            weights_bytes=self.vocabulary.n_bytes
            + sum(one.n_bytes for one in self._adapters.values())
            + (self.projector.n_bytes if self.projector else 0)
            + draft.weights_bytes,
            cache_bytes=context.layout.cache_bytes + draft.cache_bytes,
            cache_bytes_per_slot=context.cache_bytes_per_seq + draft.cache_bytes_per_slot,
            cache_bytes_per_token=context.layout.per_token,
            compute_bytes=context.compute_bytes + draft.compute_bytes,
            window=context.window,
            window_bytes_per_token=context.layout.per_window_token,
            recurrent_bytes=context.layout.per_sequence,
        )

    def close(self) -> None:
        """Free the contexts. The model is freed with the last object that knows its vocabulary."""
        self._context.close()
        if self.draft is not None:
            self.draft.close()
        if self._embedder is not None:
            self._embedder.close()


def _open_projector(model: Model, options: EngineOptions) -> MtmdProjector | None:
    if options.projector is None:
        return None
    from serve_app.llama.vision.projector import MtmdProjector  # its library takes memory

    return MtmdProjector(model, options.projector, options.threads)
