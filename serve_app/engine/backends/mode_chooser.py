"""The choice of a llama.cpp context's mode: remembered from an earlier start, or measured now."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Protocol

from serve_app.engine.autotune import modes, profile_cache
from serve_app.engine.autotune.clocks import Clocks
from serve_app.engine.autotune.cost_model import Profile
from serve_app.engine.autotune.modes import Mode, ModeChoice
from serve_app.engine.autotune.profiler import DEPTH, ROOM, DeepProfiler, Profiler, in_turns
from serve_app.engine.autotune.threads import best_threads
from serve_app.engine.options import EngineOptions
from serve_app.llama import library
from serve_app.llama.context import Context
from serve_app.llama.formats import Threads
from serve_app.llama.model import Model
from serve_app.progress import Report, Stage

logger = logging.getLogger("corral.engine")

# Tokens of a slot in contexts that are only profiled: the largest chunk.
_PROFILE_CTX = 512
# The parts of its time in which profiling compares modes, and tries numbers of threads.
_COMPARING, _TRYING_THREADS = 0.8, 0.1


class OpenContext(Protocol):
    """Opens a context in a mode, with so many tokens for each slot. `n_ctx` are the cells of a unified
    cache, if they are bounded; `n_more` are sequences besides the slots."""

    def __call__(
        self, mode: Mode, n_ctx_slot: int, n_ctx: int | None, *, n_more: int = 0
    ) -> Context: ...


@dataclass(frozen=True)
class ChosenMode:
    """A choice, and where it comes from."""

    choice: ModeChoice
    kept_as: str | None = None
    """The name of the profile, if it is kept on disk."""


class ModeChooser:
    """Chooses among the modes that the options leave open. Used by the thread that opens the backend."""

    def __init__(
        self, model: Model, options: EngineOptions, open_context: OpenContext, report: Report
    ) -> None:
        self._model, self._options = model, options
        self._open, self._report = open_context, report
        self._n_profiled = min(options.n_ctx_share, _PROFILE_CTX)
        self._forgets = model.is_recurrent
        self._can_change = not self._forgets and not model.window
        """Whether the model's states fit both kinds of cache."""
        depth = min(model.window or DEPTH, DEPTH, options.n_ctx_share - ROOM) // ROOM * ROOM
        self._depth = 0 if self._forgets else max(0, depth)
        """Tokens in the cache where batches are measured deep in it; 0 where slots could not forget the
        rows of a batch, or have no depth worth the name."""

    def choose(self) -> ChosenMode:
        """Choose a mode, as measured now or at an earlier start. Raises DecodeError."""
        options = self._options
        measures = options.profile_limit_s > 0 and self._model.is_causal
        candidates = modes.candidates(options, can_change=measures and self._can_change)
        if not measures:
            return ChosenMode(modes.choose({candidates[0]: Profile()}, options))
        folder, model = options.profile_folder, self._model.fingerprint().hex()
        name = profile_cache.key(options, model=model, llama_cpp=library.version())
        choice = profile_cache.load(folder, name, ModeChoice)
        if choice is None:
            self._report(Stage("measuring", limit_s=options.profile_limit_s))
            choice = self._measured(candidates)
            if profile_cache.is_worth_keeping(choice.profiles):
                profile_cache.save(folder, name, choice)
            else:
                logger.warning(
                    "Other programs computed during the measurement, which got %.0f%% of its "
                    "threads' time. The batches are measured again while nobody waits.",
                    100 * min(profile.share for profile in choice.profiles),
                )
        return ChosenMode(choice, kept_as=name)

    def _measured(self, candidates: Sequence[Mode]) -> ModeChoice:
        """Compare these modes, then measure the rest of the one that is chosen."""
        options, limit_s = self._options, self._options.profile_limit_s
        opened = time.perf_counter()
        with ExitStack() as contexts:

            def opened_context(
                mode: Mode, n_ctx_slot: int, n_ctx: int | None, n_more: int
            ) -> Context:
                context = self._open(mode, n_ctx_slot, n_ctx, n_more=n_more)
                return contexts.enter_context(closing(context))

            shallow = {mode: opened_context(mode, self._n_profiled, None, 0) for mode in candidates}
            n_cells = self._depth + ROOM + options.n_slots
            deep = {
                flash_attn: opened_context(Mode(flash_attn, True), self._depth, n_cells, 2)
                for flash_attn in {mode.flash_attn: None for mode in candidates}
                if self._depth
            }
            began = time.perf_counter()
            threads = self._try_threads([*shallow.values(), *deep.values()])
            tried_s = time.perf_counter() - began
            clocks = Clocks(threads or Threads.alike(options.threads, options.threads_batch))
            profilers = {
                mode: Profiler(
                    context,
                    n_slots=options.n_slots,
                    n_ctx_slot=self._n_profiled,
                    n_batch=options.n_batch,
                    clocks=clocks,
                )
                for mode, context in shallow.items()
            }
            depths = {
                flash_attn: DeepProfiler(
                    context,
                    n_slots=options.n_slots,
                    depth=self._depth,
                    n_batch=options.n_batch,
                    clocks=clocks,
                )
                for flash_attn, context in deep.items()
            }
            compared: list[Profiler | DeepProfiler] = [*profilers.values(), *depths.values()]
            in_turns(compared, _COMPARING * limit_s - tried_s)
            choice = modes.choose(
                {mode: self._whole(mode, profilers[mode].profile, depths) for mode in candidates},
                options,
            )
            if choice.mode.flash_attn in depths:
                left_s = limit_s - (time.perf_counter() - opened)
                depths[choice.mode.flash_attn].rest(left_s / 2)
            profilers[choice.mode].rest(limit_s - (time.perf_counter() - opened))
            took_s = time.perf_counter() - began
        logger.info("Measured batches in %d modes in %.1f s.", len(candidates), took_s)
        profile, other = profilers[choice.mode].profile, choice.other
        if other is not None:
            filled = modes.filled(profilers[other[0]].profile, profile)
            other = other[0], self._whole(other[0], filled, depths)
        return replace(
            choice,
            profile=self._whole(choice.mode, profile, depths),
            threads=threads,
            other=other if self._can_change else None,
        )

    def _try_threads(self, contexts: Sequence[Context]) -> Threads | None:
        options = self._options
        if not options.fewer_threads:
            return None
        threads = best_threads(
            contexts[0],
            n_slots=options.n_slots,
            n_ctx_slot=self._n_profiled,
            most=options.threads,
            limit_s=_TRYING_THREADS * options.profile_limit_s,
        )
        for context in contexts:
            context.use_threads(threads)
        return threads

    @staticmethod
    def _whole(mode: Mode, profile: Profile, depths: Mapping[bool, DeepProfiler]) -> Profile:
        """The profile in that mode, with what a depth adds."""
        if mode.flash_attn not in depths:
            return profile
        return depths[mode.flash_attn].depth.added_to(profile, unified=mode.kv_unified)
