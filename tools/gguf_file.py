"""The common parts of the GGUF files that Corral writes.

The sizes of an architecture, a byte-level BPE vocabulary, and the chat template of `template`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gguf import GGUFWriter, LlamaFileType, TokenType

from tools.chat_template import CHAT_TEMPLATE, CONTROL_TOKENS

Architecture = Literal["qwen3", "qwen3moe", "qwen2vl", "qwen3vl", "gemma3", "lfm2", "gpt-oss"]
"""The architectures, by llama.cpp's names; those that end in `vl` have positions of several dimensions."""
ARCHITECTURE: Architecture = "qwen3"
RMS_EPS = 1e-6
N_CONV = 3
"""Tokens that a convolution of LFM2 sees."""
_PARTS: dict[Architecture, tuple[int, int, int]] = {"qwen2vl": (2, 3, 3), "qwen3vl": (6, 5, 5)}
"""Of the pairs that are turned, how many are by time, by row and by column."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model. `n_embd`, `n_ff` and `n_head * head_dim` are multiples of 32."""

    name: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    """Tokens: 256 bytes, then the merged ones, then the 3 control tokens; at least 259."""
    n_ctx_train: int
    """The longest context, in tokens, that the model claims to be made for."""
    architecture: Architecture = ARCHITECTURE
    n_deepstack: int = 0
    """First layers that are given more of a picture than its embeddings."""
    n_expert: int = 0
    """Experts of each layer, with `n_ff` each; 0 for a dense model."""
    n_expert_used: int = 0
    """Experts that compute each token."""
    window: int = 0
    """Tokens that a token sees in five of six layers (gemma3) or in every other one (gpt-oss); 0: all."""
    attending: tuple[int, ...] = ()
    """The layers with attention where the others are convolutions (lfm2)."""
    is_tied: bool = True
    """Whether the matrix of the logits is that of the embeddings."""

    def attends(self, layer: int) -> bool:
        """Whether that layer has attention."""
        return not self.attending or layer in self.attending


def add_hyperparameters(
    writer: GGUFWriter, shape: ModelShape, file_type: LlamaFileType, *, rope_base: float
) -> None:
    """Write the model's name and sizes."""
    writer.add_name(shape.name)
    writer.add_file_type(file_type)
    writer.add_quantization_version(2)
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(shape.n_ctx_train)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    if shape.attending:
        layers = range(shape.n_layer)
        writer.add_head_count_kv([shape.n_head_kv if shape.attends(i) else 0 for i in layers])
        writer.add_shortconv_l_cache(N_CONV)
    else:
        writer.add_head_count_kv(shape.n_head_kv)
    if shape.n_expert:
        writer.add_expert_count(shape.n_expert)
        writer.add_expert_used_count(shape.n_expert_used)
        writer.add_expert_feed_forward_length(shape.n_ff)
    if shape.window:
        writer.add_sliding_window(shape.window)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(RMS_EPS)
    writer.add_rope_freq_base(rope_base)
    if shape.architecture in _PARTS:
        parts = _PARTS[shape.architecture]
        n_pairs = shape.head_dim // 2 // sum(parts)
        writer.add_rope_dimension_sections([*(n_pairs * part for part in parts), 0])
    if shape.n_deepstack:
        writer.add_num_deepstack_layers(shape.n_deepstack)


def add_tokenizer(
    writer: GGUFWriter,
    tokens: Sequence[str],
    merges: Sequence[tuple[str, str]],
    control: Sequence[str] = CONTROL_TOKENS,
) -> None:
    """Write the vocabulary, of which `control` are control tokens, and the chat template."""
    types = [TokenType.CONTROL if t in control else TokenType.NORMAL for t in tokens]
    padding, _, end_of_turn = CONTROL_TOKENS
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{left} {right}" for left, right in merges])
    writer.add_eos_token_id(tokens.index(end_of_turn))
    writer.add_pad_token_id(tokens.index(padding))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
