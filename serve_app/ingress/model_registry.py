"""The models that the ingress serves, and the protocol of a client of their engines."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from serve_app.config.defaults import NO_DEFAULTS, ModelDefaults
from serve_app.config.sources import AdapterConfig
from serve_app.errors import ModelNotFoundError
from serve_app.ingress.openai.answers import ModelCard, ModelMeta, ModelStatus, VersionCard
from serve_app.ingress.versions.choice import chosen, shares
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
    Version,
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
    is_on_demand: bool = False
    """Whether it is loaded when somebody asks for it."""
    version: Version | None = None
    """If there are several under one name: this one, with the weight that it has now."""

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


def cards(models: Mapping[str, ServedModel]) -> list[ModelCard]:
    """The entries in /v1/models. Of a model with versions, first the one of the name for all of them."""
    found = []
    for name, versions in families(models).items():
        if versions[0].version is not None:
            found.append(_card_of_all(name, versions))
        found += [card for model in versions for card in model.cards]
    return found


def card_of(models: Mapping[str, ServedModel], name: str) -> ModelCard:
    """The entry of that name. Raises ModelNotFoundError."""
    found = find(models, name)
    if found.version is None or name in {found.id, found.version.full_name}:
        return found.card
    return _card_of_all(found.version.model, families(models)[found.version.model])


def _card_of_all(name: str, versions: Sequence[ServedModel]) -> ModelCard:
    """That of the version with most, and what all of them have."""
    card = chosen(versions, None).card
    parts = present_shares(versions)
    told = [
        VersionCard(
            id=one.id,
            version=one.version.name,
            weight=one.version.weight,
            share=round(parts[one.id], 4),
            status=one.card.status,
        )
        for one in versions
        if one.version is not None
    ]
    names = {name, *card.aliases} - {card.id}
    return card.model_copy(update={"id": name, "aliases": sorted(names), "versions": told})


def present_shares(versions: Iterable[ServedModel]) -> dict[str, float]:
    """The parts of their requests that versions under one name are given now, by their own names."""
    return shares({one.id: one.version.present_weight for one in versions if one.version})


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

    @property
    def version(self) -> Version | None:
        """See ServedModel."""

    def adapted(self, adapter: AdapterUse) -> Self:
        """The model with one of them, under a name of its own."""


M = TypeVar("M", bound=Named)


def adapted_name(model_id: str, adapter: AdapterUse) -> str:
    """Clients' name for a model with one of its adapters."""
    return f"{model_id}:{adapter.id}"


def active(adapters: Iterable[AdapterUse]) -> Adapters:
    """The adapters that a request is computed with: in one order, and without those that change nothing."""
    return tuple(sorted(one for one in adapters if one.scale != 0))


def family(model: Named) -> str:
    """The name that a model has together with its other versions."""
    return model.id if model.version is None else model.version.model


def families(models: Mapping[str, M]) -> dict[str, list[M]]:
    """The versions of each model, by the name of all; models without versions are alone."""
    found: dict[str, list[M]] = {}
    for model in models.values():
        found.setdefault(family(model), []).append(model)
    return found


def find(models: Mapping[str, M], name: str | None, beginning: str | None = None) -> M:
    """The model of that name, with an adapter if it is `MODEL:ADAPTER`, or the first without a name. Of
    several versions under one name, the one for a conversation with this beginning: see `chosen`. Raises
    ModelNotFoundError."""
    if name is not None and name in models:
        return models[name]
    if name is None:
        name = family(next(iter(models.values())))
    if found := [one for one in models.values() if name == family(one) or name in one.aliases]:
        return chosen(found, beginning)
    if adapted := list(_adapted(models.values(), name)):
        return chosen(adapted, beginning)
    if others := [one for one in models.values() if "*" in one.aliases]:
        return chosen(others, beginning)
    raise ModelNotFoundError(name)


def _adapted(models: Iterable[M], name: str) -> Iterator[M]:
    """The models that have an adapter of that name."""
    for model in models:
        for adapter in model.adapters.values():
            names = (model.id, family(model), *model.aliases)
            if name in {f"{one}:{adapter.id}" for one in names}:
                yield model.adapted(adapter)
