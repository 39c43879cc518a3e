"""OpenVINO's kernels for CPUs, behind the same engine: paged attention, and one mixed batch a step."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from collections.abc import Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serve_app.base import progress
from serve_app.base.engine_options import EngineOptions
from serve_app.base.errors import ConfigError
from serve_app.base.formats import Row, State
from serve_app.base.progress import Report, Stage
from serve_app.base.sampling import SamplingParams
from serve_app.engine.backends.base import Backend, CacheTraits, EmbeddingShape, MemoryUse
from serve_app.engine.backends.draft_model import draft_for, open_draft
from serve_app.engine.backends.llama_cpp import LlamaBackend, LlamaEmbeddings
from serve_app.engine.choice.caches import load_or_measure
from serve_app.engine.choice.plan import OPENVINO_PLAN, PAGED, CachePlan, Plan
from serve_app.engine.costs.clocks import Clocks
from serve_app.engine.costs.cost_model import Profile
from serve_app.engine.costs.profiler import DEPTH, ROOM, Depth, Profiler, in_turns, paged_depth
from serve_app.kernels.llama.grammars.constraint import Constraint
from serve_app.kernels.llama.model import Model
from serve_app.kernels.llama.sampler import SequenceSampler
from serve_app.kernels.openvino.convert import converted_of, unserved_reason, versions
from serve_app.kernels.openvino.encoder import Encoder
from serve_app.kernels.openvino.gguf_model import EmbeddingRows
from serve_app.kernels.openvino.paged.blocks import BLOCK
from serve_app.kernels.openvino.paged.compiling import CacheType, check_cache_type, computes_bf16
from serve_app.kernels.openvino.paged.context import PagedContext
from serve_app.kernels.openvino.paged.model import LayerChain, Layers, PagedModel, PagedOptions
from serve_app.kernels.openvino.parts import WHOLE, ModelPart
from serve_app.prompt.chat_template import delimiters

logger = logging.getLogger("corral.engine")

_REASON = "Paged KV cache, as OpenVINO has it"
# The part of the time for profiling in which the sizes are measured that tell most.
_ESSENTIAL = 0.5
# And in which batches are measured behind many tokens.
_DEEP = 0.2
# Stages measure in this part of the time that loading takes: meanwhile, no machine answers.
_MEASURING = 0.4
# Texts in one batch of embeddings, at most. Encoders also bound the rows: each row sees all others, even if
# only those of its text count. A longer text is a batch of its own.
_TEXTS_AT_ONCE, _ENCODED_TEXTS, _ENCODED_ROWS = 32, 64, 512


class PagedStates:
    """Saved slots of a paged cache. A slot forgets nothing, so a checkpoint is empty."""

    def __init__(self, context: PagedContext, key: bytes) -> None:
        self._context, self.key = context, key
        self.save, self.restore, self.whole = context.save, context.restore, context.whole

    def checkpoint(self, seq_id: int) -> State:
        return b""

    def rewind(self, seq_id: int, checkpoint: State, n_past: int) -> None:
        self._context.truncate(seq_id, n_past)


class PagedEmbeddings:
    """Vectors of texts, in blocks of the same cache."""

    def __init__(self, context: PagedContext, shape: EmbeddingShape) -> None:
        self.shape, self.embed = shape, context.embed


class EncoderEmbeddings(LlamaEmbeddings):
    """Vectors of texts, or the outputs of a classifier, from an encoder."""

    def __init__(self, model: Model, options: EngineOptions, plan: Plan, encoder: Encoder) -> None:
        super().__init__(model, options, plan, flash_attn=False)
        self._encoder = encoder

    @property
    def shape(self) -> EmbeddingShape:
        return replace(super().shape, n_rows=_ENCODED_ROWS, n_seq_max=_ENCODED_TEXTS)

    def embed(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        vectors = self._encoder.embed(rows)
        if self.shape.pooling != "rank":
            return vectors
        _, first, text = np.unique([row[2] for row in rows], return_index=True, return_inverse=True)
        return vectors[first[text], : max(1, len(self._model.labels))]

    def close(self) -> None:
        self._encoder.close()


class EncoderBackend(LlamaBackend):
    """A model that makes vectors of texts, or classifies them, which OpenVINO computes. llama.cpp has its
    file open, for the vocabulary, and reads no weights. Raises ConfigError."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: EngineOptions,
        report: Report = progress.nowhere,
        plan: Plan = OPENVINO_PLAN,
    ) -> None:
        super().__init__(path, options, report, plan)
        model = self.vocabulary
        if reason := unserved_reason(model, options.embedding_pooling):
            raise ConfigError(reason)
        encoder = Encoder(
            converted_of(
                model, options.max_converted_bytes, report, quantization=options.quantization
            ),
            threads=options.threads,
            window=model.meta_int("attention.sliding_window", 0),
        )
        self.embeddings = EncoderEmbeddings(model, options, plan, encoder)
        self.cache_plan = replace(self.cache_plan, reason="An encoder has no cache")


def open_with_openvino(path: Path, options: EngineOptions, report: Report, plan: Plan) -> Backend:
    """The backend of that model's kind. Raises ConfigError."""
    model = Model(path, vocab_only=True, delimiters=delimiters)
    if model.is_causal:
        return OpenVinoBackend(model, options, report, plan)
    return EncoderBackend(path, options, report, plan)


class OpenVinoBackend:
    """A model that OpenVINO computes. The vocabulary and the samplers are llama.cpp's. Raises ConfigError
    if OpenVINO cannot read it, or the model needs what this backend lacks.

    A model is converted at its first start, and kept under ~/.cache/corral/openvino.
    """

    adapters = pictures = modes = None
    slots_with_pending_copy: Set[int] = frozenset()  # the slots share blocks
    traits = CacheTraits(n_rewind=sys.maxsize, can_shift=False, fills_gaps=False, forgets=False)

    def __init__(
        self,
        model: Model,
        options: EngineOptions,
        report: Report = progress.nowhere,
        plan: Plan = OPENVINO_PLAN,
        chain: LayerChain | None = None,
    ) -> None:
        """Compute the model, which is open without its weights, or the stage of a chain."""
        began = time.monotonic()
        if options.computing_cpus is not None:  # OpenVINO's threads inherit it from this one
            os.sched_setaffinity(0, options.computing_cpus)
        self._options = options
        self.vocabulary = model
        if reason := unserved_reason(model, options.embedding_pooling):
            raise ConfigError(reason)
        check_cache_type(_cache_type(options))
        self._fingerprint = model.fingerprint()
        part = WHOLE if chain is None else chain.part
        most, many_from = options.max_converted_bytes, plan.kernels.many_from
        graph = converted_of(model, most, report, part, options.quantization)
        few = None if many_from is None else (converted_of(model, most, report), many_from)
        report(Stage("loading"))
        paged = _paged_options(options, part)
        layers = _open_layers(model, graph, paged, chain, few)
        self._context = context = PagedContext(layers, model, paged)
        context.warm_up()
        self.decode, self.cancel, self.truncate = context.decode, context.cancel, context.truncate
        self.copy, self.shift = context.copy, context.shift
        self._n_stages = part.n_parts
        if chain is not None:
            limit_s = min(options.profile_limit_s, _MEASURING * (time.monotonic() - began))
            self._options = replace(options, profile_limit_s=limit_s)
        self.plan, self.cache_plan = plan, CachePlan(PAGED, _REASON, Profile())
        if self._options.profile_limit_s > 0:
            self.cache_plan = load_or_measure(plan, self._options, report, self._measure)
        # llama.cpp is the faster with few rows, one for each slot.
        self.draft = open_draft(model, draft_for(model, options), options)
        self.states = PagedStates(context, self._state_key())
        shape = EmbeddingShape(
            n_rows=options.n_batch,
            n_seq_max=min(_TEXTS_AT_ONCE, options.n_batch),
            n_text=options.n_ctx_slot,
            pooling=model.pooling_with(options.embedding_pooling),
            causal=True,
        )
        self.embeddings = PagedEmbeddings(context, shape)

    def _state_key(self) -> bytes:
        """The key of states that this backend can read. None of them is llama.cpp's."""
        options = self._options
        parts = (versions(), BLOCK, options.cache_type_k, options.quantization)
        return hashlib.blake2b(
            self._fingerprint + repr(parts).encode() + self._context.turns
        ).digest()

    def _measure(self) -> CachePlan:
        """Measure batches in `profile_limit_s`. Leaves the cache empty."""
        context, options, began = self._context, self._options, time.perf_counter()
        clocks = Clocks(options.threads_of if self._n_stages == 1 else None)
        clocks.begin()
        profiler = Profiler(
            context,
            n_slots=options.n_slots,
            n_ctx_slot=options.n_ctx_share,
            n_batch=options.n_batch,
        )
        in_turns([profiler], _ESSENTIAL * options.profile_limit_s)
        n_tokens = min(DEPTH, options.n_ctx_share - ROOM, context.n_tokens - ROOM)
        n_tokens, deep_s = n_tokens // BLOCK * BLOCK, _DEEP * options.profile_limit_s
        depth = Depth()
        if n_tokens > 0:
            depth = paged_depth(context, profiler.profile, n_tokens, deep_s)
        profiler.rest(options.profile_limit_s - (time.perf_counter() - began))
        _, share = clocks.end(options.n_batch)
        context.release()
        profile = replace(depth.added_to(profiler.profile, unified=False), share=share)
        return CachePlan(PAGED, _REASON, profile)

    def keep(self, profile: Profile) -> None:
        cache = replace(self.cache_plan, profile=profile)
        self.plan.keep(self._options.profile_folder, cache)

    def sampler(
        self, params: SamplingParams, prompt: Sequence[int], constraint: Constraint | None
    ) -> SequenceSampler:
        return SequenceSampler(self._context, params, prompt, constraint)

    def can_cut(self, seq_id: int, n_past: int) -> bool:
        return True

    @property
    def memory(self) -> MemoryUse:
        context = self._context
        draft = self.draft.memory if self.draft else MemoryUse(0, 0, 0, 0, 0)
        per_slot = _n_blocks(self._options.n_ctx_share) * context.block_bytes
        return MemoryUse(
            weights_bytes=context.n_parameter_bytes // self._n_stages + draft.weights_bytes,
            cache_bytes=context.cache_bytes + draft.cache_bytes,
            cache_bytes_per_slot=per_slot + draft.cache_bytes_per_slot,
            cache_bytes_per_token=context.block_bytes // BLOCK,
            compute_bytes=draft.compute_bytes,
        )

    def close(self) -> None:
        self._context.close()
        if self.draft is not None:
            self.draft.close()


def _cache_type(options: EngineOptions) -> CacheType:
    """The format of keys and values. `w8a8` rounds the products of attention, too: to bf16, where the
    processor computes with such numbers."""
    narrow = options.quantization == "w8a8" and computes_bf16()
    types: dict[str, CacheType] = {"bf16": "bf16", "q8_0": "u8"}
    return types.get(options.cache_type_k, "bf16" if narrow else "f16")


def _paged_options(options: EngineOptions, part: ModelPart) -> PagedOptions:
    """The options of the context, which holds the slots and what is pinned."""
    n_sequences = options.n_slots + len(options.pinned)
    n_blocks = n_sequences * _n_blocks(options.n_ctx_share)
    if options.n_ctx is not None:  # what slots share, and what is pinned
        n_blocks = sum(_n_blocks(n) for n in (options.n_ctx, *map(len, options.pinned)))
    paged = PagedOptions(
        n_sequences=n_sequences,
        n_ctx_slot=options.n_ctx_slot,
        n_blocks=n_blocks,
        threads=options.threads,
        n_texts=_TEXTS_AT_ONCE,
        n_text_blocks=_n_blocks(options.n_ctx_slot + options.n_batch) + _TEXTS_AT_ONCE,
        cache_type=_cache_type(options),
    )
    if part == WHOLE:
        return paged
    keeps_states = options.prefix_folder is None  # files have whole ones
    return replace(paged, context=part.index, n_contexts=part.n_parts, keeps_states=keeps_states)


def _open_layers(
    model: Model,
    graph: Path,
    paged: PagedOptions,
    chain: LayerChain | None,
    few: tuple[Path, int] | None,
) -> Layers:
    if chain is None:
        return PagedModel(graph, paged, few=few)
    embeddings = EmbeddingRows(model.files) if chain.part.reads_embeddings else None
    chain.open(partial(PagedModel, graph, paged, embeddings))
    return chain


def _n_blocks(n_tokens: int) -> int:
    return -(-n_tokens // BLOCK)
