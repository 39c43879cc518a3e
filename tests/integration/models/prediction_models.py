"""Tiny models with prediction layers of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tools.random_models.architectures import N_VOCAB, Weights, drawn, write_architecture

_N_EMBD, _N_LAYER = 64, 2
_SIZES: dict[str, Any] = {
    "block_count": _N_LAYER + 1,
    "nextn_predict_layers": 1,
    "context_length": 4096,
    "embedding_length": _N_EMBD,
    "feed_forward_length": 128,
    "attention.head_count": 2,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_shared_count": 1,
    "expert_feed_forward_length": 64,
    "expert_shared_feed_forward_length": 64,
    "expert_gating_func": 2,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.0,
    "leading_dense_block_count": 0,
}
_WINDOW: dict[str, Any] = {
    "attention.sliding_window": 128,
    "attention.sliding_window_pattern": [True, False, True],
}
_LATENT: dict[str, Any] = {
    "attention.head_count_kv": 1,
    "attention.key_length": 48,
    "attention.value_length": 32,
    "attention.key_length_mla": 32,
    "attention.value_length_mla": 16,
    "attention.q_lora_rank": 32,
    "attention.kv_lora_rank": 32,
    "rope.dimension_count": 16,
}
_STATES: dict[str, Any] = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 64,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "bailingmoe3": _SIZES
    | _LATENT
    | {
        "attention.head_count_kv": [0, 1, 1],
        "kda.gate_lower_bound": -5.0,
        "kda.head_dim": 32,
        "kda.safe_gate": True,
        "rope.dimension_sections": [2, 3, 3, 0],
        "ssm.conv_kernel": 4,
    },
    "cohere2moe": _SIZES | _WINDOW | {"logit_scale": 1.0},
    "deepseek2": _SIZES | _LATENT,
    "deepseek4": _SIZES
    | {
        "block_count": 5,
        "attention.compress_ratios": [0, 0, 4, 128, 0],
        "attention.compress_rope_freq_base": 1.6e5,
        "attention.head_count": 8,
        "attention.head_count_kv": 1,
        "attention.indexer.head_count": 64,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 512,
        "attention.key_length": 64,
        "attention.output_group_count": 8,
        "attention.output_lora_rank": 32,
        "attention.q_lora_rank": 32,
        "attention.sliding_window": 128,
        "attention.value_length": 64,
        "expert_gating_func": 4,
        "hash_layer_count": 0,
        "hyper_connection.count": 4,
        "hyper_connection.epsilon": 1e-6,
        "hyper_connection.sinkhorn_iterations": 2,
        "rope.dimension_count": 32,
        "swiglu_clamp_exp": 10.0,
    },
    "glm4moe": _SIZES,
    "hy_v3": _SIZES,
    "mimo2": _SIZES | _WINDOW,
    "nemotron_h_moe": _SIZES
    | _STATES
    | {
        "block_count": 4,
        "attention.head_count_kv": [0, 2, 0, 2],
        "feed_forward_length": [0, 0, 64, 64],
    },
    "qwen35": _SIZES
    | _STATES
    | {"block_count": 5, "full_attention_interval": 4, "rope.dimension_sections": [6, 5, 5, 0]},
    "qwen3next": _SIZES | _STATES | {"block_count": 5, "full_attention_interval": 4},
    "step35": _SIZES | _WINDOW,
}
"""Metadata of architectures whose prediction layers llama.cpp computes."""


def write_random(
    path: Path, kind: str = "glm4moe", *, n_own_layers: int = 1, left_out: bool = False
) -> None:
    """With random weights, so that its own layer is hardly ever right; `left_out` has the metadata only."""
    metadata = KINDS[kind] | {"nextn_predict_layers": n_own_layers}
    metadata["block_count"] += n_own_layers - 1
    own = f"blk.{metadata['block_count'] - 1}."

    def change(weights: Weights) -> None:
        if left_out:
            for name in [name for name in weights if name.startswith(own)]:
                del weights[name]
        if kind == "mimo2":
            _fuse(weights)
        if kind == "deepseek4":  # llama.cpp only looks for them in a file
            weights |= {
                f"{own}nextn.{name}.weight": drawn(np.random.default_rng(1), name, shape)
                for name, shape in (
                    ("eh_proj", (_N_EMBD, 2 * _N_EMBD)),
                    ("enorm", (_N_EMBD,)),
                    ("hnorm", (_N_EMBD,)),
                )
            }

    # Of the two likeliest tokens of mimo2 with seed 0, either may be the likelier, by rounding.
    write_architecture(path, kind, metadata, change, seed=int(kind == "mimo2"))


def _fuse(weights: Weights) -> None:
    """Join the matrices of queries, keys and values."""
    for name in [name for name in weights if name.endswith("attn_q.weight")]:
        block = name.removesuffix("q.weight")
        joined = np.concatenate([weights[f"{block}{part}.weight"] for part in "qkv"])
        parts = tuple(f"{block}{part}." for part in "qkv")
        for other in [other for other in weights if other.startswith(parts)]:
            del weights[other]
        weights[f"{block}qkv.weight"] = joined


def write_counting(path: Path) -> None:
    """A token is followed by the next one, which its own layer knows by the hidden state alone.

    Embeddings turn by one step from token to token. Layers add nothing; the own one turns the hidden state,
    and does not see the embedding beside it. So it is right only where it is fed the right states.
    """
    write_architecture(path, "glm4moe", KINDS["glm4moe"], _count)


def write_head(path: Path, kind: str) -> None:
    """An EAGLE-3 head (`eagle3`) or a DFlash draft (`dflash`), which no engine takes."""
    sizes = {name: _SIZES[name] for name in _SIZES if not name.startswith(("expert", "nextn"))}
    layers = {"target_layers": [0, 1, 2], "target_hidden_size": _N_EMBD, "block_size": 8}

    def change(weights: Weights) -> None:
        for name in [name for name in weights if name == "output.weight" or "rope_freqs" in name]:
            del weights[name]

    write_architecture(path, kind, sizes | layers | {"block_count": 1}, change)


def _count(weights: Weights) -> None:
    turned, step = _turns()
    for values in weights.values():
        values *= values.ndim == 1 and (values == 1).all()
    weights["token_embd.weight"] = turned[1:]
    weights["output.weight"] = turned[:-1]
    own = f"blk.{_N_LAYER}.nextn."
    weights[f"{own}eh_proj.weight"] = np.concatenate([0 * step, step], 1).astype(np.float32)
    del weights[f"{own}shared_head_head.weight"]  # it shares the model's


def _turns() -> tuple[Any, Any]:
    """Points that turn by a step from token to token, from that before the first on, and the step."""
    speeds = np.random.default_rng(0).uniform(0, 2 * np.pi, _N_EMBD // 2)
    angles = np.outer(np.arange(-1, N_VOCAB), speeds)
    turned = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    cos, sin = np.diag(np.cos(speeds)), np.diag(np.sin(speeds))
    return turned, np.block([[cos, -sin], [sin, cos]])
