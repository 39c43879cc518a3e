"""The process that workers are forked from. A new one takes milliseconds, as the vocabularies are read.

    python -m serve_app.ingress.workers.stack serve_app.ingress.workers.zygote FD

FD is a socket to the ingress. The first message over it is a `Start`. After that, each byte comes with a
socket: a new worker serves it, and its process id is the answer. All of it ends with the ingress.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from serve_app.config.defaults import NO_DEFAULTS, ModelDefaults
from serve_app.errors import CorralError
from serve_app.ingress.model_registry import NumberedAdapters
from serve_app.ingress.workers import pictures, slices, sounds, wire, worker
from serve_app.llama.formats import EmbeddingPooling
from serve_app.types import Version

PID = struct.Struct("<i")
NO_PID = -1
"""The answer where no worker could be forked."""
logger = logging.getLogger("corral.ingress")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model that workers shall know."""

    id: str
    n_ctx_slot: int
    path: Path
    aliases: Sequence[str] = ()
    defaults: ModelDefaults = NO_DEFAULTS
    pooling: EmbeddingPooling | None = None
    """Instead of what the file says."""
    adapters: NumberedAdapters = field(default_factory=dict)
    sees: bool = False
    """Whether it has a projector for pictures, ..."""
    hears: bool = False
    """... and for sounds."""
    version: Version | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """The input of a zygote."""

    models: Sequence[ModelFile]
    modules: Sequence[str]
    """The modules that workers are going to import."""


def main(fd: int) -> None:
    """Fork workers until the ingress is gone."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    slices.shorten()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ingress, which ends this
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers
    with socket.socket(fileno=fd) as control, suppress(EOFError, ConnectionError):
        models = _models(wire.receive(control))
        control.sendall(wire.packed(None if isinstance(models, dict) else models))
        gc.freeze()  # so that workers need not copy what is there now
        while isinstance(models, dict):
            command, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not command:
                return
            _fork(control, socket.socket(fileno=fds[0]), models)


def _models(start: Start) -> dict[str, worker.LocalModel] | CorralError:
    try:
        for module in start.modules:
            importlib.import_module(module)
        if any(one.sees for one in start.models):
            pictures.load()
        if any(one.hears for one in start.models):
            sounds.load()
        return {
            one.id: worker.local(
                one.id,
                one.n_ctx_slot,
                one.path,
                one.aliases,
                one.defaults,
                one.pooling,
                one.adapters,
                sees=one.sees,
                hears=one.hears,
                version=one.version,
            )
            for one in start.models
        }
    except CorralError as error:
        return error


def _fork(
    control: socket.socket, connection: socket.socket, models: dict[str, worker.LocalModel]
) -> None:
    with connection:
        try:
            pid = os.fork()
        except OSError as error:  # no memory, or too many processes
            logger.warning("No worker can be started: %s", error)
            pid = NO_PID
        if pid:
            control.sendall(PID.pack(pid))
            return
        control.close()
        try:
            worker.serve(connection, models)
        except BaseException:
            logger.exception("A worker failed.")
            os._exit(1)
        os._exit(0)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    main(int(sys.argv[1]))
