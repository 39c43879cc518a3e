"""Writes projectors with random weights: a vision encoder of real shape whose pictures mean nothing.

    python -m serve_app.demo_model.random_projector OUT --shape tiny-llava --n-embd 256

Each goes with text models whose embeddings have `n_embd` numbers. The same arguments give the same bytes
(under one version of numpy).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from gguf import GGUFWriter, LlamaFileType
from numpy.typing import NDArray

Kind = Literal["mlp", "idefics3", "gemma3", "qwen2vl_merger"]
"""How patches become embeddings, by llama.cpp's names: LLaVA's, SmolVLM's, Gemma 3's, Qwen2-VL's."""


@dataclass(frozen=True, slots=True)
class ProjectorShape:
    """Sizes of a vision encoder, and of what is behind it."""

    kind: Kind
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    image_size: int
    """Pixels of a side of what is encoded at once."""
    patch_size: int
    n_merge: int = 1
    """Patches of a side that become one embedding."""
    longest_edge: int = 0
    """Larger pictures are shrunk to this, and cut into tiles; 0: they are never cut."""


SHAPES: dict[str, ProjectorShape] = {
    "tiny-llava": ProjectorShape("mlp", 3, 32, 64, 2, 32, 8),
    "tiny-smolvlm": ProjectorShape("idefics3", 2, 32, 64, 2, 64, 8, 2, 256),
    "tiny-gemma3": ProjectorShape("gemma3", 2, 32, 64, 2, 64, 8, 2),
    "tiny-qwen2vl": ProjectorShape("qwen2vl_merger", 2, 32, 64, 2, 56, 14, 2),
    "thin-llava": ProjectorShape("mlp", 3, 64, 128, 2, 336, 14),
    "thin-smolvlm": ProjectorShape("idefics3", 2, 64, 128, 2, 512, 16, 4, 2048),
    "thin-gemma3": ProjectorShape("gemma3", 1, 64, 128, 2, 896, 14, 4),
    "smolvlm-256m": ProjectorShape("idefics3", 12, 768, 3072, 12, 512, 16, 4, 2048),
}
"""The shapes on offer: small ones for tests; those that cut pictures and count tokens as LLaVA 1.5, SmolVLM
and Gemma 3 do, with few layers and numbers; and SmolVLM's own."""

IDEFICS3_TOKENS = (
    "\n\n",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
"""Control tokens that models with a projector of the kind `idefics3` have."""

_STD = 0.3
"""Of the pictures' embeddings, so that they change what a random model says."""


def write_random_projector(
    path: str | os.PathLike[str], shape: ProjectorShape, n_embd: int, seed: int = 0
) -> None:
    """Write a projector for text models with embeddings of `n_embd` numbers, whole or not at all."""
    target = Path(path)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    writer = GGUFWriter(part, "clip")
    try:
        _add_metadata(writer, shape, n_embd)
        rng = np.random.default_rng(seed)
        for name, tensor in _tensors(shape, n_embd, rng):
            matrix = tensor.ndim > 1 and not name.startswith("v.position")
            writer.add_tensor(name, tensor.astype(np.float16 if matrix else np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _add_metadata(writer: GGUFWriter, shape: ProjectorShape, n_embd: int) -> None:
    writer.add_name("random projector")
    writer.add_file_type(LlamaFileType.MOSTLY_F16)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", shape.kind)
    writer.add_bool("clip.use_gelu", True)
    numbers = {
        "image_size": shape.image_size,
        "patch_size": shape.patch_size,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff,
        "projection_dim": n_embd,
        "block_count": shape.n_layer,
        "attention.head_count": shape.n_head,
    }
    if shape.kind in ("idefics3", "gemma3"):
        numbers["projector.scale_factor"] = shape.n_merge
    if shape.longest_edge:
        numbers["preproc_image_size"] = shape.longest_edge
    for name, number in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])


def _tensors(
    shape: ProjectorShape, n_embd: int, rng: np.random.Generator
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    def matrix(*sizes: int, std: float = 1.0) -> NDArray[np.float32]:
        scale = np.float32(std / np.prod(sizes[1:]) ** 0.5)
        return scale * rng.standard_normal(sizes, np.float32)

    def norm(name: str) -> Iterator[tuple[str, NDArray[np.float32]]]:
        yield f"{name}.weight", np.ones(shape.n_embd, np.float32)
        yield f"{name}.bias", np.zeros(shape.n_embd, np.float32)

    side = shape.image_size // shape.patch_size
    yield "v.patch_embd.weight", matrix(shape.n_embd, 3, shape.patch_size, shape.patch_size)
    if shape.kind == "qwen2vl_merger":  # of two frames, and with positions that are turned
        yield (
            "v.patch_embd.weight.1",
            matrix(shape.n_embd, 3, shape.patch_size, shape.patch_size),
        )
    else:
        yield "v.patch_embd.bias", np.zeros(shape.n_embd, np.float32)
        yield "v.position_embd.weight", matrix(side * side, shape.n_embd, std=shape.n_embd**0.5)
    for i in range(shape.n_layer):
        yield from norm(f"v.blk.{i}.ln1")
        yield from norm(f"v.blk.{i}.ln2")
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            yield f"v.blk.{i}.{part}.weight", matrix(shape.n_embd, shape.n_embd)
            yield f"v.blk.{i}.{part}.bias", np.zeros(shape.n_embd, np.float32)
        for part, rows, columns in (
            ("ffn_up", shape.n_ff, shape.n_embd),
            ("ffn_down", shape.n_embd, shape.n_ff),
        ):
            yield f"v.blk.{i}.{part}.weight", matrix(rows, columns)
            yield f"v.blk.{i}.{part}.bias", np.zeros(rows, np.float32)
    yield from norm("v.post_ln")
    n_merged = shape.n_embd * shape.n_merge**2
    if shape.kind == "idefics3":
        yield "mm.model.fc.weight", matrix(n_embd, n_merged, std=_STD)
    elif shape.kind == "gemma3":  # stored as it is used: turned
        yield "mm.input_projection.weight", matrix(shape.n_embd, n_embd, std=_STD)
        yield "mm.soft_emb_norm.weight", np.ones(shape.n_embd, np.float32)
    else:
        n_in = n_merged if shape.kind == "qwen2vl_merger" else shape.n_embd
        yield "mm.0.weight", matrix(n_in, n_in)
        yield "mm.0.bias", np.zeros(n_in, np.float32)
        yield "mm.2.weight", matrix(n_embd, n_in, std=_STD)
        yield "mm.2.bias", np.zeros(n_embd, np.float32)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write a projector with random weights.")
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--shape", choices=SHAPES, default="tiny-llava")
    parser.add_argument("--n-embd", type=int, required=True, help="numbers of an embedding")
    parser.add_argument("--layers", type=int, help="of the encoder, if others than the shape's")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    if args.layers is not None:
        shape = replace(shape, n_layer=args.layers)
    write_random_projector(args.out, shape, args.n_embd, args.seed)
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
