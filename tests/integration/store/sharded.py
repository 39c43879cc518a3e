"""Splits a GGUF model into shards, as llama-gguf-split does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter


def split(source: Path, stem: Path, n_shards: int) -> list[Path]:
    """The files `STEM-00001-of-0000N.gguf`: metadata and vocabulary are in the first, tensors in all."""
    reader = GGUFReader(source)
    tensors = list(reader.tensors)
    paths = []
    for i in range(n_shards):
        path = stem.with_name(f"{stem.name}-{i + 1:05d}-of-{n_shards:05d}.gguf")
        field = reader.get_field("general.architecture")
        assert field is not None
        writer = GGUFWriter(path, field.contents())
        if i == 0:
            _copy_metadata(reader, writer)
        writer.add_key_value("split.no", i, GGUFValueType.UINT16)
        writer.add_key_value("split.count", n_shards, GGUFValueType.UINT16)
        writer.add_key_value("split.tensors.count", len(tensors), GGUFValueType.INT32)
        for tensor in tensors[i::n_shards]:
            data: Any = np.array(tensor.data)
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


def _copy_metadata(reader: GGUFReader, writer: GGUFWriter) -> None:
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind, *inner = field.types
        writer.add_key_value(
            field.name, field.contents(), kind, sub_type=inner[-1] if inner else None
        )
