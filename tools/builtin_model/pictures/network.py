"""The built-in model's eyes as PyTorch trains them: a vision transformer, and what makes embeddings of it.

They are computed as llama.cpp computes a projector of the type `nemotron_v2_vl`: patches and one more
token through transformer layers, then four patches to an embedding of the language model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.builtin_model.pictures.shape import NORM_EPS, EyesShape


class Layer(nn.Module):
    """Attention of all to all, then a feed-forward network."""

    def __init__(self, shape: EyesShape) -> None:
        super().__init__()
        self.n_head = shape.n_head
        self.ln1 = nn.LayerNorm(shape.n_embd, eps=NORM_EPS)
        self.qkv = nn.Linear(shape.n_embd, 3 * shape.n_embd)
        self.out = nn.Linear(shape.n_embd, shape.n_embd)
        self.ln2 = nn.LayerNorm(shape.n_embd, eps=NORM_EPS)
        self.up = nn.Linear(shape.n_embd, shape.n_ff)
        self.down = nn.Linear(shape.n_ff, shape.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.ln1(x)).view(rows, length, 3, self.n_head, width // self.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        # Plain products: on a CPU, gradients take a quarter of the time of PyTorch's own attention.
        scores = q @ k.transpose(2, 3) * (width // self.n_head) ** -0.5
        y = scores.float().softmax(-1).to(v.dtype) @ v
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.ln2(x)), approximate="tanh"))


class Eyes(nn.Module):
    """From pixels, `[rows, 3, image_size, image_size]` between -1 and 1, to embeddings, `[rows, n_tokens,
    n_out]`."""

    def __init__(self, shape: EyesShape) -> None:
        super().__init__()
        self.shape = shape
        self.patches = nn.Conv2d(3, shape.n_embd, shape.patch_size, shape.patch_size)
        self.positions = nn.Parameter(_waves(shape.n_side, shape.n_embd))
        self.register = nn.Parameter(0.02 * torch.randn(1, shape.n_embd))
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.n_layer))
        self.norm = nn.LayerNorm(shape.n_embd, eps=NORM_EPS)
        n_merged = shape.n_embd * shape.n_merge**2
        self.merged_norm = nn.RMSNorm(n_merged, eps=NORM_EPS)
        self.hidden = nn.Linear(n_merged, shape.n_hidden, bias=False)
        self.output = nn.Linear(shape.n_hidden, shape.n_out, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.project(self.encode(pixels))

    def encode(self, pixels: Tensor) -> Tensor:
        """The patches' features, `[rows, n_side ** 2, n_embd]`."""
        return self.look(pixels)[1]

    def look(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """The patches' features behind half of the layers, and behind all."""
        x = self.patches(pixels).flatten(2).transpose(1, 2) + self.positions
        x = torch.cat([self.register.expand(len(x), 1, -1), x], dim=1)
        middle = x
        for number, layer in enumerate(self.layers, start=1):
            x = layer(x)
            if number == len(self.layers) // 2:
                middle = x
        return middle[:, 1:], self.norm(x)[:, 1:]

    def gathered(self, features: Tensor) -> Tensor:
        """The features of the patches that become one embedding, behind each other: `[rows, n_tokens,
        n_merge ** 2, n_embd]`."""
        side, merge = self.shape.n_side // self.shape.n_merge, self.shape.n_merge
        x = features.unflatten(1, (side, merge, side, merge)).transpose(2, 3)
        return x.flatten(3, 4).flatten(1, 2)

    def project(self, features: Tensor) -> Tensor:
        """The embeddings of features."""
        x = self.hidden(self.merged_norm(self.gathered(features).flatten(2)))
        return self.output(functional.relu(x).square())


def _waves(n_side: int, n_embd: int) -> Tensor:
    """Sines and cosines of rows and columns, to begin with: neighbours are alike, and each step across or
    down is the same turn."""
    places = torch.arange(n_side, dtype=torch.float32)
    lengths = torch.logspace(0, math.log10(4 * n_side), n_embd // 4)
    angles = places[:, None] * math.tau / (2 * lengths)
    along = torch.cat([angles.sin(), angles.cos()], dim=1)
    rows = along[:, None].expand(-1, n_side, -1)
    columns = along[None].expand(n_side, -1, -1)
    return 0.7 * torch.cat([rows, columns], dim=2).flatten(0, 1)
