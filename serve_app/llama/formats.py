"""The values of llama.cpp's options, by llama-server's names. Does not load llama.cpp."""

from __future__ import annotations

from typing import Literal

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "iq4_nl", "q4_1", "q4_0"]
"""A number format of the KV cache (`--cache-type-k`, `--cache-type-v`)."""

LoadMode = Literal["auto", "mmap", "mlock", "mmap+mlock", "none"]
"""How the weights come into memory (`--load-mode`)."""

EmbeddingPooling = Literal["mean", "cls", "last"]
"""How the vectors of a text's tokens become one: their mean, the first's, the last's (`--pooling`)."""

NumaStrategy = Literal["distribute", "isolate", "numactl"]
"""How threads are spread over NUMA nodes (`--numa`)."""


def ggml_type(name: CacheType) -> int:
    """llama.cpp's number for it."""
    return int(GGMLQuantizationType[name.upper()])


def block_size(name: CacheType) -> int:
    """How many numbers share a scale; above 1, the format is quantised."""
    return int(GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]][0])


def n_bytes(name: CacheType, n_elements: int) -> int:
    """Bytes of so many numbers, a multiple of the block size."""
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
    return int(n_elements * block_bytes // block)
