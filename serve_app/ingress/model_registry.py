"""The models that the ingress serves, and the protocol of a client of their engines."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from serve_app.config.defaults import NO_DEFAULTS, ModelDefaults
from serve_app.errors import ModelNotFoundError
from serve_app.ingress.openai.protocol import ModelCard, ModelMeta
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.types import (
    Accepted,
    FetchingReplica,
    GenerationRequest,
    ReplicaStats,
    RequestRecord,
    SlotAction,
    TokenDelta,
)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Answers(Generic[T]):
    """What a model's replicas answered."""

    found: tuple[T, ...]
    missing: tuple[str, ...] = ()
    """The ids of replicas that run and did not answer in time."""


class EngineClient(Protocol):
    """The way to one model's engines."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Accepted | TokenDelta]:
        """Run a request: its acceptance, then its deltas. Raises CorralError. Closing the generator ends
        the request."""

    async def embed(
        self, texts: tuple[tuple[int, ...], ...], client: str, *, background: bool = False
    ) -> NDArray[np.float32]:
        """A vector, not normalised, for each text of a client, given as tokens; of a reranking model, one
        score each. For `background`, see GenerationRequest. Raises CorralError. Cancelling it ends the
        request."""

    async def stats(self) -> Answers[ReplicaStats]:
        """What each replica tells about itself. Raises nothing because of a late one."""

    async def replica_states(self) -> dict[str, int]:
        """How many replicas are in which state, by Serve's names (`STARTING`, `RUNNING`, `STOPPING`).
        Raises EngineClosedError if the application is being stopped."""

    async def fetching(self) -> Sequence[FetchingReplica]:
        """The replicas that fetch their model now. Nothing if nobody knows in time."""

    async def act_on_slot(
        self, replica_id: str, action: str, slot_id: int, name: str
    ) -> SlotAction:
        """Save, restore or erase one replica's slot. Raises CorralError."""

    async def explain(self, wanted: str) -> Answers[RequestRecord]:
        """What the replicas remember of a request. Raises nothing because of a late one."""


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """One model."""

    id: str
    n_ctx_slot: int
    tokenizer: Tokenizer
    engine: EngineClient
    aliases: Sequence[str] = ()
    """Its other names; `*` is all that no model has."""
    tags: Sequence[str] = ()
    defaults: ModelDefaults = NO_DEFAULTS
    """What requests have where they say nothing."""
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def card(self) -> ModelCard:
        """Its entry in /v1/models."""
        told = self.tokenizer
        return ModelCard(
            id=self.id,
            aliases=sorted({self.id, *self.aliases} - {"*"}),
            tags=sorted(self.tags),
            meta=ModelMeta(
                vocab_type=told.vocab_type,
                n_vocab=told.n_vocab,
                n_ctx=self.n_ctx_slot,
                n_ctx_train=told.n_ctx_train,
                n_embd=told.n_embd,
                n_params=told.n_params,
                size=told.n_bytes,
                ftype=told.file_type,
            ),
            created=self.created,
            n_ctx_slot=self.n_ctx_slot,
        )


class Named(Protocol):
    """A model with other names besides its id."""

    @property
    def aliases(self) -> Sequence[str]:
        """`*` is all that no model has."""


M = TypeVar("M", bound=Named)


def find(models: Mapping[str, M], name: str | None) -> M:
    """The model of that name, or the first without one. Raises ModelNotFoundError."""
    if name is None:
        return next(iter(models.values()))
    if name in models:
        return models[name]
    for wanted in (name, "*"):
        for model in models.values():
            if wanted in model.aliases:
                return model
    raise ModelNotFoundError(name)
