"""The least Python that can serve sequences with llama.cpp: what `loadtests.engine` measures against.

Contexts with the engine's own parameters; prompts in batches of `n_batch` rows, then one row of a
sequence at a time. No scheduling, no text, no streams.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Sequence

import llama_cpp

from serve_app.cli.measure.benchmark import Prompt
from serve_app.cli.measure.process import RUN_TIMEOUT_S
from serve_app.engine import EngineOptions

Row = tuple[int, int, int, bool]
"""(token, position, sequence id, wants logits)."""
Groups = Sequence[Sequence[int]]
"""Sequences by their index: those of a group share a `llama_decode`, the groups take turns."""

# Kept at module level: llama.cpp holds a bare pointer.
_NO_LOG = llama_cpp.llama_log_callback(lambda _level, _text, _user_data: None)

# llama.cpp rounds a slot's length up to this many cells.
_CELL_PADDING = 256


class BareModel:
    """A GGUF file opened by llama.cpp. Any number of contexts, on any threads, may share it."""

    def __init__(
        self, path: str | os.PathLike[str], *, vocab_only: bool = False, repack: bool = True
    ) -> None:
        self._log, self._of_log = llama_cpp.llama_log_callback(), ctypes.c_void_p()
        llama_cpp.llama_log_get(ctypes.byref(self._log), ctypes.byref(self._of_log))
        llama_cpp.llama_log_set(_NO_LOG, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = vocab_only
        params.n_gpu_layers = 0
        params.use_extra_bufts = repack
        self.pointer = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not self.pointer:
            raise RuntimeError(f"llama.cpp cannot load {path}.")
        self.vocab = llama_cpp.llama_model_get_vocab(self.pointer)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.eog = [
            token
            for token in range(self.n_vocab)
            if llama_cpp.llama_vocab_is_eog(self.vocab, token)
        ]
        """Every token that ends a generation."""

    def __enter__(self) -> BareModel:
        return self

    def __exit__(self, *_: object) -> None:
        llama_cpp.llama_model_free(self.pointer)
        llama_cpp.llama_log_set(self._log, self._of_log)  # others in this process read it


class BareLoop:
    """A context, the same as the engine's with these options. One thread at a time."""

    def __init__(self, model: BareModel, options: EngineOptions) -> None:
        self._model = model
        self.context = _new_context(model.pointer, options)
        self._n_batch = options.n_batch
        self._batch = llama_cpp.llama_batch_init(options.n_batch, 0, 1)
        for i in range(options.n_batch):
            self._batch.n_seq_id[i] = 1

    def run(
        self, prompts: Sequence[Prompt], max_tokens: int, groups: Groups, seeds: Sequence[int]
    ) -> tuple[list[list[float]], int]:
        """Generate `max_tokens` tokens after each prompt, one group of prompts after the other in each
        step. Together the groups name every prompt, by its index, once.

        Returns when each token of each sequence was there, by `time.perf_counter()`, and the number
        of `llama_decode` calls. Raises TimeoutError after RUN_TIMEOUT_S, RuntimeError if llama.cpp
        fails.
        """
        deadline = time.perf_counter() + RUN_TIMEOUT_S
        arrivals: list[list[float]] = [[] for _ in prompts]
        last = [0] * len(prompts)
        chains = [self._sampler_chain(seed) for seed in seeds]
        steps = 0

        def step(rows: Sequence[Row]) -> None:
            nonlocal steps
            steps += 1
            self._decode(rows)
            sampled = [(row[2], i) for i, row in enumerate(rows) if row[3]]
            for seq_id, i in sampled:
                last[seq_id] = llama_cpp.llama_sampler_sample(chains[seq_id], self.context, i)
            now = time.perf_counter()
            for seq_id, _ in sampled:
                arrivals[seq_id].append(now)
            if now > deadline:
                raise TimeoutError(f"The bare loop took longer than {RUN_TIMEOUT_S} s.")

        try:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)
            for group in groups:
                rows = _prompt_rows(prompts, group)
                for first in range(0, len(rows), self._n_batch):
                    step(rows[first : first + self._n_batch])
            for past in range(max_tokens - 1):
                for group in groups:
                    step(
                        [
                            (last[seq_id], len(prompts[seq_id]) + past, seq_id, True)
                            for seq_id in group
                        ]
                    )
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
        status = llama_cpp.llama_decode(self.context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status} for a batch of {len(rows)} rows.")

    def _sampler_chain(self, seed: int) -> llama_cpp.llama_sampler_p:
        """The chain of the engine's default parameters, with every end-of-generation token banned."""
        params = llama_cpp.llama_sampler_chain_default_params()
        chain: llama_cpp.llama_sampler_p = llama_cpp.llama_sampler_chain_init(params)
        eog = self._model.eog
        banned = (llama_cpp.llama_logit_bias * len(eog))(
            *(llama_cpp.llama_logit_bias(token, -math.inf) for token in eog)
        )
        for link in (
            llama_cpp.llama_sampler_init_logit_bias(self._model.n_vocab, len(eog), banned),
            llama_cpp.llama_sampler_init_top_k(40),
            llama_cpp.llama_sampler_init_top_p(0.95, 1),
            llama_cpp.llama_sampler_init_min_p(0.05, 1),
            llama_cpp.llama_sampler_init_temp(0.8),
            llama_cpp.llama_sampler_init_dist(seed),
        ):
            llama_cpp.llama_sampler_chain_add(chain, link)
        return chain


def context_cells(options: EngineOptions) -> int:
    """Cells of the whole context that gives every slot its length."""
    return options.n_slots * -(-options.n_ctx_slot // _CELL_PADDING) * _CELL_PADDING


def _new_context(
    model: llama_cpp.llama_model_p, options: EngineOptions
) -> llama_cpp.llama_context_p:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = context_cells(options)
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


def _prompt_rows(prompts: Sequence[Prompt], group: Sequence[int]) -> list[Row]:
    """The group's prompts one after the other; each one's last token wants logits."""
    return [
        (token, position, seq_id, position == len(prompts[seq_id]) - 1)
        for seq_id in group
        for position, token in enumerate(prompts[seq_id])
    ]
