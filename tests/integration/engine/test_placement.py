"""Threads and NUMA nodes of a real engine, and the benchmark of pinned replicas."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from serve_app.engine import Engine, EngineOptions
from serve_app.kernels.llama import library
from serve_app.kernels.llama.context import Context, ContextOptions
from serve_app.kernels.llama.model import Model


def test_numa_is_set_up_before_the_model_is_loaded(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    load = llama_cpp.llama_model_load_from_file

    def noted(*given: Any) -> Any:
        calls.append("load")
        return load(*given)

    monkeypatch.setattr(llama_cpp, "llama_numa_init", calls.append)
    monkeypatch.setattr(llama_cpp, "llama_model_load_from_file", noted)
    library.init_numa.cache_clear()
    options = EngineOptions(1, 64, threads=1, profile_limit_s=0, numa="isolate")
    Engine.load(tiny_gguf, options).close()
    assert calls == [llama_cpp.GGML_NUMA_STRATEGY_ISOLATE, "load"]


@pytest.mark.parametrize(("threads_batch", "expected"), [(None, (1, 1)), (2, (1, 2))])
def test_threads_of_single_rows_and_of_batches(
    tiny_gguf: Path, threads_batch: int | None, expected: tuple[int, int]
) -> None:
    context = Context(
        Model(tiny_gguf),
        ContextOptions(
            n_seq_max=1,
            n_ctx_slot=64,
            n_batch=8,
            threads=1,
            threads_batch=threads_batch,
            flash_attn=False,
        ),
    )
    pointer = context.pointer
    found = (llama_cpp.llama_n_threads(pointer), llama_cpp.llama_n_threads_batch(pointer))
    context.close()
    assert found == expected


def test_the_engine_tells_both(tiny_gguf: Path) -> None:
    engine = Engine.load(
        tiny_gguf, EngineOptions(1, 64, threads=1, threads_batch=2, profile_limit_s=0)
    )
    stats = engine.stats()
    engine.close()
    assert (stats.compute.threads, stats.compute.threads_batch) == (1, 2)


def test_the_threads_that_compute_keep_to_their_cpus(tiny_gguf: Path) -> None:
    ours = os.sched_getaffinity(0)
    options = EngineOptions(1, 64, threads=1, profile_limit_s=0, computing_cpus=(min(ours),))
    engine = Engine.load(tiny_gguf, options)
    (decoder,) = [thread for thread in threading.enumerate() if thread.name == "corral-decoder"]
    assert decoder.native_id is not None
    masks = os.sched_getaffinity(decoder.native_id), os.sched_getaffinity(0)
    engine.close()
    assert masks == ({min(ours)}, ours)
