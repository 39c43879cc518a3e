"""Checks that the kernels of the llama.cpp that was just compiled work on this machine.

    python -m cluster.llama_cpp.probe

The built-in model, and a random one in each format that llama.cpp has AMX kernels for, read a few tokens:
first with llama.cpp's plain kernels, then with those that it chooses here. Ends with 0 if the logits agree,
with 1 if they do not, and by a signal if a kernel is broken: that is why this is a process of its own.
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

from serve_app.kernels.llama import library
from serve_app.kernels.llama.quantising import quantise
from serve_app.store.builtin_model import BUILTIN_MODEL
from tools.random_models.model import SHAPES, write_random_gguf

FORMATS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K_S", "Q5_K_S", "Q6_K", "IQ4_XS")
"""llama.cpp's names of those with AMX kernels, `qtype_has_amx_kernels`."""
N_TOKENS = 48
"""More than one tile has rows, and not full tiles only."""
_LEAST_CORRELATION = 0.99


def logits(path: Path, *, chosen: bool, n_tokens: int = N_TOKENS) -> NDArray[np.float32]:
    """The logits after each of so many tokens, which are read at once, with the kernels that llama.cpp
    chooses on this machine, or its plain ones. Raises RuntimeError if it cannot read them."""
    library.init()
    with _context(path, chosen) as (model, context), _batch(n_tokens) as batch:
        if status := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {status}.")
        n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        rows = llama_cpp.llama_get_logits(context)
        return np.ctypeslib.as_array(rows, (n_tokens, n_vocab)).copy()


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


@contextmanager
def _batch(n_tokens: int) -> Iterator[Any]:
    batch = llama_cpp.llama_batch_init(n_tokens, 0, 1)
    batch.n_tokens = n_tokens
    for i in range(n_tokens):
        batch.token[i], batch.pos[i], batch.logits[i] = i + 1, i, True
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    try:
        yield batch
    finally:
        llama_cpp.llama_batch_free(batch)


def agree(path: Path) -> bool:
    """Whether both kinds of kernels compute the same after each token, but for rounding."""
    plain, chosen = (logits(path, chosen=chosen) for chosen in (False, True))
    if not np.isfinite(chosen).all():
        return False
    found = (np.corrcoef(*rows)[0, 1] for rows in zip(plain, chosen, strict=True))
    return all(float(one) >= _LEAST_CORRELATION for one in found)


def main() -> None:
    """Check all files."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "f16.gguf", Path(folder) / "quantised.gguf"
        write_random_gguf(source, SHAPES["tiny"], "f16")
        right = agree(BUILTIN_MODEL)
        for name in FORMATS:
            quantise(source, target, name, alike=True)
            right = right and agree(target)
        sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
