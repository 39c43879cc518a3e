"""Opens the backend that the options name, or with `auto` the one that is measured to be faster."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from serve_app import progress
from serve_app.engine.autotune import profile_cache
from serve_app.engine.backends.base import Backend
from serve_app.engine.backends.choice.kernels import LLAMA_CPP, OPENVINO, KernelsChoice, faster
from serve_app.engine.backends.choice.measuring import measured
from serve_app.engine.backends.choice.opening import open_named
from serve_app.engine.options import EngineOptions
from serve_app.errors import ConfigError, EngineFailedError
from serve_app.llama import library
from serve_app.llama.model import files_of, fingerprint_of
from serve_app.openvino.convert import versions
from serve_app.openvino.exported.files import is_graph
from serve_app.progress import Report, Stage

logger = logging.getLogger("corral.engine")


def open_backend(
    path: str | os.PathLike[str], options: EngineOptions, report: Report = progress.nowhere
) -> Backend:
    """The backend, opened; on the thread that will compute. Raises ConfigError."""
    path = Path(path)
    if options.backend != "auto":
        choice = KernelsChoice(options.backend, "as configured")
    else:
        choice = chosen(path, options, report)
        logger.info("Backend %s: %s.", choice.name, choice.reason)
    try:
        backend = open_named(choice.name, path, replace(options, backend=choice.name), report)
    except ConfigError as error:
        if options.backend != "auto" or choice.name == LLAMA_CPP or is_graph(path):
            raise
        choice = KernelsChoice(LLAMA_CPP, f"OpenVINO could not be started: {_said(error)}")
        logger.warning("Backend %s: %s.", choice.name, choice.reason)
        backend = open_named(LLAMA_CPP, path, replace(options, backend=LLAMA_CPP), report)
    backend.setup = replace(backend.setup, kernels_reason=choice.reason)
    return backend


def chosen(path: Path, options: EngineOptions, report: Report = progress.nowhere) -> KernelsChoice:
    """The backend for `auto`, as measured now or at an earlier start. One of the two has weights in memory
    at a time, in a process of its own. Of several processes of this node that ask at once, one measures.
    Nothing is measured of a model in OpenVINO's format, which llama.cpp cannot read."""
    if is_graph(path):
        return KernelsChoice(OPENVINO, "the model is in OpenVINO's format")
    if names := options.unsupported_by_openvino():
        return KernelsChoice(LLAMA_CPP, f"OpenVINO's backend does not support {names[0]}")
    try:
        kernels = versions()
    except ConfigError as error:
        return KernelsChoice(LLAMA_CPP, _said(error))
    folder = options.profile_folder
    if options.profile_limit_s <= 0:
        return KernelsChoice(LLAMA_CPP, "nothing is measured")
    if folder is None:
        return _compare(path, options, report)[0]
    name = f"backend-{_key(path, options, kernels)}"
    with _alone(folder, name):
        known = profile_cache.load_as(folder, name, KernelsChoice.parse)
        if known is not None:
            return known
        choice, is_certain = _compare(path, options, report)
        if is_certain:
            profile_cache.save(folder, name, choice)
    return choice


def _compare(path: Path, options: EngineOptions, report: Report) -> tuple[KernelsChoice, bool]:
    """The backend, and whether the next start may rely on that."""
    report(Stage("measuring", limit_s=options.profile_limit_s))
    try:
        theirs = measured(OPENVINO, path, options)
    except ConfigError as error:
        return KernelsChoice(LLAMA_CPP, f"OpenVINO cannot serve it: {_said(error)}"), True
    except EngineFailedError as error:
        return KernelsChoice(LLAMA_CPP, f"OpenVINO could not be measured: {_said(error)}"), False
    report(Stage("measuring", limit_s=options.profile_limit_s))
    ours = measured(LLAMA_CPP, path, options)
    choice = faster({LLAMA_CPP: ours, OPENVINO: theirs}, options)
    return choice, ours.undisturbed and theirs.undisturbed


def _said(error: Exception) -> str:
    """The error as a part of a sentence."""
    return str(error).removesuffix(".")


def _key(path: Path, options: EngineOptions, kernels: str) -> str:
    """A name for the choice under these conditions."""
    return profile_cache.key(
        model=fingerprint_of(files_of(path)).hex(),
        kernels=(library.version(), kernels),
        threads=(options.threads, options.threads_batch, options.fewer_threads),
        slots=(options.n_slots, options.n_ctx_slot, options.n_ctx),
        pinned=[len(tokens) for tokens in options.pinned],
        attention=(options.flash_attn, options.kv_unified),
        cache=(options.cache_type_k, options.cache_type_v),
        max_stall_s=options.max_stall_s,
        n_batch=options.n_batch,
        limit_s=options.profile_limit_s,
    )


@contextmanager
def _alone(folder: Path, name: str) -> Iterator[None]:
    """Inside the block, no other process of this node is in it with that name."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
