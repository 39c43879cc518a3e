"""The built-in model with fixed weights, from embeddings to hidden states, for training what feeds it.

It computes what `network.Network` does, its products in bfloat16.
"""

from __future__ import annotations

import os

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor
from torch.nn import functional

from serve_app.store.builtin_model import BUILTIN_MODEL
from tools.builtin_model.export import ROPE_BASE
from tools.gguf_file import RMS_EPS

N_HEAD, N_HEAD_KV, HEAD_DIM = 4, 2, 64
_COMPUTED = torch.bfloat16


class Language:
    """The language model. Its weights are constants: gradients flow through it to the embeddings."""

    def __init__(self, path: str | os.PathLike[str] = BUILTIN_MODEL) -> None:
        reader = GGUFReader(path)
        weights = {
            one.name: torch.from_numpy(dequantize(one.data, one.tensor_type)).clone()
            for one in reader.tensors
        }
        self.embedding = weights["token_embd.weight"]
        """`[n_vocab, n_embd]`"""
        self._unembedding = self.embedding.to(_COMPUTED)
        self._norm = weights["output_norm.weight"]
        n_layer = sum(name.endswith(".ffn_norm.weight") for name in weights)
        self._layers = [_layer(weights, f"blk.{index}") for index in range(n_layer)]
        frequencies = ROPE_BASE ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self._frequencies = frequencies

    def hidden(self, x: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """The last hidden states, `[rows, length, n_embd]`, of embeddings. `visible[row, one, other]` says
        whether the embedding `one` sees the `other`."""
        angles = positions[:, None, :, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        bias = torch.zeros(visible.shape, dtype=_COMPUTED).masked_fill(~visible, -1e9)[:, None]
        for layer in self._layers:
            x = _computed(layer, x, cos, sin, bias)
        return _normed(x) * self._norm

    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden.to(_COMPUTED), self._unembedding).float()


Layer = dict[str, Tensor]


def _layer(weights: dict[str, Tensor], name: str) -> Layer:
    """One layer's weights; the norms that stand before products are part of these."""
    qkv = torch.cat([weights[f"{name}.attn_{one}.weight"] for one in "qkv"])
    gate_up = torch.cat([weights[f"{name}.ffn_{one}.weight"] for one in ("gate", "up")])
    return {
        "qkv": (qkv * weights[f"{name}.attn_norm.weight"]).to(_COMPUTED),
        "output": weights[f"{name}.attn_output.weight"].to(_COMPUTED),
        "gate_up": (gate_up * weights[f"{name}.ffn_norm.weight"]).to(_COMPUTED),
        "down": weights[f"{name}.ffn_down.weight"].to(_COMPUTED),
        "q_norm": weights[f"{name}.attn_q_norm.weight"],
        "k_norm": weights[f"{name}.attn_k_norm.weight"],
    }


def _computed(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor) -> Tensor:
    rows, length, _ = x.shape
    y = functional.linear(_normed(x).to(_COMPUTED), layer["qkv"]).view(rows, length, -1, HEAD_DIM)
    q, k, v = y.transpose(1, 2).split([N_HEAD, N_HEAD_KV, N_HEAD_KV], dim=1)
    q = _rotated(_normed(q.float()) * layer["q_norm"], cos, sin)
    k = _rotated(_normed(k.float()) * layer["k_norm"], cos, sin)
    group = N_HEAD // N_HEAD_KV
    # Plain products: on a CPU, PyTorch's own attention takes twice their time with a mask.
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * HEAD_DIM**-0.5 + bias
    y = scores.float().softmax(-1).to(_COMPUTED) @ v.repeat_interleave(group, 1)
    x = x + functional.linear(y.transpose(1, 2).reshape(rows, length, -1), layer["output"])
    gate, up = functional.linear(_normed(x).to(_COMPUTED), layer["gate_up"]).chunk(2, dim=-1)
    return x + functional.linear(functional.silu(gate) * up, layer["down"])


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + RMS_EPS)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1).to(_COMPUTED)
