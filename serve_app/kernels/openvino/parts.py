"""How a model is divided by layers into parts, one for each stage, and what a part reads and holds. Pure.

A pass reads the weights of each layer once. Of experts, a pass of `r` rows reads those that some row is
sent to. If each row chooses `k` of `E` experts at random, that is a part of `1 - (1 - k/E)^r` of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise

from serve_app.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A part of a model, which is divided by layers. A stage computes a part."""

    index: int = 0
    n_parts: int = 1
    layers: range | None = None
    """The layers of the part. None: all nodes count as equal, and `divide` says it."""

    @property
    def is_whole(self) -> bool:
        """Whether the part is the model."""
        return self.n_parts == 1

    @property
    def reads_embeddings(self) -> bool:
        """Whether the part begins with rows of the embeddings' matrix, which is not in its graph."""
        return self.index == 0 and not self.is_whole

    @property
    def is_last(self) -> bool:
        """Whether the part makes logits of hidden states."""
        return self.index == self.n_parts - 1


WHOLE = ModelPart()


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that decide how it is divided, in bytes as they are when it is converted."""

    layer_bytes: tuple[int, ...]
    """Bytes of each layer's weights but its experts."""
    expert_bytes: tuple[int, ...]
    """Bytes of all experts of each layer."""
    chosen_experts: float
    """The part of a layer's experts that a row is sent to."""
    embedding_bytes: int
    output_bytes: int
    """Bytes of the output's matrix, which may be that of the embeddings."""
    token_bytes: tuple[int, ...]
    """Bytes of a token's keys and values in each layer, as 16-bit numbers."""

    def read_bytes(self, n_rows: float = 1, sampled: float = 1.0) -> list[float]:
        """Bytes of each layer's weights that a pass of so many rows reads. The last layer has the output,
        too, which counts for the part `sampled` of the time: in which logits of all rows are wanted."""
        part = 1 - (1 - self.chosen_experts) ** n_rows
        layers = zip(self.layer_bytes, self.expert_bytes, strict=True)
        read = [dense + part * experts for dense, experts in layers]
        read[-1] += sampled * self.output_bytes
        return read

    def weight_bytes(self, layers: range) -> int:
        """Bytes of the weights of a part with these layers. Of several parts, none has the embeddings."""
        n_bytes = self.embedding_bytes * (len(layers) == len(self.layer_bytes))
        n_bytes += self.output_bytes * (layers.stop == len(self.layer_bytes))
        for sizes in (self.layer_bytes, self.expert_bytes):
            n_bytes += sum(sizes[layers.start : layers.stop])
        return n_bytes

    def memory_bytes(self, layers: range, n_tokens: int) -> int:
        """Bytes of a part with these layers whose cache has room for so many tokens."""
        cache = sum(self.token_bytes[layers.start : layers.stop]) * n_tokens
        return self.weight_bytes(layers) + cache


@dataclass(frozen=True, slots=True)
class StageNode:
    """A node as a stage's place."""

    bytes_per_s: float = 1.0
    """The weights that passes read in a second; only ratios count."""
    memory_bytes: float = math.inf
    """The memory for weights and cache."""


def divide(
    shape: ModelShape,
    nodes: Sequence[StageNode],
    *,
    read: Sequence[float] | None = None,
    n_tokens: int = 0,
) -> list[range]:
    """The layers of each stage, so that the slowest one takes as little time as is possible. A pipeline is
    as fast as that stage. `read` has the bytes that a pass reads of each layer, by default a pass of
    one row. Caches have room for `n_tokens`.

    Each stage has a layer at least. Of divisions that are as fast, one whose stages differ least, and whose
    first stages have few layers: the first looks up embeddings. Raises ConfigError if there are too few
    layers, or too little memory. Source: the chains-on-chains partitioning problem (Pinar and Aykanat,
    "Fast optimal load balancing algorithms for 1D partitioning", 2004), by dynamic programming.
    """
    n_layers = len(shape.layer_bytes)
    if n_layers < len(nodes):
        raise ConfigError(f"it has {n_layers} layers, which are too few for {len(nodes)} stages")
    before = [0.0, *accumulate(read or shape.read_bytes())]
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    """The slowest stage's seconds, the sum of all squares and the cuts, by the layers that are divided."""
    for i, node in enumerate(nodes):
        more: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(i + 1, n_layers - len(nodes) + i + 2):
            for begin, (slowest, squares, cuts) in best.items():
                if (
                    begin >= end
                    or shape.memory_bytes(range(begin, end), n_tokens) > node.memory_bytes
                ):
                    continue
                seconds = (before[end] - before[begin]) / node.bytes_per_s
                division = max(slowest, seconds), squares + seconds**2, (*cuts, end)
                if end not in more or division[:2] < more[end][:2]:
                    more[end] = division
        best = more
    if n_layers not in best:
        least = shape.memory_bytes(range(n_layers), n_tokens)
        raise ConfigError(
            f"its layers with their caches take {least / 2**30:.1f} GiB, for which the memory of "
            f"{len(nodes)} stages has no room"
        )
    return [range(*cut) for cut in pairwise(best[n_layers][2])]


def fewest_stages(shape: ModelShape, node: StageNode, n_tokens: int) -> int:
    """The fewest stages on such nodes that hold a model. Each of them has an engine, whose cache has room
    for `n_tokens`. Raises ConfigError if as many as there are layers do not."""
    n_layers = len(shape.layer_bytes)
    for n in range(1, n_layers):
        with suppress(ConfigError):
            divide(shape, [node] * n, n_tokens=n * n_tokens)
            return n
    divide(shape, [node] * n_layers, n_tokens=n_layers * n_tokens)
    return n_layers
