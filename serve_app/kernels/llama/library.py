"""Starting llama.cpp once per process, with its log lines going to Python's logging."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp

from serve_app.base.formats import NumaStrategy
from serve_app.kernels.llama import IS_SPIN_COUNT_OWN

if IS_SPIN_COUNT_OWN:
    os.environ.pop("GOMP_SPINCOUNT", None)

logger = logging.getLogger("corral.llama")

# llama.cpp is chatty: what it calls INFO is for its developers. What it calls WARN mostly notes
# a deliberate choice (a context smaller than the training context, say).
_LEVELS = {3: logging.INFO, 4: logging.ERROR}  # GGML_LOG_LEVEL_WARN and _ERROR
_CONTINUATION = 5
# What llama.cpp calls errors when a pass is left because somebody told it to.
_LEFT = re.compile(r"failed with error 1$|compute status: 1$|failed to decode, ret = 2$")

# Where llama-cpp-python looks, too: a second copy would be loaded from elsewhere.
_FOLDER = os.environ.get("LLAMA_CPP_LIB_PATH") or Path(llama_cpp.__file__).with_name("lib")
_PATH = Path(_FOLDER) / "libllama.so"

_NUMA_STRATEGIES: dict[NumaStrategy, int] = {
    "distribute": llama_cpp.GGML_NUMA_STRATEGY_DISTRIBUTE,
    "isolate": llama_cpp.GGML_NUMA_STRATEGY_ISOLATE,
    "numactl": llama_cpp.GGML_NUMA_STRATEGY_NUMACTL,
}


class _LogForwarder:
    """Joins llama.cpp's line fragments and forwards whole lines. llama.cpp may call on any thread."""

    def __init__(self) -> None:
        self.copies: dict[int, list[str]] = {}
        self._level = logging.DEBUG
        self._line = ""

    def __call__(self, level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
        if level != _CONTINUATION:
            self._level = _LEVELS.get(level, logging.DEBUG)
        self._line += text.decode(errors="replace")
        if self._line.endswith("\n"):
            line, self._line = self._line.strip(), ""
            if line.strip("."):
                level = logging.DEBUG if _LEFT.search(line) else self._level
                logger.log(level, "%s", line)
                for copy in [*self.copies.values()]:
                    copy.append(line)


# Kept at module level: llama.cpp holds a bare pointer, and the process dies if the object is collected.
_forwarder = _LogForwarder()
_log_callback = llama_cpp.llama_log_callback(_forwarder)


@contextmanager
def capture_log() -> Iterator[list[str]]:
    """llama.cpp's log lines while this is open: what it tells nowhere else."""
    lines: list[str] = []
    _forwarder.copies[id(lines)] = lines
    try:
        yield lines
    finally:
        del _forwarder.copies[id(lines)]


def log_callback() -> Any:
    """The callback for logs of the other libraries of llama.cpp."""
    return _log_callback


@functools.cache
def init() -> None:
    """Initialise llama.cpp's backends. Idempotent; call before any other llama.cpp function."""
    llama_cpp.llama_log_set(_log_callback, ctypes.c_void_p(0))
    _load_kernels()
    llama_cpp.llama_backend_init()


def _load_kernels() -> None:
    """Load the library that suits this CPU best, if llama.cpp was built for many CPUs
    (`cluster/Dockerfile`); other builds have their only library linked in."""
    # The one that is loaded already; its dependencies' symbols are found in it, too.
    library = ctypes.CDLL(str(_PATH))
    if not library.ggml_backend_reg_count():
        library.ggml_backend_load_all_from_path(str(_PATH.parent).encode())


def brief(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `llama_cpp` that keeps the interpreter's lock while it runs. For calls of some
    microseconds that the decoder's thread makes for each token. Who lets the lock go may wait for it for
    as long as the event loop's next callback takes."""
    same = ctypes.PyDLL(str(_PATH))[function.__name__]
    same.argtypes, same.restype = function.argtypes, function.restype  # type: ignore[attr-defined]
    return same


def function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """A function of llama.cpp or ggml that `llama_cpp` does not bind, with its types."""
    bound = ctypes.CDLL(str(_PATH))[name]
    bound.restype, bound.argtypes = result, arguments
    return bound


@functools.cache
def init_numa(strategy: NumaStrategy) -> None:
    """Have llama.cpp spread the threads that it starts from now on over NUMA nodes, in the whole process.
    Before a model is loaded: pages of its weights are then not read ahead. The first call counts."""
    init()
    llama_cpp.llama_numa_init(_NUMA_STRATEGIES[strategy])


def version() -> str:
    """The version of the llama-cpp-python package, which names the llama.cpp inside it."""
    return str(llama_cpp.__version__)
