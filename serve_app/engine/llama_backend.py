"""The real backend: llama.cpp."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

from serve_app.engine.backend import MemoryUse, Row
from serve_app.engine.cost_model import Measurements
from serve_app.engine.options import EngineOptions
from serve_app.engine.sweep import Sweep
from serve_app.errors import ConfigError, DecodeError
from serve_app.llama.context import Context
from serve_app.llama.model import Model
from serve_app.llama.sampler import Sampler
from serve_app.types import SamplingParams

logger = logging.getLogger("corral.engine")

_SWEEP_LIMIT_S = 15.0


class LlamaBackend:
    """A GGUF model and one context over it. Raises ConfigError if it cannot be loaded."""

    def __init__(self, path: str | os.PathLike[str], options: EngineOptions) -> None:
        self.vocabulary = Model(path, load_mode=options.load_mode)
        self._options = options
        try:
            self._context = Context(
                self.vocabulary,
                n_seq_max=options.n_slots + len(options.pinned),
                n_ctx_slot=options.n_ctx_slot,
                n_batch=options.n_batch + options.n_slots,
                threads=options.threads,
                flash_attn=options.flash_attn,
                cache_type_k=options.cache_type_k,
                cache_type_v=options.cache_type_v,
            )
            self._context.warm_up()
        except DecodeError as error:
            raise ConfigError(f"{path} cannot be decoded: {error}") from error

    def decode(self, rows: Sequence[Row]) -> None:
        """See Backend.decode."""
        self._context.decode(rows)

    def sampler(self, params: SamplingParams, prompt: Sequence[int]) -> Sampler:
        """A llama.cpp sampler chain."""
        return Sampler(self._context, params, prompt)

    def truncate(self, seq_id: int, n_past: int) -> None:
        """See Backend.truncate."""
        self._context.truncate(seq_id, n_past)

    def copy(self, source: int, target: int) -> None:
        """See Backend.copy."""
        self._context.copy(source, target)

    def save(self, seq_id: int) -> bytes:
        """See Backend.save."""
        return self._context.save(seq_id)

    def restore(self, seq_id: int, state: bytes) -> None:
        """See Backend.restore."""
        self._context.restore(seq_id, state)

    @property
    def memory(self) -> MemoryUse:
        """See Backend.memory."""
        context = self._context
        return MemoryUse(
            self.vocabulary.n_bytes, context.cache_bytes_per_lane, context.cache_bytes_per_token
        )

    def measure(self) -> Measurements:
        """See Backend.measure: a sweep of some seconds."""
        began = time.perf_counter()
        found = Sweep(
            self.decode,
            self.truncate,
            n_slots=self._options.n_slots,
            n_ctx_slot=self._options.n_ctx_slot,
            n_batch=self._options.n_batch,
            limit_s=_SWEEP_LIMIT_S,
        ).run()
        logger.info("Measured what passes cost in %.1f s.", time.perf_counter() - began)
        return found

    def close(self) -> None:
        """Free the context. The model is freed with the last object that knows its vocabulary."""
        self._context.close()
