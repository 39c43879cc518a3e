"""The processes of workers: the zygote that forks them, and what they do, within bounds on time and memory.

    python -m serve_app.server.workers.worker FD

FD is a socket to the ingress. The first message over it is a `Start`. After that, each byte comes with a
socket: a new worker serves it, and its process id is the answer. A fork takes milliseconds, as the
vocabularies are read. All of it ends with the ingress.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import math
import os
import pkgutil
import platform
import resource
import signal
import socket
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass

import msgspec

from serve_app.base import logs
from serve_app.base.errors import CorralError, InvalidRequestError, RequestTooLargeError
from serve_app.server.http import request_context, request_model
from serve_app.server.http.request_context import Caller
from serve_app.server.model_registry import ModelFile, ModelInfo, Models, open_or_leave_out
from serve_app.server.workers import wire
from serve_app.server.workers.wire import Work, WorkOrder

logger = logging.getLogger("corral.ingress")

File = bytes | memoryview
STACK_BYTES = 32 * 2**20
"""Stack of a worker. With the pre-tokenizers that it leaves to `std::regex`, llama.cpp's tokenizer takes
some 300 bytes for each character of a word. Beyond the stack, the process dies."""
CPU_S = 5.0
"""CPU seconds that one request may take here; whole seconds count."""
MAX_BODY_BYTES = 8 * 2**20
"""Largest body of a request."""
MEMORY_BYTES = 32 * 2**20
"""Memory that one request may take here, and MEMORY_FACTOR times its body besides, the body included."""
MEMORY_FACTOR = 2
"""The bytes of memory for each byte of a body. With what the ingress and the proxy hold of it, a body of
the largest size takes less than ten times as much everywhere."""


def serve_orders(connection: socket.socket, models: Models) -> None:
    """Do what comes over this connection until it ends. Its process does nothing else."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ingress, which ends this
    while True:
        try:
            order = wire.receive_order(connection)
            _limit(order.n_bytes)
            data = wire.receive_bytes(connection, order.n_bytes)
        except EOFError:
            return
        answer = answer_order(order, models, data)
        del order, data
        # So that there is room to send the answer, and for the next order.
        set_limit(resource.RLIMIT_DATA, sys.maxsize)
        try:
            connection.sendall(answer)
        except OSError:
            return


def answer_order(order: WorkOrder, models: Models, data: bytes) -> bytes:
    """The outcome, packed, which takes memory, too."""
    request_context.enter(Caller(allowed_models=order.allowed_models))
    try:
        n_body = order.n_bytes - sum(n_bytes for _, n_bytes in order.files)
        files, start = dict[str, memoryview](), n_body
        for url, n_bytes in order.files:
            files[url] = memoryview(data)[start : start + n_bytes]
            start += n_bytes
        with request_model.ignored_fields() as ignored, provide_files(files):
            work: Work = pkgutil.resolve_name(order.work)
            body = request_model.body_for(work, data[:n_body])
            value = work(wire.with_adapters(models, order.adapters), body)
        return wire.packed_outcome(wire.WorkResult(value, ignored))
    except CorralError as error:
        return wire.packed_outcome(error)
    except (MemoryError, RecursionError):
        return wire.packed_outcome(InvalidRequestError("This request takes too much memory."))
    except Exception:
        logger.exception("%s failed", order.work)
        return wire.packed_outcome(CorralError("The server failed to handle this request."))


NO_FILES: Mapping[str, bytes] = {}
_files: ContextVar[Mapping[str, File]] = ContextVar("files", default=NO_FILES)


@contextmanager
def provide_files(files: Mapping[str, File]) -> Iterator[None]:
    """A block in which `files_at_hand` are these, which were fetched for the present body."""
    token = _files.set(files)
    try:
        yield
    finally:
        _files.reset(token)


def files_at_hand() -> Mapping[str, File]:
    """The files that were fetched for the present body, by URL."""
    return _files.get()


def _limit(n_bytes: int) -> None:
    """Bound what a body of so many bytes may take from now on. Beyond the CPU time, the kernel ends the
    process; beyond the memory, allocations fail."""
    set_limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + CPU_S))
    set_limit(resource.RLIMIT_DATA, _data_bytes() + MEMORY_BYTES + MEMORY_FACTOR * n_bytes)


@contextmanager
def more_memory(n_bytes: int) -> Iterator[None]:
    """A block in which the work that runs here may take so much more."""
    grant_memory(n_bytes)
    try:
        yield
    finally:
        grant_memory(-n_bytes)


def grant_memory(n_bytes: int) -> None:
    """Let the work that runs here take so many bytes more, or less if the number is negative."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if soft not in (resource.RLIM_INFINITY, sys.maxsize):
        set_limit(resource.RLIMIT_DATA, soft + n_bytes)


def set_limit(which: int, limit: int) -> None:
    """Set a soft limit of this process, which can be changed again: as far as the hard one allows."""
    _, hard = resource.getrlimit(which)
    soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(which, (soft, hard))


def _data_bytes() -> int:
    """The bytes of this process that RLIMIT_DATA counts. Source: proc(5), `statm`."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123  # this is done often
        pages = file.read().split()
    return int(pages[5]) * resource.getpagesize()


def nothing(models: Models, body: bytes) -> None:
    """The work of a worker that only says whether it runs."""


ENCODINGS = ("gzip", "x-gzip", "deflate")
"""The forms of compressed bodies that are read."""
_GZIP_OR_ZLIB, _RAW = 32 + zlib.MAX_WBITS, -zlib.MAX_WBITS


def inflate(models: Models, body: bytes) -> bytes:
    """A body that was compressed as gzip, zlib or raw deflate. Runs in a worker. Raises InvalidRequestError
    for other bytes, and RequestTooLargeError for more than a body may have, as soon as there is more."""
    with more_memory(2 * MAX_BODY_BYTES):
        for form in (_GZIP_OR_ZLIB, _RAW):
            stream = zlib.decompressobj(form)
            with suppress(zlib.error):
                content = stream.decompress(body, MAX_BODY_BYTES + 1)
                if len(content) > MAX_BODY_BYTES:
                    raise RequestTooLargeError(f"The body has more than {MAX_BODY_BYTES} bytes.")
                if stream.eof and not stream.unused_data:
                    return content
    raise InvalidRequestError("The body cannot be decompressed.")


PID = struct.Struct("<i")
PING = b"p"
"""A question of the ingress whether the zygote runs. The answer is NO_PID."""
NO_PID = -1
"""The answer where no worker could be forked."""
SHORTEST_NS = 100_000  # Linux takes no shorter slices
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}


@dataclass(frozen=True, slots=True)
class Start:
    models: tuple[ModelFile, ...]
    modules: tuple[str, ...]
    """The modules that workers are going to import."""
    read: str
    """The function that reads a model's vocabulary, as `module:name`."""
    keeps_texts: bool = True
    """Whether the log may have clients' texts."""


def _shorten_slices() -> None:
    """Give the calling thread, and what it forks, the shortest slices, if Linux takes that.

    Linux lets a process that computes finish its slice, about 3 ms, before another one that has just woken
    up runs, whatever their niceness. Each token of a stream wakes several processes in turn. With shorter
    slices, a worker holds each of them up for less. Source: sched(7), and `sched_runtime` in
    sched_setattr(2), which Linux heeds for ordinary processes since 6.12; earlier ones ignore it.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is not None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        # The first version of `struct sched_attr`: size, policy, flags, nice, priority, three times.
        attributes = struct.pack("=IIQiIQQQ", 48, os.SCHED_OTHER, 0, nice, 0, SHORTEST_NS, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)


def fork_worker(fd: int, opened: Models) -> int:
    """The id of a process forked from the ingress, which has read these models. It runs `main`."""
    gc.freeze()  # so that neither process copies what is there now
    if pid := os.fork():
        return pid
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for other in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, fd}:  # noqa: PTH208
            with suppress(OSError):
                os.close(other)
        main(fd, opened)
    except BaseException:
        logger.exception("The process that forks workers failed.")
    finally:
        os._exit(0)


def main(fd: int, opened: Models | None = None) -> None:
    """Fork workers until the ingress is gone. `opened` are the models, if they are read already."""
    os.environ["GGML_NO_BACKTRACE"] = "1"  # llama.cpp would start a debugger when it gives up
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    set_limit(resource.RLIMIT_STACK, STACK_BYTES)  # it has room: Linux leaves 128 MiB at least
    _shorten_slices()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ingress, which ends this
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers
    with socket.socket(fileno=fd) as control, suppress(EOFError, ConnectionError):
        start = msgspec.msgpack.decode(wire.receive(control), type=Start)
        if not start.keeps_texts:
            logs.forbid_texts(logging.getLogger().handlers)
        models = _models(start, opened)
        control.sendall(wire.packed_outcome(wire.WorkResult(None)))
        gc.freeze()  # so that workers need not copy what is there now
        while True:
            command, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not command:
                return
            if command == PING:
                control.sendall(PID.pack(NO_PID))
                continue
            _fork(control, socket.socket(fileno=fds[0]), models)


def _models(start: Start, opened: Models | None) -> dict[str, ModelInfo]:
    """The models, ready for work. One that cannot be read is left out: its requests learn why."""
    for module in start.modules:
        importlib.import_module(module)
    read: Callable[[ModelFile], ModelInfo] = pkgutil.resolve_name(start.read)

    def warmed_up(file: ModelFile) -> ModelInfo:
        model = read(file) if opened is None else opened[file.id]
        if not model.problem:
            model.tokenizer.warm_up()
            if model.media is not None:
                model.media.load()
        return model

    return {file.id: open_or_leave_out(file, warmed_up) for file in start.models}


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
            serve_orders(connection, models)
        except BaseException:
            logger.exception("A worker failed.")
            os._exit(1)
        os._exit(0)


if __name__ == "__main__":
    from serve_app.server.workers import worker  # the module that the work imports, too

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    worker.main(int(sys.argv[1]))
