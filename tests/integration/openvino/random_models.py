"""Models with random weights, of the architectures that OpenVINO's backend knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, LlamaFileType

from serve_app.kernels.openvino.architectures import ARCHITECTURES, Architecture
from tools.gguf_file import ModelShape, add_hyperparameters, add_tokenizer
from tools.random_models.model import vocabulary

_FILE_TYPES = {
    Kind.F16: LlamaFileType.MOSTLY_F16,
    Kind.Q4_0: LlamaFileType.MOSTLY_Q4_0,
    Kind.Q8_0: LlamaFileType.MOSTLY_Q8_0,
    Kind.MXFP4: LlamaFileType.MOSTLY_MXFP4_MOE,
}
_N_EXPERTS, _N_EXPERTS_USED = 8, 2
_SHAPE = ModelShape("random", 2, 256, 512, 4, 2, 64, 512, 4096)


@dataclass(frozen=True, slots=True)
class Made:
    """A model with random weights, with the parts that the architecture's table has."""

    architecture: str
    kind: Kind = Kind.F16
    biases: bool = False
    tied: bool = False
    one_qkv: bool = False
    """Whether queries, keys and values are one matrix."""
    wide_norms: bool = False
    """Whether norms of queries and keys are those of all heads together."""
    outlier: float = 1.0
    """The factor of one value of each layer's norms: activations have a large one there."""
    n_layer: int = _SHAPE.n_layer
    metadata: dict[str, Any] = field(default_factory=dict)
    """More of the architecture's metadata."""
    vectors: dict[str, tuple[int, float]] = field(default_factory=dict)
    """More tensors: their lengths and the mean of their values."""

    def write(self, path: Path) -> Path:
        tokens, merges = vocabulary(_SHAPE.n_vocab)
        writer, rng = GGUFWriter(path, self.architecture), np.random.default_rng(1)
        shape = replace(_SHAPE, n_layer=self.n_layer)
        add_hyperparameters(writer, shape, _FILE_TYPES[self.kind], rope_base=1e4)
        parts = ARCHITECTURES.get(self.architecture, Architecture())
        if parts.experts:
            writer.add_expert_count(_N_EXPERTS)
            writer.add_expert_used_count(_N_EXPERTS_USED)
            writer.add_expert_feed_forward_length(_SHAPE.n_ff)
        for name, value in self.metadata.items():
            _add(writer, f"{self.architecture}.{name}", value)
        add_tokenizer(writer, tokens, merges)
        all_norms = (
            parts.attention_norm,
            parts.attention_post_norm,
            parts.ffn_norm,
            parts.ffn_post_norm,
        )
        norms = tuple(filter(None, all_norms))

        def matrix(name: str, rows: int, columns: int, *more: int) -> None:
            values = rng.normal(0, columns**-0.5, (*more, rows, columns)).astype(np.float32)
            kept = gguf.quants.quantize(values, self.kind)
            writer.add_tensor(name, kept, raw_dtype=self.kind)

        def vector(name: str, n: int | tuple[int, int], mean: float = 1.0) -> None:
            values = rng.normal(mean, 0.2, n).astype(np.float32)
            if name.startswith("blk.") and name.removesuffix(".weight").endswith(norms):
                values[5] *= self.outlier
            writer.add_tensor(name, values)

        n_embd, n_ff, head = _SHAPE.n_embd, _SHAPE.n_ff, _SHAPE.head_dim
        heads = {"q": _SHAPE.n_head * head, "k": _SHAPE.n_head_kv * head}
        heads["v"] = heads["k"]
        matrix("token_embd.weight", len(tokens), n_embd)
        vector("output_norm.weight", n_embd)
        if not self.tied:
            matrix("output.weight", len(tokens), n_embd)
        for name, (n, mean) in self.vectors.items():
            vector(name, n, mean)
        for layer in range(self.n_layer):
            block = f"blk.{layer}."
            for name in norms:
                vector(f"{block}{name}.weight", n_embd)
            for name, rows in (
                {"qkv": sum(heads.values())}.items() if self.one_qkv else heads.items()
            ):
                matrix(f"{block}attn_{name}.weight", rows, n_embd)
                if self.biases:
                    vector(f"{block}attn_{name}.bias", rows, 0.0)
            matrix(f"{block}attn_output.weight", n_embd, heads["q"])
            suffixes: dict[str, tuple[int, ...]] = {"": ()}
            if parts.experts:
                vector(f"{block}ffn_gate_inp.weight", (_N_EXPERTS, n_embd), 0.0)
                suffixes = {"_exps": (_N_EXPERTS,)}
            if parts.shared_expert:
                vector(f"{block}ffn_gate_inp_shexp.weight", n_embd, 0.0)
                suffixes["_shexp"] = ()
            for suffix, more in suffixes.items():
                if not parts.gate_in_up:
                    matrix(f"{block}ffn_gate{suffix}.weight", n_ff, n_embd, *more)
                n_up = 2 * n_ff if parts.gate_in_up else n_ff
                matrix(f"{block}ffn_up{suffix}.weight", n_up, n_embd, *more)
                matrix(f"{block}ffn_down{suffix}.weight", n_embd, n_ff, *more)
            if parts.clamped_experts:
                for name, n in (("gate", n_ff), ("up", n_ff), ("down", n_embd)):
                    vector(f"{block}ffn_{name}_exps.bias", (_N_EXPERTS, n), 0.0)
                vector(f"{block}ffn_gate_inp.bias", _N_EXPERTS, 0.0)
                vector(f"{block}attn_output.bias", n_embd, 0.0)
            if parts.sinks:
                vector(f"{block}attn_sinks.weight", _SHAPE.n_head, 2.0)
            if parts.head_norms:
                for name in "qk":
                    n = heads[name] if self.wide_norms else head
                    vector(f"{block}attn_{name}_norm.weight", n, 1.5)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _add(writer: GGUFWriter, name: str, value: Any) -> None:
    add: dict[type, Callable[[str, Any], None]] = {
        str: writer.add_string,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    add[type(value)](name, value)
