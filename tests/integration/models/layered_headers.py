"""Headers of models whose layers differ. The weights are a hole in the file, because sizes need none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quant_shape_to_byte_shape

from tools.chat_template import CONTROL_TOKENS
from tools.gguf_file import add_tokenizer
from tools.random_models.model import SHAPES, vocabulary

_WEIGHTS = GGMLQuantizationType.Q4_0


@dataclass(frozen=True)
class Layers:
    """A dense model, with one entry for each layer."""

    architecture: str
    n_embd: int
    n_ff: int
    windowed: Sequence[bool]
    """Whether the layer looks back on `window` tokens only."""
    window: int
    heads: Sequence[int]
    heads_kv: Sequence[int]
    head_sizes: Sequence[tuple[int, int]]
    """Elements of a head's key and value."""
    n_shared: int = 0
    """Layers at the end that use another layer's keys and values."""


def write_header(path: Path, layers: Layers) -> None:
    """Write the metadata and the list of tensors, and extend the file to the size with weights."""
    n_layer, name = len(layers.windowed), layers.architecture
    tokens, merges = vocabulary(SHAPES["tiny"].n_vocab, CONTROL_TOKENS)
    writer = GGUFWriter(path, name)
    writer.add_block_count(n_layer)
    writer.add_context_length(131_072)
    writer.add_embedding_length(layers.n_embd)
    writer.add_feed_forward_length(layers.n_ff)
    writer.add_expert_feed_forward_length(layers.n_ff)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_logit_scale(1.0)
    writer.add_sliding_window(layers.window)
    writer.add_sliding_window_pattern(list(layers.windowed))
    writer.add_head_count(list(layers.heads))
    writer.add_head_count_kv(list(layers.heads_kv))
    for is_windowed, (key, value) in zip(layers.windowed, layers.head_sizes, strict=True):
        suffix = "_swa" if is_windowed else ""
        writer.kv_data[0].pop(f"{name}.attention.key_length{suffix}", None)
        writer.kv_data[0].pop(f"{name}.attention.value_length{suffix}", None)
        writer.add_uint32(f"{name}.attention.key_length{suffix}", key)
        writer.add_uint32(f"{name}.attention.value_length{suffix}", value)
    if name == "gemma4":
        writer.add_embedding_length_per_layer_input(0)
        writer.add_shared_kv_layers(layers.n_shared)
    add_tokenizer(writer, tokens, merges, CONTROL_TOKENS)
    n_bytes = 0

    def add(tensor: str, *shape: int) -> None:
        nonlocal n_bytes
        if len(shape) == 1:
            writer.add_tensor_info(tensor, shape, np.dtype(np.float32), 4 * shape[0])
            n_bytes += 4 * shape[0]
            return
        packed = quant_shape_to_byte_shape(shape, _WEIGHTS)
        size = packed[0] * packed[1]
        writer.add_tensor_info(tensor, packed, np.dtype(np.uint8), size, _WEIGHTS)
        n_bytes += size

    n_embd, n_ff = layers.n_embd, layers.n_ff
    add("token_embd.weight", len(tokens), n_embd)
    add("output.weight", len(tokens), n_embd)
    add("output_norm.weight", n_embd)
    if name == "gemma4":
        add("rope_freqs.weight", layers.head_sizes[-1][0] // 2)
    for i in range(n_layer):
        layer, (key, value) = f"blk.{i}.", layers.head_sizes[i]
        for norm in ("attn_norm", "ffn_norm"):
            add(f"{layer}{norm}.weight", n_embd)
        if name == "gemma4":
            for norm in ("post_attention_norm", "post_ffw_norm"):
                add(f"{layer}{norm}.weight", n_embd)
            for norm in ("attn_q_norm", "attn_k_norm"):
                add(f"{layer}{norm}.weight", key)
        if name == "granite_swa":
            add(layer + "attn_sinks.weight", layers.heads[i])
        add(layer + "attn_q.weight", layers.heads[i] * key, n_embd)
        add(layer + "attn_k.weight", layers.heads_kv[i] * key, n_embd)
        add(layer + "attn_v.weight", layers.heads_kv[i] * value, n_embd)
        add(layer + "attn_output.weight", n_embd, layers.heads[i] * value)
        add(layer + "ffn_gate.weight", n_ff, n_embd)
        add(layer + "ffn_up.weight", n_ff, n_embd)
        add(layer + "ffn_down.weight", n_embd, n_ff)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        n_header = file.seek(0, 2)
        file.truncate(n_header + n_bytes + 64 * 16 * n_layer)  # each tensor may be aligned
