"""Values of llama.cpp's options, by llama-server's names, and what caches take. Does not load llama.cpp."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

Row = tuple[int, int, int, bool]
"""(token, its index in the slot or its position, sequence id, wants logits): one row of a batch."""

State = bytes | memoryview

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "iq4_nl", "q4_1", "q4_0"]
"""A number format of the KV cache (`--cache-type-k`, `--cache-type-v`)."""

LoadMode = Literal["auto", "mmap", "mlock", "mmap+mlock", "none"]
"""How the weights come into memory (`--load-mode`)."""

BackendName = Literal["auto", "llama.cpp", "openvino"]
"""Kernels that compute a model; `auto` measures which are faster."""

Quantization = Literal["auto", "none", "w8a8"]
"""Whether products are rounded further than in the file: weights to 8 bits, with scales for longer groups.
`auto`: where a measurement finds that faster."""

EmbeddingPooling = Literal["none", "mean", "cls", "last", "rank"]
"""How the vectors of a text's tokens become one: not at all, their mean, the first's, the last's, a score
(`--pooling`)."""

NumaStrategy = Literal["distribute", "isolate", "numactl"]
"""How threads are spread over NUMA nodes (`--numa`)."""

# Two lines of these for a model with sliding windows: layers that see everything, then those with a window.
_KEYS_VALUES = re.compile(
    r"llama_kv_cache: size = +[\d.]+ MiB \( *(\d+) cells, +(\d+) layers, +\d+/(\d+) seqs\), "
    r"K \([^)]*\): +([\d.]+) MiB, V \([^)]*\): +([\d.]+) MiB"
)
_RECURRENT = re.compile(
    r"llama_memory_recurrent: size = +([\d.]+) MiB \( *\d+ cells,.*?(\d+) seqs +(\d+) rs_seq"
)
# These lines round to hundredths.
_ROUNDED_BYTES = 0.011 * 2**20


def ggml_type(name: CacheType) -> int:
    return int(GGMLQuantizationType[name.upper()])


def block_size(name: CacheType) -> int:
    """How many numbers share a scale; above 1, the format is quantised."""
    return int(GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]][0])


def n_bytes(name: CacheType, n_elements: int) -> int:
    """Bytes of so many numbers, a multiple of the block size."""
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
    return int(n_elements * block_bytes // block)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Bytes of a cache, by what they depend on."""

    per_token: int
    """Keys and values of one token, in layers that see everything."""
    per_window_token: int = 0
    """Keys and values of one token, in layers that have a window."""
    per_sequence: int = 0
    """The present states of one sequence, in recurrent layers."""
    cache_bytes: int = 0
    rewind_bytes: int = 0
    """The part of `cache_bytes` that past states of recurrent layers take."""

    @classmethod
    def read(cls, lines: Sequence[str], per_layer: float, n_seq_max: int) -> CacheLayout | None:
        """The layout that llama.cpp's log lines tell; None if they do not say. `per_layer` are the bytes of
        one token in one layer by the model's file. They are not rounded if they fit what llama.cpp says."""
        parts = [match for match in map(_KEYS_VALUES.search, lines) if match]
        recurrent = [match for match in map(_RECURRENT.search, lines) if match]
        if not (parts or recurrent) or len(parts) > 2:
            return None
        tokens, total = [0, 0], 0
        for i, part in enumerate(parts):
            n_cells, n_layers = int(part[1]) * int(part[3]), int(part[2])
            said = (float(part[4]) + float(part[5])) * 2**20
            exact = n_cells * n_layers * per_layer
            n_bytes = exact if abs(exact - said) <= 2 * _ROUNDED_BYTES else said
            tokens[i] = round(n_bytes / n_cells)
            total += round(n_bytes)
        states = round(sum(float(match[1]) * 2**20 for match in recurrent))
        n_states = 1 + max((int(match[3]) for match in recurrent), default=0)
        present = states // n_states
        return cls(tokens[0], tokens[1], present // n_seq_max, total + states, states - present)
