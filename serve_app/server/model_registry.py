"""The models that the ingress serves, and the protocol of a client of their engines."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import (
    AsyncGenerator,
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, Protocol, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from serve_app.base.errors import CorralError, EngineUnavailableError, ModelNotFoundError
from serve_app.base.formats import EmbeddingPooling
from serve_app.base.values.adapters import Adapters, AdapterUse
from serve_app.base.values.answers import Accepted, TokenDelta
from serve_app.base.values.media import Medium, Size
from serve_app.base.values.replicas import FetchingReplica, ReplicaStats, RequestRecord, SlotAction
from serve_app.base.values.requests import GenerationRequest
from serve_app.config.defaults import NO_DEFAULTS, ModelDefaults
from serve_app.config.sources import AdapterConfig
from serve_app.kernels.llama.vision.senses import NO_SENSES, Senses
from serve_app.prompt.tokenizer import Tokenizer, open_tokenizer
from serve_app.server.http import request_context

if TYPE_CHECKING:
    from serve_app.server.media.decoder import MediaDecoder

logger = logging.getLogger("corral.ingress")

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Answers(Generic[T]):
    found: tuple[T, ...]
    missing: tuple[str, ...] = ()
    """The ids of replicas that run and did not answer in time."""


Purpose = Literal["text", "embeddings", "rerank", "classify"]
NumberedAdapters = Mapping[int, AdapterUse]
"""A model's LoRA adapters by what llama-server's API calls them. A number is never another one's."""


class EngineClient(Protocol):
    """The way to one model's engines."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Accepted | TokenDelta]:
        """Run a request: its acceptance, then its deltas. Closing ends it. Raises CorralError."""

    async def embed(
        self,
        texts: tuple[tuple[int, ...], ...],
        client: str,
        *,
        background: bool = False,
        media: tuple[Medium, ...] = (),
    ) -> NDArray[np.float32]:
        """A vector, not normalised, for each text of a client. Texts are tokens, with MEDIUM for each of
        `media`. A model with a classifier gives its outputs. For `background`, see GenerationRequest.
        Raises CorralError. Cancelling it ends the request."""

    @property
    def is_loaded(self) -> bool:
        """Whether an engine runs, as far as is known here."""

    @property
    def failure(self) -> CorralError | None:
        """The reason why no engine can be started, as far as is known here."""

    async def load(self) -> None:
        """Returns when an engine runs. Raises CorralError."""

    async def release(self) -> None:
        """An engine that is loaded on demand may go, if nobody uses it. A late one raises nothing."""

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

    async def explain(self, request_id: str) -> Answers[RequestRecord]:
        """The replicas' records of a request. Raises nothing because of a late one."""


@dataclasses.dataclass(frozen=True)
class ModelEntry:
    """A model under its names, as the configuration has it."""

    id: str
    n_ctx_slot: int
    """Tokens that one request may have, and a text to be embedded or ranked."""
    _: dataclasses.KW_ONLY
    aliases: Sequence[str] = ()
    """Other names; `*` is all that no model has."""
    tags: Sequence[str] = ()
    defaults: ModelDefaults = NO_DEFAULTS
    """The defaults of the configuration, which take the place of those that the file recommends."""
    adapters: NumberedAdapters = dataclasses.field(default_factory=dict)
    """The model's LoRA adapters, each with its scale where it is asked for by its name."""
    is_on_demand: bool = False
    waits_for_requests: bool = False
    """Whether it may be that no engine runs because nobody has asked."""
    problem: str = ""
    """The reason why the model is left out, though others are served."""


@dataclasses.dataclass(frozen=True)
class ModelFile(ModelEntry):
    """The file that has a model's vocabulary. Workers get it as MessagePack, and read the file
    themselves."""

    path: str
    pooling: EmbeddingPooling | None = None
    """Takes the place of the file's own."""
    senses: Senses = NO_SENSES
    """The kinds of media that the model's projector takes."""


class _NoTokenizer:
    """Stands for the vocabulary of a model that cannot be read. Any use raises EngineUnavailableError."""

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def __getattr__(self, _: str) -> NoReturn:
        raise EngineUnavailableError(self._problem)


@dataclasses.dataclass(frozen=True)
class ModelInfo(ModelEntry):
    """A model whose vocabulary was read, as every process of an ingress knows it."""

    tokenizer: Tokenizer
    """A tokenizer; that of a model with a problem raises it at any use."""
    used: Adapters = ()
    """Adapters of requests that do not say which they want."""
    media: MediaDecoder | None = None

    @classmethod
    def left_out(cls, file: ModelFile, problem: str) -> Self:
        """A model whose file cannot be read. It has its names, so that requests learn the reason."""
        message = f"The model {file.id} is left out: {problem}"
        logger.error("%s", message)
        tokenizer = cast(Tokenizer, _NoTokenizer(message))
        return cls(**_entry(file, problem=problem), tokenizer=tokenizer)

    @classmethod
    def open(cls, file: ModelFile, media: MediaDecoder | None = None) -> Self:
        """Read a model's vocabulary. Raises ConfigError."""
        tokenizer = open_tokenizer(file.path, file.defaults.chat_template, file.pooling)
        entry = _entry(
            file,
            n_ctx_slot=tokenizer.model.most_tokens(file.n_ctx_slot),
            defaults=file.defaults.over(tokenizer.recommended_sampling),
        )
        used = active(a for a in file.adapters.values() if a.id in file.defaults.adapters)
        return cls(**entry, tokenizer=tokenizer, used=used, media=media)

    @property
    def purpose(self) -> Purpose:
        """The use of the model, by its file. An encoder, or a file that names a kind of pooling, is not
        made to write text."""
        if self.problem:
            return "text"
        if self.tokenizer.has_classifier:
            return "rerank" if self.tokenizer.reranks else "classify"
        file = self.tokenizer.model
        return "text" if file.is_causal and file.pooling is None else "embeddings"

    @property
    def sees(self) -> bool:
        return self.media is not None and self.media.sees

    @property
    def hears(self) -> bool:
        return self.media is not None and self.media.hears

    def with_adapter(self, adapter: AdapterUse) -> Self:
        """The model with one of its adapters, under a name of its own."""
        name = f"{self.id}:{adapter.id}"
        return dataclasses.replace(self, id=name, aliases=(), used=active([adapter]))

    def served_by(self, engine: EngineClient) -> ServedModel:
        return ServedModel(**vars(self), engine=engine)


Models = Mapping[str, ModelInfo]


def _entry(file: ModelFile, **changes: Any) -> dict[str, Any]:
    """The fields of the model's entry, with these changes."""
    return {one.name: getattr(file, one.name) for one in dataclasses.fields(ModelEntry)} | changes


@dataclasses.dataclass(frozen=True)
class ServedModel(ModelInfo):
    engine: EngineClient = dataclasses.field(kw_only=True)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))


M = TypeVar("M", bound=ModelInfo)


def open_or_leave_out(file: ModelFile, read: Callable[[ModelFile], ModelInfo]) -> ModelInfo:
    """The model that `read` makes of a file. If that cannot be read, the model is left out, so that the
    others go on."""
    if file.problem:
        return ModelInfo.left_out(file, file.problem)
    try:
        return read(file)
    except Exception as error:  # of any kind, with a damaged file
        return ModelInfo.left_out(file, str(error))


def active(adapters: Iterable[AdapterUse]) -> Adapters:
    """The adapters that a request is computed with: in one order, and without those that change nothing."""
    return tuple(sorted(one for one in adapters if one.scale != 0))


def find(models: Mapping[str, M], name: str | None, purposes: Container[Purpose] = ()) -> M:
    """The model of that name, with an adapter if it is `MODEL:ADAPTER`. Without a name, it is the first one
    that is made for one of the purposes, or the first. A name that is nobody's means the model that Ollama
    would take: see `full_name`. Raises ModelNotFoundError.

    It is the one check of what the present caller may use: no other way leads from a client's name to a
    model. Raises PermissionDeniedError, also for a name that nobody has. So the answer does not tell
    whether there is such a model. The model has the adapters that the caller may use."""
    caller = request_context.current()
    if name is None:
        made_for_it = (one for one in models.values() if purposes and one.purpose in purposes)
        base = model = next(chain(made_for_it, models.values()))
    elif name in models:
        base = model = models[name]
    else:
        candidates = chain(
            ((model, model) for model in models.values() if name in model.aliases),
            _adapted_models(models.values(), name),
            ((model, model) for model in _named_like(models.values(), name)),
            ((model, model) for model in models.values() if "*" in model.aliases),
        )
        if (first := next(candidates, None)) is None:
            caller.check_model(name, name)
            raise ModelNotFoundError(name)
        base, model = first
    caller.check_model(model.id, name)
    return _with_usable_adapters(model, base.id)


def usable(models: Mapping[str, M]) -> dict[str, M]:
    """The models that the present caller may use, for lists."""
    caller = request_context.current()
    return {
        model_id: _with_usable_adapters(model, model_id)
        for model_id, model in models.items()
        if caller.may_use(model_id)
    }


def _with_usable_adapters(model: M, base_id: str) -> M:
    """The model without the adapters that the present caller may not use."""
    caller = request_context.current()
    may_use = {i: a for i, a in model.adapters.items() if caller.may_use(f"{base_id}:{a.id}")}
    if len(may_use) == len(model.adapters):
        return model
    return dataclasses.replace(model, adapters=may_use)


def _names(model: ModelInfo) -> tuple[str, ...]:
    return (model.id, *model.aliases)


_DEFAULT_PLACES = ("registry.ollama.ai/", "library/")
"""The parts that Ollama reads before a name without them."""


def full_name(name: str) -> str:
    """A name with a tag, as Ollama has it (its types/model/name.go): `name` is `name:latest`."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _named_like(models: Iterable[M], name: str) -> Iterator[M]:
    """The models of that name in Ollama's eyes: in any case, and with or without the default parts."""
    wanted = _canonical_name(name)
    return (model for model in models if wanted in map(_canonical_name, _names(model)))


def _canonical_name(name: str) -> str:
    canonical = full_name(name).lower()
    for place in _DEFAULT_PLACES:
        canonical = canonical.removeprefix(place)
    return canonical


def _adapted_models(models: Iterable[M], name: str) -> Iterator[tuple[M, M]]:
    """The models of that name with an adapter, each behind the one without."""
    for model in models:
        for adapter in model.adapters.values():
            if name in {f"{one}:{adapter.id}" for one in _names(model)}:
                yield model, model.with_adapter(adapter)
