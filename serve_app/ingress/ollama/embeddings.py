"""Ollama's requests for embeddings, and the answers, which may be as long as a book. Runs in workers."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import numpy as np
import orjson

from serve_app.ingress.embeddings.preparation import Texts, check_makes_embeddings, checked
from serve_app.ingress.embeddings.serving import Vectors, normalized
from serve_app.ingress.generation.tokenization import refuse_huge
from serve_app.ingress.http.json_body import parsed
from serve_app.ingress.model_registry import ModelInfo
from serve_app.ingress.ollama import names
from serve_app.ingress.ollama.protocol import OllamaEmbeddingsRequest, OllamaEmbedRequest
from serve_app.ingress.workers.worker import Models


@dataclass(frozen=True, slots=True)
class Asked:
    """The prepared request."""

    model: str
    """Its id."""
    name: str
    """The model's, as it was asked."""
    texts: Texts
    """None: the model is loaded, which it is anyway."""
    dimensions: int | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """An engine's results for a request."""

    name: str
    vectors: Vectors
    n_tokens: int
    total_ns: int

    def packed(self) -> bytes:
        """As a worker takes it."""
        return pickle.dumps(self, pickle.HIGHEST_PROTOCOL)


def embed(models: Models, body: bytes) -> Asked:
    """POST /api/embed. Raises CorralError."""
    asked = parsed(OllamaEmbedRequest, body)
    model = names.find(models, asked.model)
    texts = _texts(model, asked.texts, "input", cut=asked.truncate is not False)
    return Asked(
        model.id,
        asked.model or names.displayed(model.id),
        texts,
        asked.dimensions or None,
        asked.user,
    )


def embeddings(models: Models, body: bytes) -> Asked:
    """POST /api/embeddings. Raises CorralError."""
    asked = parsed(OllamaEmbeddingsRequest, body)
    model = names.find(models, asked.model)
    texts = _texts(model, [asked.prompt] if asked.prompt else [], "prompt", cut=True)
    return Asked(model.id, asked.model or names.displayed(model.id), texts)


def _texts(model: ModelInfo, texts: list[str], field: str, *, cut: bool) -> Texts:
    check_makes_embeddings(model)
    if not texts:
        return ()
    for text in texts:
        refuse_huge(field, len(text))
    found = [model.tokenizer.encode(text) for text in texts]
    if cut:
        found = [_cut(model, tokens) for tokens in found]
    return checked(model, found, field)


def _cut(model: ModelInfo, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """As many as the model takes; one that ends every text stays."""
    most = model.n_ctx_slot
    if len(tokens) <= most:
        return tokens
    nothing = model.tokenizer.encode("")
    ending = tokens[-1:] if nothing[-1:] == tokens[-1:] else ()
    return tokens[: most - len(ending)] + ending


def several(models: Models, found: bytes) -> bytes:
    """The answer to POST /api/embed with a packed `Found`, as JSON."""
    told: Found = pickle.loads(found)
    return _json(
        {
            "model": told.name,
            "embeddings": normalized(told.vectors, 2),
            "total_duration": told.total_ns,
            "load_duration": 0,
            "prompt_eval_count": told.n_tokens,
        }
    )


def one(models: Models, found: bytes) -> bytes:
    """The answer to POST /api/embeddings with a packed `Found`, as JSON: the vector as the model made
    it."""
    told: Found = pickle.loads(found)
    return _json({"embedding": told.vectors[0].astype(np.float64)})


def _json(answer: object) -> bytes:
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
