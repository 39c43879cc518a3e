"""llama-cpp-python's own class, to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp


@contextmanager
def reference(path: Path, n_ctx: int, **options: Any) -> Iterator[llama_cpp.Llama]:
    """A model that takes so many tokens in one batch. With one thread, as a second team of OpenMP's in the
    tests' process would make the engines of later tests four times slower."""
    llama = llama_cpp.Llama(
        str(path),
        n_ctx=n_ctx,
        n_batch=n_ctx,
        n_ubatch=n_ctx,
        n_threads=1,
        n_threads_batch=1,
        verbose=False,
        **options,
    )
    try:
        yield llama
    finally:
        llama.close()
