"""The process that workers are forked from. A new one takes milliseconds, as the vocabularies are read.

    python -m serve_app.ingress.workers.stack serve_app.ingress.workers.zygote FD

FD is a socket to the ingress. The first message over it is a `Start`. After that, each byte comes with a
socket: a new worker serves it, and its process id is the answer. All of it ends with the ingress.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import platform
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import c_int32, c_uint32, c_uint64
from dataclasses import dataclass

from serve_app.errors import CorralError
from serve_app.ingress.model_registry import ModelInfo
from serve_app.ingress.workers import wire, worker

PID = struct.Struct("<i")
NO_PID = -1
"""The answer where no worker could be forked."""
logger = logging.getLogger("corral.ingress")
SHORTEST_NS = 100_000  # Linux takes no shorter slices
_SYSCALL = {"x86_64": 314, "aarch64": 274}


@dataclass(frozen=True, slots=True)
class Start:
    """The input of a zygote."""

    models: Sequence[Callable[[], ModelInfo]]
    """Functions that read the models' vocabularies."""
    modules: Sequence[str]
    """The modules that workers are going to import."""


class _SchedAttr(ctypes.Structure):
    """Linux's `struct sched_attr`, first version."""

    _fields_ = (
        ("size", c_uint32),
        ("sched_policy", c_uint32),
        ("sched_flags", c_uint64),
        ("sched_nice", c_int32),
        ("sched_priority", c_uint32),
        ("sched_runtime", c_uint64),
        ("sched_deadline", c_uint64),
        ("sched_period", c_uint64),
    )


def shorten_slices() -> bool:
    """Give the calling thread, and what it forks, the shortest slices. Returns whether Linux took that.

    Linux lets a process that computes finish its slice, about 3 ms, before another one that has just woken
    up runs, whatever their niceness. Each token of a stream wakes several processes in turn. With shorter
    slices, a worker holds each of them up for less. Source: sched(7), and `sched_runtime` in
    sched_setattr(2), which Linux heeds for ordinary processes since 6.12; earlier ones ignore it.
    """
    number = _SYSCALL.get(platform.machine())
    if number is None:
        return False
    attributes = _SchedAttr(
        size=ctypes.sizeof(_SchedAttr),
        sched_policy=os.SCHED_OTHER,
        sched_nice=os.getpriority(os.PRIO_PROCESS, 0),
        sched_runtime=SHORTEST_NS,
    )
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    return int(syscall(number, 0, ctypes.byref(attributes), 0)) == 0


def main(fd: int) -> None:
    """Fork workers until the ingress is gone."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    shorten_slices()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ingress, which ends this
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers
    with socket.socket(fileno=fd) as control, suppress(EOFError, ConnectionError):
        models = _models(wire.receive(control))
        outcome = wire.WorkResult(None) if isinstance(models, dict) else models
        control.sendall(wire.packed_outcome(outcome))
        gc.freeze()  # so that workers need not copy what is there now
        while isinstance(models, dict):
            command, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not command:
                return
            _fork(control, socket.socket(fileno=fds[0]), models)


def _models(start: Start) -> dict[str, ModelInfo] | CorralError:
    try:
        for module in start.modules:
            importlib.import_module(module)
        models = [read() for read in start.models]
        for model in models:
            model.tokenizer.warm_up()
            if model.media is not None:
                model.media.load()
        return {model.id: model for model in models}
    except CorralError as error:
        return error


def _fork(control: socket.socket, connection: socket.socket, models: dict[str, ModelInfo]) -> None:
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
