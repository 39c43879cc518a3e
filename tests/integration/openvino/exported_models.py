"""Models that OpenVINO's exporter wrote, and a GGUF file of the same weights."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from gguf import GGMLQuantizationType, GGUFWriter, SpecialVocab
from numpy.typing import NDArray

from serve_app.openvino.exported.files import GRAPH
from serve_app.openvino.exported.header import hyperparameters_of
from serve_app.openvino.exported.vocabulary import read

ARCHIVES = Path(__file__).parents[2] / "data" / "openvino"
_MATRICES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def unpacked(name: str, folder: Path) -> Path:
    """The folder of the model of that name, in this one."""
    with tarfile.open(ARCHIVES / f"{name}.tar.xz") as archive:
        archive.extractall(folder / name, filter="data")
    return folder / name


def changed(folder: Path, file: str, **values: object) -> None:
    """Give the object in a file other values."""
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def as_gguf(folder: Path, path: Path) -> Path:
    """The model `qwen3-fp16` as a GGUF file, its weights read from the graph."""
    nodes = {
        node.get_friendly_name(): node
        for node in openvino.Core().read_model(folder / GRAPH).get_ops()
    }
    sizes = hyperparameters_of(folder)
    writer = GGUFWriter(path, sizes.architecture)
    sizes.add_to(writer)
    read(json.loads((folder / "tokenizer.json").read_text()), sizes.n_vocab).add_to(writer)
    SpecialVocab(folder, load_merges=True).add_to_gguf(writer, quiet=True)

    def add(name: str, values: NDArray[Any]) -> None:
        kind = GGMLQuantizationType.F16 if values.ndim > 1 else GGMLQuantizationType.F32
        stored = values.astype(np.float16 if values.ndim > 1 else np.float32)
        writer.add_tensor(name, stored, raw_dtype=kind)

    def norm(name: str) -> NDArray[Any]:
        product = nodes[f"__module.model.{name}/aten::mul/Multiply_1"]
        weights: NDArray[Any] = product.input_value(0).get_node().input_value(0).get_node().data
        return weights.reshape(-1)

    add("token_embd.weight", nodes["self.model.embed_tokens.weight_compressed"].data)
    add("output_norm.weight", norm("norm"))
    for layer in range(sizes.n_layer):
        for theirs, ours in _MATRICES.items():
            matrix = nodes[f"self.model.layers.{layer}.{theirs}.weight_compressed"].data
            add(f"blk.{layer}.{ours}.weight", matrix)
        for theirs, ours in _NORMS.items():
            add(f"blk.{layer}.{ours}.weight", norm(f"layers.{layer}.{theirs}"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
