"""A worker: reads one client's body after the other, within bounds on time and memory."""

from __future__ import annotations

import logging
import math
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from serve_app.errors import CorralError, InvalidRequestError
from serve_app.ingress.http import request_model
from serve_app.ingress.model_registry import ModelInfo, NumberedAdapters
from serve_app.ingress.workers import wire

logger = logging.getLogger("corral.ingress")

CPU_S = 5.0
"""CPU seconds that one request may take here; whole seconds count."""
MEMORY_BYTES = 32 * 2**20
"""Memory that one request may take here, and MEMORY_FACTOR times its body besides, the body included."""
MEMORY_FACTOR = 2
"""The bytes of memory for each byte of a body. With what the ingress and the proxy hold of it, a body of
the largest size takes less than ten times as much everywhere."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of the models since workers read them, by their ids."""

    adapters: Mapping[str, NumberedAdapters] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    """The present weights of versions."""

    def made_in(self, models: Mapping[str, ModelInfo]) -> Mapping[str, ModelInfo]:
        """The models with these changes."""
        if not self.adapters and not self.weights:
            return models
        return {name: self._made_in(name, one) for name, one in models.items()}

    def _made_in(self, name: str, model: ModelInfo) -> ModelInfo:
        version = model.version
        if version is not None:
            version = replace(version, given=self.weights.get(name))
        return replace(model, adapters=self.adapters.get(name, model.adapters), version=version)


Models = Mapping[str, ModelInfo]
Work = Callable[[Models, bytes], Any]
"""The work on a request's body: a function that can be imported. It may raise CorralError."""


def serve(connection: socket.socket, models: Mapping[str, ModelInfo]) -> None:
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
    """The outcome, packed, which takes memory, too."""
    try:
        with request_model.ignored_fields() as ignored:
            value = work(models, body)
        return wire.packed_outcome(wire.WorkResult(value, ignored))
    except CorralError as error:
        return wire.packed_outcome(error)
    except (MemoryError, RecursionError):
        return wire.packed_outcome(InvalidRequestError("This request takes too much memory."))
    except Exception:
        logger.exception("%s failed", work.__qualname__)
        return wire.packed_outcome(CorralError("The server failed to handle this request."))


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
    """Let the work that runs here take so many bytes more, or less if the number is negative."""
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
