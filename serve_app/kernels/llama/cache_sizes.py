"""Sizes of a model's cache, as llama.cpp tells them: it makes a context without memory."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import llama_cpp

from serve_app.kernels.llama import library

# The context that is asked for: with many cells, two decimals of a MiB are whole elements. Layers with a
# window are known by fewer cells, so the windows of all sequences take half of the context at most.
_N_CTX, _MOST_SEQUENCES = 2**15, 64
# As `llama_kv_cache` and `llama_memory_recurrent` log their sizes: keys and values, or the two states.
_SIZE = re.compile(
    r"^llama_(\w+): size = .*?\( *(\d+) cells,.*?: +([\d.]+) MiB, [VS] \(\w+\): +([\d.]+) MiB"
)


class CacheSizes(NamedTuple):
    """The cache that a model needs."""

    full: tuple[int, int]
    """Elements of one token's keys and values in the layers that see everything."""
    windowed: tuple[int, int]
    """Elements of one token's keys and values in the layers with a window."""
    window: int
    """Tokens that these look back on."""
    recurrent_bytes: int
    """Bytes of one sequence in the recurrent layers."""


def cache_sizes(model: Any) -> CacheSizes | None:
    """The sizes of llama.cpp's model, whose weights are not loaded. None if llama.cpp makes no context of
    it, or one without a cache."""
    window = int(llama_cpp.llama_model_n_swa(model))
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.kv_unified = _N_CTX, True
    options.n_seq_max = max(1, min(_MOST_SEQUENCES, _N_CTX // 2 // max(1, window)))
    options.swa_full = False
    options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED  # which takes the most
    with library.capture_log() as lines:
        context = llama_cpp.llama_init_from_model(model, options)
        if context:
            llama_cpp.llama_free(context)
    return _parse(lines, window)


def _parse(lines: list[str], window: int) -> CacheSizes | None:
    full, windowed, recurrent_bytes, has_cache = [0, 0], [0, 0], 0.0, False
    for line in lines:
        if (size := _SIZE.match(line)) is None:
            continue
        n_cells = int(size[2])
        n_bytes = [float(mib) * 2**20 / n_cells for mib in size.groups()[2:]]
        has_cache = True
        if size[1] == "memory_recurrent":
            recurrent_bytes += sum(n_bytes)
            continue
        elements = windowed if window and n_cells < _N_CTX else full
        for i, of_token in enumerate(n_bytes):
            elements[i] += round(of_token / 2)
    if not has_cache:
        return None
    return CacheSizes(
        (full[0], full[1]), (windowed[0], windowed[1]), window, round(recurrent_bytes)
    )
