"""Models of real shapes that agree: random weights, of which the same token always follows."""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFReader

from serve_app.demo_model.gguf_file import ModelShape
from serve_app.demo_model.random_gguf import SHAPES, write_random_gguf

_N_VOCAB, _N_CTX = SHAPES["0.6b"].n_vocab, SHAPES["0.6b"].n_ctx_train
DRAFT = SHAPES["0.6b"]
TARGET = ModelShape("random-1b", 16, 2048, 8192, 32, 8, 64, _N_VOCAB, _N_CTX)
"""The layers of Llama 3.2 1B, and the draft's vocabulary."""
TINY = SHAPES["tiny"]


def agreeing(folder: Path, shape: ModelShape, dtype: str) -> Path:
    """Such a model, made if it is not there yet. It computes all that others do, and its last norm makes
    zeros of it: of logits that are all alike, the first token's is taken."""
    path = folder / f"agreeing-{shape.name}-{dtype}.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    write_random_gguf(part, shape, dtype)
    reader = GGUFReader(part, "r+")
    (norm,) = (tensor for tensor in reader.tensors if tensor.name == "output_norm.weight")
    norm.data[:] = 0
    reader.data.flush()
    part.rename(path)
    return path
