"""Chooses how llama.cpp lays weights out: repacked for kernels of few rows, or as they are stored.

For K- and IQ-quants it also has kernels for many rows, which skip weights that were repacked. Which layout
takes less time depends on the machine, the model and the slots, so both are measured at the first start, in
turns, in a process of their own.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from gguf import LlamaFileType

from serve_app.engine.autotune import profile_cache
from serve_app.engine.autotune.clocks import Clocks
from serve_app.engine.autotune.cost_model import Profile
from serve_app.engine.autotune.modes import Mode, compared
from serve_app.engine.autotune.profiler import Profiler, in_turns
from serve_app.engine.backends.apart import apart
from serve_app.engine.options import EngineOptions
from serve_app.errors import ConfigError, DecodeError, EngineFailedError
from serve_app.llama import library
from serve_app.llama.context import Context, ContextOptions
from serve_app.llama.formats import Threads
from serve_app.llama.model import Model, files_of, fingerprint_of
from serve_app.progress import Report, Stage

logger = logging.getLogger("corral.engine")

# Formats of weights, by llama.cpp's names, that it has fast kernels for without repacking them.
_TILED = re.compile(r"MOSTLY_(Q\d_K\w*|IQ\d_\w+)")
# Seconds of batches at most, and the tokens that a slot has room for meanwhile.
_LIMIT_S, _N_CTX_SLOT = 12.0, 256
_MODE = Mode(flash_attn=True, kv_unified=False)


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """Whether llama.cpp lays the weights out anew when it loads them, and why, in one line."""

    repack: bool
    reason: str = ""


def chosen_layout(path: Path, options: EngineOptions, report: Report) -> LayoutChoice:
    """The layout with which a request takes less of the machine's time, as measured now or at an earlier
    start; as the options say, if they do. Of several processes of this node that ask at once, one measures.
    """
    if options.repack is not None:
        return LayoutChoice(options.repack)
    if options.profile_limit_s <= 0 or not path.is_file():
        return LayoutChoice(repack=True)

    def measure() -> tuple[LayoutChoice, bool]:
        if not _has_layouts(path):
            return LayoutChoice(repack=True), True
        report(Stage("measuring", limit_s=_LIMIT_S))
        try:
            as_stored, repacked = apart(profiles_of_layouts, path, options)
        except (ConfigError, EngineFailedError) as error:
            logger.warning("The layouts of weights cannot be compared: %s", error)
            return LayoutChoice(repack=True), False
        comparison = compared(as_stored, repacked, options, _MODE, _MODE)
        if comparison is None:
            return LayoutChoice(repack=True), True
        pays, figures = comparison
        layout = "as they are stored" if pays else "repacked"
        reason = f"weights {layout}: the time of a request, as stored to repacked, is {figures}"
        return LayoutChoice(not pays, reason), profile_cache.is_worth_keeping([as_stored, repacked])

    model = fingerprint_of(files_of(path)).hex()
    name = f"layout-{profile_cache.key(options, model=model, llama_cpp=library.version())}"
    return profile_cache.remembered(options.profile_folder, name, LayoutChoice, measure)


def profiles_of_layouts(path: Path, options: EngineOptions) -> tuple[Profile, Profile]:
    """The times of batches with weights as they are stored, and repacked, measured in turns; nothing of
    models that do not generate. Raises ConfigError."""
    threads = Threads.alike(options.threads, options.threads_batch)
    n_ctx_slot = min(options.n_ctx_share, _N_CTX_SLOT)
    models = [Model(path, load_mode=options.load_mode, repack=repack) for repack in (False, True)]
    if not models[0].is_causal:
        return Profile(), Profile()
    try:
        contexts = [
            Context(
                model,
                ContextOptions(
                    n_seq_max=options.n_slots,
                    n_ctx_slot=n_ctx_slot,
                    n_batch=max(n_ctx_slot, options.n_slots),
                    n_outputs=options.n_slots,
                    threads=options.threads,
                    threads_batch=options.threads_batch,
                    flash_attn=_MODE.flash_attn,
                    kv_unified=_MODE.kv_unified,
                    cache_type_k=options.cache_type_k,
                    cache_type_v=options.cache_type_v,
                ),
            )
            for model in models
        ]
    except DecodeError as error:
        raise ConfigError(f"{path} cannot be decoded: {error}") from error
    profilers = [
        Profiler(
            context,
            n_slots=options.n_slots,
            n_ctx_slot=n_ctx_slot,
            n_batch=min(options.n_batch, n_ctx_slot),
            clocks=Clocks(threads),
        )
        for context in contexts
    ]
    for context in contexts:
        context.warm_up()
    in_turns(profilers, min(_LIMIT_S, options.profile_limit_s))
    for context in contexts:
        context.close()
    as_stored, repacked = (profiler.profile for profiler in profilers)
    return as_stored, repacked


def _has_layouts(path: Path) -> bool:
    """Whether llama.cpp has fast kernels for the file's weights both as they are stored and repacked."""
    try:
        model = Model(path, vocab_only=True)
    except ConfigError:
        return False
    number = model.meta("general.file_type")
    names = (kind.name for kind in LlamaFileType if number and int(kind) == int(number))
    return _TILED.fullmatch(next(names, "")) is not None
