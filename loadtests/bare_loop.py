"""The least Python that can serve a batch with llama.cpp: what `loadtests.engine` measures against.

One model, one context with the engine's own parameters, all prompts in batches of `n_batch` rows,
then one row of each sequence per step. No scheduling, no text, no streams.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence

import llama_cpp

from serve_app.engine import EngineOptions

Prompt = tuple[int, ...]
Row = tuple[int, int, int, bool]
"""(token, position, sequence id, wants logits)."""

# Kept at module level: llama.cpp holds a bare pointer.
_NO_LOG = llama_cpp.llama_log_callback(lambda _level, _text, _user_data: None)

# llama.cpp rounds a lane's length up to this many cells.
_CELL_PADDING = 256


class BareLoop:
    """A model and a context, the same as the engine's with these options. One thread only."""

    def __init__(self, path: str | os.PathLike[str], options: EngineOptions) -> None:
        self._model = _load_model(path)
        self._context = _new_context(self._model, options)
        self._n_batch = options.n_batch
        self._batch = llama_cpp.llama_batch_init(options.n_batch, 0, 1)
        for i in range(options.n_batch):
            self._batch.n_seq_id[i] = 1
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._n_vocab: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self._eog = [
            token
            for token in range(self._n_vocab)
            if llama_cpp.llama_vocab_is_eog(self._vocab, token)
        ]

    def close(self) -> None:
        """Free everything; nothing is called afterwards."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def __enter__(self) -> BareLoop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, prompts: Sequence[Prompt], max_tokens: int, seeds: Sequence[int], timeout_s: float
    ) -> tuple[list[list[float]], int]:
        """Generate `max_tokens` tokens after each prompt, in lockstep.

        Returns when each token of each sequence was there, in seconds from the start, and the number
        of `llama_decode` calls. Raises TimeoutError after `timeout_s`, RuntimeError if llama.cpp fails.
        """
        start = time.perf_counter()
        arrivals: list[list[float]] = [[] for _ in prompts]
        last = [0] * len(prompts)
        chains = [self._sampler_chain(seed) for seed in seeds]
        steps = 0

        def step(rows: Sequence[Row]) -> None:
            nonlocal steps
            steps += 1
            self._decode(rows)
            sampled = [(row[2], i) for i, row in enumerate(rows) if row[3]]
            for lane, i in sampled:
                last[lane] = llama_cpp.llama_sampler_sample(chains[lane], self._context, i)
            now = time.perf_counter() - start
            for lane, _ in sampled:
                arrivals[lane].append(now)
            if now > timeout_s:
                raise TimeoutError(f"The bare loop took longer than {timeout_s} s.")

        try:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
            rows = _prompt_rows(prompts)
            for first in range(0, len(rows), self._n_batch):
                step(rows[first : first + self._n_batch])
            for past in range(max_tokens - 1):
                step([(last[i], len(p) + past, i, True) for i, p in enumerate(prompts)])
        finally:
            for chain in chains:
                llama_cpp.llama_sampler_free(chain)
        return arrivals, steps

    def _decode(self, rows: Sequence[Row]) -> None:
        batch = self._batch
        token, pos, seq_id, logits = batch.token, batch.pos, batch.seq_id, batch.logits
        for i, row in enumerate(rows):
            token[i], pos[i], seq_id[i][0], logits[i] = row
        batch.n_tokens = len(rows)
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status} for a batch of {len(rows)} rows.")

    def _sampler_chain(self, seed: int) -> llama_cpp.llama_sampler_p:
        """The chain of the engine's default parameters, with every end-of-generation token banned."""
        params = llama_cpp.llama_sampler_chain_default_params()
        chain: llama_cpp.llama_sampler_p = llama_cpp.llama_sampler_chain_init(params)
        banned = (llama_cpp.llama_logit_bias * len(self._eog))(
            *(llama_cpp.llama_logit_bias(token, -math.inf) for token in self._eog)
        )
        for link in (
            llama_cpp.llama_sampler_init_logit_bias(self._n_vocab, len(self._eog), banned),
            llama_cpp.llama_sampler_init_top_k(40),
            llama_cpp.llama_sampler_init_top_p(0.95, 1),
            llama_cpp.llama_sampler_init_min_p(0.05, 1),
            llama_cpp.llama_sampler_init_temp(0.8),
            llama_cpp.llama_sampler_init_dist(seed),
        ):
            llama_cpp.llama_sampler_chain_add(chain, link)
        return chain


def text_tokens(path: str | os.PathLike[str]) -> list[int]:
    """Every token of a GGUF file's vocabulary that stands for text: none that controls or ends."""
    model = _load_model(path, vocab_only=True)
    vocab = llama_cpp.llama_model_get_vocab(model)
    tokens = [
        token
        for token in range(llama_cpp.llama_vocab_n_tokens(vocab))
        if not llama_cpp.llama_vocab_is_control(vocab, token)
        and not llama_cpp.llama_vocab_is_eog(vocab, token)
    ]
    llama_cpp.llama_model_free(model)
    return tokens


def _load_model(
    path: str | os.PathLike[str], *, vocab_only: bool = False
) -> llama_cpp.llama_model_p:
    llama_cpp.llama_log_set(_NO_LOG, None)
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = vocab_only
    params.n_gpu_layers = 0
    model: llama_cpp.llama_model_p = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {path}.")
    return model


def _new_context(
    model: llama_cpp.llama_model_p, options: EngineOptions
) -> llama_cpp.llama_context_p:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = options.n_slots * -(-options.n_ctx_slot // _CELL_PADDING) * _CELL_PADDING
    params.n_batch = params.n_ubatch = options.n_batch
    params.n_seq_max = params.n_outputs_max = options.n_slots
    params.n_threads = params.n_threads_batch = options.threads
    params.flash_attn_type = (
        llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        if options.flash_attn
        else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    params.kv_unified = False
    params.no_perf = True
    context: llama_cpp.llama_context_p = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("llama.cpp cannot make the context.")
    return context


def _prompt_rows(prompts: Sequence[Prompt]) -> list[Row]:
    """All prompts in a row; each one's last token wants logits."""
    return [
        (token, position, lane, position == len(prompt) - 1)
        for lane, prompt in enumerate(prompts)
        for position, token in enumerate(prompt)
    ]
