"""Chooses the plan of a start. What the options say is no candidate. The rest is compared in this order:

1. Layouts of weights that llama.cpp has for the file: repacked, as they are stored, and both.
2. The fastest of them and OpenVINO, with the file's weights and with `w8a8`, in the same measurement
   (`kernels.py`).
3. With the weights of the winner loaded, modes of llama.cpp's cache (`caches.py`).

Candidates are rated by the seconds of a request (`rating.py`). Of those that are about as fast as the
fastest, the first in the list wins. The plan is kept for later starts. One that other programs disturbed
is measured again by a start that nobody waits for.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gguf import LlamaFileType

from serve_app.base.engine_options import EngineOptions
from serve_app.base.errors import ConfigError, CorralError
from serve_app.base.folders import GIB
from serve_app.base.progress import Report, Stage, nowhere
from serve_app.engine.choice.apart import apart
from serve_app.engine.choice.kernels import MODE, kernels_profiles
from serve_app.engine.choice.plan import (
    AS_STORED,
    BOTH,
    OPENVINO,
    OPENVINO_BOTH,
    OPENVINO_W8A8,
    PAGED,
    REPACKED,
    Kernels,
    Plan,
)
from serve_app.engine.choice.rating import alike, comparison, fastest, join_profiles, request_s
from serve_app.engine.costs import profile_cache
from serve_app.kernels.llama import library
from serve_app.kernels.llama.model import Model, files_of, fingerprint_of
from serve_app.kernels.openvino import convert
from serve_app.kernels.openvino.slices import converted_slice

logger = logging.getLogger("corral.engine")

# Smaller models gain less than the process of a measurement costs.
_LEAST_BYTES = 20 * 2**20
# Seconds in which each of the kernels is measured. Any but the first must take 5% less: the rest is noise.
_EACH_S, _SAME = 6.0, 1 / 0.95 - 1
# A start waits for a conversion of so many seconds.
_MOST_CONVERSION_S = 30.0
# Formats of weights, by llama.cpp's names, that it has fast kernels for without repacking them.
_TILED = re.compile(r"MOSTLY_(Q\d_K\w*|IQ\d_\w+)")
# Formats whose products OpenVINO does not round at all.
_FLOATS = re.compile(r"ALL_F32|MOSTLY_B?F16")
# Files may be mapped beside repacked weights if they were loaded so. They take this part of the memory
# that weights leave, at most: half of it is for the KV cache, and some for prefixes.
_MAPPED, _MOST_BESIDES = ("auto", "mmap"), 1 / 4


def choose(path: Path, options: EngineOptions, report: Report = nowhere) -> Plan:
    """The plan of a start, but for its cache, as measured now or at an earlier start. Of several processes
    of this node that ask at once, one measures. Raises ConfigError."""
    if options.profile_limit_s <= 0 or not path.is_file():
        why = "nothing is measured" if options.backend == "auto" else "as configured"
        return Plan(
            _configured_kernels(options) if options.backend == "openvino" else REPACKED, why
        )
    files = files_of(path)
    n_bytes, fingerprint = sum(file.stat().st_size for file in files), fingerprint_of(files)
    left = math.inf if options.memory_bytes is None else options.memory_bytes - n_bytes
    has_room = options.load_mode in _MAPPED and n_bytes <= _MOST_BESIDES * left
    refusal = _refusal(files, n_bytes, options)
    name = profile_cache.key(
        options,
        model=fingerprint.hex(),
        llama_cpp=library.version(),
        openvino=refusal or convert.versions(),
        has_room=has_room,
        drafts=(options.speculate, options.own_layers or options.draft is not None),
    )
    folder = options.profile_folder
    with profile_cache.alone(folder, name):
        kept = profile_cache.load(folder, name, Plan)
        plan = kept or Plan(name=name)
        if options.backend == "openvino":
            return replace(plan, kernels=_configured_kernels(options))
        if kept is None or (options.measures_again and not plan.is_certain):
            plan = _measure_kernels(plan, path, options, refusal, has_room, report)
            profile_cache.save(folder, name, plan)
    plan = replace(plan, kernels=plan.llama_cpp, why=plan.reason, converts=False)
    if plan.openvino is None:
        return plan
    converted = (
        convert.converted_models(None).of(convert.name_of(fingerprint, quantization=way))
        for way in plan.openvino.quantizations
    )
    if plan.conversion_s <= _MOST_CONVERSION_S or all(path.is_file() for path in converted):
        return replace(plan, kernels=plan.openvino)
    why = f"{plan.reason}; to convert the file for OpenVINO takes about {plan.conversion_s:.0f} s"
    why += ": that is done beside the requests, for the next start" * has_room
    why += " and much memory: set backend: openvino for that" * (not has_room)
    return replace(plan, why=why, converts=has_room)


def _configured_kernels(options: EngineOptions) -> Kernels:
    """OpenVINO's kernels without a measurement."""
    return OPENVINO_W8A8 if options.quantization == "w8a8" else OPENVINO


def _refusal(files: Sequence[Path], n_bytes: int, options: EngineOptions) -> str:
    """Why OpenVINO is no candidate, as far as options and files tell; "" if it is one."""
    if options.backend != "auto":
        return "as configured" if options.backend == "llama.cpp" else ""
    if names := options.unsupported_by_openvino():
        return f"OpenVINO's backend does not support {names[0]}"
    if n_bytes < _LEAST_BYTES:
        return "the model is small"
    try:
        convert.versions()
        n_converted = convert.read_model(files).converted_bytes()
    except ConfigError as error:
        return str(error).removesuffix(".")
    if n_converted > (options.memory_bytes or math.inf):
        return f"OpenVINO would take {n_converted / GIB:.1f} GiB of memory, and there is less"
    return ""


def _measure_kernels(
    plan: Plan, path: Path, options: EngineOptions, refusal: str, has_room: bool, report: Report
) -> Plan:
    """The plan with the fastest kernels. `refusal` says why OpenVINO is not among them."""
    model = Model(path, vocab_only=True)
    refusal = refusal or (convert.unserved_reason(model, options.embedding_pooling) or "").strip(
        "."
    )
    plan, layouts = replace(plan, reason=refusal, is_certain=True), _layouts(model, has_room)
    if not (refusal or model.is_causal):
        return replace(plan, openvino=OPENVINO, reason="OpenVINO is the faster for encoders")
    if not refusal:
        candidates, max_bytes = [OPENVINO], options.max_converted_bytes
        if _may_round(model, options):
            candidates += [OPENVINO_W8A8, *([OPENVINO_BOTH] if has_room else [])]
        ways = list(dict.fromkeys(each.quantization for each in candidates))
        try:
            with converted_slice(model, max_bytes, report, ways) as (part, share, s):
                plan = _fastest(plan, part, [*layouts, *candidates], options, share, report)
                n_ways = 1 if plan.openvino is None else len(plan.openvino.quantizations)
                return replace(plan, conversion_s=n_ways * s)
        except (CorralError, OSError, ValueError) as error:  # some metadata cannot be in a slice
            reason = f"OpenVINO could not be measured: {error}".removesuffix(".")
            plan = replace(plan, reason=reason, is_certain=False)
        finally:
            for way in ways:
                name = convert.name_of(model.fingerprint(), quantization=way)
                convert.converted_models(None).leave(name)
    try:
        return plan if len(layouts) == 1 else _fastest(plan, path, layouts, options, 1.0, report)
    except CorralError as error:
        logger.warning("The layouts of weights cannot be compared: %s", error)
        return replace(plan, is_certain=False)


def _layouts(model: Model, has_room: bool) -> list[Kernels]:
    """The layouts of weights that come into question, the usual one first."""
    if not model.is_causal or _TILED.fullmatch(_format(model)) is None:
        return [REPACKED]
    return [REPACKED, AS_STORED, *([BOTH] if has_room else [])]


def _may_round(model: Model, options: EngineOptions) -> bool:
    """Whether `w8a8` is about as exact as the file's weights are with OpenVINO, and fits."""
    if options.quantization != "auto" or _FLOATS.fullmatch(_format(model)):
        return False
    n_bytes = convert.read_model(model.files, quantization="w8a8").converted_bytes()
    return n_bytes <= (options.memory_bytes or math.inf)


def _format(model: Model) -> str:
    """The file's format by llama.cpp's name; "" if it does not say it."""
    number = model.meta("general.file_type")
    names = (kind.name for kind in LlamaFileType if number and int(kind) == int(number))
    return next(names, "")


def _fastest(
    plan: Plan,
    path: Path,
    candidates: list[Kernels],
    options: EngineOptions,
    share: float,
    report: Report,
) -> Plan:
    """The plan with the fastest of these kernels, as measured with a file that takes that share of the
    model's time. Raises CorralError."""
    measured = [kernels for kernels in candidates if kernels not in (BOTH, OPENVINO_BOTH)]
    limit_s = min(_EACH_S * len(measured), options.profile_limit_s)
    report(Stage("measuring", limit_s=limit_s))
    found = apart(kernels_profiles, path, options, measured, limit_s)
    is_certain = not profile_cache.is_disturbed(found)
    profiles = alike(dict(zip(measured, found, strict=True)))
    pairs = {BOTH: (REPACKED, AS_STORED), OPENVINO_BOTH: (OPENVINO, OPENVINO_W8A8)}
    for both, (few, many) in pairs.items():
        if both in candidates and (joined := join_profiles(profiles[few], profiles[many])):
            profiles[replace(both, many_from=joined[0])] = joined[1]
    options = replace(options, max_stall_ms=share * options.max_stall_ms)
    loads = [replace(options, n_slots=n) for n in sorted({1, options.n_slots})]
    seconds = {}
    for kernels, profile in profiles.items():
        mode = PAGED if kernels.backend == "openvino" else MODE
        seconds[kernels] = [request_s(profile, load, mode) / share for load in loads]
    openvino_s = {each: times for each, times in seconds.items() if each.backend == "openvino"}
    layouts_s = {each: times for each, times in seconds.items() if each not in openvino_s}
    winner = best = fastest(layouts_s, _SAME)
    if is_certain:
        winner = fastest({best: seconds[best], **openvino_s}, _SAME)
    at_once = " and ".join(str(load.n_slots) for load in loads)
    reasons = [plan.reason, comparison(seconds, f"with {at_once} at once")]
    if not is_certain:
        reasons.append("other programs computed, so it says little: the next start measures again")
    return replace(
        plan,
        llama_cpp=best,
        openvino=winner if winner in openvino_s else None,
        reason="; ".join(filter(None, reasons)),
        is_certain=plan.is_certain and is_certain,
    )
