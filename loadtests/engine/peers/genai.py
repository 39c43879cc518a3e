"""OpenVINO GenAI's own continuous batching, with the same GGUF file, as its own reader converts it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from serve_app.base.folders import cache_folder
from serve_app.cli.measure.benchmark import BenchmarkError, Prompt
from serve_app.cli.measure.process import RUN_TIMEOUT_S
from serve_app.engine import EngineOptions
from serve_app.kernels.llama.model import files_of, fingerprint_of
from serve_app.kernels.openvino.paged.blocks import BLOCK
from serve_app.kernels.openvino.paged.compiling import settings


class GenAiLoop:
    """The pipeline: so many sequences at once, as many prompt tokens in a step, the same threads, precision
    and format of the cache as the engine's, and no prefix cache. One thread at a time."""

    def __init__(self, model: Path, options: EngineOptions) -> None:
        folder = _converted(model)
        config = openvino_genai.SchedulerConfig()
        config.max_num_seqs = options.n_slots
        config.max_num_batched_tokens = options.n_batch
        config.num_kv_blocks = options.n_slots * -(-options.n_ctx_slot // BLOCK) + options.n_slots
        config.enable_prefix_caching = False
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            folder, config, "CPU", settings(options.threads)
        )
        self._n_begun = 0

    def run(
        self, prompts: Sequence[Prompt], max_tokens: int, seeds: Sequence[int]
    ) -> tuple[list[list[float]], int]:
        """Generate `max_tokens` tokens after each prompt. Returns when each was there, by
        `time.perf_counter()`, and the number of steps. Raises BenchmarkError after RUN_TIMEOUT_S."""
        handles = [
            self._add(prompt, max_tokens, seed) for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        arrivals: list[list[float]] = [[] for _ in prompts]
        deadline, n_steps = time.perf_counter() + RUN_TIMEOUT_S, 0
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            n_steps, now = n_steps + 1, time.perf_counter()
            for handle, times in zip(handles, arrivals, strict=True):
                while handle.can_read():
                    found = handle.read().values()
                    times += [now] * sum(len(one.generated_ids) for one in found)
            if now > deadline:
                raise BenchmarkError("OpenVINO GenAI takes too long.")
        return arrivals, n_steps

    def _add(self, prompt: Prompt, max_tokens: int, seed: int) -> Any:
        """The engine's samplers, as far as the pipeline has them."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = max_tokens, True
        config.do_sample, config.rng_seed = True, seed
        config.top_k, config.top_p, config.temperature = 40, 0.95, 0.8
        self._n_begun += 1
        tokens = openvino.Tensor(np.array([prompt], np.int64))
        return self._pipeline.add_request(self._n_begun, tokens, config)


def _converted(model: Path) -> Path:
    """The folder with the model in OpenVINO's format, made at the first call. GenAI writes it beside the
    file that it reads, so that is a link."""
    name = fingerprint_of(files_of(model)).hex()[:32]
    made = cache_folder() / "openvino-genai" / name
    if not made.is_dir():
        part = made.with_name(f"{name}.{os.getpid()}")
        part.mkdir(parents=True)
        (part / "model.gguf").symlink_to(model.resolve())
        openvino_genai.LLMPipeline(str(part / "model.gguf"), "CPU", enable_save_ov_model=True)
        part.rename(made)
    return made
