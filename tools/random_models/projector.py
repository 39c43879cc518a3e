"""Writes projectors with random weights: an encoder of real shape whose pictures or sounds mean nothing.

    python -m tools.random_models.projector OUT --shape tiny-llava --n-embd 256

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

Kind = Literal[
    "mlp", "idefics3", "gemma3", "qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger", "qwen2a"
]
"""How patches become embeddings, by llama.cpp's names: LLaVA's, SmolVLM's, Gemma 3's, and those of
Qwen2-VL, Qwen2.5-VL and Qwen3-VL; and how Qwen2-Audio hears."""
QWEN_KINDS = ("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger")
"""Those for models with positions of several dimensions."""

Tensors = Iterator[tuple[str, NDArray[np.float32]]]
"""Names and entries."""


@dataclass(frozen=True, slots=True)
class ProjectorShape:
    """Sizes of a vision encoder, and of what is behind it."""

    kind: Kind
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    image_size: int = 0
    """Pixels of a side of what is encoded at once."""
    patch_size: int = 0
    n_merge: int = 1
    """Patches of a side that become one embedding."""
    longest_edge: int = 0
    """Larger pictures are shrunk to this, and cut into tiles; 0: they are never cut."""
    n_deepstack: int = 0
    """First blocks whose outputs go to the text model's first layers, too."""


SHAPES: dict[str, ProjectorShape] = {
    "tiny-llava": ProjectorShape("mlp", 3, 32, 64, 2, 32, 8),
    "tiny-smolvlm": ProjectorShape("idefics3", 2, 32, 64, 2, 64, 8, 2, 256),
    "tiny-gemma3": ProjectorShape("gemma3", 2, 32, 64, 2, 64, 8, 2),
    "tiny-qwen2vl": ProjectorShape("qwen2vl_merger", 2, 32, 64, 2, 56, 14, 2),
    "tiny-qwen2.5vl": ProjectorShape("qwen2.5vl_merger", 2, 32, 64, 2, 56, 14, 2),
    "tiny-qwen3vl": ProjectorShape("qwen3vl_merger", 2, 32, 64, 2, 64, 16, 2, n_deepstack=1),
    "tiny-qwen2audio": ProjectorShape("qwen2a", 2, 32, 64, 2),
    "thin-llava": ProjectorShape("mlp", 3, 64, 128, 2, 336, 14),
    "thin-smolvlm": ProjectorShape("idefics3", 2, 64, 128, 2, 512, 16, 4, 2048),
    "thin-gemma3": ProjectorShape("gemma3", 1, 64, 128, 2, 896, 14, 4),
    "thin-qwen2vl": ProjectorShape("qwen2vl_merger", 2, 64, 128, 2, 560, 14, 2),
    "thin-qwen2.5vl": ProjectorShape("qwen2.5vl_merger", 2, 64, 128, 2, 560, 14, 2),
    "thin-qwen3vl": ProjectorShape("qwen3vl_merger", 2, 64, 128, 2, 768, 16, 2, n_deepstack=1),
    "smolvlm-256m": ProjectorShape("idefics3", 12, 768, 3072, 12, 512, 16, 4, 2048),
}
"""The shapes on offer: small ones for tests; those that cut pictures and count tokens as LLaVA 1.5,
SmolVLM, Gemma 3 and Qwen's models do, with few layers and numbers; and SmolVLM's own."""

IDEFICS3_TOKENS = (
    "\n\n",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
"""Control tokens that models with a projector of the kind `idefics3` have."""

QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>")
"""The same for Qwen's."""

_N_MEL, _N_STEPS = 80, 1500
"""Bands of a sound's spectrum, and steps of half a minute."""
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
        for name, tensor in _Drawing(shape, n_embd, rng).all():
            matrix = tensor.ndim > 1 and not (".position_" in name or name.endswith(".bias"))
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
    sense = "audio" if shape.kind == "qwen2a" else "vision"
    writer.add_bool(f"clip.has_{sense}_encoder", True)
    writer.add_string("clip.projector_type", shape.kind)
    gated = shape.kind == "qwen2.5vl_merger"
    writer.add_bool("clip.use_silu" if gated else "clip.use_gelu", True)
    numbers = {
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff,
        "projection_dim": n_embd,
        "block_count": shape.n_layer,
        "attention.head_count": shape.n_head,
    }
    if sense == "audio":
        numbers["num_mel_bins"] = _N_MEL
    else:
        numbers |= {"image_size": shape.image_size, "patch_size": shape.patch_size}
        writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
        writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    if shape.kind in ("idefics3", "gemma3"):
        numbers["projector.scale_factor"] = shape.n_merge
    if shape.kind == "qwen2.5vl_merger":  # every so many blocks, one without windows
        numbers["n_wa_pattern"] = 2
    if shape.longest_edge:
        numbers["preproc_image_size"] = shape.longest_edge
    for name, number in numbers.items():
        writer.add_uint32(f"clip.{sense}.{name}", number)
    writer.add_float32(f"clip.{sense}.attention.layer_norm_epsilon", 1e-6)


class _Drawing:
    """Draws a projector's tensors, in the order of the file."""

    def __init__(self, shape: ProjectorShape, n_embd: int, rng: np.random.Generator) -> None:
        self._shape = shape
        self._prefix = "a" if shape.kind == "qwen2a" else "v"
        self._n_out = n_embd
        self._rng = rng

    def matrix(self, *sizes: int, std: float = 1.0) -> NDArray[np.float32]:
        """Entries such that a sum over a row's has that deviation."""
        scale = np.float32(std / np.prod(sizes[1:]) ** 0.5)
        return scale * self._rng.standard_normal(sizes, np.float32)

    def linear(self, name: str, rows: int, columns: int, std: float = 1.0) -> Tensors:
        """A matrix, and a bias of zeros."""
        yield f"{name}.weight", self.matrix(rows, columns, std=std)
        yield f"{name}.bias", np.zeros(rows, np.float32)

    def norm(self, name: str, n: int) -> Tensors:
        """A norm that changes nothing; Qwen2.5-VL's have no bias."""
        yield f"{name}.weight", np.ones(n, np.float32)
        if self._shape.kind != "qwen2.5vl_merger":
            yield f"{name}.bias", np.zeros(n, np.float32)

    def patches(self) -> Tensors:
        """Pixels become numbers; Qwen's models see two frames, and those before 3 have no other positions
        than turned ones."""
        shape = self._shape
        sizes = shape.n_embd, 3, shape.patch_size, shape.patch_size
        side = shape.image_size // shape.patch_size
        yield "v.patch_embd.weight", self.matrix(*sizes)
        if shape.kind in QWEN_KINDS:
            yield "v.patch_embd.weight.1", self.matrix(*sizes)
        if shape.kind not in ("qwen2vl_merger", "qwen2.5vl_merger"):
            yield "v.patch_embd.bias", np.zeros(shape.n_embd, np.float32)
            positions = self.matrix(side * side, shape.n_embd, std=shape.n_embd**0.5)
            yield "v.position_embd.weight", positions

    def spectrum(self) -> Tensors:
        """Half a minute's spectrum becomes 1500 steps of numbers."""
        n = self._shape.n_embd
        for i, n_in in ((1, _N_MEL), (2, n)):
            yield f"a.conv1d.{i}.weight", self.matrix(n, n_in, 3)
            yield f"a.conv1d.{i}.bias", np.zeros((n, 1), np.float32)
        yield "a.position_embd.weight", self.matrix(_N_STEPS, n, std=n**0.5)

    def layer(self, i: int) -> Tensors:
        """A block of the encoder, and what Qwen3-VL takes from its output."""
        shape, name = self._shape, f"{self._prefix}.blk.{i}"
        yield from self.norm(f"{name}.ln1", shape.n_embd)
        yield from self.norm(f"{name}.ln2", shape.n_embd)
        if shape.kind == "qwen3vl_merger":
            yield from self.linear(f"{name}.attn_qkv", 3 * shape.n_embd, shape.n_embd)
        else:
            for part in ("attn_q", "attn_k", "attn_v"):
                tensors = self.linear(f"{name}.{part}", shape.n_embd, shape.n_embd)
                yield next(tensors)
                if part != "attn_k" or shape.kind != "qwen2a":  # whose keys have no bias
                    yield from tensors
        yield from self.linear(f"{name}.attn_out", shape.n_embd, shape.n_embd)
        if shape.kind == "qwen2.5vl_merger":
            yield from self.linear(f"{name}.ffn_gate", shape.n_ff, shape.n_embd)
        yield from self.linear(f"{name}.ffn_up", shape.n_ff, shape.n_embd)
        yield from self.linear(f"{name}.ffn_down", shape.n_embd, shape.n_ff)
        if i < shape.n_deepstack:
            n_merged = shape.n_embd * shape.n_merge**2
            yield from self.norm(f"v.deepstack.{i}.norm", n_merged)
            yield from self.linear(f"v.deepstack.{i}.fc1", n_merged, n_merged)
            yield from self.linear(f"v.deepstack.{i}.fc2", self._n_out, n_merged, _STD)

    def last(self) -> Tensors:
        """The tensors that make embeddings of the encoder's output."""
        shape = self._shape
        n_merged = shape.n_embd * shape.n_merge**2
        yield from self.norm(f"{self._prefix}.post_ln", shape.n_embd)
        if shape.kind == "qwen2a":
            yield from self.linear("mm.a.fc", self._n_out, shape.n_embd, _STD)
        elif shape.kind == "idefics3":
            yield "mm.model.fc.weight", self.matrix(self._n_out, n_merged, std=_STD)
        elif shape.kind == "gemma3":  # stored as it is used: turned
            yield "mm.input_projection.weight", self.matrix(shape.n_embd, self._n_out, std=_STD)
            yield "mm.soft_emb_norm.weight", np.ones(shape.n_embd, np.float32)
        else:
            n_in = n_merged if shape.kind in QWEN_KINDS else shape.n_embd
            yield from self.linear("mm.0", n_in, n_in)
            yield from self.linear("mm.2", self._n_out, n_in, _STD)

    def all(self) -> Tensors:
        """Every tensor."""
        yield from self.spectrum() if self._prefix == "a" else self.patches()
        for i in range(self._shape.n_layer):
            yield from self.layer(i)
        yield from self.last()


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
