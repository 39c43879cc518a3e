"""Writes GGUF encoders with random weights, which make vectors of texts, or scores.

    python -m tools.random_models.encoder OUT --shape bge-small --type q8_0

Their vocabulary consists of pieces of words, as BERT's. The same shape and type give the same weights.
"""

from __future__ import annotations

import argparse
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
from gguf import GGUFWriter, PoolingType, TokenType

from tools.random_models.model import TYPES

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_WORDS = ("the", "fox", "cat", "story", *string.ascii_lowercase)
_EPSILON = 1e-12


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """The sizes of an encoder. `n_embd` and `n_ff` are multiples of 32."""

    name: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_ctx: int
    """The longest text, in tokens."""
    n_vocab: int = 0
    """Tokens at least; there are some for letters and a few words in any case."""
    architecture: str = "bert"
    """llama.cpp's name: bert, nomic-bert or modern-bert."""
    window: int = 0
    """Tokens that a token of a modern-bert sees in two of three layers; 0 for all."""


SHAPES = {
    "tiny": EncoderShape("random-bert", 2, 64, 128, 4, 64),
    "bge-small": EncoderShape("random-bge-small", 12, 384, 1536, 12, 512, 30522),
    "bge-m3": EncoderShape("random-bge-m3", 24, 1024, 4096, 16, 8192, 250002),
    "nomic": EncoderShape("random-nomic", 12, 768, 3072, 12, 2048, 30522, "nomic-bert"),
    "modernbert": EncoderShape(
        "random-modernbert", 22, 768, 1152, 12, 8192, 50368, "modern-bert", 128
    ),
}
"""The shapes on offer: a tiny one for tests, and those of the models that they are named after."""


def write_encoder(
    path: Path,
    shape: EncoderShape,
    pooling: PoolingType,
    dtype: str = "f32",
    seed: int = 0,
    labels: Sequence[str] = (),
) -> Path:
    """Write a model. With labels, it has a classifier with an output for each, as of llama.cpp's
    converter, which names no pooling type. With the type `RANK`, it has at least one output."""
    tokens = [*_SPECIAL, *(f"\u2581{word}" for word in _WORDS), *string.ascii_lowercase]
    tokens += [f"\u2581{i}" for i in range(shape.n_vocab - len(tokens))]
    kinds = [TokenType.CONTROL] * len(_SPECIAL)
    kinds += [TokenType.NORMAL] * (len(tokens) - len(_SPECIAL))
    kind, file_type = TYPES[dtype]
    writer = GGUFWriter(path, shape.architecture)
    writer.add_name(shape.name)
    writer.add_file_type(file_type)
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_layer_norm_eps(_EPSILON)
    writer.add_causal_attention(False)
    writer.add_pooling_type(pooling)
    writer.add_token_type_count(2)
    if labels:
        writer.add_classifier_output_labels(labels)
    if shape.architecture != "bert":
        writer.add_rope_freq_base(160000.0 if shape.window else 1000.0)
    if shape.window:
        writer.add_sliding_window(shape.window)
        writer.add_float32(f"{shape.architecture}.rope.freq_base_swa", 10000.0)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    writer.add_mask_token_id(4)
    rng = np.random.default_rng(seed)
    n_outputs = len(labels) or int(pooling is PoolingType.RANK)
    for name, sizes in _shapes(shape, len(tokens), n_outputs).items():
        scale = 0.3 * (1 if len(sizes) == 1 else sizes[-1] ** -0.5)
        offset = 1.0 if "norm.weight" in name else 0.0
        values = (offset + scale * rng.standard_normal(sizes)).astype(np.float32)
        is_exact = len(sizes) == 1 or name.startswith(("position_", "token_types", "cls"))
        stored = gguf.GGMLQuantizationType.F32 if is_exact else kind
        writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(shape: EncoderShape, n_tokens: int, n_outputs: int) -> dict[str, tuple[int, ...]]:
    """The sizes of each tensor. A classifier has `n_outputs`."""
    n_embd, n_ff, kind = shape.n_embd, shape.n_ff, shape.architecture
    sizes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_tokens, n_embd)}
    if kind != "modern-bert":
        sizes["token_types.weight"] = (2, n_embd)
    if kind == "bert":
        sizes["position_embd.weight"] = (shape.n_ctx, n_embd)
    norms = ["token_embd_norm"]
    for layer in range(shape.n_layer):
        block = f"blk.{layer}."
        if kind == "modern-bert":
            sizes[f"{block}attn_qkv.weight"] = (3 * n_embd, n_embd)
            norms += [f"{block}ffn_norm", *([f"{block}attn_norm"] if layer else [])]
        else:
            sizes |= {f"{block}attn_{name}.weight": (n_embd, n_embd) for name in "qkv"}
            norms += [f"{block}attn_output_norm", f"{block}layer_output_norm"]
        sizes[f"{block}attn_output.weight"] = (n_embd, n_embd)
        sizes[f"{block}ffn_up.weight"] = (2 * n_ff if kind == "modern-bert" else n_ff, n_embd)
        sizes[f"{block}ffn_down.weight"] = (n_embd, n_ff)
        if kind == "nomic-bert":
            sizes[f"{block}ffn_gate.weight"] = (n_ff, n_embd)
    if kind == "modern-bert":
        norms.append("output_norm")
    sizes |= {f"{norm}.weight": (n_embd,) for norm in norms}
    if kind == "bert":
        products = [name for name in sizes if name.startswith("blk.") and len(sizes[name]) == 2]
        sizes |= {f"{name.removesuffix('weight')}bias": sizes[name][:1] for name in products}
    if kind != "modern-bert":
        sizes |= {f"{norm}.bias": (n_embd,) for norm in norms}
    if n_outputs:
        has_norm = kind == "modern-bert"
        sizes["cls.weight"] = (n_embd, n_embd)
        sizes["cls.norm.weight" if has_norm else "cls.bias"] = (n_embd,)
        sizes |= {"cls.output.weight": (n_outputs, n_embd), "cls.output.bias": (n_outputs,)}
    return sizes


def main() -> None:
    """Write the model that the command line names."""
    parser = argparse.ArgumentParser(description="Write a GGUF encoder with random weights.")
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--type", choices=TYPES, default="f16")
    parser.add_argument("--pooling", choices=("mean", "cls", "rank"), default="mean")
    parser.add_argument("--labels", nargs="*", default=(), help="of a classifier's outputs")
    parser.add_argument("--layers", type=int, help="write so many of the shape's layers")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    shape = replace(shape, n_layer=args.layers or shape.n_layer)
    write_encoder(args.out, shape, PoolingType[args.pooling.upper()], args.type, labels=args.labels)


if __name__ == "__main__":
    main()
