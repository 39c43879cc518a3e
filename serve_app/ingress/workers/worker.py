"""A worker: reads one client's body after the other, within bounds on time and memory."""

from __future__ import annotations

import logging
import math
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

from serve_app.config.defaults import NO_DEFAULTS, ModelDefaults
from serve_app.errors import CorralError, InvalidRequestError
from serve_app.ingress.http import request_model
from serve_app.ingress.model_registry import NumberedAdapters, active, adapted_name
from serve_app.ingress.workers import wire
from serve_app.llama.formats import EmbeddingPooling
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.types import Adapters, AdapterUse, Version

logger = logging.getLogger("corral.ingress")

CPU_S = 5.0
"""CPU seconds that one request may take here; whole seconds count."""
MEMORY_BYTES = 32 * 2**20
"""Memory that one request may take here, and MEMORY_FACTOR times its body besides, the body included."""
MEMORY_FACTOR = 2
"""With what the ingress and the proxy hold of it, a body of the largest size takes less than ten times as
much everywhere."""


class KnownModel(Protocol):
    """A model as workers know it."""

    @property
    def id(self) -> str:
        """Its name."""

    @property
    def n_ctx_slot(self) -> int:
        """Tokens that one request may have."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Its vocabulary and chat template."""

    @property
    def aliases(self) -> Sequence[str]:
        """Its other names; `*` is all that no model has."""

    @property
    def defaults(self) -> ModelDefaults:
        """The defaults of the model's requests."""

    @property
    def adapters(self) -> NumberedAdapters:
        """See ServedModel."""

    @property
    def used(self) -> Adapters:
        """See ServedModel."""

    @property
    def sees(self) -> bool:
        """See ServedModel."""

    @property
    def hears(self) -> bool:
        """See ServedModel."""

    @property
    def version(self) -> Version | None:
        """See ServedModel."""

    def adapted(self, adapter: AdapterUse) -> Self:
        """See ServedModel."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A KnownModel in a worker."""

    id: str
    n_ctx_slot: int
    tokenizer: Tokenizer
    aliases: Sequence[str] = ()
    defaults: ModelDefaults = NO_DEFAULTS
    adapters: NumberedAdapters = field(default_factory=dict)
    used: Adapters = ()
    sees: bool = False
    hears: bool = False
    version: Version | None = None

    def adapted(self, adapter: AdapterUse) -> LocalModel:
        """See KnownModel."""
        return replace(self, id=adapted_name(self.id, adapter), aliases=(), used=active([adapter]))


def local(
    name: str,
    n_ctx_slot: int,
    path: Path,
    aliases: Sequence[str],
    defaults: ModelDefaults,
    pooling: EmbeddingPooling | None,
    adapters: NumberedAdapters,
    *,
    sees: bool = False,
    hears: bool = False,
    version: Version | None = None,
) -> LocalModel:
    """Read a model's vocabulary, once for all workers that are forked then. Raises ConfigError."""
    tokenizer = Tokenizer(path, defaults.chat_template, pooling)
    tokenizer.warm_up()
    own = defaults.over(tokenizer.recommended)
    return LocalModel(
        name,
        n_ctx_slot,
        tokenizer,
        aliases,
        own,
        adapters,
        sees=sees,
        hears=hears,
        version=version,
    )


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of the models since workers read them, by their ids."""

    adapters: Mapping[str, NumberedAdapters] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    """Those that versions have now."""

    def made_in(self, models: Mapping[str, LocalModel]) -> Mapping[str, LocalModel]:
        """The models with these changes."""
        if not self.adapters and not self.weights:
            return models
        return {name: self._made_in(name, one) for name, one in models.items()}

    def _made_in(self, name: str, model: LocalModel) -> LocalModel:
        version = model.version
        if version is not None:
            version = replace(version, given=self.weights.get(name))
        return replace(model, adapters=self.adapters.get(name, model.adapters), version=version)


Models = Mapping[str, KnownModel]
Work = Callable[[Models, bytes], Any]
"""The work on a request's body: a function that can be imported. It may raise CorralError."""


@dataclass(frozen=True, slots=True)
class Made:
    """The result of work."""

    made: Any
    ignored: Sequence[str]
    """Fields of the body that Corral does not have."""


def serve(connection: socket.socket, models: Mapping[str, LocalModel]) -> None:
    """Do what comes over this connection until it ends. Its process does nothing else."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ingress, which ends this
    while True:
        try:
            work, length, changes = wire.receive(connection)
            _limit(length)
            body = wire.receive_bytes(connection, length)
        except EOFError:
            return
        answer = _answer(work, changes.made_in(models), body)
        del work, body
        _unlimit_memory()  # so that there is room for the answer to be sent, and the next head
        try:
            connection.sendall(answer)
        except OSError:
            return


def _answer(work: Work, models: Models, body: bytes) -> bytes:
    """Made, or a CorralError; packed, which takes memory, too."""
    try:
        with request_model.ignored_fields() as ignored:
            made = work(models, body)
        return wire.packed(Made(made, ignored))
    except CorralError as error:
        return wire.packed(error)
    except (MemoryError, RecursionError):
        return wire.packed(InvalidRequestError("This request takes too much memory."))
    except Exception:
        logger.exception("%s failed", work.__qualname__)
        return wire.packed(CorralError("The server failed to handle this request."))


def _limit(n_bytes: int) -> None:
    """Bound what a body of so many bytes may take from now on. Beyond the CPU time, the kernel ends the
    process; beyond the memory, allocations fail."""
    _set_limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + CPU_S))
    _set_limit(resource.RLIMIT_DATA, _data_bytes() + MEMORY_BYTES + MEMORY_FACTOR * n_bytes)


@contextmanager
def more_memory(n_bytes: int) -> Iterator[None]:
    """Within this, the work that runs here may take so much more."""
    grant_memory(n_bytes)
    try:
        yield
    finally:
        grant_memory(-n_bytes)


def grant_memory(n_bytes: int) -> None:
    """From now on, the work that runs here may take so much more, or less if it is negative."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if soft not in (resource.RLIM_INFINITY, sys.maxsize):
        _set_limit(resource.RLIMIT_DATA, soft + n_bytes)


def _unlimit_memory() -> None:
    _set_limit(resource.RLIMIT_DATA, sys.maxsize)


def _set_limit(which: int, limit: int) -> None:
    """The soft limit, which can be changed again."""
    _, hard = resource.getrlimit(which)
    soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(which, (soft, hard))


def _data_bytes() -> int:
    """The bytes of this process that RLIMIT_DATA counts. Source: proc(5), `statm`."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123  # this is done often
        pages = file.read().split()
    return int(pages[5]) * resource.getpagesize()
