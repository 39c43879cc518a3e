"""Writes the trained model as GGUF, its matrices as Q8_0."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import quantize
from numpy.typing import NDArray

from tools.gguf_file import ARCHITECTURE, ModelShape, add_hyperparameters, add_tokenizer

Weights = Mapping[str, NDArray[np.float32]]

ROPE_BASE = 10_000.0
_DESCRIPTION = (
    "A small chat model that Corral trained from scratch on text of its own making, to be tried and "
    "tested with. See MODEL_CARD.md."
)


def write_gguf(
    path: str | os.PathLike[str],
    shape: ModelShape,
    weights: Weights,
    tokens: Sequence[str],
    merges: Sequence[tuple[str, str]],
) -> None:
    """Write a model with the weights of a `network.Network`, by its names for them."""
    writer = GGUFWriter(Path(path), ARCHITECTURE)
    try:
        add_hyperparameters(writer, shape, LlamaFileType.MOSTLY_Q8_0, rope_base=ROPE_BASE)
        writer.add_description(_DESCRIPTION)
        writer.add_license("Apache-2.0")
        add_tokenizer(writer, tokens, merges)
        for name, values in _tensors(shape, weights):
            if values.ndim == 1:
                writer.add_tensor(name, values)
            else:
                kind = GGMLQuantizationType.Q8_0
                writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _tensors(shape: ModelShape, weights: Weights) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """llama.cpp's name for each tensor, and the tensor; the joint matrices taken apart."""
    yield "token_embd.weight", weights["embedding.weight"]
    yield "output_norm.weight", weights["norm.weight"]
    queries, keys = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    for layer in range(shape.n_layer):
        ours, theirs = f"blocks.{layer}", f"blk.{layer}"
        q, k, v = np.split(weights[f"{ours}.attention.qkv.weight"], [queries, queries + keys])
        gate, up = np.split(weights[f"{ours}.gate_up.weight"], 2)
        yield f"{theirs}.attn_norm.weight", weights[f"{ours}.attention_norm.weight"]
        yield f"{theirs}.attn_q.weight", q
        yield f"{theirs}.attn_k.weight", k
        yield f"{theirs}.attn_v.weight", v
        yield f"{theirs}.attn_q_norm.weight", weights[f"{ours}.attention.q_norm.weight"]
        yield f"{theirs}.attn_k_norm.weight", weights[f"{ours}.attention.k_norm.weight"]
        yield f"{theirs}.attn_output.weight", weights[f"{ours}.attention.output.weight"]
        yield f"{theirs}.ffn_norm.weight", weights[f"{ours}.ffn_norm.weight"]
        yield f"{theirs}.ffn_gate.weight", gate
        yield f"{theirs}.ffn_up.weight", up
        yield f"{theirs}.ffn_down.weight", weights[f"{ours}.down.weight"]
