"""Opens the backend that the options name, or with `auto` the one that is measured to be faster.

A measurement runs in a process of its own, which gives all of its memory back."""

from __future__ import annotations

import logging
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from gguf import LlamaFileType

from serve_app import progress
from serve_app.engine.autotune import profile_cache
from serve_app.engine.autotune.modes import alike, request_s
from serve_app.engine.backends.base import Backend, Setup
from serve_app.engine.options import EngineOptions, KernelsName
from serve_app.errors import ConfigError, EngineFailedError
from serve_app.llama import library
from serve_app.llama.model import Model, files_of, fingerprint_of
from serve_app.locks import FolderLocks
from serve_app.openvino.convert import versions
from serve_app.openvino.exported.files import ONLY_OPENVINO, is_graph
from serve_app.progress import Report, Stage

logger = logging.getLogger("corral.engine")

LLAMA_CPP: KernelsName = "llama.cpp"
OPENVINO: KernelsName = "openvino"
# Seconds of a measurement, at most: to convert a large model takes the most of it.
_LIMIT_S = 3600.0
# The other kernels must take so much less time, as a part: less is noise, and llama.cpp's own can do more.
_LEAST_GAIN = 0.05
# Formats of weights, by llama.cpp's names, that it has fast kernels for without repacking them.
_TILED = re.compile(r"MOSTLY_(Q\d_K\w*|IQ\d_\w+)")


@dataclass(frozen=True, slots=True)
class KernelsChoice:
    """A backend, and why it is this one, in one line."""

    name: KernelsName
    reason: str
    repack: bool = True
    """Whether llama.cpp lays the weights out anew when it loads them."""


def faster(measured: Mapping[KernelsName, Setup], options: EngineOptions) -> KernelsChoice:
    """The backend with which a request takes less of the machine's time.

    A server with several slots often has a single stream, too. So the time is the geometric mean of
    two: with one sequence, and with all slots busy. A ratio counts the same upwards and downwards then.
    """
    comparison = _compared(measured[OPENVINO], measured[LLAMA_CPP], options)
    if comparison is None:
        return KernelsChoice(LLAMA_CPP, "nothing was measured")
    pays, figures = comparison
    reason = f"measured: the time of a request, OpenVINO's to llama.cpp's, is {figures}"
    return KernelsChoice(OPENVINO if pays else LLAMA_CPP, reason)


def faster_layout(as_stored: Setup, repacked: Setup, options: EngineOptions) -> KernelsChoice:
    """The layout of weights with which a request takes less of the machine's time with llama.cpp, by the
    same mean of two loads as `faster`."""
    comparison = _compared(as_stored, repacked, options)
    if comparison is None:
        return KernelsChoice(LLAMA_CPP, "nothing was measured")
    pays, figures = comparison
    layout = "as they are stored" if pays else "repacked"
    reason = f"weights {layout}: the time of a request, as stored to repacked, is {figures}"
    return KernelsChoice(LLAMA_CPP, reason, repack=not pays)


def _compared(other: Setup, usual: Setup, options: EngineOptions) -> tuple[bool, str] | None:
    """Whether the other setup pays, and the ratios of the times of a request; None if nothing was
    measured."""
    profiles = alike({True: other.profile, False: usual.profile})
    ratios = {}
    for n in sorted({1, options.n_slots}):
        sized = replace(options, n_slots=n)
        other_s = request_s(profiles[True], sized, other.mode)
        usual_s = request_s(profiles[False], sized, usual.mode)
        if other_s and usual_s:
            ratios[n] = other_s / usual_s
    if not ratios:
        return None
    mean = math.exp(sum(math.log(ratio) for ratio in ratios.values()) / len(ratios))
    figures = ", ".join(f"{ratio:.2f} with {n} at once" for n, ratio in ratios.items())
    if len(ratios) > 1:
        figures += f", {mean:.2f} in the mean"
    return mean <= 1 - _LEAST_GAIN, figures


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
    with tempfile.TemporaryDirectory(prefix="corral-") as folder:
        result = Path(folder) / "result"
        try:
            done = subprocess.run(
                [sys.executable, "-c", f"import {__name__} as choice; choice.main()", str(result)],
                input=msgspec.msgpack.encode((name, path, options), enc_hook=str),
                stdout=subprocess.DEVNULL,
                timeout=_LIMIT_S,
                check=False,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        except subprocess.TimeoutExpired:
            raise EngineFailedError(f"{name} was not measured within {_LIMIT_S:.0f} s.") from None
        if done.returncode or not result.is_file():
            raise EngineFailedError(f"Measuring {name} ended with status {done.returncode}.")
        outcome = msgspec.msgpack.decode(result.read_bytes(), type=Setup | str)
    if isinstance(outcome, str):
        raise ConfigError(outcome)
    return outcome


def main() -> None:
    """Measure in this process. The input is the arguments of `measured`. The file that the first argument
    names gets the Setup, or the message of a ConfigError."""
    logging.basicConfig(level=logging.WARNING)
    name, path, options = msgspec.msgpack.decode(
        sys.stdin.buffer.read(),
        type=tuple[KernelsName, Path, EngineOptions],
        dec_hook=lambda kind, value: kind(value),
    )
    try:
        with closing(open_named(name, path, replace(options, backend=name))) as backend:
            outcome: Setup | str = backend.setup
    except ConfigError as error:
        outcome = str(error)
    Path(sys.argv[1]).write_bytes(msgspec.msgpack.encode(outcome))


def open_backend(
    path: str | os.PathLike[str], options: EngineOptions, report: Report = progress.nowhere
) -> Backend:
    """The backend, opened; on the thread that will compute. Raises ConfigError."""
    path = Path(path)
    if options.backend != "auto":
        choice = KernelsChoice(options.backend, "as configured", options.repack)
    else:
        choice = chosen(path, options, report)
        logger.info("Backend %s: %s.", choice.name, choice.reason)
    options_chosen = replace(options, backend=choice.name, repack=choice.repack)
    try:
        backend = open_named(choice.name, path, options_chosen, report)
    except ConfigError as error:
        if options.backend != "auto" or choice.name == LLAMA_CPP or is_graph(path):
            raise
        reason = f"OpenVINO could not be started: {_said(error)}"
        choice = replace(choice, name=LLAMA_CPP, reason=reason)
        logger.warning("Backend %s: %s.", choice.name, choice.reason)
        backend = open_named(LLAMA_CPP, path, replace(options_chosen, backend=LLAMA_CPP), report)
    backend.setup = replace(backend.setup, kernels_reason=choice.reason)
    return backend


def chosen(path: Path, options: EngineOptions, report: Report = progress.nowhere) -> KernelsChoice:
    """The backend for `auto`, and llama.cpp's layout of weights, as measured now or at an earlier start.

    One at a time has weights in memory, in a process of its own. Of several processes of this node that
    ask at once, one measures. Nothing is measured of a model in OpenVINO's format, which llama.cpp cannot
    read.
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
    folder = options.profile_folder
    if options.profile_limit_s <= 0:
        return KernelsChoice(LLAMA_CPP, refusal or "nothing is measured")
    if folder is None:
        return _measured_choice(path, options, report, refusal)[0]
    model, libraries = fingerprint_of(files_of(path)).hex(), (library.version(), kernels, refusal)
    name = f"backend-{profile_cache.key(options, model=model, libraries=libraries)}"
    with FolderLocks(folder).alone(f"{name}.lock", wait=True):
        kept = profile_cache.load(folder, name, KernelsChoice)
        if kept is not None:
            return kept
        choice, is_certain = _measured_choice(path, options, report, refusal)
        if is_certain:
            profile_cache.save(folder, name, choice)
    return choice


def _measured_choice(
    path: Path, options: EngineOptions, report: Report, refusal: str
) -> tuple[KernelsChoice, bool]:
    """The choice, and whether it is good for later starts. `refusal` says why OpenVINO is none."""
    is_certain, stage = True, Stage("measuring", limit_s=options.profile_limit_s)
    theirs = None
    if not refusal:
        report(stage)
        try:
            theirs = measured(OPENVINO, path, options)
        except ConfigError as error:
            refusal = f"OpenVINO cannot serve it: {_said(error)}"
        except EngineFailedError as error:
            refusal, is_certain = f"OpenVINO could not be measured: {_said(error)}", False
    has_layouts = _has_layouts(path)
    if theirs is None and not has_layouts:
        return KernelsChoice(LLAMA_CPP, refusal), is_certain
    report(stage)
    ours, layout = measured(LLAMA_CPP, path, options), KernelsChoice(LLAMA_CPP, "")
    setups = [ours]
    if has_layouts:
        report(stage)
        as_stored = measured(LLAMA_CPP, path, replace(options, repack=False))
        setups.append(as_stored)
        layout = faster_layout(as_stored, ours, options)
        ours = ours if layout.repack else as_stored
    reasons = [layout.reason] if layout.reason else []
    if theirs is None:
        choice = KernelsChoice(LLAMA_CPP, refusal)
    else:
        setups.append(theirs)
        choice = faster({LLAMA_CPP: ours, OPENVINO: theirs}, options)
    is_certain = is_certain and profile_cache.is_worth_keeping([one.profile for one in setups])
    reason = "; ".join([choice.reason, *reasons])
    return KernelsChoice(choice.name, reason, layout.repack), is_certain


def _has_layouts(path: Path) -> bool:
    """Whether llama.cpp has fast kernels for the file's weights both as they are stored and repacked."""
    try:
        number = Model(path, vocab_only=True).meta("general.file_type")
    except ConfigError:
        return False
    names = (kind.name for kind in LlamaFileType if number and int(kind) == int(number))
    return _TILED.fullmatch(next(names, "")) is not None


def _said(error: Exception) -> str:
    return str(error).removesuffix(".")
