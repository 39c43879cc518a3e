"""Tiny models with random weights whose layers do not keep all of their past."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

from tests.integration.models.embedding_models import finish
from tools.chat_template import CONTROL_TOKENS
from tools.gguf_file import add_tokenizer
from tools.random_models.model import SHAPES, vocabulary

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


def _begin(
    path: Path, architecture: str, n_layer: int, more_control: Sequence[str] = ()
) -> tuple[GGUFWriter, _Tensors]:
    control = [*CONTROL_TOKENS, *more_control]
    tokens, merges = vocabulary(SHAPES["tiny"].n_vocab, control)
    writer, tensors = GGUFWriter(path, architecture), _Tensors()
    writer.add_block_count(n_layer)
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(_N_EMBD)
    writer.add_layer_norm_rms_eps(1e-5)
    add_tokenizer(writer, tokens, merges, control)
    tensors.draw(
        "token_embd.weight", len(tokens), _N_EMBD, std=0.02 if architecture == "gemma3" else 0.2
    )
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


def _draw_attention(tensors: _Tensors, layer: str) -> None:
    tensors.draw(layer + "attn_q.weight", _N_HEAD * _HEAD_DIM, _N_EMBD, std=0.3)
    tensors.draw(layer + "attn_k.weight", _N_HEAD_KV * _HEAD_DIM, _N_EMBD, std=0.3)
    tensors.draw(layer + "attn_v.weight", _N_HEAD_KV * _HEAD_DIM, _N_EMBD)
    tensors.draw(layer + "attn_output.weight", _N_EMBD, _N_HEAD * _HEAD_DIM)
    tensors.ones(layer + "attn_q_norm.weight", _HEAD_DIM)
    tensors.ones(layer + "attn_k_norm.weight", _HEAD_DIM)


def write_lfm2(path: Path) -> None:
    """Hybrid: of four layers, two with attention, and two recurrent."""
    recurrent, n_conv = [True, False, True, False], 3
    writer, tensors = _begin(path, "lfm2", len(recurrent))
    writer.add_uint32("lfm2.shortconv.l_cache", n_conv)
    _attention(writer, [0 if one else _N_HEAD_KV for one in recurrent])
    tensors.ones("token_embd_norm.weight", _N_EMBD)
    for i, is_recurrent in enumerate(recurrent):
        layer = f"blk.{i}."
        tensors.ones(layer + "attn_norm.weight", _N_EMBD)
        if is_recurrent:
            tensors.draw(layer + "shortconv.conv.weight", _N_EMBD, n_conv)
            tensors.draw(layer + "shortconv.in_proj.weight", 3 * _N_EMBD, _N_EMBD)
            tensors.draw(layer + "shortconv.out_proj.weight", _N_EMBD, _N_EMBD)
        else:
            _draw_attention(tensors, layer)
        _draw_feed_forward(tensors, layer)
    finish(writer, tensors)


def write_gemma3(path: Path, more_control: Sequence[str] = ()) -> None:
    """Of six layers, five with a window."""
    n_layer = 6
    writer, tensors = _begin(path, "gemma3", n_layer, more_control)
    _attention(writer, _N_HEAD_KV)
    writer.add_key_length(_HEAD_DIM)
    writer.add_value_length(_HEAD_DIM)
    writer.add_sliding_window(WINDOW)
    tensors.ones("output_norm.weight", _N_EMBD)
    for layer in (f"blk.{i}." for i in range(n_layer)):
        tensors.ones(layer + "attn_norm.weight", _N_EMBD)
        tensors.ones(layer + "post_attention_norm.weight", _N_EMBD)
        tensors.ones(layer + "post_ffw_norm.weight", _N_EMBD)
        _draw_attention(tensors, layer)
        _draw_feed_forward(tensors, layer)
    finish(writer, tensors)


FORGETFUL: dict[str, Callable[[Path], None]] = {
    "mamba": write_mamba,
    "lfm2": write_lfm2,
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
