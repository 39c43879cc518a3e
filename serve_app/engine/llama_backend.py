"""The real backend: llama.cpp."""

from __future__ import annotations

import os
from collections.abc import Sequence

from serve_app.engine.backend import Row
from serve_app.engine.options import EngineOptions
from serve_app.errors import ConfigError, DecodeError
from serve_app.llama.context import Context
from serve_app.llama.model import Model
from serve_app.llama.sampler import Sampler
from serve_app.types import SamplingParams


class LlamaBackend:
    """A GGUF model and one context over it. Raises ConfigError if it cannot be loaded."""

    def __init__(self, path: str | os.PathLike[str], options: EngineOptions) -> None:
        self.vocabulary = Model(path)
        try:
            self._context = Context(
                self.vocabulary,
                n_seq_max=options.n_slots,
                n_ctx_slot=options.n_ctx_slot,
                n_batch=options.n_batch + options.n_slots,
                threads=options.threads,
                flash_attn=options.flash_attn,
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

    def close(self) -> None:
        """Free the context. The model is freed with the last object that knows its vocabulary."""
        self._context.close()
