"""Models with random weights, of the architectures that OpenVINO's backend knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, LlamaFileType

from tools.gguf_file import ModelShape, add_hyperparameters, add_tokenizer
from tools.random_models.model import vocabulary

_FILE_TYPES = {
    Kind.F16: LlamaFileType.MOSTLY_F16,
    Kind.Q4_0: LlamaFileType.MOSTLY_Q4_0,
    Kind.Q8_0: LlamaFileType.MOSTLY_Q8_0,
}
_SHAPE = ModelShape("random", 2, 256, 512, 4, 2, 64, 512, 4096)


@dataclass(frozen=True, slots=True)
class Made:
    """A model with random weights."""

    architecture: str
    kind: Kind = Kind.F16
    biases: bool = False
    tied: bool = False
    n_frequencies: int = 0
    scaling: dict[str, str | float] = field(default_factory=dict)
    stranger: str | None = None
    """The name of one more tensor."""

    def write(self, path: Path) -> Path:
        tokens, merges = vocabulary(_SHAPE.n_vocab)
        writer, rng = GGUFWriter(path, self.architecture), np.random.default_rng(1)
        add_hyperparameters(writer, _SHAPE, _FILE_TYPES[self.kind], rope_base=1e4)
        for key, value in self.scaling.items():
            name = f"{self.architecture}.rope.scaling.{key}"
            if isinstance(value, str):
                writer.add_string(name, value)
            else:
                writer.add_float32(name, value)
        add_tokenizer(writer, tokens, merges)

        def matrix(name: str, rows: int, columns: int) -> None:
            values = rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)
            kept = gguf.quants.quantize(values, self.kind)
            writer.add_tensor(name, kept, raw_dtype=self.kind)

        def vector(name: str, n: int, mean: float = 1.0) -> None:
            writer.add_tensor(name, rng.normal(mean, 0.2, n).astype(np.float32))

        n_embd, n_ff, head = _SHAPE.n_embd, _SHAPE.n_ff, _SHAPE.head_dim
        heads = {"q": _SHAPE.n_head * head, "k": _SHAPE.n_head_kv * head}
        heads["v"] = heads["k"]
        matrix("token_embd.weight", len(tokens), n_embd)
        vector("output_norm.weight", n_embd)
        if not self.tied:
            matrix("output.weight", len(tokens), n_embd)
        if self.n_frequencies:
            vector("rope_freqs.weight", self.n_frequencies, 4.0)
        if self.stranger:
            vector(self.stranger, n_embd)
        for layer in range(_SHAPE.n_layer):
            block = f"blk.{layer}."
            vector(f"{block}attn_norm.weight", n_embd)
            vector(f"{block}ffn_norm.weight", n_embd)
            for name, rows in heads.items():
                matrix(f"{block}attn_{name}.weight", rows, n_embd)
                if self.biases:
                    vector(f"{block}attn_{name}.bias", rows, 0.0)
            matrix(f"{block}attn_output.weight", n_embd, heads["q"])
            for name in ("gate", "up"):
                matrix(f"{block}ffn_{name}.weight", n_ff, n_embd)
            matrix(f"{block}ffn_down.weight", n_embd, n_ff)
            if self.architecture == "qwen3":
                vector(f"{block}attn_q_norm.weight", head, 1.5)
                vector(f"{block}attn_k_norm.weight", head, 1.5)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path
