"""Writes trained eyes as a projector for llama.cpp, their matrices as Q8_0."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import quantize
from numpy.typing import NDArray

from tools.builtin_model.pictures.shape import NORM_EPS, EyesShape

Weights = Mapping[str, NDArray[np.float32]]

_DESCRIPTION = (
    "Eyes of Corral's built-in model, trained from scratch on pictures that a script draws. "
    "See MODEL_CARD.md."
)
_KINDS = {"f16": GGMLQuantizationType.F16, "q8_0": GGMLQuantizationType.Q8_0}


def write_gguf(
    path: str | os.PathLike[str], shape: EyesShape, weights: Weights, *, matrices: str = "q8_0"
) -> None:
    """Write a projector with the weights of `network.Eyes`, by its names for them. `matrices` is their
    format: f16, or q8_0."""
    writer = GGUFWriter(Path(path), "clip")
    try:
        _add_metadata(writer, shape)
        for name, values in _tensors(shape, weights):
            if values.ndim == 1 or name in ("v.position_embd.weight", "v.class_embd"):
                writer.add_tensor(name, values.astype(np.float32))
            elif values.ndim == 4:
                writer.add_tensor(name, values.astype(np.float16))
            else:
                kind = _KINDS[matrices]
                writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _add_metadata(writer: GGUFWriter, shape: EyesShape) -> None:
    writer.add_name("corral-demo's eyes")
    writer.add_description(_DESCRIPTION)
    writer.add_license("Apache-2.0")
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "nemotron_v2_vl")
    writer.add_bool("clip.use_gelu", True)
    numbers = {
        "image_size": shape.image_size,
        "patch_size": shape.patch_size,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff,
        "projection_dim": shape.n_out,
        "block_count": shape.n_layer,
        "attention.head_count": shape.n_head,
        "projector.scale_factor": shape.n_merge,
    }
    for name, number in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", NORM_EPS)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])


def _tensors(shape: EyesShape, weights: Weights) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """llama.cpp's name for each tensor, and the tensor."""
    yield "v.patch_embd.weight", weights["patches.weight"]
    yield "v.patch_embd.bias", weights["patches.bias"]
    yield "v.position_embd.weight", weights["positions"]
    yield "v.class_embd", weights["register"]
    for layer in range(shape.n_layer):
        for part in ("weight", "bias"):
            ours, theirs = f"layers.{layer}", f"v.blk.{layer}"
            yield f"{theirs}.ln1.{part}", weights[f"{ours}.ln1.{part}"]
            yield f"{theirs}.ln2.{part}", weights[f"{ours}.ln2.{part}"]
            for name, values in zip("qkv", np.split(weights[f"{ours}.qkv.{part}"], 3), strict=True):
                yield f"{theirs}.attn_{name}.{part}", values
            yield f"{theirs}.attn_out.{part}", weights[f"{ours}.out.{part}"]
            yield f"{theirs}.ffn_up.{part}", weights[f"{ours}.up.{part}"]
            yield f"{theirs}.ffn_down.{part}", weights[f"{ours}.down.{part}"]
    yield "v.post_ln.weight", weights["norm.weight"]
    yield "v.post_ln.bias", weights["norm.bias"]
    yield "mm.model.mlp.0.weight", weights["merged_norm.weight"]
    yield "mm.model.mlp.1.weight", weights["hidden.weight"]
    yield "mm.model.mlp.3.weight", weights["output.weight"]
