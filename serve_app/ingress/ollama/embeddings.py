"""Ollama's requests for embeddings, and the answers, which may be as long as a book. Runs in workers."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import numpy as np
import orjson

from serve_app.ingress.embeddings.preparation import (
    ComputedVectors,
    Texts,
    check_makes_embeddings,
    checked,
    normalized,
)
from serve_app.ingress.generation.preparation import refuse_huge
from serve_app.ingress.http.request_model import parsed
from serve_app.ingress.model_registry import ModelInfo, Models, find, full_name
from serve_app.ingress.ollama.protocol import OllamaEmbeddingsRequest, OllamaEmbedRequest


@dataclass(frozen=True, slots=True)
class OllamaTexts:
    """The prepared request for vectors."""

    model: str
    """The model's id."""
    name: str
    """The model's name, as the client sent it."""
    texts: Texts
    """None: the model is loaded, which it is anyway."""
    dimensions: int | None = None
    user: str | None = None


def embed(models: Models, body: bytes) -> OllamaTexts:
    """POST /api/embed. Raises CorralError."""
    request = parsed(OllamaEmbedRequest, body)
    model = find(models, request.model)
    texts = _texts(model, request.texts, "input", cut=request.truncate is not False)
    return OllamaTexts(
        model.id,
        request.model or full_name(model.id),
        texts,
        request.dimensions or None,
        request.user,
    )


def embeddings(models: Models, body: bytes) -> OllamaTexts:
    """POST /api/embeddings. Raises CorralError."""
    request = parsed(OllamaEmbeddingsRequest, body)
    model = find(models, request.model)
    texts = _texts(model, [request.prompt] if request.prompt else [], "prompt", cut=True)
    return OllamaTexts(model.id, request.model or full_name(model.id), texts)


def _texts(model: ModelInfo, texts: list[str], field: str, *, cut: bool) -> Texts:
    check_makes_embeddings(model)
    if not texts:
        return ()
    for text in texts:
        refuse_huge(field, len(text))
    encoded = [model.tokenizer.encode_for_embedding(text) for text in texts]
    if cut:
        encoded = [_cut(model, tokens) for tokens in encoded]
    return checked(model, encoded, field)


def _cut(model: ModelInfo, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """As many tokens as the model takes. A token that ends every text stays."""
    most = model.longest_text
    if len(tokens) <= most:
        return tokens
    nothing = model.tokenizer.encode_for_embedding("")
    ending = tokens[-1:] if nothing[-1:] == tokens[-1:] else ()
    return tokens[: most - len(ending)] + ending


def several(models: Models, packed: bytes) -> bytes:
    """The answer to POST /api/embed with a packed `ComputedVectors`, as JSON."""
    result: ComputedVectors = pickle.loads(packed)
    return _json(
        {
            "model": result.model,
            "embeddings": normalized(result.vectors, 2),
            "total_duration": result.total_ns,
            "load_duration": 0,
            "prompt_eval_count": result.n_tokens,
        }
    )


def single(models: Models, packed: bytes) -> bytes:
    """The answer to POST /api/embeddings with a packed `ComputedVectors`, as JSON. The vector stays as the
    model made it."""
    result: ComputedVectors = pickle.loads(packed)
    return _json({"embedding": result.vectors[0].astype(np.float64)})


def _json(answer: object) -> bytes:
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
