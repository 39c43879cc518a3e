"""Tiny models of GLM 4.5's architecture that have a prediction layer of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

from tests.integration.models.embedding_models import finish
from tools.chat_template import CONTROL_TOKENS
from tools.gguf_file import add_tokenizer
from tools.random_models.model import SHAPES, vocabulary

N_CTX = 4096
_N_EMBD, _N_FF, _N_EXPERT, _N_HEAD, _HEAD_DIM, _N_LAYER = 64, 64, 4, 2, 32, 2
_N_VOCAB = SHAPES["tiny"].n_vocab

Matrix = NDArray[np.float32]


def write_random(path: Path, *, n_own_layers: int = 1, left_out: bool = False) -> None:
    """With random weights, so that its own layer is hardly ever right; `left_out` has the metadata only."""
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(0, 0.3, shape).astype(np.float32) if len(shape) > 1 else _ones(*shape)
        for name, shape in _shapes(n_own_layers).items()
        if not (left_out and name.startswith(f"blk.{_N_LAYER}."))
    }
    _write(path, tensors, n_own_layers)


def write_counting(path: Path) -> None:
    """A token is followed by the next one, which its own layer knows by the hidden state alone.

    Embeddings turn by one step from token to token. Layers add nothing; the own one turns the hidden state,
    and does not see the embedding beside it. So it is right only where it is fed the right states.
    """
    rng = np.random.default_rng(0)
    speeds = rng.uniform(0, 2 * np.pi, _N_EMBD // 2)
    angles = np.outer(np.arange(-1, _N_VOCAB), speeds)
    turned = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    cos, sin = np.diag(np.cos(speeds)), np.diag(np.sin(speeds))
    step = np.block([[cos, -sin], [sin, cos]])
    tensors = {
        name: np.zeros(shape, np.float32) if len(shape) > 1 else _ones(*shape)
        for name, shape in _shapes(1).items()
    }
    tensors["token_embd.weight"] = turned[1:]
    tensors["output.weight"] = turned[:-1]
    own = f"blk.{_N_LAYER}.nextn.eh_proj.weight"
    tensors[own] = np.concatenate([np.zeros_like(step), step], 1).astype(np.float32)
    _write(path, tensors, 1)


def _ones(n: int) -> Matrix:
    return np.ones(n, np.float32)


def _shapes(n_own_layers: int) -> dict[str, tuple[int, ...]]:
    heads, experts = _N_HEAD * _HEAD_DIM, (_N_EXPERT, _N_FF, _N_EMBD)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (_N_VOCAB, _N_EMBD),
        "output_norm.weight": (_N_EMBD,),
        "output.weight": (_N_VOCAB, _N_EMBD),
    }
    for layer in range(_N_LAYER + n_own_layers):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm": (_N_EMBD,),
            "attn_q": (heads, _N_EMBD),
            "attn_k": (heads, _N_EMBD),
            "attn_v": (heads, _N_EMBD),
            "attn_output": (_N_EMBD, heads),
            "post_attention_norm": (_N_EMBD,),
            "ffn_gate_inp": (_N_EXPERT, _N_EMBD),
            "ffn_gate_exps": experts,
            "ffn_up_exps": experts,
            "ffn_down_exps": (_N_EXPERT, _N_EMBD, _N_FF),
            "ffn_gate_shexp": (_N_FF, _N_EMBD),
            "ffn_up_shexp": (_N_FF, _N_EMBD),
            "ffn_down_shexp": (_N_EMBD, _N_FF),
        }
        if layer >= _N_LAYER:
            block |= {
                "nextn.eh_proj": (_N_EMBD, 2 * _N_EMBD),
                "nextn.enorm": (_N_EMBD,),
                "nextn.hnorm": (_N_EMBD,),
            }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
        shapes[f"blk.{layer}.exp_probs_b.bias"] = (_N_EXPERT,)
    return shapes


def _write(path: Path, tensors: dict[str, Matrix], n_own_layers: int) -> None:
    tokens, merges = vocabulary(_N_VOCAB)
    writer = GGUFWriter(path, "glm4moe")
    writer.add_block_count(_N_LAYER + n_own_layers)
    writer.add_nextn_predict_layers(n_own_layers)
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(_N_EMBD)
    writer.add_feed_forward_length(_N_FF)
    writer.add_expert_feed_forward_length(_N_FF)
    writer.add_expert_count(_N_EXPERT)
    writer.add_expert_used_count(2)
    writer.add_expert_shared_count(1)
    writer.add_leading_dense_block_count(0)
    writer.add_head_count(_N_HEAD)
    writer.add_head_count_kv(_N_HEAD)
    writer.add_key_length(_HEAD_DIM)
    writer.add_value_length(_HEAD_DIM)
    writer.add_rope_dimension_count(_HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    add_tokenizer(writer, tokens, merges, CONTROL_TOKENS)
    finish(writer, tensors)
