"""OpenVINO computes with the threads and on the cores that the replica has, and no others."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from serve_app.engine import EngineOptions
from serve_app.kernels.llama.model import Model
from serve_app.store.builtin_model import BUILTIN_MODEL

pytest.importorskip("openvino_genai", reason="corral[openvino] is not installed")

OPTIONS = EngineOptions(
    n_slots=2, n_ctx_slot=64, threads=2, n_batch=64, profile_limit_s=0, backend="openvino"
)
CPUS = sorted(os.sched_getaffinity(0))


def tasks() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


def computed(options: EngineOptions) -> tuple[dict[int, set[int]], dict[str, object]]:
    """Over there: the CPUs of each thread that computed a batch, and what the model is compiled with."""
    from serve_app.engine.backends.openvino import OpenVinoBackend

    before = tasks() - {os.getpid()}
    backend = OpenVinoBackend(Model(BUILTIN_MODEL, vocab_only=True), options)
    started = cpu_ticks()
    for i in range(200):
        backend.decode([(i + j, j, 0, True) for j in range(32)])
        backend.truncate(0, 0)
    busy = {one for one, ticks in cpu_ticks().items() if ticks > started.get(one, 0)} - before
    compiled = backend._context.layers._requests[0][0].get_compiled_model()  # type: ignore[attr-defined]
    names = ("INFERENCE_NUM_THREADS", "NUM_STREAMS", "ENABLE_CPU_PINNING")
    return (
        {one: os.sched_getaffinity(one) for one in busy},
        {name: compiled.get_property(name) for name in names},
    )


def cpu_ticks() -> dict[int, int]:
    """CPU time of each thread of this process."""
    found = {}
    for one in tasks():
        fields = Path(f"/proc/self/task/{one}/stat").read_text().rpartition(")")[2].split()
        found[one] = int(fields[11]) + int(fields[12])
    return found


def in_a_process(options: EngineOptions) -> tuple[dict[int, set[int]], dict[str, object]]:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(computed, options).result()


@pytest.mark.parametrize("threads", [1, 2])
def test_as_many_threads_compute_as_are_configured(threads: int) -> None:
    busy, properties = in_a_process(replace(OPTIONS, threads=threads))
    assert len(busy) <= threads
    assert properties == {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
    }


@pytest.mark.skipif(len(CPUS) < 2, reason="there is only one CPU")
def test_threads_keep_to_the_cores_of_the_lease() -> None:
    busy, _ = in_a_process(replace(OPTIONS, computing_cpus=(CPUS[-1],)))
    assert busy
    assert all(cpus == {CPUS[-1]} for cpus in busy.values())
