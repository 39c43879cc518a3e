"""The models that the ingress serves, and the protocol of a client of their engines."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from serve_app.config.defaults import NO_DEFAULTS, ModelDefaults
from serve_app.config.sources import AdapterConfig
from serve_app.errors import ModelNotFoundError
from serve_app.ingress.openai.protocol import ModelCard, ModelMeta, ModelStatus
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.types import (
    Accepted,
    Adapters,
    AdapterUse,
    FetchingReplica,
    GenerationRequest,
    ReplicaStats,
    RequestRecord,
    Size,
    SlotAction,
    TokenDelta,
)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Answers(Generic[T]):
    """The answers of a model's replicas."""

    found: tuple[T, ...]
    missing: tuple[str, ...] = ()
    """The ids of replicas that run and did not answer in time."""


NumberedAdapters = Mapping[int, AdapterUse]
"""A model's LoRA adapters by what llama-server's API calls them. A number is never another one's."""


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

    @property
    def is_loaded(self) -> bool:
        """Whether an engine runs, as far as is known here."""

    async def load(self) -> None:
        """Returns when an engine runs. Raises CorralError."""

    async def release(self) -> None:
        """An engine that is loaded on demand may go, if nobody uses it. Raises nothing because of a late
        one."""

    async def load_adapter(self, adapter: AdapterConfig) -> None:
        """Have one more LoRA adapter, at all replicas. Raises CorralError."""

    async def unload_adapter(self, adapter_id: str) -> None:
        """Have one no more that was loaded so. Raises CorralError."""

    async def stats(self) -> Answers[ReplicaStats]:
        """Each replica's state and statistics. Raises nothing because of a late one."""

    async def replica_states(self) -> dict[str, int]:
        """How many replicas are in which state, by Serve's names (`STARTING`, `RUNNING`, `STOPPING`).
        Raises EngineClosedError if the application is being stopped."""

    async def fetching(self) -> Sequence[FetchingReplica]:
        """The replicas that fetch their model now. Nothing if nobody knows in time."""

    async def media_tokens(self, sizes: Sequence[Size]) -> int:
        """How many tokens pictures of these widths and heights have. Raises CorralError."""

    async def act_on_slot(
        self, replica_id: str, action: str, slot_id: int, name: str
    ) -> SlotAction:
        """Save, restore or erase one replica's slot. Raises CorralError."""

    async def explain(self, wanted: str) -> Answers[RequestRecord]:
        """The replicas' records of a request. Raises nothing because of a late one."""


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
    """The defaults of requests."""
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    adapters: NumberedAdapters = dataclasses.field(default_factory=dict)
    """LoRA adapters that it has, each with its scale where it is asked for by its name."""
    used: Adapters = ()
    """Those that its requests have, if they do not say."""
    sees: bool = False
    """Whether it has a projector for pictures, ..."""
    hears: bool = False
    """... and for sounds."""

    def adapted(self, adapter: AdapterUse) -> ServedModel:
        """The model with one of its adapters, under a name of its own."""
        return dataclasses.replace(
            self, id=adapted_name(self.id, adapter), aliases=(), used=active([adapter])
        )

    @property
    def cards(self) -> list[ModelCard]:
        """Its entries in /v1/models: its own, and those of its adapters."""
        return [self.card, *(self.adapted(one).card for one in self.adapters.values())]

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
            status=ModelStatus(value="loaded" if self.engine.is_loaded else "unloaded"),
            capabilities=[*(["vision"] if self.sees else ()), *(["audio"] if self.hears else ())],
        )


class Named(Protocol):
    """A model with other names besides its id."""

    @property
    def id(self) -> str:
        """Its name."""

    @property
    def aliases(self) -> Sequence[str]:
        """`*` is all that no model has."""

    @property
    def adapters(self) -> NumberedAdapters:
        """Its LoRA adapters."""

    def adapted(self, adapter: AdapterUse) -> Self:
        """The model with one of them, under a name of its own."""


M = TypeVar("M", bound=Named)


def adapted_name(model_id: str, adapter: AdapterUse) -> str:
    """Clients' name for a model with one of its adapters."""
    return f"{model_id}:{adapter.id}"


def active(adapters: Iterable[AdapterUse]) -> Adapters:
    """The adapters that a request is computed with: in one order, and without those that change nothing."""
    return tuple(sorted(one for one in adapters if one.scale != 0))


def find(models: Mapping[str, M], name: str | None) -> M:
    """The model of that name, with an adapter if it is `MODEL:ADAPTER`, or the first without a name. Raises
    ModelNotFoundError."""
    if name is None:
        return next(iter(models.values()))
    if name in models:
        return models[name]
    for model in models.values():
        if name in model.aliases:
            return model
    for model in models.values():
        for adapter in model.adapters.values():
            if name in {f"{one}:{adapter.id}" for one in (model.id, *model.aliases)}:
                return model.adapted(adapter)
    for model in models.values():
        if "*" in model.aliases:
            return model
    raise ModelNotFoundError(name)
