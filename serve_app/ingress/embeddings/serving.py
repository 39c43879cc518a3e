"""Writes answers to requests for embeddings. Runs in workers: an answer may be as long as a book."""

from __future__ import annotations

import base64
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from serve_app.ingress.workers.worker import Models

Vectors = NDArray[np.float32]

_INT16_MAX = 32760.0  # what llama-server makes of the largest number with `embd_normalize: 0`


@dataclass(frozen=True, slots=True)
class Found:
    """An engine's results for a request, and the form of the answer."""

    model: str
    vectors: Vectors
    n_tokens: int
    as_base64: bool = False
    norm: int = 2
    """See `normalized`."""
    lengths: tuple[int, ...] | None = None
    """How many vectors each text has, as they are; None if one, that is normalised."""

    def packed(self) -> bytes:
        """As a worker takes it."""
        return pickle.dumps(self, pickle.HIGHEST_PROTOCOL)


def openai(models: Models, found: bytes) -> bytes:
    """The answer to POST /v1/embeddings with a packed `Found`, as JSON."""
    told: Found = pickle.loads(found)
    vectors = normalized(told.vectors, told.norm)
    return _json(
        {
            "object": "list",
            "model": told.model,
            "data": [
                {
                    "object": "embedding",
                    "index": i,
                    "embedding": in_base64(vector) if told.as_base64 else vector.astype(np.float64),
                }
                for i, vector in enumerate(vectors)
            ],
            "usage": usage(told.n_tokens),
        }
    )


def llama(models: Models, found: bytes) -> bytes:
    """The answer to POST /embedding with a packed `Found`, as JSON."""
    told: Found = pickle.loads(found)
    if told.lengths is None:
        of_texts = list(normalized(told.vectors, told.norm)[:, np.newaxis])
    else:
        of_texts = np.split(told.vectors, np.cumsum(told.lengths)[:-1])
    return _json(
        [{"index": i, "embedding": one.astype(np.float64)} for i, one in enumerate(of_texts)]
    )


def usage(n_tokens: int) -> dict[str, int]:
    """OpenAI's `usage` of texts with so many tokens."""
    return {"prompt_tokens": n_tokens, "total_tokens": n_tokens}


def _json(answer: Any) -> bytes:
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def normalized(vectors: Vectors, kind: int) -> Vectors:
    """Each row divided by its norm, by llama-server's `embd_normalize`; rows of zeros stay."""
    if kind < 0:
        return vectors
    sizes = np.abs(vectors.astype(np.float64))
    if kind == 0:
        norms = sizes.max(axis=1, keepdims=True) / _INT16_MAX
    else:
        norms = (sizes**kind).sum(axis=1, keepdims=True) ** (1 / kind)
    return (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)


def in_base64(vector: Vectors) -> str:
    """As OpenAI's clients read it: little-endian 32-bit floats."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
