"""Writes tiny models with random weights of any architecture that llama.cpp knows.

llama.cpp makes a model from metadata alone, and shows each tensor that the model has. So a file needs its
architecture's metadata here, and no list of tensors. Source: llama.cpp, `llama_model_init_from_user` and
tests/test-llama-archs.cpp, where the metadata are from.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from gguf import GGUFValueType, GGUFWriter
from numpy.typing import NDArray

from serve_app.kernels.llama import library
from serve_app.kernels.llama.stored_weights import GgmlTensor
from tools.chat_template import CONTROL_TOKENS
from tools.gguf_file import add_tokenizer
from tools.random_models.model import vocabulary

N_VOCAB = 512
_TYPES = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
_SCALES = (b".scale", b".input_scale")

Metadata = Mapping[str, int | float | bool | Sequence[int] | Sequence[float]]
Weights = dict[str, NDArray[np.float32]]


class _GgufParams(ctypes.Structure):
    """llama.cpp's `gguf_init_params`: no tensors are made."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def write_architecture(
    path: Path,
    architecture: str,
    metadata: Metadata,
    change: Callable[[Weights], None] = lambda weights: None,
    *,
    seed: int = 0,
) -> None:
    """Write a model with these metadata of its architecture, its own prediction layers included. `change`
    may change its weights. Raises ValueError if llama.cpp makes no model of the metadata."""
    header = path.with_suffix(".header")
    try:
        _write(header, architecture, metadata, {})
        shapes = _shapes(header)
    finally:
        header.unlink(missing_ok=True)
    rng = np.random.default_rng(seed)
    weights = {name: drawn(rng, name, shape) for name, shape in shapes.items()}
    change(weights)
    _write(path, architecture, metadata, weights)


def _write(path: Path, architecture: str, metadata: Metadata, tensors: Weights) -> None:
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        name = f"{architecture}.{key}"
        if isinstance(value, Sequence):
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, _TYPES[type(value)])
    tokens, merges = vocabulary(N_VOCAB)
    add_tokenizer(writer, tokens, merges, CONTROL_TOKENS)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shapes(header: Path) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a model's tensors, rows first, without the scales of quantised ones. The file
    has its metadata."""
    shapes: dict[str, tuple[int, ...]] = {}

    def look(address: int, _user_data: Any) -> None:
        tensor = GgmlTensor.from_address(address)
        n_dimensions = max((i + 1 for i, n in enumerate(tensor.ne) if n > 1), default=1)
        if not tensor.name.endswith(_SCALES):
            shapes[tensor.name.decode()] = tuple(reversed(tensor.ne[:n_dimensions]))

    library.init()
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers, params.load_mtp, params.use_extra_bufts = 0, True, False
    read = library.function("gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, _GgufParams)
    found = read(os.fsencode(header), _GgufParams(True, None))
    model = llama_cpp.llama_model_init_from_user(
        found, llama_cpp.llama_model_set_tensor_data_t(look), None, params
    )
    library.function("gguf_free", None, ctypes.c_void_p)(found)
    if not model:
        raise ValueError(f"llama.cpp makes no model of the metadata in {header}.")
    llama_cpp.llama_model_free(model)
    return shapes


def drawn(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Random weights: norms of one, decays below zero, and logits that differ."""
    if "norm" in name and name.endswith("weight"):
        return np.ones(shape, np.float32)
    std = 2.0 if name.startswith("token_embd") else 1.5 * shape[-1] ** -0.5
    values = rng.normal(0, std, shape).astype(np.float32)
    return -np.abs(values) if "ssm_a" in name.split(".") else values
