"""OpenAI's answers that are not generated: models, token counts and errors.

Source: OpenAI's API reference, "Models"; `meta` and `status` are llama-server's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel

from serve_app.server.http import request_context
from serve_app.server.model_registry import ServedModel


class InputTokens(BaseModel):
    """POST /v1/chat/completions/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ModelMeta(BaseModel):
    """llama-server's `meta`."""

    vocab_type: int
    n_vocab: int
    n_ctx: int
    """The tokens of one slot, as `n_ctx_slot`."""
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


class FailedStatus(ModelStatus):
    """A model that is left out, or whose engine cannot start: `failed` is llama-server's."""

    failed: Literal[True] = True
    reason: str


class ModelCard(BaseModel):
    """An entry of /v1/models."""

    id: str
    aliases: list[str]
    """All names of the model."""
    tags: list[str]
    meta: ModelMeta | None
    """Null for a model whose file cannot be read."""
    object: Literal["model"] = "model"
    created: int
    """Unix time at which the ingress started."""
    owned_by: Literal["corral"] = "corral"
    n_ctx_slot: int
    """Tokens, prompt and answer together, that one request may have."""
    status: ModelStatus | FailedStatus
    capabilities: list[Literal["vision", "audio", "embeddings", "rerank", "classify"]] = []
    """The kinds of input that a model that writes text takes besides text. One that is not made to
    write text has what it is made for."""


class ModelList(BaseModel):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: Sequence[ModelCard]


class AnthropicModelCard(ModelCard):
    """An entry for Anthropic's clients."""

    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    """The time of `created`, in RFC 3339's form."""
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int

    @classmethod
    def of(cls, card: ModelCard) -> AnthropicModelCard:
        """The entry with the fields that Anthropic's clients read."""
        created_at = datetime.fromtimestamp(card.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return cls(
            **dict(card),
            display_name=card.id,
            created_at=created_at,
            max_input_tokens=card.n_ctx_slot,
        )


class AnthropicModelList(ModelList):
    """GET /v1/models for Anthropic's clients: all models are on one page."""

    data: Sequence[AnthropicModelCard]
    has_more: Literal[False] = False
    first_id: str | None
    last_id: str | None


def model_card(model: ServedModel) -> ModelCard:
    """The model's entry in /v1/models."""
    status = ModelStatus(value="loaded" if model.engine.is_loaded else "unloaded")
    if model.problem or model.engine.failure is not None:
        reason = model.problem or str(model.engine.failure)
        status = FailedStatus(value=status.value, reason=reason)
    return ModelCard(
        id=model.id,
        aliases=sorted({model.id, *model.aliases} - {"*"}),
        tags=sorted(model.tags),
        meta=None if model.problem else _model_meta(model),
        created=model.created,
        n_ctx_slot=model.n_ctx_slot,
        status=status,
        capabilities=[
            *(["vision"] if model.sees else ()),
            *(["audio"] if model.hears else ()),
            *([model.purpose] if model.purpose != "text" else ()),
        ],
    )


def _model_meta(model: ServedModel) -> ModelMeta:
    file = model.tokenizer.model
    return ModelMeta(
        vocab_type=file.vocab_type,
        n_vocab=file.n_vocab,
        n_ctx=model.n_ctx_slot,
        n_ctx_train=file.n_ctx_train,
        n_embd=file.n_embd,
        n_params=file.n_params,
        size=file.n_bytes,
        ftype=file.file_type,
    )


def model_cards(models: Mapping[str, ServedModel]) -> list[ModelCard]:
    """The entries in /v1/models of what the caller may use, also of the models with an adapter."""
    cards: list[ModelCard] = []
    may_use = request_context.current().may_use
    for model in models.values():
        adapted = (model.with_adapter(adapter) for adapter in model.adapters.values())
        cards += (model_card(one) for one in (model, *adapted) if may_use(one.id))
    return cards
