"""Chooses the mode of llama.cpp's cache, with the weights loaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

from serve_app.base.engine_options import EngineOptions
from serve_app.base.formats import block_size, n_bytes
from serve_app.base.progress import Report, Stage
from serve_app.engine.choice.plan import CachePlan, Mode, Plan
from serve_app.engine.choice.rating import alike, comparison, fastest, fill_profile, request_s
from serve_app.engine.costs.clocks import Clocks
from serve_app.engine.costs.cost_model import Profile
from serve_app.engine.costs.profile_cache import is_disturbed
from serve_app.engine.costs.profiler import DEPTH, ROOM, DeepProfiler, Profiler, in_turns
from serve_app.kernels.llama.context import CELL_PADDING, Context
from serve_app.kernels.llama.model import Model

logger = logging.getLogger("corral.engine")

# Modes in which a request takes up to so much longer than in the best one are as good.
_SAME = 0.12
# Tokens of a slot in contexts that are only profiled: the largest chunk.
_PROFILE_CTX = 512
# A quarter of all tokens in such contexts stand before deep batches, at most.
_DEEP_PART = 1 / 4
# What they may take also where the cache that comes after them is smaller.
_PROFILE_BYTES = 2**28
# The part of its time in which profiling compares modes.
_COMPARING = 0.8

OpenContext = Callable[[Mode, int, int | None, int], Context]
"""Opens a context in a mode. Its numbers: tokens for each slot, cells of a unified cache (None: no bound),
and sequences besides the slots."""


def load_or_measure(
    plan: Plan, options: EngineOptions, report: Report, measure: Callable[[], CachePlan]
) -> CachePlan:
    """The cache's part of the plan: as an earlier start kept it, or as measured now, and kept."""
    kept = plan.cache
    if kept is not None and not (options.measures_again and is_disturbed([kept.profile])):
        return kept
    report(Stage("measuring", limit_s=options.profile_limit_s))
    logger.info("Measuring batches, %g s at most.", options.profile_limit_s)
    began, cache = time.perf_counter(), measure()
    logger.info("Measured batches in %.1f s.", time.perf_counter() - began)
    plan.keep(options.profile_folder, cache)
    if is_disturbed([cache.profile]):
        logger.warning(
            "Other programs computed during the measurement, which got %.0f%% of its threads' time. %s.",
            100 * cache.profile.share,
            "The next start measures again"
            if options.measures_again
            else "What is learned while the model serves betters it",
        )
    return cache


def choose_cache(
    plan: Plan, model: Model, options: EngineOptions, open_context: OpenContext, report: Report
) -> CachePlan:
    """The mode, as measured now or at an earlier start. For the thread that will compute. Raises
    DecodeError."""
    measures = options.profile_limit_s > 0 and model.is_causal
    can_change = not (model.is_recurrent or model.window)  # states fit both kinds of cache then
    modes = candidates(options, can_change=measures and can_change)
    if not measures:
        return CachePlan(modes[0], f"{modes[0]}: as configured", Profile())

    def measure() -> CachePlan:
        cache = _measure(modes, model, options, open_context)
        return cache if can_change else replace(cache, other=None)

    return load_or_measure(plan, options, report, measure)


def candidates(options: EngineOptions, *, can_change: bool = True) -> list[Mode]:
    """The modes that come into question, the likelier first. They are the likelier kind of cache with and
    without flash attention, and the other one with it, if both are open. There is no time for four on a
    slow machine. A unified cache without flash attention is seldom fast: cells of others cost as much as
    own ones.

    Where a request may be longer than a slot's share, the cache is unified from the start unless it
    `can_change` later. Its attention is flash attention: without it, llama.cpp's buffers hold a number for
    each head, row and cell."""
    flash = [True, False] if options.flash_attn is None else [options.flash_attn]
    if block_size(options.cache_type_v) > 1:
        flash = [True]
    likely = bool(options.pinned)
    unified = [likely, not likely] if options.kv_unified is None else [options.kv_unified]
    if options.is_pooled:
        n_pinned = max(map(len, options.pinned), default=0)
        if not can_change or n_pinned >= options.n_ctx_share:
            unified = [True]
        if unified[0] and options.flash_attn is None:
            flash = [True]
    elif options.n_slots == 1:
        unified = unified[:1]
    return [*(Mode(f, unified[0]) for f in flash), *(Mode(flash[0], u) for u in unified[1:])]


def fastest_mode(
    profiles: Mapping[Mode, Profile], options: EngineOptions
) -> tuple[Mode, str, Mode | None]:
    """The mode in which a request takes least, and why. Then the best mode with the other kind of cache, if
    both are open. What other programs had of the time of the measurement makes more modes alike."""
    seconds = {mode: [request_s(each, options, mode)] for mode, each in alike(profiles).items()}
    same = max(_SAME, *(1 - profile.share for profile in profiles.values()))
    prompts = "a common system prompt" if options.pinned else "prompts of their own"
    best = fastest(seconds, same)
    why = comparison(seconds, f"with {prompts}") if len(seconds) > 1 else "as configured"
    others = [mode for mode in seconds if mode.kv_unified != best.kv_unified]
    other = min(others, key=lambda mode: seconds[mode], default=None)
    return best, f"{best}: {why}", other


def _size_contexts(modes: Sequence[Mode], model: Model, options: EngineOptions) -> tuple[int, int]:
    """Tokens of a slot, and those before deep batches, in the contexts that `_measure` opens. All are open
    at once, and take no more memory than the cache that comes after them."""
    of_layer = sum(map(n_bytes, (options.cache_type_k, options.cache_type_v), model.layer_elements))
    n_cells = max(options.n_ctx_together, _PROFILE_BYTES // max(1, model.n_layer * of_layer))
    n_deep = len({mode.flash_attn for mode in modes})
    of_deep = int(_DEEP_PART * n_cells) // n_deep // CELL_PADDING * CELL_PADDING
    # Slots of recurrent layers cannot forget the rows of a batch.
    most = 0 if model.is_recurrent else min(model.window or DEPTH, DEPTH)
    most = min(most, options.n_ctx_share - ROOM, of_deep - ROOM - options.n_slots)
    n_left = n_cells - n_deep * of_deep
    n_each = n_left // (len(modes) * options.n_slots) // CELL_PADDING * CELL_PADDING
    n_ctx_slot = min(options.n_ctx_share, _PROFILE_CTX, max(CELL_PADDING, n_each))
    return n_ctx_slot, max(0, most // ROOM * ROOM)


def _measure(
    modes: Sequence[Mode], model: Model, options: EngineOptions, open_context: OpenContext
) -> CachePlan:
    """Compare the modes, then measure the rest of the one that is chosen."""
    began, n_slots, n_batch = time.perf_counter(), options.n_slots, options.n_batch
    n_ctx_slot, depth = _size_contexts(modes, model, options)
    clocks = Clocks(options.threads_of)

    def left_s(part: float = 1.0) -> float:
        return part * options.profile_limit_s - (time.perf_counter() - began)

    with ExitStack() as contexts:
        profilers, depths = {}, {}
        for mode in modes:
            context = contexts.enter_context(closing(open_context(mode, n_ctx_slot, None, 0)))
            profilers[mode] = Profiler(
                context, n_slots=n_slots, n_ctx_slot=n_ctx_slot, n_batch=n_batch, clocks=clocks
            )
        for flash_attn in dict.fromkeys(mode.flash_attn for mode in modes if depth):
            cells = depth, depth + ROOM + n_slots
            context = contexts.enter_context(
                closing(open_context(Mode(flash_attn, True), *cells, 2))
            )
            depths[flash_attn] = DeepProfiler(
                context, n_slots=n_slots, depth=depth, n_batch=n_batch, clocks=clocks
            )

        def whole(mode: Mode, profile: Profile) -> Profile:
            added = depths.get(mode.flash_attn)
            return added.depth.added_to(profile, unified=mode.kv_unified) if added else profile

        in_turns([*profilers.values(), *depths.values()], left_s(_COMPARING))
        profiles = {mode: whole(mode, profilers[mode].profile) for mode in modes}
        best, reason, other = fastest_mode(profiles, options)
        if best.flash_attn in depths:
            depths[best.flash_attn].rest(left_s() / 2)
        profilers[best].rest(left_s())
    profile, turned = profilers[best].profile, None
    if other is not None:
        turned = other, whole(other, fill_profile(profilers[other].profile, profile))
    return CachePlan(best, reason, whole(best, profile), turned)
