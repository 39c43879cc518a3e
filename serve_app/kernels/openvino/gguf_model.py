"""A GGUF file, or several, as OpenVINO's graph is built from it, and whether it can be.

Sources of the rotary embedding, which is llama.cpp's: "RoFormer" (Su et al., 2021); "YaRN: Efficient
Context Window Extension of Large Language Models" (Peng et al., 2023), section 3.
"""

from __future__ import annotations

import math
import mmap
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, ReaderField
from numpy.typing import NDArray

from serve_app.base.errors import ConfigError
from serve_app.base.formats import Quantization
from serve_app.kernels.gguf_reader import GgufReader
from serve_app.kernels.openvino.architectures import ARCHITECTURES, Architecture
from serve_app.kernels.openvino.parts import WHOLE, ModelPart, ModelShape, StageNode, divide
from serve_app.kernels.openvino.weights import GROUP, floats, is_quantised, is_rounded, matrix_bytes


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
    n_turned: int = 0
    """The dimensions of a head that turn; 0 for all."""
    betas: tuple[float, float] = (32.0, 1.0)
    """YaRN leaves a pair alone that turns as often in training, and scales one that turns more seldom."""
    log_multiplier: float = 0.0
    """YaRN's factor of the logarithm by which it divides the magnitude."""

    def frequencies(self, factors: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Radians for each position, of each pair of dimensions; 0 for pairs that do not turn. `factors`
        divide them, as Llama 3.1's."""
        pairs = np.arange(0, self._n_turned, 2) / self._n_turned
        radians = self.base**-pairs
        if factors is not None:
            radians = radians / factors
        if self.scaling != "none":
            kept = self._ramp() if self.scaling == "yarn" else 0.0
            radians = radians * ((1 - kept) / self.factor + kept)
        return np.pad(radians, (0, self.head_size // 2 - len(radians))).astype(np.float32)

    @property
    def _n_turned(self) -> int:
        return self.n_turned or self.head_size

    @property
    def magnitude(self) -> float:
        """The factor of the dimensions that turn, in queries and in keys."""
        magnitude = self.attention_factor
        if self.scaling == "yarn" and self.factor > 1:
            log = 0.1 * math.log(self.factor)
            magnitude *= (1 + log) / (1 + log * self.log_multiplier)
        return magnitude

    def order(self, neighbours: bool) -> NDArray[np.intp]:
        """The dimensions of a head in the order in which the first half turns with the second, as
        `frequencies` has them. `neighbours` says that each dimension turns with the next in the file."""
        turned = np.arange(self._n_turned)
        first, second = turned.reshape(-1, 2).T if neighbours else np.split(turned, 2)
        others = np.split(np.arange(self._n_turned, self.head_size), 2)
        return np.concatenate([first, others[0], second, others[1]])

    def _ramp(self) -> NDArray[np.float64]:
        """1 where a pair turns often in the context of training, and is left alone; 0 where it does not."""
        low, high = (self._dimension(beta) for beta in self.betas)
        low, high = max(0, math.floor(low)), min(self._n_turned - 1, math.ceil(high))
        at = np.arange(self._n_turned // 2)
        return 1 - np.clip((at - low) / max(0.001, high - low), 0, 1)

    def _dimension(self, n_turns: float) -> float:
        turns = self.n_ctx_train / (n_turns * 2 * math.pi)
        return self._n_turned * math.log(turns) / (2 * math.log(self.base))


# The most weights of a row that have a scale in common: more are faster, and less exact.
_MOST_TOGETHER = 4 * GROUP
# Matrices of which single rows are taken.
_ROWS = ("token_embd.weight", "token_types.weight", "position_embd.weight")
_SCALINGS = ("none", "linear", "yarn", "longrope")
_LONG_ROPE = ("rope_factors_short.weight", "rope_factors_long.weight")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as it is in the file: a row of `data` for each output, of floats or of a format's bytes."""

    name: str
    data: NDArray[Any]
    kind: GGMLQuantizationType
    n_weights: int


class GgufModel:
    """Opened for reading; the tensors stay in the file until they are read. Remembers which were taken.

    Of a part of a model, it has the tensors of that part. Sizes are those with `quantization`. Raises
    ConfigError for an architecture that is not known, with the reason as the rest of a sentence."""

    def __init__(
        self, files: Sequence[Path], part: ModelPart = WHOLE, quantization: Quantization = "none"
    ) -> None:
        readers = [GgufReader(path) for path in files]
        self._first = readers[0]
        self._tensors = {
            one.name: Tensor(one.name, one.data, one.tensor_type, int(one.n_elements))
            for reader in readers
            for one in reader.tensors
        }
        self._taken = set[str]()
        self.architecture = str(self._value("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise ConfigError(f"the architecture {self.architecture} is not known")
        self.kind: Architecture = ARCHITECTURES[self.architecture]
        self.part, self.quantization = part, quantization
        self.layers = range(self.count("block_count"))
        widths = (one.n_weights // len(one.data) for one in self.tensors if self.rounds(one))
        width = math.gcd(*widths)
        self.group = max(n for n in range(GROUP, _MOST_TOGETHER + 1, GROUP) if width % n == 0)
        """Weights of a row that have a scale in common where products are rounded, as have the values that
        they are multiplied by. OpenVINO has one such number for all of a graph."""
        if part != WHOLE:
            self._keep_part()

    def _keep_part(self) -> None:
        """Have the tensors of this part only."""
        part = self.part
        self.layers = part.layers or divide(self.shape, [StageNode()] * part.n_parts)[part.index]
        blocks = {f"blk.{i}" for i in self.layers}
        elsewhere = set() if part.is_whole else {"token_embd.weight"}  # see `EmbeddingRows`
        if self.part.is_last:
            elsewhere -= {self._output}
        else:
            elsewhere |= {"output.weight", "output.bias", "output_norm.weight"}
        self._tensors = {
            name: tensor
            for name, tensor in self._tensors.items()
            if name not in elsewhere and (block_of(name) is None or block_of(name) in blocks)
        }

    @property
    def _output(self) -> str:
        """The name of the output's matrix."""
        return "output.weight" if self.has("output.weight") else "token_embd.weight"

    @property
    def shape(self) -> ModelShape:
        """The sizes by which a decoder is divided. Raises ConfigError for an encoder."""
        if self.kind.encodes:
            raise ConfigError("it is an encoder, which cannot be computed in stages")
        sizes, experts = Counter[str](), Counter[str]()
        for name, tensor in self._tensors.items():
            counter = experts if "_exps." in name else sizes
            counter[block_of(name) or name] += self._converted_bytes(tensor)
        blocks = [f"blk.{i}" for i in self.layers]
        n_head = self.count("attention.head_count")
        token_bytes = 2 * self.head_size * self.count("attention.head_count_kv", n_head) * 2
        return ModelShape(
            tuple(sizes[block] for block in blocks),
            tuple(experts[block] for block in blocks),
            self.count("expert_used_count", 0) / max(1, self.count("expert_count", 0)),
            sizes["token_embd.weight"],
            self._tied_bytes or sizes[self._output],
            (token_bytes,) * len(blocks),
        )

    @property
    def metadata(self) -> dict[str, ReaderField]:
        """The first file's values and arrays by key, without arrays of texts."""
        text = [GGUFValueType.ARRAY, GGUFValueType.STRING]
        return {key: one for key, one in self._first.fields.items() if one.types != text}

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
        """The tensors of all files."""
        return list(self._tensors.values())

    @property
    def taken_part(self) -> float:
        """The part of all weights that was taken."""
        taken = sum(self._tensors[name].n_weights for name in self._taken)
        return taken / sum(one.n_weights for one in self.tensors)

    @property
    def names_left(self) -> list[str]:
        """Names of tensors that nobody took."""
        return sorted(set(self._tensors) - self._taken)

    @property
    def head_size(self) -> int:
        """Elements of one head's query, key and value. Raises ConfigError if they differ."""
        size = self.count("embedding_length") // self.count("attention.head_count")
        sizes = {self.count(f"attention.{one}_length", size) for one in ("key", "value")}
        if len(sizes) > 1:
            raise ConfigError("the sizes of its heads differ")
        return sizes.pop()

    @property
    def rotary(self) -> Rotary:
        """How positions turn queries and keys. Raises ConfigError for a scaling that is not known."""
        scaling = self.value("rope.scaling.type", "linear")
        if scaling not in _SCALINGS:
            raise ConfigError(f"its positions are scaled as {scaling}")
        if any(self.value("rope.dimension_sections", [])[:2]):
            raise ConfigError("its positions have several dimensions")
        if self.kind.scaled and not self.value("rope.scaling.finetuned", True):
            raise ConfigError("it has no positions")
        factor = self.value("rope.scaling.factor") or self.value("rope.scale_linear") or 1.0
        return Rotary(
            self.head_size,
            self.value("rope.freq_base", 10000.0),
            scaling,
            factor,
            self.value("rope.scaling.original_context_length") or self.count("context_length"),
            self.value("rope.scaling.attn_factor", 1.0),
            self.count("rope.dimension_count", self.head_size),
            (
                self.value("rope.scaling.yarn_beta_fast", 32.0),
                self.value("rope.scaling.yarn_beta_slow", 1.0),
            ),
            self.value("rope.scaling.yarn_log_multiplier", 0.0),
        )

    @property
    def window_rotary(self) -> Rotary:
        """How positions turn queries and keys in layers with a sliding window."""
        rotary, kind = self.rotary, self.kind
        base = self.value("rope.freq_base_swa", kind.window_base or rotary.base)
        if kind.window_scaled:
            return replace(rotary, base=base)
        return replace(rotary, base=base, scaling="none", attention_factor=1.0)

    @property
    def windows(self) -> list[int]:
        """The sliding window of each layer, in tokens with a token itself; 0 for layers without one."""
        window = self.value("attention.sliding_window", 0) if self.kind.windows else 0
        pattern = self.value("attention.sliding_window_pattern", self.kind.windows)
        n_layer = self.count("block_count")
        if isinstance(pattern, int):  # the length of a period
            full = 0 if self.kind.encodes else pattern - 1
            pattern = [pattern == 0 or i % pattern != full for i in range(n_layer)]
        return [window if has_window else 0 for has_window in pattern[:n_layer]]

    @property
    def classifies_means(self) -> bool:
        """Whether it has a classifier that takes the mean of a text's tokens, not the first one."""
        default = gguf.PoolingType.MEAN if self.kind.modern_classifier else gguf.PoolingType.CLS
        pooling = self.value("classifier.pooling_type", default)
        has_classifier = any(name.startswith("cls.") for name in self._tensors)
        return has_classifier and pooling == gguf.PoolingType.MEAN

    @property
    def rotary_factors(self) -> list[NDArray[np.float32]]:
        """The divisors of frequencies: none, those for all contexts, or those for contexts up to that of
        training and those for longer ones."""
        names = [name for name in ("rope_freqs.weight", *_LONG_ROPE) if self.has(name)]
        return [self.vector(name) for name in names]

    def converted_bytes(self) -> int:
        """The size of the model when it is converted, at most; its vectors are left out."""
        return sum(map(self._converted_bytes, self.tensors)) + self._tied_bytes

    def _converted_bytes(self, tensor: Tensor) -> int:
        n_dimensions = tensor.data.ndim
        if n_dimensions == 1:
            return 0
        if self.rounds(tensor) and tensor.name not in _ROWS:
            return self._rounded_bytes(tensor)
        return matrix_bytes(
            tensor.kind, tensor.n_weights, has_wide_zeros=n_dimensions > 2
        )  # of experts

    def _rounded_bytes(self, tensor: Tensor) -> int:
        return tensor.n_weights + 4 * tensor.n_weights // self.group

    @property
    def _tied_bytes(self) -> int:
        """Bytes of an output's matrix that is rounded, beside the same weights as rows of embeddings."""
        tensor = self._tensors.get(self._output)
        if tensor is None or tensor.name not in _ROWS or self.kind.encodes:
            return 0
        return self._rounded_bytes(tensor) if self.rounds(tensor) else 0

    def rounds(self, tensor: Tensor) -> bool:
        """Whether a product with that matrix is rounded as `quantization` says. Experts and routers are
        not, and what the file has as 32-bit floats."""
        return (
            self.quantization == "w8a8"
            and tensor.data.ndim == 2
            and tensor.kind is not GGMLQuantizationType.F32
            and "ffn_gate_inp" not in tensor.name
            and tensor.n_weights // len(tensor.data) % GROUP == 0
        )

    @property
    def rounded_formats(self) -> list[str]:
        """The formats in it that are rounded to 8 bits."""
        kinds = {one.kind for one in self.tensors}
        return sorted(kind.name for kind in kinds if is_rounded(kind))

    def vector(self, name: str) -> NDArray[np.float32]:
        """A tensor of one dimension."""
        return self.take(name).data.astype(np.float32)


class EmbeddingRows:
    """The rows of a model's matrix of embeddings. The matrix stays in the file: a pass needs few rows."""

    def __init__(self, files: Sequence[Path]) -> None:
        matrix = GgufModel(files).take("token_embd.weight")
        self._data, self._kind = matrix.data, matrix.kind
        self._file: Any = matrix.data.base
        while isinstance(self._file, np.ndarray):
            self._file = self._file.base

    def of(self, tokens: NDArray[np.integer]) -> NDArray[np.float32]:
        """The rows of these tokens. Their pages leave this process's memory again, or in time it would have
        the whole matrix."""
        rows = self._data[tokens]
        self._file.madvise(mmap.MADV_DONTNEED)
        return floats(rows, self._kind).astype(np.float32)


def block_of(name: str) -> str | None:
    """The name of the block that a tensor is in; None for those around the blocks."""
    match = re.match(r"blk\.\d+", name)
    return None if match is None else match[0]


def readable(
    files: Sequence[Path], part: ModelPart = WHOLE, quantization: Quantization = "none"
) -> GgufModel:
    """The model in these files, or a part of it. Raises ConfigError as `GgufModel`, also if it cannot be
    computed. Blocks for as long as it takes to read names: for a second where there are 100,000 tokens."""
    model = GgufModel(files, part, quantization)
    _ = model.rotary
    for tensor in model.tensors:
        if not model.kind.reads(tensor.name):
            raise ConfigError(f"its tensor {tensor.name} would not be used")
        if is_quantised(tensor.kind) and not _is_known(tensor.kind):
            raise ConfigError(f"nobody has written how to read {tensor.kind.name} weights")
    return model


def _is_known(kind: GGMLQuantizationType) -> bool:
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
