"""Writes GGUF models with random weights: real shapes and speed, meaningless text, no download.

    python -m tools.random_models.model OUT --shape 0.6b --type q4_0 [--layers N]

Models have a byte-level BPE vocabulary of their own. The same shape, type and seed give the same
bytes (under one version of numpy).

How the weights are drawn keeps generation lively. The embeddings are small beside what the layers
add to the residual stream, so that the last token does not simply predict itself through the tied
output matrix; the query and key norms are above one, so that attention tells positions apart. The
rows of the control tokens and of the bytes that are not printable ASCII are smaller still: a model
ends its turn, or writes half a character, only rarely.
"""

from __future__ import annotations

import argparse
import os
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType
from numpy.typing import NDArray

from serve_app.kernels.llama.quantising import FORMATS, quantise
from tools.chat_template import CONTROL_TOKENS
from tools.gguf_file import N_CONV, ModelShape, add_hyperparameters, add_tokenizer

SHAPES: dict[str, ModelShape] = {
    "tiny": ModelShape("random-tiny", 2, 256, 512, 4, 2, 64, 512, 4096),
    "tiny-qwen2vl": ModelShape(
        "random-tiny-qwen2vl", 2, 256, 512, 4, 2, 64, 512, 4096, architecture="qwen2vl"
    ),
    "tiny-qwen3vl": ModelShape(
        "random-tiny-qwen3vl", 2, 256, 512, 4, 2, 64, 512, 4096, "qwen3vl", n_deepstack=1
    ),
    "tiny-gpt-oss": ModelShape(
        *("random-tiny-gpt-oss", 2, 256, 64, 4, 2, 64, 512, 4096, "gpt-oss"),
        n_expert=8,
        n_expert_used=2,
        window=32,
        is_tied=False,
    ),
    "wide": ModelShape("random-wide", 1, 64, 128, 2, 1, 32, 151936, 32768),
    "0.6b": ModelShape("random-0.6b", 28, 1024, 3072, 16, 8, 128, 151936, 32768),
    "1.7b": ModelShape("random-1.7b", 28, 2048, 6144, 16, 8, 128, 151936, 32768),
    "4b": ModelShape("random-4b", 36, 2560, 9728, 32, 8, 128, 151936, 32768),
    "8b": ModelShape("random-8b", 36, 4096, 12288, 32, 8, 128, 151936, 32768, is_tied=False),
    "30b-a3b": ModelShape(
        *("random-30b-a3b", 48, 2048, 768, 32, 4, 128, 151936, 32768, "qwen3moe"),
        n_expert=128,
        n_expert_used=8,
        is_tied=False,
    ),
    "gpt-oss-20b": ModelShape(
        *("random-gpt-oss-20b", 24, 2880, 2880, 64, 8, 64, 201088, 131072, "gpt-oss"),
        n_expert=32,
        n_expert_used=4,
        window=128,
        is_tied=False,
    ),
    "gemma3-4b": ModelShape(
        *("random-gemma3-4b", 34, 2560, 10240, 8, 4, 256, 262144, 131072, "gemma3"), window=1024
    ),
    "lfm2-350m": ModelShape(
        *("random-lfm2-350m", 16, 1024, 4608, 16, 8, 64, 65536, 128000, "lfm2"),
        attending=(2, 5, 8, 10, 12, 14),
    ),
}
"""The shapes on offer: tiny ones for tests, `wide` for its large vocabulary, and the sizes of the models
that the others are named after. Without another name, these are Qwen3's."""

TYPES: dict[str, tuple[GGMLQuantizationType, LlamaFileType]] = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "mxfp4": (GGMLQuantizationType.MXFP4, LlamaFileType.MOSTLY_MXFP4_MOE),
}
"""The types that matrices can be stored as: the tensor's and the file's. Norms are always F32, and only the
matrices of experts are MXFP4: the others of such a file are Q8_0, as in gpt-oss' files."""

MIXTURES = {name.lower(): name for name in FORMATS if "_K" in name or name.startswith("IQ")}
"""The types that llama.cpp makes itself, of an F16 file, with another format for some matrices."""

_WORDS = """
    the of and to a in is it you that he was for on are with as his they be at one have this from
    or had by hot word but what some we can out other were all there when up use your how said an
    each she which do their time if will way about many then them write would like so these her
    long make thing see him two has look more day could go come did number sound no most people my
    over know water than call first who may down side been now find any new work part take get
    place made live where after back little only round man year came show every good me give our
    under name very through just form sentence great think say help low line differ turn cause
    much mean before move right boy old too same tell does set three want air well also play small
"""
"""Common English words, the most common first: what the first merges are learned from."""

_EMBEDDING_STD = 0.02
_RARE_STD = _EMBEDDING_STD / 4
_LOGIT_STD = 3.0
_QK_NORM = 1.5
_BIAS = 0.5
_EXPERT_BIAS = 0.1
"""OpenVINO leaves out biases of 0, and does not know the experts then."""
_NIBBLE_STD = (255 / 12) ** 0.5  # of a uniform integer from -8 to 7
_BYTE_STD = ((255**2 - 1) / 12) ** 0.5  # of a uniform integer from -127 to 127
_MXFP4_MEAN_SQUARE = 274 / 8  # of the integers that MXFP4 has: twice the numbers 0 to 6
_MXFP4_BIAS = 128  # of the exponent that is a block's scale


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor: a norm, all of it `value`; or a matrix with entries of deviation `std`."""

    name: str
    shape: tuple[int, ...]  # experts if it is theirs, rows, then columns
    value: float | None = None
    std: NDArray[np.float32] | None = None  # one per row, of all experts
    is_exact: bool = False  # F32, whatever the type of the file


def parameter_count(shape: ModelShape) -> int:
    """How many numbers the model is made of; the embeddings count once."""
    tokens, _ = vocabulary(shape.n_vocab)
    return sum(int(np.prod(tensor.shape)) for tensor in _tensors(shape, tokens))


def write_random_gguf(
    path: str | os.PathLike[str],
    shape: ModelShape,
    dtype: str,
    seed: int = 0,
    *,
    more_control: Sequence[str] = (),
) -> None:
    """Write a model to `path`, whole or not at all; a file already there is replaced.

    `dtype` is a key of `TYPES` or `MIXTURES`; `more_control` are its last tokens, such as those for infill.
    Memory: up to three times the largest tensor, the embeddings.

    Raises ValueError for an unknown type or a vocabulary too small, OSError if the file cannot be
    written.
    """
    if dtype not in TYPES | MIXTURES:
        raise ValueError(f"unknown type {dtype!r}: expected one of {', '.join(TYPES | MIXTURES)}")
    target = Path(path)
    # Not tempfile: its files can be read by their owner alone.
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        plain = "f16" if dtype in MIXTURES else dtype
        _write(part, shape, plain, seed, [*CONTROL_TOKENS, *more_control])
        if dtype in MIXTURES:
            whole = part.replace(part.with_suffix(".f16"))
            quantise(whole, part, MIXTURES[dtype], threads=os.cpu_count() or 1)
        part.replace(target)
    finally:
        part.with_suffix(".f16").unlink(missing_ok=True)
        part.unlink(missing_ok=True)


def _write(path: Path, shape: ModelShape, dtype: str, seed: int, control: Sequence[str]) -> None:
    """Write the file straight to `path`, one tensor in memory at a time."""
    tokens, merges = vocabulary(shape.n_vocab, control)
    tensors = list(_tensors(shape, tokens, control))
    writer = GGUFWriter(path, shape.architecture)
    try:
        add_hyperparameters(writer, shape, TYPES[dtype][1], rope_base=1e6)
        add_tokenizer(writer, tokens, merges, control)
        for tensor in tensors:
            kind = _kind(tensor, dtype)
            block, block_bytes = GGML_QUANT_SIZES[kind]
            n_bytes = int(np.prod(tensor.shape)) // block * block_bytes
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), n_bytes, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for index, tensor in enumerate(tensors):
            rng = np.random.default_rng([seed, index])
            writer.write_tensor_data(_draw(tensor, _kind(tensor, dtype), rng))
    finally:
        writer.close()


def vocabulary(
    n_vocab: int, control: Sequence[str] = CONTROL_TOKENS
) -> tuple[list[str], list[tuple[str, str]]]:
    """The tokens, `n_vocab` of them, `control` last, and the merges that make the ones longer than a byte.

    Raises ValueError if `n_vocab` leaves no room for the bytes and the control tokens.
    """
    n_text, n_bytes = n_vocab - len(control), len(_byte_symbols())
    if n_text < n_bytes:
        raise ValueError(f"n_vocab is {n_vocab}: expected at least {n_bytes + n_vocab - n_text}")
    tokens, merges = _text_vocabulary(n_text)
    return [*tokens, *control], [*merges]


@cache
def _text_vocabulary(n_text: int) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """So many tokens of text, and their merges: learnt once for all models of a process."""
    tokens = dict.fromkeys(_byte_symbols())
    merges: dict[tuple[str, str], None] = {}
    pairs = _merges()
    while len(tokens) < n_text:
        pair = next(pairs)
        merges[pair] = None
        tokens["".join(pair)] = None
    return tuple(tokens), tuple(merges)


def _byte_symbols() -> list[str]:
    """The character that stands for each byte, 0 to 255, in a byte-level BPE vocabulary."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(spare)) for byte in range(256)]


def _merges() -> Iterator[tuple[str, str]]:
    """Pairs of tokens to merge, the first ranking highest; there are always more.

    First those that byte-pair encoding learns from `_WORDS`, then those that build every run of
    lower-case letters, with and without a space before it, by length.
    """
    space = _byte_symbols()[ord(" ")]
    common = _WORDS.split()
    words = [([space, *word], len(common) - rank) for rank, word in enumerate(common)]
    while True:
        counts: Counter[tuple[str, str]] = Counter()
        for symbols, weight in words:
            for pair in pairwise(symbols):
                counts[pair] += weight
        if not counts:
            break
        best = max(counts, key=lambda pair: (counts[pair], pair))
        yield best
        words = [(_merged(symbols, best), weight) for symbols, weight in words]
    runs = [space, *string.ascii_lowercase]
    while True:
        yield from ((run, letter) for run in runs for letter in string.ascii_lowercase)
        runs = [run + letter for run in runs for letter in string.ascii_lowercase]


def _merged(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    """`symbols` with every occurrence of `pair`, from the left, made one symbol."""
    out: list[str] = []
    for symbol in symbols:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return out


def _tensors(
    shape: ModelShape, tokens: list[str], control: Sequence[str] = CONTROL_TOKENS
) -> Iterator[_Tensor]:
    """The model's tensors, in the order of the file."""
    n_embd = shape.n_embd
    embeddings = (len(tokens), n_embd)
    std = _embedding_std(tokens, control)
    output_norm = _LOGIT_STD / (_EMBEDDING_STD * n_embd**0.5)
    if shape.architecture == "gemma3":  # which scales them by the root of their width
        std, output_norm = std * np.float32(n_embd**-0.5), output_norm * n_embd**0.5
    yield _Tensor("token_embd.weight", embeddings, std=std)
    name = "token_embd_norm.weight" if shape.architecture == "lfm2" else "output_norm.weight"
    yield _Tensor(name, (n_embd,), value=output_norm)
    if not shape.is_tied:
        yield _Tensor("output.weight", embeddings, std=std)
    for layer in range(shape.n_layer):
        block = f"blk.{layer}."
        norms = ["attn_norm", "ffn_norm"]
        if shape.architecture == "gemma3":
            norms += ["post_attention_norm", "post_ffw_norm"]
        elif shape.architecture == "gpt-oss":
            norms = ["attn_norm", "post_attention_norm"]
        for name in norms:
            yield _Tensor(f"{block}{name}.weight", (n_embd,), value=1.0)
        if shape.attends(layer):
            yield from _attention(shape, block)
        else:
            yield _matrix(f"{block}shortconv.in_proj.weight", 3 * n_embd, n_embd)
            yield _matrix(f"{block}shortconv.conv.weight", n_embd, N_CONV, is_exact=True)
            yield _matrix(f"{block}shortconv.out_proj.weight", n_embd, n_embd)
        experts = (shape.n_expert,) if shape.n_expert else ()
        suffix = "_exps" if experts else ""
        if experts:
            yield _matrix(f"{block}ffn_gate_inp.weight", shape.n_expert, n_embd, is_exact=True)
        yield _matrix(f"{block}ffn_gate{suffix}.weight", *experts, shape.n_ff, n_embd)
        yield _matrix(f"{block}ffn_up{suffix}.weight", *experts, shape.n_ff, n_embd)
        yield _matrix(f"{block}ffn_down{suffix}.weight", *experts, n_embd, shape.n_ff)
        if shape.architecture == "gpt-oss":
            yield _Tensor(f"{block}ffn_gate_inp.bias", experts, value=_EXPERT_BIAS)
            for name, n in (("gate", shape.n_ff), ("up", shape.n_ff), ("down", n_embd)):
                yield _Tensor(f"{block}ffn_{name}_exps.bias", (*experts, n), value=_EXPERT_BIAS)


def _attention(shape: ModelShape, block: str) -> Iterator[_Tensor]:
    """The tensors of a layer's attention."""
    n_embd = shape.n_embd
    heads, heads_kv = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    rows = {"attn_q": heads, "attn_k": heads_kv, "attn_v": heads_kv}
    if shape.architecture in ("qwen2vl", "gpt-oss"):
        for name, n in rows.items():
            yield _Tensor(f"{block}{name}.bias", (n,), value=_BIAS)
    else:
        for name in ("attn_q_norm", "attn_k_norm"):
            yield _Tensor(f"{block}{name}.weight", (shape.head_dim,), value=_QK_NORM)
    for name, n in rows.items():
        yield _matrix(f"{block}{name}.weight", n, n_embd)
    yield _matrix(f"{block}attn_output.weight", n_embd, heads)
    if shape.architecture == "gpt-oss":
        yield _Tensor(f"{block}attn_output.bias", (n_embd,), value=0.0)
        yield _Tensor(f"{block}attn_sinks.weight", (shape.n_head,), value=1.0)


def _matrix(name: str, *shape: int, is_exact: bool = False) -> _Tensor:
    std = np.full(int(np.prod(shape[:-1])), shape[-1] ** -0.5, np.float32)
    return _Tensor(name, shape, std=std, is_exact=is_exact)


def _embedding_std(tokens: list[str], control: Sequence[str]) -> NDArray[np.float32]:
    """Per token, the deviation of its row: the smaller, the less often it is generated."""
    symbols = _byte_symbols()
    usual = {*b"\n ", *range(0x21, 0x7F)}
    rare = {symbol for byte, symbol in enumerate(symbols) if byte not in usual}
    rare.update(control)
    return np.array([_RARE_STD if t in rare else _EMBEDDING_STD for t in tokens], np.float32)


def _kind(tensor: _Tensor, dtype: str) -> GGMLQuantizationType:
    if tensor.is_exact or tensor.std is None:
        return GGMLQuantizationType.F32
    kind, _ = TYPES[dtype]
    if kind is GGMLQuantizationType.MXFP4 and "_exps." not in tensor.name:
        return GGMLQuantizationType.Q8_0
    return kind


def _draw(
    tensor: _Tensor, kind: GGMLQuantizationType, rng: np.random.Generator
) -> NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint8]:
    """The tensor's contents as they lie in the file."""
    if tensor.std is None:
        return np.full(tensor.shape, tensor.value, np.float32)
    std = tensor.std[:, None]
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        weights = rng.standard_normal((len(std), tensor.shape[-1]), np.float32)
        weights *= std
        return weights if kind is GGMLQuantizationType.F32 else weights.astype(np.float16)
    # Random blocks, each a scale and its integers, rather than floats quantised: seconds, not
    # minutes. Scales of either sign cancel the half step by which nibbles lean to the negative.
    block, block_bytes = GGML_QUANT_SIZES[kind]
    rows, n_blocks = len(tensor.std), tensor.shape[-1] // block
    blocks = rng.integers(0, 256, (rows, n_blocks, block_bytes), np.uint8)
    if kind is GGMLQuantizationType.MXFP4:
        # Of the two powers of two that are nearest, each so often that squares are right on average.
        squares = std**2 / _MXFP4_MEAN_SQUARE
        exponent = np.floor(np.log2(squares) / 2)
        is_larger = rng.random((rows, n_blocks), np.float32) < (squares / 4**exponent - 1) / 3
        blocks[:, :, 0] = exponent + is_larger + _MXFP4_BIAS
        return blocks
    if kind is GGMLQuantizationType.Q8_0:
        blocks[blocks == 0x80] = 0x81  # quantisers never write -128
    unit = _BYTE_STD if kind is GGMLQuantizationType.Q8_0 else _NIBBLE_STD
    sign = rng.choice(np.array([-1, 1], np.float32), (rows, n_blocks))
    scale = (sign * std / unit).astype(np.float16)
    blocks[:, :, :2] = scale[:, :, None].view(np.uint8)
    return blocks


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write a GGUF model with random weights.")
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--type", choices=TYPES | MIXTURES, default="f16")
    parser.add_argument("--layers", type=int, help="write so many of the shape's layers")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    if args.layers is not None:
        if not 0 < args.layers <= shape.n_layer:
            parser.error(f"--layers: the shape has {shape.n_layer}")
        shape = replace(shape, name=f"{shape.name}-{args.layers}-layers", n_layer=args.layers)
    write_random_gguf(args.out, shape, args.type, args.seed)
    size = args.out.stat().st_size
    print(f"{args.out}: {size / 1e6:.1f} MB, {parameter_count(shape) / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
