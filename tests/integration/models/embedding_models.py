"""Tiny models with random weights that are made for something else than to generate; tools has encoders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter, LlamaFileType, PoolingType
from numpy.typing import NDArray

from tools.gguf_file import add_hyperparameters, add_tokenizer
from tools.random_models import model as random_model
from tools.random_models.architectures import write_architecture

_SHAPE = random_model.SHAPES["tiny"]


def finish(writer: GGUFWriter, tensors: dict[str, NDArray[np.float32]]) -> None:
    """Write the tensors and the file."""
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_reranker(path: Path, *, template: str | None) -> None:
    """Qwen3's reranking form: causal, with a classifier of two outputs behind the last token."""
    writer = GGUFWriter(path, "qwen3")
    tokens, merges = random_model.vocabulary(_SHAPE.n_vocab)
    add_hyperparameters(writer, _SHAPE, LlamaFileType.ALL_F32, rope_base=1e6)
    add_tokenizer(writer, tokens, merges)
    writer.add_pooling_type(PoolingType.RANK)
    writer.add_classifier_output_labels(["yes", "no"])
    if template is not None:
        writer.add_string("tokenizer.chat_template.rerank", template)
    tensors = {}
    for index, tensor in enumerate(random_model._tensors(_SHAPE, tokens)):
        kind = random_model._kind(tensor, "f32")
        rng = np.random.default_rng([0, index])
        tensors[tensor.name] = random_model._draw(tensor, kind, rng).astype(np.float32)
    rng = np.random.default_rng(1)
    head = 0.05 * rng.standard_normal((2, _SHAPE.n_embd), np.float32)
    finish(writer, {**tensors, "cls.output.weight": head})


def write_t5(path: Path, architecture: str) -> None:
    """A T5 model, or its encoder alone (`t5encoder`)."""
    metadata = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "attention.head_count": 1,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.relative_buckets_count": 32,
    }
    write_architecture(path, architecture, metadata)
