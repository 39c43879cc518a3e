"""Slices of models: some layers, and the same part of the vocabulary, as a GGUF file of its own.

Whatever computes a slice takes about that part of the time. So kernels are compared by slices: to convert a
whole model for that would take minutes. The texts of the vocabulary are left out."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

from serve_app.base.formats import Quantization
from serve_app.base.progress import Report
from serve_app.kernels.llama.model import Model
from serve_app.kernels.openvino import convert
from serve_app.kernels.openvino.gguf_model import GgufModel, block_of

# The bytes of a slice, if so many layers or a period have no more. A processor's cache would hold too much
# of fewer bytes. Smaller files are their own slices, as they are converted in seconds.
_BYTES, _LEAST_LAYERS = 2**29, 2
# A slice has a multiple of these tokens. With OpenVINO, a product with 84,408 rows took a third longer than
# its part of a product with 151,936 rows.
_TOKENS = 256
_Tensor = tuple[str, NDArray[Any], GGMLQuantizationType]


@contextmanager
def converted_slice(
    model: Model,
    max_bytes: int | None,
    report: Report,
    quantizations: Sequence[Quantization] = ("none",),
) -> Iterator[tuple[Path, float, float]]:
    """A slice, which is converted in each of these ways until the end. Then its part of the model's time,
    and the seconds that it takes to convert the whole model in one of them. A small model is its own slice,
    and stays converted and open.

    Raises ConfigError and OSError."""
    whole, models = convert.read_model(model.files), convert.converted_models(max_bytes)
    layers = sliced_layers(whole)
    if len(layers) == len(whole.layers):
        for quantization in quantizations:
            convert.converted_of(model, max_bytes, report, quantization=quantization)
        yield model.path, 1.0, 0.0
        return
    name = f"{convert.name_of(model.fingerprint())}-slice"
    with models.locks.alone(name, wait=True):
        tensors = _tensors(whole, layers)
        n_bytes = sum(data.nbytes for _, data, _ in tensors)
        folder = models.make_room(name, n_bytes)
        try:
            path = folder / f"{model.path.stem}-slice.gguf"
            _write(path, whole, layers, tensors)
            part = Model(path, vocab_only=True)
            names = [convert.name_of(part.fingerprint(), quantization=q) for q in quantizations]
            for converted in names:
                with models.locks.alone(converted, wait=True):
                    pass  # the conversion of a start that was killed goes on
                models.remove(converted)  # what is there already would seem to take no time
            began = time.monotonic()
            try:
                for quantization in quantizations:
                    convert.converted_of(part, max_bytes, report, quantization=quantization)
                seconds = (time.monotonic() - began) / len(quantizations)
                seconds *= sum(tensor.data.nbytes for tensor in whole.tensors) / n_bytes
                yield path, len(layers) / len(whole.layers), seconds
            finally:
                for converted in names:
                    models.leave(converted)
                    models.remove(converted)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def sliced_layers(model: GgufModel) -> list[int]:
    """The layers of a slice: periods of layers that differ, evenly spread, as layers at both ends often
    have formats with more bits. All layers of a small model."""
    pattern = model.value("attention.sliding_window_pattern")
    windows = pattern if isinstance(pattern, int) else model.kind.windows
    period = math.lcm(windows or 1, model.kind.unrotated or 1)
    n_periods = len(model.layers) // period
    n_bytes = sum(tensor.data.nbytes for tensor in model.tensors)
    n = max(math.ceil(_LEAST_LAYERS / period), n_periods * _BYTES // n_bytes)
    if n >= n_periods:
        return list(model.layers)
    starts = (int((i + 0.5) * n_periods / n) * period for i in range(n))
    return [start + i for start in starts for i in range(period)]


def _tensors(model: GgufModel, layers: Sequence[int]) -> list[_Tensor]:
    """The tensors of these layers, by their numbers in the slice, and rows of the matrices around them."""
    names = {f"blk.{layer}": f"blk.{i}" for i, layer in enumerate(layers)}
    tensors = []
    for tensor in model.tensors:
        name, data, block = tensor.name, tensor.data, block_of(tensor.name)
        if block is not None and block not in names:
            continue
        if block is not None:
            name = names[block] + name.removeprefix(block)
        elif name.split(".")[0] in ("token_embd", "output"):
            n_tokens = len(data) * len(layers) // len(model.layers)
            data = data[: max(1, n_tokens // _TOKENS) * _TOKENS]
        tensors.append((name, data, tensor.kind))
    return tensors


def _write(path: Path, model: GgufModel, layers: Sequence[int], tensors: Sequence[_Tensor]) -> None:
    writer = GGUFWriter(path, model.architecture)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(next(len(data) for name, data, _ in tensors if "token_embd." in name))
    own = f"{model.architecture}."
    for key, field in model.metadata.items():
        if not key.startswith((own, "general.")) or key in writer.kv_data[0]:
            continue
        value, (kind, *kinds) = field.contents(), field.types
        if key == f"{own}block_count":
            value = len(layers)
        elif kinds and len(value) == len(model.layers) and not key.startswith(f"{own}rope."):
            value = [value[layer] for layer in layers]
        writer.add_key_value(key, value, kind, next(iter(kinds), None))
    for name, data, stored in tensors:
        writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
