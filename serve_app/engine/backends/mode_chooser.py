"""The choice of a llama.cpp context's mode: remembered from an earlier start, or measured now."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Protocol

from serve_app.engine.autotune import modes, profile_cache
from serve_app.engine.autotune.cost_model import Profile
from serve_app.engine.autotune.modes import Mode, ModeChoice
from serve_app.engine.autotune.profiler import ALONE, DEPTH, ROOM, DeepProfiler, Profiler, in_turns
from serve_app.engine.autotune.threads import ThreadTrial, tries_fewer
from serve_app.engine.options import EngineOptions
from serve_app.llama import library
from serve_app.llama.context import Context
from serve_app.llama.formats import Threads
from serve_app.llama.model import Model
from serve_app.progress import Report, Stage

logger = logging.getLogger("corral.engine")

_PROFILE_CTX = 512
"""Tokens of a slot in contexts that are only profiled: the largest chunk."""
_COMPARING = 0.8
"""The part of its time in which profiling compares modes."""
_TRYING_THREADS = 0.1
"""The part of its time in which profiling tries numbers of threads."""


class OpenContext(Protocol):
    """Opens a context in a mode, with so many tokens for each slot."""

    def __call__(
        self, mode: Mode, n_ctx_slot: int, n_ctx: int | None, *, n_more: int = 0
    ) -> Context:
        """`n_ctx`: cells of a unified cache, if they are bounded. `n_more`: sequences besides the slots."""


@dataclass(frozen=True)
class ChosenMode:
    """A choice, and where it comes from."""

    choice: ModeChoice
    undisturbed: bool = True
    """Whether the threads had their time when the modes were measured, now or at an earlier start."""
    kept_as: str | None = None
    """The name of the profile, if it is kept on disk."""


class ModeChooser:
    """Chooses among the modes that the options leave open. Used by the thread that opens the backend."""

    def __init__(
        self, model: Model, options: EngineOptions, open_context: OpenContext, report: Report
    ) -> None:
        self._model, self._options = model, options
        self._open, self._report = open_context, report
        self._n_profiled = min(options.n_ctx_slot, _PROFILE_CTX)

    def choose(self) -> ChosenMode:
        """One of the modes, as measured now or at an earlier start. Raises DecodeError."""
        options, folder = self._options, self._options.profile_folder
        open_modes = modes.candidates(options)
        if options.profile_limit_s <= 0 or not self._model.is_causal:
            return ChosenMode(modes.choose({open_modes[0]: Profile()}, options))
        name = self._name(open_modes)
        known = profile_cache.load(folder, name, ModeChoice)
        if known is not None:
            return ChosenMode(known, kept_as=name)
        self._report(Stage("measuring", limit_s=options.profile_limit_s))
        choice, used = self._run_profilers(open_modes)
        if used < ALONE:
            logger.warning(
                "Other programs computed during the measurement, which got %.0f%% of its threads' time. "
                "The next start measures again.",
                100 * used,
            )
            return ChosenMode(choice, undisturbed=False)
        if not folder:
            return ChosenMode(choice)
        profile_cache.save(folder, name, choice)
        return ChosenMode(choice, kept_as=name)

    def _name(self, open_modes: Sequence[Mode]) -> str:
        """The profile's, by everything that its figures depend on."""
        options = self._options
        return profile_cache.key(
            model=self._model.fingerprint().hex(),
            llama_cpp=library.version(),
            modes=open_modes,
            threads=(options.threads, options.threads_batch, options.numa, *tries_fewer(options)),
            slots=(options.n_slots, options.n_ctx_slot, [len(tokens) for tokens in options.pinned]),
            max_stall_s=options.max_stall_s,
            n_batch=options.n_batch,
            cache=(options.cache_type_k, options.cache_type_v),
            limit_s=options.profile_limit_s,
        )

    def _run_profilers(self, candidates: Sequence[Mode]) -> tuple[ModeChoice, float]:
        """Compare these modes, then measure the rest of the one that is chosen; and in which part of its
        threads' time this process computed."""
        options = self._options
        opened = time.perf_counter()
        with ExitStack() as open_contexts:
            contexts = {
                mode: open_contexts.enter_context(closing(self._open(mode, self._n_profiled, None)))
                for mode in candidates
            }
            deep_contexts = self._open_deep(candidates, open_contexts)
            profilers = {mode: self._profiler(context) for mode, context in contexts.items()}
            deep = {flash: self._deep_profiler(found) for flash, found in deep_contexts.items()}
            began, computed = time.perf_counter(), time.process_time()
            threads = self._try_threads([*contexts.values(), *deep_contexts.values()])
            tried_s = time.perf_counter() - began
            compared: list[Profiler | DeepProfiler] = [*profilers.values(), *deep.values()]
            in_turns(compared, _COMPARING * options.profile_limit_s - tried_s)
            choice = modes.choose(
                {mode: self._whole(mode, profilers[mode].profile, deep) for mode in candidates},
                options,
                max(one.noise for one in compared),
            )
            profiler, flash_attn = profilers[choice.mode], choice.mode.flash_attn
            left_s = options.profile_limit_s - (time.perf_counter() - opened)
            if flash_attn in deep:
                deep[flash_attn].rest(left_s / 2)
            profiler.rest(options.profile_limit_s - (time.perf_counter() - opened))
            took_s, computed_s = time.perf_counter() - began, time.process_time() - computed
        logger.info("Measured batches in %d modes in %.1f s.", len(candidates), took_s)
        profile = self._whole(choice.mode, profiler.profile, deep)
        choice = replace(choice, profile=profile, threads=threads)
        if choice.other is not None:
            mode = choice.other[0]
            found = modes.filled(profilers[mode].profile, profiler.profile)
            can_change = self._model.can_rewind and not self._model.window
            other = mode, self._whole(mode, found, deep)
            choice = replace(choice, other=other if can_change else None)
        used = threads or Threads.alike(options.threads, options.threads_batch)
        n_threads = min(used.one_row, used.few_rows, used.many_rows)
        return choice, computed_s / (took_s * n_threads)

    def _try_threads(self, contexts: Sequence[Context]) -> Threads | None:
        """The threads that the contexts compute with from now on, if that is open."""
        options = self._options
        if not tries_fewer(options):
            return None
        trial = ThreadTrial(
            contexts[0],
            n_slots=options.n_slots,
            n_ctx_slot=self._n_profiled,
            most=options.threads,
        )
        threads = trial.run(_TRYING_THREADS * options.profile_limit_s)
        for context in contexts:
            context.use_threads(threads)
        return threads

    def _profiler(self, context: Context) -> Profiler:
        options = self._options
        return Profiler(
            context,
            n_slots=options.n_slots,
            n_ctx_slot=self._n_profiled,
            n_batch=options.n_batch,
            can_rewind=self._model.can_rewind,
        )

    def _open_deep(
        self, candidates: Sequence[Mode], open_contexts: ExitStack
    ) -> dict[bool, Context]:
        """By whether there is flash attention. None where slots could not forget the rows of a batch, or
        have no depth worth the name."""
        if not self._model.can_rewind or self._deep <= 0:
            return {}
        n_ctx = self._deep + ROOM + self._options.n_slots
        return {
            flash_attn: open_contexts.enter_context(
                closing(self._open(Mode(flash_attn, True), self._deep, n_ctx, n_more=2))
            )
            for flash_attn in {mode.flash_attn: None for mode in candidates}
        }

    def _deep_profiler(self, context: Context) -> DeepProfiler:
        options = self._options
        return DeepProfiler(
            context, n_slots=options.n_slots, depth=self._deep, n_batch=options.n_batch
        )

    @property
    def _deep(self) -> int:
        """Tokens in the cache where batches are measured deep in it."""
        window = self._model.window or DEPTH
        return min(window, DEPTH, self._options.n_ctx_slot - ROOM) // ROOM * ROOM

    def _whole(self, mode: Mode, profile: Profile, deep: Mapping[bool, DeepProfiler]) -> Profile:
        """The profile in that mode, with the other measurements. llama.cpp copies all of a slot's cells."""
        copy_s = profile.copy_s * self._options.n_ctx_slot / self._n_profiled
        profile = replace(profile, copy_s=copy_s)
        if mode.flash_attn not in deep:
            return profile
        return deep[mode.flash_attn].depth.added_to(profile, unified=mode.kv_unified)
