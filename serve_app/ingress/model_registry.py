"""The models as the ingress knows them, and the way to their engines."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from serve_app.errors import ModelNotFoundError
from serve_app.ingress.openai.protocol import ModelCard
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.types import GenerationRequest, ReplicaStats, RequestRecord, SlotAction, TokenDelta


class EngineClient(Protocol):
    """The way to one model's engines."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta]:
        """Run a request; raises CorralError. Closing the generator ends the request."""

    async def embed(self, texts: tuple[tuple[int, ...], ...], client: str) -> NDArray[np.float32]:
        """A vector, not normalised, for each text of a client, given as tokens; of a reranking model, one
        score each. Raises CorralError. Cancelling it ends the request."""

    async def stats(self) -> list[ReplicaStats]:
        """What each replica tells about itself. Raises EngineUnavailableError if one does not answer."""

    async def replica_states(self) -> dict[str, int]:
        """How many replicas are in which state, by Serve's names (`STARTING`, `RUNNING`, `STOPPING`).
        Raises EngineClosedError if the application is being stopped."""

    async def act_on_slot(
        self, replica_id: str, action: str, slot_id: int, name: str
    ) -> SlotAction:
        """Save, restore or erase one replica's slot. Raises CorralError."""

    async def explain(self, wanted: str) -> list[RequestRecord]:
        """What the replicas remember of a request. Raises EngineUnavailableError if one does not answer."""


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """One model."""

    id: str
    n_ctx_slot: int
    tokenizer: Tokenizer
    engine: EngineClient
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def card(self) -> ModelCard:
        """Its entry in /v1/models."""
        return ModelCard(id=self.id, created=self.created, n_ctx_slot=self.n_ctx_slot)


def find(models: Mapping[str, ServedModel], model_id: str | None) -> ServedModel:
    """The model of that name, or the first without one. Raises ModelNotFoundError."""
    if model_id is None:
        return next(iter(models.values()))
    if model_id not in models:
        raise ModelNotFoundError(model_id)
    return models[model_id]
