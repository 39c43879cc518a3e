"""Chooses the plan of a start. What the options say is no candidate. The rest is compared in this order:

1. Layouts of weights that llama.cpp has for the file: repacked, as they are stored, and both.
2. The fastest of them and OpenVINO, in the same measurement (`kernels.py`).
3. With the weights of the winner loaded, numbers of threads, and then modes of the cache (`caches.py`).

Candidates are rated by the seconds of a request (`rating.py`). Of those that are about as fast as the
fastest, the first in the list wins. The plan is kept for later starts, unless other programs disturbed it.
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
    PAGED,
    REPACKED,
    Kernels,
    Plan,
    kept_plan,
)
from serve_app.engine.choice.rating import alike, fastest, joined, request_s
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
# Ways to load that leave the file mapped.
_MAPPED = ("auto", "mmap")
# The file beside repacked weights takes this part of the memory that weights leave, at most: half of that
# is for the KV cache, and some for prefixes.
_MOST_BESIDES = 1 / 4


def choose(path: Path, options: EngineOptions, report: Report = nowhere) -> Plan:
    """The plan of a start, but for its cache, as measured now or at an earlier start. Of several processes
    of this node that ask at once, one measures. Raises ConfigError."""
    if options.profile_limit_s <= 0 or not path.is_file():
        why = "nothing is measured" if options.backend == "auto" else "as configured"
        return Plan(OPENVINO if options.backend == "openvino" else REPACKED, why)
    files = files_of(path)
    fingerprint, refusal = fingerprint_of(files), _refusal(files, options)
    room_for_both = _has_room_for_both(files, options)
    name = profile_cache.key(
        options,
        model=fingerprint.hex(),
        llama_cpp=library.version(),
        openvino=refusal or convert.versions(),
        room_for_both=room_for_both,
        drafts=(options.speculate, options.own_layers or options.draft is not None),
    )
    folder = options.profile_folder
    with profile_cache.alone(folder, name):
        plan = kept_plan(folder, name)
        if options.backend == "openvino":
            return replace(plan, kernels=OPENVINO)
        if not plan.is_certain:
            plan = _measured(plan, path, options, refusal, room_for_both, report)
            if plan.is_certain:
                profile_cache.save(folder, name, plan)
    plan = replace(plan, kernels=plan.llama_cpp, why=plan.reason, converts=False)
    if not plan.openvino:
        return plan
    converted = convert.converted_models(None).of(convert.name_of(fingerprint))
    if plan.conversion_s <= _MOST_CONVERSION_S or converted.is_file():
        return replace(plan, kernels=OPENVINO)
    why = f"{plan.reason}, but to convert the file takes about {plan.conversion_s:.0f} s"
    if room_for_both:
        why += ": that is done beside the requests, for the next start"
    else:
        why += " and much memory: set backend: openvino for that"
    return replace(plan, why=why, converts=room_for_both)


def _refusal(files: Sequence[Path], options: EngineOptions) -> str:
    """Why OpenVINO is no candidate, as far as options and files tell; "" if it is one."""
    if options.backend != "auto":
        return "as configured" if options.backend == "llama.cpp" else ""
    if names := options.unsupported_by_openvino():
        return f"OpenVINO's backend does not support {names[0]}"
    if sum(file.stat().st_size for file in files) < _LEAST_BYTES:
        return "the model is small"
    try:
        convert.versions()
        n_bytes = convert.checked(files).converted_bytes()
    except ConfigError as error:
        return said(error)
    if n_bytes > (options.memory_bytes or math.inf):
        return f"OpenVINO would take {n_bytes / GIB:.1f} GiB of memory, and there is less"
    return ""


def _has_room_for_both(files: Sequence[Path], options: EngineOptions) -> bool:
    """Whether the files may be mapped beside weights that were repacked."""
    if options.load_mode not in _MAPPED:
        return False
    n_bytes = sum(file.stat().st_size for file in files)
    left = math.inf if options.memory_bytes is None else options.memory_bytes - n_bytes
    return n_bytes <= _MOST_BESIDES * left


def _measured(
    plan: Plan,
    path: Path,
    options: EngineOptions,
    refusal: str,
    room_for_both: bool,
    report: Report,
) -> Plan:
    """The plan with the fastest kernels. `refusal` says why OpenVINO is not among them."""
    model = Model(path, vocab_only=True)
    refusal = refusal or (convert.unserved(model, options.embedding_pooling) or "").strip(".")
    plan, layouts = replace(plan, reason=refusal, is_certain=True), _layouts(model, room_for_both)
    if not (refusal or model.is_causal):
        return replace(plan, openvino=True, reason="OpenVINO is the faster for encoders")
    if not refusal:
        try:
            with converted_slice(model, options.max_converted_bytes, report) as (part, share, s):
                plan = _fastest(plan, part, [*layouts, OPENVINO], options, share, report)
                return replace(plan, conversion_s=s)
        except (CorralError, OSError, ValueError) as error:  # some metadata cannot be in a slice
            reason = f"OpenVINO could not be measured: {said(error)}"
            plan = replace(plan, reason=reason, is_certain=False)
        finally:
            convert.converted_models(None).leave(convert.name_of(model.fingerprint()))
    try:
        return plan if len(layouts) == 1 else _fastest(plan, path, layouts, options, 1.0, report)
    except CorralError as error:
        logger.warning("The layouts of weights cannot be compared: %s", error)
        return replace(plan, is_certain=False)


def _layouts(model: Model, room_for_both: bool) -> list[Kernels]:
    """The layouts of weights that come into question, the usual one first."""
    number = model.meta("general.file_type")
    names = (kind.name for kind in LlamaFileType if number and int(kind) == int(number))
    if not model.is_causal or _TILED.fullmatch(next(names, "")) is None:
        return [REPACKED]
    return [REPACKED, AS_STORED, *([BOTH] if room_for_both else [])]


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
    measured = [kernels for kernels in candidates if kernels != BOTH]
    limit_s = min(_EACH_S * len(measured), options.profile_limit_s)
    report(Stage("measuring", limit_s=limit_s))
    found = apart(kernels_profiles, path, options, measured, limit_s)
    profiles = alike(dict(zip(measured, found, strict=True)))
    if BOTH in candidates and (both := joined(profiles[REPACKED], profiles[AS_STORED])):
        profiles[replace(BOTH, stored_from=both[0])] = both[1]
    if options.max_stall_s is not None:
        options = replace(options, max_stall_s=share * options.max_stall_s)
    at_once = sorted({1, options.n_slots})
    load = f", with {' and '.join(map(str, at_once))} at once"
    seconds = {
        kernels: [
            request_s(profile, replace(options, n_slots=n), PAGED if kernels == OPENVINO else MODE)
            / share
            for n in at_once
        ]
        for kernels, profile in profiles.items()
    }
    openvino_s, reasons, openvino = seconds.pop(OPENVINO, None), [plan.reason], False
    is_certain = profile_cache.is_worth_keeping(found)
    best, reason = fastest(seconds, _SAME, load)
    reasons.append(reason)
    if openvino_s is not None:
        winner, reason = fastest({best: seconds[best], OPENVINO: openvino_s}, _SAME, load)
        openvino = winner == OPENVINO and is_certain
        reasons.append(reason)
    if not is_certain:
        reasons.append(
            "which says little, as other programs computed: the next start measures again"
        )
    return replace(
        plan,
        llama_cpp=best,
        openvino=openvino,
        reason="; ".join(filter(None, reasons)),
        is_certain=plan.is_certain and is_certain,
    )


def said(error: Exception) -> str:
    """An error as a part of a sentence."""
    return str(error).removesuffix(".")
