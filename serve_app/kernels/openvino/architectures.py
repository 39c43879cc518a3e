"""Tables of the models that OpenVINO's graph is built for: what their layers are made of.

An architecture is one entry of `ARCHITECTURES`, by llama.cpp's name. Keys of metadata and names of tensors
are those of GGUF files. Source: the model files of llama.cpp (`src/models`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The parts of a model's layers. The defaults are Llama's parts.

    Every matrix may have a bias. Queries, keys and values may be one matrix, and the output may be that of
    the embeddings. A layer may lack a norm.
    """

    encodes: bool = False
    """Whether tokens see the whole text, which the model makes vectors of, or a score. Its norms are layer
    norms, and those of decoders are RMS norms. Embeddings have a norm, and may have tables of positions and
    of kinds of texts."""
    modern_classifier: bool = False
    """Whether a classifier takes the mean of a text, if metadata do not say it, and has GELU. Others take
    the first token, and have tanh."""
    norms_sums: bool = False
    """Whether the norms behind attention and behind the feed-forward part are norms of the sum (BERT)."""
    pairs: Literal["halves", "neighbours"] = "halves"
    """The dimensions of a head that turn together: the first half with the second, or neighbours."""
    attention_norm: str | None = "attn_norm"
    """The norm before attention. None leaves it out, as with the three norms below."""
    attention_post_norm: str | None = None
    """The norm of what attention adds."""
    ffn_norm: str | None = "ffn_norm"
    """The norm before the feed-forward part."""
    ffn_post_norm: str | None = None
    """The norm of what the feed-forward part adds."""
    head_norms: bool = False
    """Whether queries and keys have norms: of each head, or of all heads together if it is that long."""
    activation: Literal["silu", "gelu"] = "silu"
    """The activation of the gate, if metadata do not say it."""
    gated: bool = True
    """Whether the feed-forward part has a gate. Without it, the activation is that of `ffn_up`."""
    gate_in_up: bool = False
    """Whether the first half of `ffn_up` is the gate."""
    experts: bool = False
    """Whether the feed-forward part is experts, of which a router chooses some for each token."""
    normed_experts: bool = False
    """Whether the shares of the experts that were chosen add up to 1."""
    clamped_experts: bool = False
    """Whether experts have biases, and a gate and values that are clamped (gpt-oss)."""
    sinks: bool = False
    """Whether each head attends to a sink besides, which has a score and no value."""
    shared_expert: bool = False
    """Whether all tokens have one more expert, with a gate of its own."""
    scaled: bool = False
    """Whether metadata scale embeddings, attention, what layers add, and logits (Granite)."""
    normed_embeddings: bool = False
    """Whether embeddings are scaled by the square root of their width (Gemma)."""
    temperature: bool = False
    """Whether metadata may scale queries the more, the further behind they are (Mistral 3)."""
    windows: int = 0
    """Layers in a period of which all but the last have a sliding window, if metadata have one. With 0,
    metadata of windows are ignored, as by llama.cpp. Encoders have a window in all but the first: half of
    it is behind a token, and half before."""
    window_base: float | None = None
    """The base of the rotary embedding in layers with a window; None for the base of the others."""
    window_scaled: bool = True
    """Whether the rotary embedding is scaled in layers with a window, too."""
    unrotated: int = 0
    """Layers in a period of which the last has no positions; 0 if all have."""
    full_unrotated: bool = False
    """Whether layers without a window have no positions in a model that has windows (EXAONE 4)."""
    layers_scaled_by_width: int = 0
    """The number of layers of the one model that scales scores by a head's share of the embeddings' width
    (Gemma 3 27B). Others scale by a head's size."""

    def reads(self, tensor: str) -> bool:
        """Whether the graph uses a tensor of that name."""
        inside = re.fullmatch(r"blk\.\d+\.(\w+)\.(weight|bias)", tensor)
        if inside is None:
            around = _AROUND_ENCODERS if self.encodes else _AROUND_LAYERS
            return tensor.removesuffix(".weight").removesuffix(".bias") in around
        name, kind = inside.groups()
        if name in self._products or (self.encodes and name in self._norms):
            return True
        if self.clamped_experts and name in self._experts:
            return True
        if self.sinks and name == "attn_sinks":
            return True
        return kind == "weight" and name in self._norms | self._experts

    @property
    def _products(self) -> set[str]:
        attention = {"attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output"}
        if self.experts:
            return attention
        has_gate = self.gated and not self.gate_in_up
        return attention | {"ffn_up", "ffn_down"} | ({"ffn_gate"} if has_gate else set())

    @property
    def _experts(self) -> set[str]:
        parts, names = ("gate_inp", "gate", "up", "down"), set[str]()
        if self.experts:
            names |= {f"ffn_{part}_exps" for part in parts[1:]} | {"ffn_gate_inp"}
        if self.shared_expert:
            names |= {f"ffn_{part}_shexp" for part in parts}
        return names

    @property
    def _norms(self) -> set[str | None]:
        norms = {self.attention_norm, self.attention_post_norm, self.ffn_norm, self.ffn_post_norm}
        return norms | ({"attn_q_norm", "attn_k_norm"} if self.head_norms else set())


_EVERYWHERE = {"token_embd", "output_norm"}
_AROUND_LAYERS = {*_EVERYWHERE, "output", "rope_freqs", "rope_factors_long", "rope_factors_short"}
_CLASSIFIER = {"cls", "cls.norm", "cls.output"}
_AROUND_ENCODERS = {*_EVERYWHERE, *_CLASSIFIER, "token_types", "position_embd", "token_embd_norm"}
_AFTER_ATTENTION, _AFTER_FFN = "post_attention_norm", "post_ffw_norm"
_bert = partial(
    Architecture,
    encodes=True,
    norms_sums=True,
    attention_norm=None,
    attention_post_norm="attn_output_norm",
    ffn_norm=None,
    ffn_post_norm="layer_output_norm",
)
"""An encoder whose norms are behind each sum."""
_normed_after = partial(
    Architecture,
    attention_norm=None,
    attention_post_norm=_AFTER_ATTENTION,
    ffn_norm=None,
    ffn_post_norm=_AFTER_FFN,
    head_norms=True,
    windows=4,
)
"""An architecture whose norms are all behind what they norm, with a window in three of four layers."""

ARCHITECTURES = {
    "llama": Architecture(pairs="neighbours"),
    "mistral3": Architecture(pairs="neighbours", temperature=True),
    "granite": Architecture(pairs="neighbours", scaled=True),
    "smollm3": Architecture(pairs="neighbours", unrotated=4),
    "qwen2": Architecture(),
    "qwen3": Architecture(head_norms=True),
    "qwen2moe": Architecture(experts=True, shared_expert=True),
    "qwen3moe": Architecture(head_norms=True, experts=True, normed_experts=True),
    "gpt-oss": Architecture(
        ffn_norm=_AFTER_ATTENTION,
        experts=True,
        normed_experts=True,
        clamped_experts=True,
        sinks=True,
        windows=2,
    ),
    "phi3": Architecture(gate_in_up=True),
    "glm4": Architecture(
        pairs="neighbours",
        gate_in_up=True,
        attention_post_norm=_AFTER_ATTENTION,
        ffn_post_norm=_AFTER_FFN,
    ),
    "gemma3": Architecture(
        attention_post_norm=_AFTER_ATTENTION,
        ffn_post_norm=_AFTER_FFN,
        head_norms=True,
        activation="gelu",
        normed_embeddings=True,
        windows=6,
        window_base=10000.0,
        window_scaled=False,
        layers_scaled_by_width=62,
    ),
    "olmo2": _normed_after(window_scaled=False),
    "exaone4": _normed_after(full_unrotated=True),
    "bert": _bert(activation="gelu", gated=False, unrotated=1),
    "nomic-bert": _bert(),
    "modern-bert": Architecture(
        encodes=True,
        modern_classifier=True,
        activation="gelu",
        gate_in_up=True,
        windows=3,
        window_base=10000.0,
    ),
}
"""The architectures by name, Llama's and those that follow it closely first."""
