"""Ways to compute: a build of llama.cpp, and how it is used."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import llama_cpp

from loadtests.common.benchmark import Prompt
from loadtests.engine import process
from loadtests.engine.bare_loop import BareLoop, BareModel
from loadtests.engine.modes import measured
from loadtests.engine.run import Run
from serve_app.engine import EngineOptions

_VARIABLE = "LLAMA_CPP_LIB_PATH"
_MAX_THREADS = 512
"""GGML_MAX_N_THREADS."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way, by its differences from Corral's own."""

    build: str = ""
    """The build's name; the installed one if there is none."""
    flags: tuple[str, ...] = ()
    """For cmake."""
    repack: bool = True
    """Whether weights get an order that the kernels like better."""
    poll: int | None = None
    """How long threads of llama.cpp's own pool look for work before they sleep: 0 not at all, 100 the
    longest. None: OpenMP's threads."""


WAYS = {
    "installed": Way(),
    "compiled again": Way("again"),
    "without repacking": Way(repack=False),
    "without llamafile": Way("without-llamafile", ("-DGGML_LLAMAFILE=OFF",)),
    "own threads, poll 0": Way("own-threads", ("-DGGML_OPENMP=OFF",), poll=0),
    "own threads, poll 50": Way("own-threads", ("-DGGML_OPENMP=OFF",), poll=50),
    "own threads, poll 100": Way("own-threads", ("-DGGML_OPENMP=OFF",), poll=100),
    "link-time optimisation": Way("lto", ("-DGGML_LTO=ON",)),
    "OpenBLAS": Way("openblas", ("-DGGML_BLAS=ON", "-DGGML_BLAS_VENDOR=OpenBLAS")),
    "clang": Way("clang", ("-DCMAKE_C_COMPILER=clang-19", "-DCMAKE_CXX_COMPILER=clang++-19")),
}


def started(
    library: Path | None, way: Way, model: Path, options: EngineOptions
) -> ProcessPoolExecutor:
    """A process with the model open, computing that way with the libraries of that folder."""
    with _environment(library):
        pool = process.started_with(_open, model, options, way)
        pool.submit(os.getpid).result()  # starts the process, which reads the variable
    return pool


def run(prompts: Sequence[Prompt], max_tokens: int) -> Run:
    """In such a process: all prompts at once, `max_tokens` tokens each."""
    loop: BareLoop = process.opened()
    return measured("bare", loop, prompts, max_tokens)


def _open(model: Path, options: EngineOptions, way: Way) -> BareLoop:
    loop = BareLoop(BareModel(model, repack=way.repack), options)
    if way.poll is not None:
        _use_own_threads(loop.context, options.threads, way.poll)
    return loop


class _PoolParams(ctypes.Structure):
    """`ggml_threadpool_params` of ggml.h."""

    _fields_ = (
        ("cpumask", ctypes.c_bool * _MAX_THREADS),
        ("n_threads", ctypes.c_int),
        ("prio", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    )


def _use_own_threads(context: llama_cpp.llama_context_p, n_threads: int, poll: int) -> None:
    """Attach a thread pool of ggml's to a context, for as long as the process lives."""
    library = llama_cpp.llama_cpp._lib
    cpu = ctypes.CDLL(str(Path(library._name).parent / "libggml-cpu.so"))
    params = _PoolParams()
    library.ggml_threadpool_params_init(ctypes.byref(params), n_threads)
    params.poll = poll
    cpu.ggml_threadpool_new.restype = ctypes.c_void_p
    pool = ctypes.c_void_p(cpu.ggml_threadpool_new(ctypes.byref(params)))
    library.llama_attach_threadpool.argtypes = [ctypes.c_void_p] * 3
    library.llama_attach_threadpool(context, pool, pool)


@contextmanager
def _environment(library: Path | None) -> Iterator[None]:
    """For processes that are started meanwhile."""
    if library is None:
        yield
        return
    os.environ[_VARIABLE] = str(library)
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
