"""A GGUF file, or several, as OpenVINO's graph is built from it, and whether it can be.

Sources of the rotary embedding, which is llama.cpp's: "RoFormer" (Su et al., 2021); "YaRN: Efficient
Context Window Extension of Large Language Models" (Peng et al., 2023), section 3.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from numpy.typing import NDArray

from serve_app.errors import ConfigError
from serve_app.openvino.weights import is_quantised, is_rounded, n_bytes


@dataclass(frozen=True, slots=True)
class Architecture:
    """The traits that tell it from others."""

    interleaved: bool = False
    """Whether neighbours turn together, as llama.cpp stores Llama's heads; otherwise halves do."""


ARCHITECTURES = {
    "llama": Architecture(interleaved=True),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
}


_BETA_FAST, _BETA_SLOW = 32.0, 1.0


@dataclass(frozen=True, slots=True)
class Rotary:
    """A model's rotary embedding."""

    head_size: int
    base: float = 10000.0
    scaling: str = "linear"
    factor: float = 1.0
    """How much longer than in training contexts may be."""
    n_ctx_train: int = 0
    attention_factor: float = 1.0

    def frequencies(self, factors: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Radians for each position, of each pair of dimensions. `factors` divide them, as Llama 3.1's."""
        pairs = np.arange(0, self.head_size, 2) / self.head_size
        radians = self.base**-pairs
        if factors is not None:
            radians = radians / factors
        if self.scaling != "none":
            kept = self._ramp() if self.scaling == "yarn" else 0.0
            radians = radians * ((1 - kept) / self.factor + kept)
        return radians.astype(np.float32)

    @property
    def attention_scale(self) -> float:
        """The factor of scores. llama.cpp has a part of it in queries and keys."""
        mscale = self.attention_factor
        if self.scaling == "yarn" and self.factor > 1:
            mscale *= 1 + 0.1 * math.log(self.factor)
        return mscale**2 / math.sqrt(self.head_size)

    def _ramp(self) -> NDArray[np.float64]:
        """1 where a pair turns often in the context of training, and is left alone; 0 where it does not."""
        low = max(0, math.floor(self._dimension(_BETA_FAST)))
        high = min(self.head_size - 1, math.ceil(self._dimension(_BETA_SLOW)))
        at = np.arange(self.head_size // 2)
        return 1 - np.clip((at - low) / max(0.001, high - low), 0, 1)

    def _dimension(self, n_turns: float) -> float:
        turns = self.n_ctx_train / (n_turns * 2 * math.pi)
        return self.head_size * math.log(turns) / (2 * math.log(self.base))


_SCALINGS = ("none", "linear", "yarn")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as it is in the file: a row of `data` for each output, of floats or of a format's bytes."""

    name: str
    data: NDArray[Any]
    kind: GGMLQuantizationType
    n_weights: int


class GgufModel:
    """Opened for reading; the tensors stay in the file until they are read. Remembers which were taken."""

    def __init__(self, files: Sequence[Path]) -> None:
        readers = [GGUFReader(path) for path in files]
        self._first = readers[0]
        self._tensors = {
            one.name: Tensor(one.name, one.data, one.tensor_type, int(one.n_elements))
            for reader in readers
            for one in reader.tensors
        }
        self._taken = set[str]()
        self.architecture = str(self._value("general.architecture"))

    def value(self, key: str, default: Any = None) -> Any:
        """The value of the architecture's key."""
        contents = self._value(f"{self.architecture}.{key}")
        return default if contents is None else contents

    def _value(self, key: str) -> Any:
        field = self._first.get_field(key)
        return None if field is None else field.contents()

    def count(self, key: str, default: int | None = None) -> int:
        """A number that all layers have in common. Raises ConfigError if there is none."""
        number = self.value(key, default)
        if not isinstance(number, int):
            raise ConfigError(f"the value of {self.architecture}.{key} is not one number")
        return number

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._tensors

    def take(self, name: str) -> Tensor:
        """The tensor of that name. Raises ConfigError if there is none."""
        if name not in self._tensors:
            raise ConfigError(f"the tensor {name} is missing")
        self._taken.add(name)
        return self._tensors[name]

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return list(self._tensors.values())

    @property
    def part_taken(self) -> float:
        """The part of all weights that was taken."""
        taken = sum(self._tensors[name].n_weights for name in self._taken)
        return taken / sum(one.n_weights for one in self.tensors)

    @property
    def left(self) -> list[str]:
        """Names of tensors that nobody took."""
        return sorted(set(self._tensors) - self._taken)

    @property
    def head_size(self) -> int:
        """Elements of one head's query, key and value. Raises ConfigError if they differ."""
        size = self.count("embedding_length") // self.count("attention.head_count")
        sizes = {
            self.count("attention.key_length", size),
            self.count("attention.value_length", size),
        }
        sizes.add(self.count("rope.dimension_count", max(sizes)))
        if len(sizes) > 1:
            raise ConfigError("the sizes of its heads differ")
        return sizes.pop()

    @property
    def rotary(self) -> Rotary:
        """How positions turn queries and keys. Raises ConfigError for a scaling that is not known."""
        scaling = self.value("rope.scaling.type", "linear")
        if scaling not in _SCALINGS:
            raise ConfigError(f"its positions are scaled as {scaling}")
        factor = self.value("rope.scaling.factor") or self.value("rope.scale_linear") or 1.0
        return Rotary(
            self.head_size,
            self.value("rope.freq_base", 10000.0),
            scaling,
            factor,
            self.value("rope.scaling.original_context_length") or self.count("context_length"),
            self.value("rope.scaling.attn_factor", 1.0),
        )

    def vector(self, name: str) -> NDArray[np.float32]:
        """A tensor of one dimension."""
        return self.take(name).data.astype(np.float32)


_TENSORS = re.compile(
    r"(token_embd|output_norm|output|rope_freqs"
    r"|blk\.\d+\.(attn_norm|attn_q|attn_k|attn_v|attn_q_norm|attn_k_norm|attn_output"
    r"|ffn_norm|ffn_gate|ffn_up|ffn_down))\.(weight|bias)"
)


def unreadable(files: Sequence[Path]) -> str | None:
    """Why the model in these files cannot be computed, as the rest of a sentence; None if it can. Blocks
    for the moment that it takes to read names."""
    try:
        model = GgufModel(files)
        if model.architecture not in ARCHITECTURES:
            return f"the architecture {model.architecture} is not known"
        _ = model.rotary
    except ConfigError as error:
        return str(error)
    for tensor in model.tensors:
        if not _TENSORS.fullmatch(tensor.name):
            return f"its tensor {tensor.name} would not be used"
        if is_quantised(tensor.kind) and not _is_known(tensor.kind):
            return f"nobody has written how to read {tensor.kind.name} weights"
    return None


def converted_bytes(files: Sequence[Path]) -> int:
    """The size of the model when it is converted, at most; its vectors are left out."""
    tensors = GgufModel(files).tensors
    return sum(n_bytes(one.kind, one.n_weights) for one in tensors if one.data.ndim > 1)


def rounded(files: Sequence[Path]) -> list[str]:
    """The formats in them that are rounded to 8 bits."""
    kinds = {one.kind for one in GgufModel(files).tensors}
    return sorted(kind.name for kind in kinds if is_rounded(kind))


def _is_known(kind: GGMLQuantizationType) -> bool:
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
