"""Checks that the kernels of the llama.cpp that was just compiled work on this machine.

    python -m cluster.llama_cpp.probe

The built-in model and a random one read a few tokens: first with llama.cpp's plain kernels, then with
those that it chooses here. Ends with 0 if the logits agree, with 1 if they do not, and by a signal if a
kernel is broken: that is why this is a process of its own. The files have the formats Q8_0 and Q4_0.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from serve_app.demo_model import BUILTIN_MODEL
from serve_app.demo_model.random_gguf import SHAPES, write_random_gguf
from serve_app.llama import library

N_TOKENS = 48
"""More than one tile has rows."""
_LEAST_CORRELATION = 0.99


def logits(path: Path, *, chosen: bool) -> NDArray[np.float32]:
    """The logits after the last of `N_TOKENS` tokens, with the kernels that llama.cpp chooses on this
    machine, or its plain ones."""
    library.init()
    with _context(path, chosen) as (model, context):
        tokens = (llama_cpp.llama_token * N_TOKENS)(*range(1, N_TOKENS + 1))
        status = llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, N_TOKENS))
        if status:
            raise RuntimeError(f"llama_decode returned {status}.")
        n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        row = llama_cpp.llama_get_logits_ith(context, -1)
        return np.ctypeslib.as_array(row, (n_vocab,)).copy()


@contextmanager
def _context(path: Path, chosen: bool) -> Iterator[tuple[Any, Any]]:
    params = llama_cpp.llama_model_default_params()
    params.use_extra_bufts = chosen
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    context = llama_cpp.llama_init_from_model(model, llama_cpp.llama_context_default_params())
    try:
        yield model, context
    finally:
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)


def agree(path: Path) -> bool:
    """Whether both kinds of kernels compute the same, but for rounding."""
    plain, chosen = (logits(path, chosen=chosen) for chosen in (False, True))
    if not np.isfinite(chosen).all():
        return False
    return float(np.corrcoef(plain, chosen)[0, 1]) >= _LEAST_CORRELATION


def main() -> None:
    """Check both files."""
    with tempfile.TemporaryDirectory() as folder:
        q4 = Path(folder) / "q4_0.gguf"
        write_random_gguf(q4, SHAPES["tiny"], "q4_0")
        sys.exit(0 if agree(BUILTIN_MODEL) and agree(q4) else 1)


if __name__ == "__main__":
    main()
