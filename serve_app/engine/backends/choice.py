"""Opens the backend that the options name, or with `auto` the one that is measured to be faster.

A measurement runs in a process of its own, which gives all of its memory back."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from serve_app import progress
from serve_app.engine.autotune import profile_cache
from serve_app.engine.autotune.cost_model import Profile
from serve_app.engine.autotune.modes import PAGED, compared
from serve_app.engine.backends.apart import apart
from serve_app.engine.backends.base import Backend
from serve_app.engine.backends.layouts import (
    LIMIT_S,
    MODE,
    LayoutChoice,
    SmallContext,
    chosen_layout,
    has_room_for_both,
    measured_in_turns,
    small_context,
)
from serve_app.engine.options import EngineOptions, KernelsName
from serve_app.errors import ConfigError, CorralError
from serve_app.folders import GIB
from serve_app.llama import library
from serve_app.llama.model import Model, files_of, fingerprint_of
from serve_app.openvino import convert
from serve_app.openvino.gguf_model import UnreadableError
from serve_app.openvino.slices import converted_slice
from serve_app.progress import Report, Stage

logger = logging.getLogger("corral.engine")

LLAMA_CPP: KernelsName = "llama.cpp"
OPENVINO: KernelsName = "openvino"
# Smaller models gain less than the process of a measurement costs.
_LEAST_BYTES = 20 * 2**20
# A start waits for a conversion of so many seconds. A longer one has this niceness, beside requests.
_MOST_CONVERSION_S, _NICENESS = 30.0, 19
# The tokens that a slot has room for in a measurement, and those that are before each batch.
_N_CTX_SLOT, _N_BEFORE = 512, 256
# The tokens of a text, the rows of a batch, and the trials that compare encoders.
_N_TOKENS, _N_ROWS, _N_TRIALS = 32, 512, 5


@dataclass(frozen=True, slots=True)
class KernelsChoice:
    """A backend, and why it is this one, in one line."""

    name: KernelsName
    reason: str
    conversion_s: float = 0.0
    """The seconds of the conversion that OpenVINO, which is measured to be faster, still needs."""


def open_named(
    name: KernelsName, path: Path, options: EngineOptions, report: Report = progress.nowhere
) -> Backend:
    """Open that backend with a model, on the thread that will compute. Raises ConfigError."""
    if name == "openvino":
        try:
            from serve_app.engine.backends.openvino import open_with_openvino
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"engine.backend: openvino needs the package {error.name}. Install corral[openvino]."
            ) from None
        return open_with_openvino(path, options, report)
    from serve_app.engine.backends.llama_cpp import LlamaBackend

    return LlamaBackend(path, options, report)


def open_backend(
    path: str | os.PathLike[str], options: EngineOptions, report: Report = progress.nowhere
) -> Backend:
    """The backend, opened; on the thread that will compute. Raises ConfigError."""
    path = Path(path)
    layout = LayoutChoice(repack=True)
    if options.backend != OPENVINO:
        layout = chosen_layout(path, options, report)
        options = replace(options, repack=layout.repack, stored_from=layout.stored_from)
    if options.backend == "auto":
        choice = chosen(path, options, report)
    else:
        choice = KernelsChoice(options.backend, "as configured")
    choice = replace(choice, reason="; ".join(filter(None, (choice.reason, layout.reason))))
    logger.info("Backend %s: %s.", choice.name, choice.reason)
    try:
        backend = open_named(choice.name, path, replace(options, backend=choice.name), report)
    except ConfigError as error:
        if options.backend != "auto" or choice.name == LLAMA_CPP:
            raise
        reason = f"OpenVINO could not be started: {_said(error)}"
        choice = replace(choice, name=LLAMA_CPP, reason=reason)
        logger.warning("Backend %s: %s.", choice.name, choice.reason)
        backend = open_named(LLAMA_CPP, path, replace(options, backend=LLAMA_CPP), report)
    backend.setup = replace(backend.setup, kernels_reason=choice.reason)
    if choice.name == LLAMA_CPP and choice.conversion_s:
        threading.Thread(target=_convert, args=(path, options), daemon=True).start()
    return backend


def _convert(path: Path, options: EngineOptions) -> None:
    """Convert the model for later starts, in a process of the lowest priority."""
    # It gets the priority of this thread, which starts it.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    try:
        convert.converted_of(Model(path, vocab_only=True), options.max_converted_bytes)
    except (ConfigError, OSError) as error:
        logger.warning("%s", error)


def chosen(path: Path, options: EngineOptions, report: Report = progress.nowhere) -> KernelsChoice:
    """The backend for `auto`, as measured now or at an earlier start. Of several processes of this node
    that ask at once, one measures."""
    files = files_of(path)
    n_bytes = sum(file.stat().st_size for file in files)
    if names := options.unsupported_by_openvino():
        return KernelsChoice(LLAMA_CPP, f"OpenVINO's backend does not support {names[0]}")
    if options.profile_limit_s <= 0 or n_bytes < _LEAST_BYTES:
        reason = "nothing is measured" if options.profile_limit_s <= 0 else "the model is small"
        return KernelsChoice(LLAMA_CPP, reason)
    fingerprint = fingerprint_of(files)
    try:
        libraries = (library.version(), convert.versions())
        is_converted = convert.converted_models(None).of(convert.name_of(fingerprint)).is_file()
    except ConfigError as error:
        return KernelsChoice(LLAMA_CPP, _said(error))
    key = profile_cache.key(options, model=fingerprint.hex(), libraries=libraries)
    measure = partial(_measured_choice, path, options, report)
    choice = profile_cache.remembered(
        options.profile_folder, f"backend-{key}", KernelsChoice, measure
    )
    if is_converted or choice.conversion_s <= _MOST_CONVERSION_S:
        return replace(choice, conversion_s=0.0)
    reason = f"{choice.reason}, but to convert the file takes about {choice.conversion_s:.0f} s"
    if not has_room_for_both(files, options):
        reason += " and much memory: set backend: openvino for that"
        return KernelsChoice(LLAMA_CPP, reason)
    reason += ": that is done beside the requests, for the next start"
    return KernelsChoice(LLAMA_CPP, reason, choice.conversion_s)


def _measured_choice(
    path: Path, options: EngineOptions, report: Report
) -> tuple[KernelsChoice, bool]:
    """The choice, and whether it is good for later starts."""
    model = Model(path, vocab_only=True)
    if refusal := convert.unserved(model, options.embedding_pooling):
        return KernelsChoice(LLAMA_CPP, refusal.strip(".")), True
    stage = Stage("measuring", limit_s=LIMIT_S)
    try:
        n_bytes = convert.checked(model.files).converted_bytes()
        if n_bytes > (options.memory_bytes or math.inf):
            raise ConfigError(f"it would take {n_bytes / GIB:.1f} GiB of memory, and there is less")
        if not model.is_causal:
            convert.converted_of(model, options.max_converted_bytes, report)
            report(stage)
            theirs_s, ours_s = apart(seconds_of_texts, path, options)
            reason = f"measured: the time of texts, OpenVINO's to llama.cpp's, is {theirs_s / ours_s:.2f}"
            return KernelsChoice(OPENVINO if theirs_s < ours_s else LLAMA_CPP, reason), True
        converted = converted_slice(model, options.max_converted_bytes, report)
        with converted as (part, share, conversion_s):
            report(stage)
            theirs, ours = apart(profiles_of_backends, part, options)
    except UnreadableError as error:
        return KernelsChoice(LLAMA_CPP, _said(error)), True
    except (CorralError, OSError, ValueError) as error:  # some metadata cannot be in a slice
        return KernelsChoice(LLAMA_CPP, f"OpenVINO could not be measured: {_said(error)}"), False
    finally:
        convert.converted_models(None).leave(convert.name_of(model.fingerprint()))
    if options.max_stall_s is not None:  # a slice has its part of that time
        options = replace(options, max_stall_s=share * options.max_stall_s)
    comparison = compared(theirs, ours, options, PAGED, MODE)
    if comparison is None:
        return KernelsChoice(LLAMA_CPP, "nothing was measured"), False
    pays, figures = comparison
    reason = f"measured: the time of a request, OpenVINO's to llama.cpp's, is {figures}"
    if not profile_cache.is_worth_keeping([theirs, ours]):
        reason += ", which says little, as other programs computed: the next start measures again"
        return KernelsChoice(LLAMA_CPP, reason), False
    if not pays:
        return KernelsChoice(LLAMA_CPP, reason), True
    return KernelsChoice(OPENVINO, reason, conversion_s), True


def profiles_of_backends(path: Path, options: EngineOptions) -> list[Profile]:
    """The times of a few batches with OpenVINO and with llama.cpp, in turns. Raises ConfigError."""
    from serve_app.engine.backends import openvino

    if options.computing_cpus is not None:
        os.sched_setaffinity(0, options.computing_cpus)
    model = Model(path, load_mode=options.load_mode, repack=options.repack is not False)
    contexts: list[SmallContext] = [
        openvino.small_context(model, options, _N_CTX_SLOT),
        small_context(model, options, _N_CTX_SLOT),
    ]
    n_before = min(_N_BEFORE, options.n_ctx_share // 2)
    return measured_in_turns(contexts, options, _N_CTX_SLOT, n_before, spin=False)


def seconds_of_texts(path: Path, options: EngineOptions) -> tuple[float, float]:
    """The seconds of a batch of texts with OpenVINO and with llama.cpp, measured in turns, each the
    shortest of several trials. Raises ConfigError."""
    names: tuple[KernelsName, KernelsName] = (OPENVINO, LLAMA_CPP)
    backends = [open_named(name, path, replace(options, backend=name)) for name in names]
    shapes = [backend.embeddings.shape for backend in backends]
    n_tokens = min(_N_TOKENS, *(shape.n_text for shape in shapes))
    n_texts = min(_N_ROWS // n_tokens, *(shape.n_seq_max for shape in shapes))
    rows = [(1, place, text, True) for text in range(n_texts) for place in range(n_tokens)]
    seconds = [math.inf, math.inf]
    for _ in range(_N_TRIALS):
        for i, backend in enumerate(backends):
            began = time.perf_counter()
            backend.embeddings.embed(rows)
            seconds[i] = min(seconds[i], time.perf_counter() - began)
    return seconds[0], seconds[1]


def _said(error: Exception) -> str:
    return str(error).removesuffix(".")
