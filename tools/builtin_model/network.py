"""The built-in model as PyTorch trains it: Qwen3's architecture, with tied embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.builtin_model.export import ROPE_BASE
from tools.gguf_file import RMS_EPS, ModelShape


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        heads = shape.n_head + 2 * shape.n_head_kv
        self.qkv = nn.Linear(shape.n_embd, heads * shape.head_dim, bias=False)
        self.output = nn.Linear(shape.n_head * shape.head_dim, shape.n_embd, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=RMS_EPS)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=RMS_EPS)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape, (rows, length, _) = self.shape, x.shape
        q, k, v = (
            self.qkv(x)
            .view(rows, length, -1, shape.head_dim)
            .split([shape.n_head, shape.n_head_kv, shape.n_head_kv], dim=2)
        )
        q, k = (
            _rotate(self.q_norm(q), cos, sin, v.dtype),
            _rotate(self.k_norm(k), cos, sin, v.dtype),
        )
        group = shape.n_head // shape.n_head_kv
        y = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2).repeat_interleave(group, 1),
            v.transpose(1, 2).repeat_interleave(group, 1),
            is_causal=True,
        )
        return self.output(y.transpose(1, 2).reshape(rows, length, -1))


class Block(nn.Module):
    """One layer: attention, then a SwiGLU feed-forward network."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.n_embd, eps=RMS_EPS)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.n_embd, eps=RMS_EPS)
        self.gate_up = nn.Linear(shape.n_embd, 2 * shape.n_ff, bias=False)
        self.down = nn.Linear(shape.n_ff, shape.n_embd, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Network(nn.Module):
    """From token ids, `[rows, length]`, to the hidden state of each, `[rows, length, n_embd]`;
    `logits` takes the ones that are wanted from there."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.n_vocab, shape.n_embd)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layer))
        self.norm = nn.RMSNorm(shape.n_embd, eps=RMS_EPS)
        frequencies = ROPE_BASE ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.n_ctx_train).float(), frequencies)[:, None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                deep = name.endswith(("output.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / ((2 * shape.n_layer) ** 0.5 if deep else 1))

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        cos, sin = self.get_buffer("cos")[:length], self.get_buffer("sin")[:length]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.embedding.weight)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotary position embedding, the halves of a head being the two axes (llama.cpp's NEOX)."""
    one, other = x.chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1).to(dtype)
