"""Opens the backend that the options name, or with `auto` the one that is measured to be faster.

A measurement runs in a process of its own, which gives all of its memory back."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from serve_app import progress
from serve_app.engine.autotune import profile_cache
from serve_app.engine.autotune.modes import compared
from serve_app.engine.backends.apart import apart
from serve_app.engine.backends.base import Backend, Setup
from serve_app.engine.backends.layouts import LayoutChoice, chosen_layout
from serve_app.engine.options import EngineOptions, KernelsName
from serve_app.errors import ConfigError, EngineFailedError
from serve_app.llama import library
from serve_app.llama.model import Model, files_of, fingerprint_of
from serve_app.openvino.convert import versions
from serve_app.openvino.exported.files import ONLY_OPENVINO, is_graph
from serve_app.progress import Report, Stage

logger = logging.getLogger("corral.engine")

LLAMA_CPP: KernelsName = "llama.cpp"
OPENVINO: KernelsName = "openvino"


@dataclass(frozen=True, slots=True)
class KernelsChoice:
    """A backend, and why it is this one, in one line."""

    name: KernelsName
    reason: str


def faster(measured: Mapping[KernelsName, Setup], options: EngineOptions) -> KernelsChoice:
    """The backend with which a request takes less of the machine's time.

    A server with several slots often has a single stream, too. So the time is the geometric mean of
    two: with one sequence, and with all slots busy. A ratio counts the same upwards and downwards then.
    """
    theirs, ours = measured[OPENVINO], measured[LLAMA_CPP]
    comparison = compared(theirs.profile, ours.profile, options, theirs.mode, ours.mode)
    if comparison is None:
        return KernelsChoice(LLAMA_CPP, "nothing was measured")
    pays, figures = comparison
    reason = f"measured: the time of a request, OpenVINO's to llama.cpp's, is {figures}"
    return KernelsChoice(OPENVINO if pays else LLAMA_CPP, reason)


def open_named(
    name: KernelsName, path: Path, options: EngineOptions, report: Report = progress.nowhere
) -> Backend:
    """Open that backend with a model, on the thread that will compute. Raises ConfigError."""
    if name == "openvino":
        try:
            from serve_app.engine.backends.openvino import OpenVinoBackend
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"engine.backend: openvino needs the package {error.name}. Install corral[openvino]."
            ) from None
        return OpenVinoBackend(path, options, report)
    if is_graph(path):
        raise ConfigError(ONLY_OPENVINO)
    from serve_app.engine.backends.llama_cpp import LlamaBackend

    return LlamaBackend(path, options, report)


def measured(name: KernelsName, path: Path, options: EngineOptions) -> Setup:
    """How that backend computes, as measured now or at an earlier start. Raises ConfigError if it cannot
    serve the model so, and EngineFailedError if nothing came of it."""
    return apart(opened_setup, name, path, options)


def opened_setup(name: KernelsName, path: Path, options: EngineOptions) -> Setup:
    """How that backend computes; it is opened and closed again, in this process."""
    with closing(open_named(name, path, replace(options, backend=name))) as backend:
        return backend.setup


def open_backend(
    path: str | os.PathLike[str], options: EngineOptions, report: Report = progress.nowhere
) -> Backend:
    """The backend, opened; on the thread that will compute. Raises ConfigError."""
    path = Path(path)
    layout = LayoutChoice(repack=True)
    if options.backend != OPENVINO and not is_graph(path):
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
        if options.backend != "auto" or choice.name == LLAMA_CPP or is_graph(path):
            raise
        reason = f"OpenVINO could not be started: {_said(error)}"
        choice = replace(choice, name=LLAMA_CPP, reason=reason)
        logger.warning("Backend %s: %s.", choice.name, choice.reason)
        backend = open_named(LLAMA_CPP, path, replace(options, backend=LLAMA_CPP), report)
    backend.setup = replace(backend.setup, kernels_reason=choice.reason)
    return backend


def chosen(path: Path, options: EngineOptions, report: Report = progress.nowhere) -> KernelsChoice:
    """The backend for `auto`, as measured now or at an earlier start.

    One at a time has weights in memory, in a process of its own. Of several processes of this node that
    ask at once, one measures. Nothing is measured of a model in OpenVINO's format, which llama.cpp cannot
    read, and of a model with experts, for which OpenVINO 2026.4 has products of many rows only with AMX
    and bf16 activations.
    """
    if is_graph(path):
        return KernelsChoice(OPENVINO, "the model is in OpenVINO's format")
    kernels, refusal = "", ""
    if names := options.unsupported_by_openvino():
        refusal = f"OpenVINO's backend does not support {names[0]}"
    else:
        try:
            kernels = versions()
        except ConfigError as error:
            refusal = _said(error)
    if not refusal and _has_experts(path):
        refusal = "OpenVINO computes the experts of each token one by one, which makes prompts slow"
    if options.profile_limit_s <= 0:
        return KernelsChoice(LLAMA_CPP, refusal or "nothing is measured")
    model, libraries = fingerprint_of(files_of(path)).hex(), (library.version(), kernels, refusal)
    name = f"backend-{profile_cache.key(options, model=model, libraries=libraries)}"
    measure = partial(_measured_choice, path, options, report, refusal)
    return profile_cache.remembered(options.profile_folder, name, KernelsChoice, measure)


def _has_experts(path: Path) -> bool:
    try:
        return Model(path, vocab_only=True).meta_int("expert_count", 0) > 0
    except ConfigError:
        return False


def _measured_choice(
    path: Path, options: EngineOptions, report: Report, refusal: str
) -> tuple[KernelsChoice, bool]:
    """The choice, and whether it is good for later starts. `refusal` says why OpenVINO is none."""
    if refusal:
        return KernelsChoice(LLAMA_CPP, refusal), True
    stage = Stage("measuring", limit_s=options.profile_limit_s)
    report(stage)
    try:
        theirs = measured(OPENVINO, path, options)
    except ConfigError as error:
        return KernelsChoice(LLAMA_CPP, f"OpenVINO cannot serve it: {_said(error)}"), True
    except EngineFailedError as error:
        reason = f"OpenVINO could not be measured: {_said(error)}"
        return KernelsChoice(LLAMA_CPP, reason), False
    report(stage)
    ours = measured(LLAMA_CPP, path, options)
    choice = faster({LLAMA_CPP: ours, OPENVINO: theirs}, options)
    return choice, profile_cache.is_worth_keeping([ours.profile, theirs.profile])


def _said(error: Exception) -> str:
    return str(error).removesuffix(".")
