"""Tiny models with random weights whose layers do not keep all of their past."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

from tests.integration.models.embedding_models import finish
from tools.gguf_file import Architecture, ModelShape, add_tokenizer
from tools.random_models.model import SHAPES, vocabulary, write_random_gguf

WINDOW = 128
N_CTX = 8192
_N_EMBD, _N_FF, _N_HEAD, _N_HEAD_KV, _HEAD_DIM = 64, 128, 2, 1, 32


class _Tensors(dict[str, NDArray[np.float32]]):
    """Random ones by name."""

    def __init__(self) -> None:
        super().__init__()
        self._rng = np.random.default_rng(0)

    def draw(self, name: str, *shape: int, std: float = 0.2, mean: float = 0.0) -> None:
        """Entries of that mean and deviation."""
        self[name] = self._rng.normal(mean, std, shape).astype(np.float32)

    def ones(self, name: str, n: int) -> None:
        """A norm."""
        self[name] = np.ones(n, np.float32)


def _begin(path: Path, architecture: str, n_layer: int) -> tuple[GGUFWriter, _Tensors]:
    tokens, merges = vocabulary(SHAPES["tiny"].n_vocab)
    writer, tensors = GGUFWriter(path, architecture), _Tensors()
    writer.add_block_count(n_layer)
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(_N_EMBD)
    writer.add_layer_norm_rms_eps(1e-5)
    add_tokenizer(writer, tokens, merges)
    tensors.draw("token_embd.weight", len(tokens), _N_EMBD)
    return writer, tensors


def write_mamba(path: Path) -> None:
    """Recurrent layers only."""
    n_state, n_conv, n_rank, n_inner, n_layer = 16, 4, 4, 2 * _N_EMBD, 2
    writer, tensors = _begin(path, "mamba", n_layer)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(n_conv)
    writer.add_ssm_inner_size(n_inner)
    writer.add_ssm_state_size(n_state)
    writer.add_ssm_time_step_rank(n_rank)
    tensors.ones("output_norm.weight", _N_EMBD)
    for layer in (f"blk.{i}." for i in range(n_layer)):
        tensors.ones(layer + "attn_norm.weight", _N_EMBD)
        tensors.draw(layer + "ssm_in.weight", 2 * n_inner, _N_EMBD)
        tensors.draw(layer + "ssm_conv1d.weight", n_inner, n_conv)
        tensors.draw(layer + "ssm_conv1d.bias", n_inner)
        tensors.draw(layer + "ssm_x.weight", n_rank + 2 * n_state, n_inner)
        tensors.draw(layer + "ssm_dt.weight", n_inner, n_rank)
        tensors.draw(layer + "ssm_dt.bias", n_inner)
        tensors.draw(layer + "ssm_a", n_inner, n_state, mean=-1.0)
        tensors.draw(layer + "ssm_d", n_inner)
        tensors.draw(layer + "ssm_out.weight", _N_EMBD, n_inner)
    finish(writer, tensors)


def _shape(architecture: Architecture, n_layer: int, **more: Any) -> ModelShape:
    sizes = (_N_EMBD, _N_FF, _N_HEAD, _N_HEAD_KV, _HEAD_DIM, SHAPES["tiny"].n_vocab, N_CTX)
    return ModelShape(architecture, n_layer, *sizes, architecture, **more)


def _attention(writer: GGUFWriter, heads_kv: int | list[int]) -> None:
    writer.add_feed_forward_length(_N_FF)
    writer.add_head_count(_N_HEAD)
    writer.add_head_count_kv(heads_kv)
    writer.add_rope_freq_base(1e4)


def _draw_feed_forward(tensors: _Tensors, layer: str) -> None:
    tensors.ones(layer + "ffn_norm.weight", _N_EMBD)
    tensors.draw(layer + "ffn_gate.weight", _N_FF, _N_EMBD)
    tensors.draw(layer + "ffn_up.weight", _N_FF, _N_EMBD)
    tensors.draw(layer + "ffn_down.weight", _N_EMBD, _N_FF)


def _draw_attention(tensors: _Tensors, layer: str, *, gates: bool = False) -> None:
    n_queries = _N_HEAD * _HEAD_DIM * (2 if gates else 1)
    tensors.draw(layer + "attn_q.weight", n_queries, _N_EMBD, std=0.3)
    tensors.draw(layer + "attn_k.weight", _N_HEAD_KV * _HEAD_DIM, _N_EMBD, std=0.3)
    tensors.draw(layer + "attn_v.weight", _N_HEAD_KV * _HEAD_DIM, _N_EMBD)
    tensors.draw(layer + "attn_output.weight", _N_EMBD, _N_HEAD * _HEAD_DIM)
    tensors.ones(layer + "attn_q_norm.weight", _HEAD_DIM)
    tensors.ones(layer + "attn_k_norm.weight", _HEAD_DIM)


def write_lfm2(path: Path) -> None:
    """Hybrid: of four layers, two with attention, and two recurrent."""
    write_random_gguf(path, _shape("lfm2", 4, attending=(1, 3)), "f32")


def write_qwen35(path: Path) -> None:
    """Hybrid: of four layers, the last with attention, and three with a gated delta rule."""
    n_layer, n_conv, n_state, n_key_heads, n_value_heads = 4, 4, 16, 2, 4
    n_inner, n_mixed = n_state * n_value_heads, n_state * (2 * n_key_heads + n_value_heads)
    writer, tensors = _begin(path, "qwen35", n_layer)
    _attention(writer, _N_HEAD_KV)
    writer.add_key_length(_HEAD_DIM)
    writer.add_value_length(_HEAD_DIM)
    writer.add_rope_dimension_sections([_HEAD_DIM // 2 - 10, 5, 5, 0])
    writer.add_ssm_conv_kernel(n_conv)
    writer.add_ssm_inner_size(n_inner)
    writer.add_ssm_state_size(n_state)
    writer.add_ssm_time_step_rank(n_value_heads)
    writer.add_ssm_group_count(n_key_heads)
    writer.add_full_attention_interval(n_layer)
    tensors.ones("output_norm.weight", _N_EMBD)
    for i in range(n_layer):
        layer = f"blk.{i}."
        tensors.ones(layer + "attn_norm.weight", _N_EMBD)
        tensors.ones(layer + "post_attention_norm.weight", _N_EMBD)
        if i + 1 == n_layer:
            _draw_attention(tensors, layer, gates=True)
        else:
            tensors.draw(layer + "attn_qkv.weight", n_mixed, _N_EMBD)
            tensors.draw(layer + "attn_gate.weight", n_inner, _N_EMBD)
            tensors.draw(layer + "ssm_conv1d.weight", n_mixed, n_conv)
            tensors.draw(layer + "ssm_dt.bias", n_value_heads)
            tensors.draw(layer + "ssm_a", n_value_heads, std=0.02, mean=-0.1)
            tensors.draw(layer + "ssm_beta.weight", n_value_heads, _N_EMBD)
            tensors.draw(layer + "ssm_alpha.weight", n_value_heads, _N_EMBD)
            tensors.ones(layer + "ssm_norm.weight", n_state)
            tensors.draw(layer + "ssm_out.weight", _N_EMBD, n_inner)
        _draw_feed_forward(tensors, layer)
        del tensors[layer + "ffn_norm.weight"]
    finish(writer, tensors)


def write_nemotron_h(path: Path) -> None:
    """Hybrid: two recurrent layers of Mamba 2's kind, one with attention, and a feed-forward one."""
    kinds, n_conv, n_state, n_ssm_head, n_group = "MAMF", 4, 16, 4, 2
    n_inner = 2 * _N_EMBD
    n_mixed = n_inner + 2 * n_group * n_state
    writer, tensors = _begin(path, "nemotron_h", len(kinds))
    writer.add_layer_norm_eps(1e-5)
    writer.add_feed_forward_length([_N_FF if kind == "F" else 0 for kind in kinds])
    writer.add_head_count(_N_HEAD)
    writer.add_head_count_kv([_N_HEAD_KV if kind == "A" else 0 for kind in kinds])
    writer.add_key_length(_HEAD_DIM)
    writer.add_value_length(_HEAD_DIM)
    writer.add_ssm_conv_kernel(n_conv)
    writer.add_ssm_inner_size(n_inner)
    writer.add_ssm_state_size(n_state)
    writer.add_ssm_time_step_rank(n_ssm_head)
    writer.add_ssm_group_count(n_group)
    tensors.ones("output_norm.weight", _N_EMBD)
    for i, kind in enumerate(kinds):
        layer = f"blk.{i}."
        tensors.ones(layer + "attn_norm.weight", _N_EMBD)
        if kind == "M":
            tensors.draw(layer + "ssm_in.weight", n_inner + n_mixed + n_ssm_head, _N_EMBD)
            tensors.draw(layer + "ssm_conv1d.weight", n_mixed, n_conv)
            tensors.draw(layer + "ssm_conv1d.bias", n_mixed)
            tensors.draw(layer + "ssm_dt.bias", n_ssm_head)
            tensors.draw(layer + "ssm_a", n_ssm_head, 1, std=0.02, mean=-0.1)
            tensors.draw(layer + "ssm_d", n_ssm_head, 1)
            tensors[layer + "ssm_norm.weight"] = np.ones((n_group, n_inner // n_group), np.float32)
            tensors.draw(layer + "ssm_out.weight", _N_EMBD, n_inner)
        elif kind == "A":
            _draw_attention(tensors, layer)
            del tensors[layer + "attn_q_norm.weight"], tensors[layer + "attn_k_norm.weight"]
        else:
            tensors.draw(layer + "ffn_up.weight", _N_FF, _N_EMBD)
            tensors.draw(layer + "ffn_down.weight", _N_EMBD, _N_FF)
    finish(writer, tensors)


def write_gemma3(path: Path, more_control: Sequence[str] = ()) -> None:
    """Of six layers, five with a window."""
    shape = _shape("gemma3", 6, window=WINDOW)
    write_random_gguf(path, shape, "f32", more_control=more_control)


FORGETFUL: dict[str, Callable[[Path], None]] = {
    "mamba": write_mamba,
    "lfm2": write_lfm2,
    "qwen35": write_qwen35,
    "nemotron_h": write_nemotron_h,
    "gemma3": write_gemma3,
}
"""Writes a model of each kind."""


def write_openelm(path: Path, heads_kv: Sequence[int]) -> None:
    """As many layers as there are numbers of key heads: each layer has its own."""
    writer, tensors = _begin(path, "openelm", len(heads_kv))
    writer.add_feed_forward_length([_N_FF] * len(heads_kv))
    writer.add_head_count([2 * n for n in heads_kv])
    writer.add_head_count_kv(list(heads_kv))
    writer.add_rope_freq_base(1e4)
    writer.add_key_length(_HEAD_DIM)
    writer.add_value_length(_HEAD_DIM)
    tensors.ones("output_norm.weight", _N_EMBD)
    for i, n_kv in enumerate(heads_kv):
        layer = f"blk.{i}."
        tensors.ones(layer + "attn_norm.weight", _N_EMBD)
        tensors.draw(layer + "attn_qkv.weight", 4 * n_kv * _HEAD_DIM, _N_EMBD)
        tensors.draw(layer + "attn_output.weight", _N_EMBD, 2 * n_kv * _HEAD_DIM)
        tensors.ones(layer + "attn_q_norm.weight", _HEAD_DIM)
        tensors.ones(layer + "attn_k_norm.weight", _HEAD_DIM)
        _draw_feed_forward(tensors, layer)
    finish(writer, tensors)
