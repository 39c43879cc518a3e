"""The sizes of a model by its config.json, by GGUF's names, and how its positions turn.

Source: llama.cpp's conversion of Hugging Face's models, and transformers' `modeling_rope_utils`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGUFWriter, RopeScalingType
from numpy.typing import NDArray

from serve_app.errors import ConfigError
from serve_app.openvino.exported.files import trusted
from serve_app.openvino.gguf_model import Rotary

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_SCALINGS = ("default", "linear", "llama3", "yarn")
_YARN: Mapping[str, Any] = {
    "attention_factor": None,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": None,
    "mscale_all_dim": None,
    "truncate": True,
}
"""The parts of YaRN that nobody has written for other values than these."""
_MOST = 2**24


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """A model's sizes."""

    architecture: str
    n_vocab: int
    n_ctx_train: int
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    epsilon: float
    rotary: Rotary
    factors: NDArray[np.float32] | None
    """Divisors of the rotary frequencies, as Llama 3.1 has them."""
    tied: bool

    @classmethod
    @trusted("its config.json")
    def of(cls, config: Mapping[str, Any]) -> Hyperparameters:
        """The hyperparameters that config.json says. Raises ConfigError, with the reason as the rest of a
        sentence, for a model that is not known."""
        kind = config.get("model_type")
        if kind not in _ARCHITECTURES:
            raise ConfigError(f"the architecture {kind} is not known")
        # Qwen's configurations name a window that they do not use.
        window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
        if window is not None or "sliding_attention" in (config.get("layer_types") or ()):
            raise ConfigError("it has layers with a sliding window")
        n_embd, n_head = _count(config, "hidden_size"), _count(config, "num_attention_heads")
        head = _count(config, "head_dim", n_embd // n_head)
        n_ctx_train = _count(config, "max_position_embeddings")
        rotary, factors = _rotary(config, head, n_ctx_train)
        rotary.frequencies(factors)  # which it may have no numbers for
        return cls(
            architecture=_ARCHITECTURES[kind],
            n_vocab=_count(config, "vocab_size"),
            n_ctx_train=n_ctx_train,
            n_layer=_count(config, "num_hidden_layers"),
            n_embd=n_embd,
            n_ff=_count(config, "intermediate_size"),
            n_head=n_head,
            n_head_kv=_count(config, "num_key_value_heads", n_head),
            epsilon=float(config.get("rms_norm_eps", 1e-6)),
            rotary=rotary,
            factors=factors,
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def frequencies(self) -> NDArray[np.float32]:
        """Radians for each position, of each pair of dimensions."""
        return self.rotary.frequencies(self.factors)

    @property
    def n_params(self) -> int:
        """Numbers in the model's matrices."""
        head = self.rotary.head_size
        attention = 2 * self.n_embd * head * (self.n_head + self.n_head_kv)
        layers = self.n_layer * (attention + 3 * self.n_embd * self.n_ff)
        return layers + self.n_vocab * self.n_embd * (1 if self.tied else 2)

    def add_to(self, writer: GGUFWriter) -> None:
        head = self.rotary.head_size
        writer.add_context_length(self.n_ctx_train)
        writer.add_embedding_length(self.n_embd)
        writer.add_block_count(self.n_layer)
        writer.add_feed_forward_length(self.n_ff)
        writer.add_head_count(self.n_head)
        writer.add_head_count_kv(self.n_head_kv)
        writer.add_key_length(head)
        writer.add_value_length(head)
        writer.add_layer_norm_rms_eps(self.epsilon)
        writer.add_vocab_size(self.n_vocab)
        writer.add_rope_dimension_count(head)
        writer.add_rope_freq_base(self.rotary.base)
        if self.rotary.factor != 1:
            writer.add_rope_scaling_type(RopeScalingType(self.rotary.scaling))
            writer.add_rope_scaling_factor(self.rotary.factor)
            writer.add_rope_scaling_orig_ctx_len(self.rotary.n_ctx_train)
        if self.factors is not None:
            writer.add_tensor("rope_freqs.weight", self.factors)


def _count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    count = config.get(name)
    if count is None and default is not None:
        return default
    if type(count) is not int or not 0 < count <= _MOST:
        raise ConfigError(f"{name} in its config.json is not a size: {count}")
    return count


def _rotary(
    config: Mapping[str, Any], head: int, n_ctx_train: int
) -> tuple[Rotary, NDArray[np.float32] | None]:
    """How positions turn, and the frequencies' divisors: one object, or two values of older exporters."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    part = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1
    if kind not in _SCALINGS:
        raise ConfigError(f"its positions are scaled as {kind}")
    if part != 1:
        raise ConfigError("only a part of its heads turns with positions")
    plain = Rotary(head, base, n_ctx_train=n_ctx_train)
    if kind == "default":
        return plain, None
    factor = float(scaling["factor"])
    trained = int(scaling.get("original_max_position_embeddings") or n_ctx_train)
    if kind == "llama3":
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        return plain, _divisors(plain.frequencies(), factor, low, high, trained)
    if kind == "yarn":
        for name, usual in _YARN.items():
            if scaling.get(name, usual) != usual:
                raise ConfigError(f"its positions are scaled as yarn with {name}: {scaling[name]}")
    return Rotary(head, base, kind, factor, trained), None


def _divisors(
    frequencies: NDArray[np.float32], factor: float, low: float, high: float, n_ctx_train: int
) -> NDArray[np.float32]:
    """Llama 3.1's divisors: 1 for pairs that turn often in the context of training, up to `factor`."""
    n_turns = n_ctx_train * frequencies.astype(np.float64) / (2 * math.pi)
    part = np.clip((n_turns - low) / (high - low), 0, 1)
    return (1 / ((1 - part) / factor + part)).astype(np.float32)
