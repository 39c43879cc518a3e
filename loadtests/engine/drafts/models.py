"""Models of real shapes with random weights: some say always the same, and so agree; others do not."""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFReader

from tools.gguf_file import ModelShape
from tools.random_models.model import SHAPES, write_random_gguf

_N_VOCAB, _N_CTX = SHAPES["0.6b"].n_vocab, SHAPES["0.6b"].n_ctx_train
DRAFT = SHAPES["0.6b"]
TARGET = ModelShape("random-1b", 16, 2048, 8192, 32, 8, 64, _N_VOCAB, _N_CTX)
"""The layers of Llama 3.2 1B, and the draft's vocabulary."""
TINY = SHAPES["tiny"]
_LAST_NORMS = ("output_norm.weight", "token_embd_norm.weight")  # the second is LFM2's


def agreeing(folder: Path, shape: ModelShape, dtype: str) -> Path:
    """Such a model, made if it is not there yet. It computes all that others do, and its last norm makes
    zeros of it: of logits that are all alike, the first token's is taken."""
    path = folder / f"agreeing-{shape.name}-{dtype}.gguf"
    if path.exists():
        return path
    part = random(folder, shape, dtype).rename(path.with_suffix(".part"))
    reader = GGUFReader(part, "r+")
    (norm,) = (tensor for tensor in reader.tensors if tensor.name in _LAST_NORMS)
    norm.data[:] = 0
    reader.data.flush()
    part.rename(path)
    return path


def random(folder: Path, shape: ModelShape, dtype: str) -> Path:
    """A model that says anything, made if it is not there yet."""
    path = folder / f"{shape.name}-{dtype}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_random_gguf(path, shape, dtype)
    return path
