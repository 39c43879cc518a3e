"""A GGUF file, or several, as the graph is built from it: values by key, tensors by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from numpy.typing import NDArray

from serve_app.errors import ConfigError
from serve_app.openvino.rotary import Rotary

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
