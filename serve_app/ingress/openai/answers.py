"""The types of OpenAI's answers that are not generated: models, token counts and errors.

Source: OpenAI's API reference, "Models"; `meta` and `status` are llama-server's.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class InputTokens(BaseModel):
    """POST /v1/chat/completions/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ModelMeta(BaseModel):
    """llama-server's `meta`."""

    vocab_type: int
    n_vocab: int
    n_ctx: int
    """As `n_ctx_slot`."""
    n_ctx_train: int
    n_embd: int
    n_params: int
    """Numbers in the model's tensors."""
    size: int
    """Bytes of them."""
    ftype: str
    """How most of them are stored, as `Q4_K - Medium`."""


class ModelStatus(BaseModel):
    """Whether a model is loaded, as llama-server's router tells it."""

    value: Literal["loaded", "unloaded"]


class VersionCard(BaseModel):
    """One version of a model."""

    id: str
    """Its own name, `MODEL@VERSION`."""
    version: str
    weight: float
    """In proportion to the other versions'."""
    share: float
    """The part of requests that it is given now, up to 1: nothing until it is loaded."""
    status: ModelStatus


class ModelCard(BaseModel):
    """One entry of /v1/models."""

    id: str
    aliases: list[str]
    """All names of the model."""
    tags: list[str]
    meta: ModelMeta
    object: Literal["model"] = "model"
    created: int
    """Unix time at which the ingress started."""
    owned_by: Literal["corral"] = "corral"
    n_ctx_slot: int
    """Tokens, prompt and answer together, that one request may have."""
    status: ModelStatus
    capabilities: list[Literal["vision", "audio"]] = []
    """Its capabilities besides text."""
    versions: list[VersionCard] = []
    """The versions that are served under this name, if there are several."""


class ModelList(BaseModel):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorBody(BaseModel):
    """The error, in OpenAI's words."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every answer that is not a success."""

    error: ErrorBody
