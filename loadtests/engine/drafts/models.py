"""Models of real shapes with random weights: some say always the same, and so agree; others do not."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gguf import GGUFReader

from serve_app.measure.benchmark import usable_cores
from serve_app.measure.quality import quantised
from tools.gguf_file import RMS_EPS, ModelShape
from tools.random_models.architectures import RARE, Metadata, Weights, write_architecture
from tools.random_models.model import SHAPES, write_random_gguf

_N_VOCAB, _N_CTX = SHAPES["0.6b"].n_vocab, SHAPES["0.6b"].n_ctx_train
DRAFT = SHAPES["0.6b"]
TARGET = ModelShape("random-1b", 16, 2048, 8192, 32, 8, 64, _N_VOCAB, _N_CTX)
"""The layers of Llama 3.2 1B, and the draft's vocabulary."""
TINY = SHAPES["tiny"]
_LITTLE = 0.03
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


def blocks(folder: Path, shape: ModelShape, dtype: str) -> Path:
    """A DFlash draft of five layers for such a model, made if it is not there yet. Its embeddings are all
    alike, and layers add little to them, so its guesses depend on hidden states, and are right. It has
    embeddings and output of its own."""
    path = folder / f"agreeing-dflash-{shape.name}-{dtype}.gguf"
    if path.exists():
        return path
    metadata: Metadata = {
        "block_count": 5,
        "block_size": 16,
        "context_length": shape.n_ctx_train,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": RMS_EPS,
        "target_layers": [1 + i * (shape.n_layer - 2) // 4 for i in range(5)],
        "tokenizer.ggml.mask_token_id": 7,
    }

    def change(weights: Weights) -> None:
        for name, values in weights.items():
            if name.endswith(("attn_output.weight", "ffn_down.weight")):
                values *= _LITTLE
        weights["token_embd.weight"][:] = 1
        weights["output.weight"] *= 0
        weights["output.weight"][0] = 1

    with tempfile.TemporaryDirectory(dir=folder) as exact:
        whole = Path(exact) / path.name
        write_architecture(whole, "dflash", metadata, change, without=RARE, n_vocab=shape.n_vocab)
        quantised(whole, dtype.upper(), whole.parent, usable_cores()).rename(path)
    return path


def random(folder: Path, shape: ModelShape, dtype: str) -> Path:
    """A model that says anything, made if it is not there yet."""
    path = folder / f"{shape.name}-{dtype}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_random_gguf(path, shape, dtype)
    return path
