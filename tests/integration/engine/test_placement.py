"""Threads and NUMA nodes of a real engine, and the benchmark of pinned replicas."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from serve_app.base.formats import FEW_ROWS, Threads
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


def test_batches_of_few_rows_have_threads_of_their_own(tiny_gguf: Path) -> None:
    context = Context(
        Model(tiny_gguf),
        ContextOptions(n_seq_max=1, n_ctx_slot=64, n_batch=32, threads=2, flash_attn=False),
    )
    context.use_threads(Threads(1, 1, 2, "a test"))
    found, begin = [], 0
    for n_rows in (1, FEW_ROWS, FEW_ROWS + 1, 2):
        context.decode([(0, begin + i, 0, i == 0) for i in range(n_rows)])
        begin += n_rows
        found.append(llama_cpp.llama_n_threads_batch(context.pointer))
        assert llama_cpp.llama_n_threads(context.pointer) == 1
    context.close()
    assert found == [1, 1, 2, 1]


def test_fewer_threads_are_tried_once_and_kept_with_the_profile(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = Threads(2, 3, 5, "a test")
    trials = [chosen]
    caches = "serve_app.engine.choice.caches"
    monkeypatch.setattr(f"{caches}.best_threads", lambda *args, **options: trials.pop())
    monkeypatch.setattr("serve_app.engine.costs.profile_cache._ALONE", 0.0)
    options = EngineOptions(
        2, 64, threads=5, fewer_threads=True, profile_limit_s=0.5, profile_folder=tmp_path
    )
    for _ in range(2):
        engine = Engine.load(tiny_gguf, options)
        compute = engine.stats().compute
        engine.close()
        found = compute.threads, compute.threads_few, compute.threads_batch, compute.threads_reason
        assert found == (2, 3, 5, "a test")
    assert not trials


def test_the_threads_that_compute_keep_to_their_cpus(tiny_gguf: Path) -> None:
    ours = os.sched_getaffinity(0)
    options = EngineOptions(1, 64, threads=1, profile_limit_s=0, computing_cpus=(min(ours),))
    engine = Engine.load(tiny_gguf, options)
    (decoder,) = [thread for thread in threading.enumerate() if thread.name == "corral-decoder"]
    assert decoder.native_id is not None
    masks = os.sched_getaffinity(decoder.native_id), os.sched_getaffinity(0)
    engine.close()
    assert masks == ({min(ours)}, ours)
