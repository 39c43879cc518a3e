"""Chooses how llama.cpp lays weights out: repacked for kernels of few rows, as they are stored, or both.

For K- and IQ-quants it also has kernels for many rows, which skip weights that were repacked. Which layout
takes less time depends on the machine, the model and the slots, so both are measured at the first start, in
turns, in a process of their own.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from gguf import LlamaFileType

from serve_app.engine.autotune import profile_cache
from serve_app.engine.autotune.clocks import Clocks
from serve_app.engine.autotune.cost_model import Profile, predicted
from serve_app.engine.autotune.modes import Mode, compared
from serve_app.engine.autotune.profiler import CHUNKS, ProfiledContext, Profiler, in_turns
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
LIMIT_S, _N_CTX_SLOT = 12.0, 256
MODE = Mode(flash_attn=True, kv_unified=False)
# Ways to load that leave the file mapped.
_MAPPED = ("auto", "mmap")
# Both layouts take the size of the file besides. That is this part of the memory that weights leave, at
# most: half of it is for the KV cache, and some for prefixes.
_MOST_BESIDES = 1 / 4


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """The layout of weights, and why, in one line."""

    repack: bool
    """Whether llama.cpp lays the weights out anew when it loads them."""
    reason: str = ""
    stored_from: int | None = None
    """Rows of a batch from which on it is computed over weights as they are stored nevertheless."""


def chosen_layout(path: Path, options: EngineOptions, report: Report) -> LayoutChoice:
    """The layout with which a request takes less of the machine's time, as measured now or at an earlier
    start; as the options say, if they do. Of several processes of this node that ask at once, one measures.
    """
    if options.repack is not None:
        return LayoutChoice(options.repack, stored_from=options.stored_from)
    if options.profile_limit_s <= 0 or not path.is_file():
        return LayoutChoice(repack=True)

    def measure() -> tuple[LayoutChoice, bool]:
        if not _has_layouts(path):
            return LayoutChoice(repack=True), True
        report(Stage("measuring", limit_s=LIMIT_S))
        try:
            as_stored, repacked = apart(profiles_of_layouts, path, options)
        except (ConfigError, EngineFailedError) as error:
            logger.warning("The layouts of weights cannot be compared: %s", error)
            return LayoutChoice(repack=True), False
        choice = fastest_layout(as_stored, repacked, options, room_for_both=room_for_both)
        return choice, profile_cache.is_worth_keeping([as_stored, repacked])

    files = files_of(path)
    room_for_both = has_room_for_both(files, options)
    conditions = {"llama_cpp": library.version(), "room_for_both": room_for_both}
    model = fingerprint_of(files).hex()
    name = f"layout-{profile_cache.key(options, model=model, **conditions)}"
    return profile_cache.remembered(options.profile_folder, name, LayoutChoice, measure)


def fastest_layout(
    as_stored: Profile, repacked: Profile, options: EngineOptions, *, room_for_both: bool
) -> LayoutChoice:
    """The layout with which a request takes least time by these profiles."""
    comparison = compared(as_stored, repacked, options, MODE, MODE)
    if comparison is None:
        return LayoutChoice(repack=True)
    pays, figures = comparison
    layout = "as they are stored" if pays else "repacked"
    n_rows = _least_rows(as_stored, repacked)
    if room_for_both and n_rows is not None:
        both, single = _joined(repacked, as_stored, n_rows), as_stored if pays else repacked
        both_comparison = compared(both, single, options, MODE, MODE)
        if both_comparison is not None and both_comparison[0]:
            reason = (
                f"weights repacked, and as they are stored for batches of {n_rows} rows and more: the time "
                f"of a request, so to all {layout}, is {both_comparison[1]}"
            )
            return LayoutChoice(True, reason, n_rows)
    reason = f"weights {layout}: the time of a request, as stored to repacked, is {figures}"
    return LayoutChoice(not pays, reason)


def has_room_for_both(files: Iterable[Path], options: EngineOptions) -> bool:
    """Whether the files may be mapped beside weights that were repacked."""
    if options.load_mode not in _MAPPED:
        return False
    n_bytes = sum(file.stat().st_size for file in files)
    left = math.inf if options.memory_bytes is None else options.memory_bytes - n_bytes
    return n_bytes <= _MOST_BESIDES * left


def _least_rows(many: Profile, few: Profile) -> int | None:
    """The number of rows from which on batches take less time by the first profile; None without any."""
    many_s, few_s = ({**profile.decode_s, **profile.prefill_s} for profile in (many, few))
    most = max(many_s.keys() & few_s.keys(), default=0)
    slower = [n for n in range(1, most + 1) if predicted(many_s, n) >= predicted(few_s, n)]
    least = max(slower, default=0) + 1
    return least if least <= most else None


def _joined(few: Profile, many: Profile, n_rows: int) -> Profile:
    """The first profile, with batches of `n_rows` rows and more as in the second one."""
    curves: dict[str, Any] = {
        name: {
            **getattr(few, name),
            **{n: seconds for n, seconds in getattr(many, name).items() if n >= n_rows},
        }
        for name in ("decode_s", "prefill_s")
    }
    return replace(few, **curves)


def profiles_of_layouts(path: Path, options: EngineOptions) -> list[Profile]:
    """The times of batches with weights as they are stored, and repacked, measured in turns; nothing of
    models that do not generate. Raises ConfigError."""
    model = Model(path, load_mode=options.load_mode)
    if not model.is_causal:
        return [Profile(), Profile()]
    contexts = [
        small_context(model, replace(options, stored_from=stored_from), _N_CTX_SLOT)
        for stored_from in (1, None)
    ]
    return measured_in_turns(contexts, options, _N_CTX_SLOT)


def small_context(model: Model, options: EngineOptions, n_ctx_slot: int) -> Context:
    """A context that is only profiled, in `MODE`. Raises ConfigError."""
    n_ctx_slot = min(options.n_ctx_share, n_ctx_slot)
    try:
        return Context(
            model,
            ContextOptions(
                n_seq_max=options.n_slots,
                n_ctx_slot=n_ctx_slot,
                n_batch=max(n_ctx_slot, options.n_slots),
                n_outputs=options.n_slots,
                threads=options.threads,
                threads_batch=options.threads_batch,
                flash_attn=MODE.flash_attn,
                kv_unified=MODE.kv_unified,
                cache_type_k=options.cache_type_k,
                cache_type_v=options.cache_type_v,
                stored_from=options.stored_from,
            ),
        )
    except DecodeError as error:
        raise ConfigError(f"{model.path} cannot be decoded: {error}") from error


class SmallContext(ProfiledContext, Protocol):
    """A context that is only profiled."""

    def warm_up(self) -> None: ...

    def close(self) -> None: ...


def measured_in_turns(
    contexts: Sequence[SmallContext],
    options: EngineOptions,
    n_ctx_slot: int,
    n_before: int = 0,
    *,
    spin: bool = True,
) -> list[Profile]:
    """The times of a few batches in each of these contexts, which are closed then. Every sequence has
    `n_before` tokens before each batch. `spin` says that the threads of all wait for each other by
    computing on, so that a batch's CPU time tells how long it would take alone."""
    n_ctx_slot = min(options.n_ctx_share, n_ctx_slot)
    threads = Threads.alike(options.threads, options.threads_batch)
    profilers = [
        Profiler(
            context,
            n_slots=options.n_slots,
            n_ctx_slot=n_ctx_slot - n_before,
            n_batch=min(options.n_batch, n_ctx_slot),
            clocks=Clocks(threads if spin else None),
            # Only in a long prompt, each expert has rows enough for other kernels.
            chunks=(*CHUNKS, n_ctx_slot - n_before),
        )
        for context in contexts
    ]
    for profiler, context in zip(profilers, contexts, strict=True):
        context.warm_up()
        profiler.fill(n_before, options.n_slots)
    whole = Clocks(threads)
    whole.begin()
    in_turns(profilers, min(LIMIT_S, options.profile_limit_s))
    _, share = whole.end(options.n_batch)
    for context in contexts:
        context.close()
    profiles = [profiler.profile for profiler in profilers]
    return [replace(profile, share=min(profile.share, share)) for profile in profiles]


def _has_layouts(path: Path) -> bool:
    """Whether llama.cpp has fast kernels for the file's weights both as they are stored and repacked."""
    try:
        model = Model(path, vocab_only=True)
    except ConfigError:
        return False
    number = model.meta("general.file_type")
    names = (kind.name for kind in LlamaFileType if number and int(kind) == int(number))
    return _TILED.fullmatch(next(names, "")) is not None
