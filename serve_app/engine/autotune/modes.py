"""Chooses the faster kind of attention and of KV cache. Pure: no model, no threads, no clock."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from serve_app.engine.autotune.cost_model import CostModel, Profile
from serve_app.engine.options import EngineOptions
from serve_app.llama.formats import Threads, block_size

# Modes in which a request takes up to so much longer than in the best one are as good.
_SAME = 0.12
# Other kernels must take so much less time, as a part: less is noise.
_LEAST_GAIN = 0.05
Name = TypeVar("Name")


@dataclass(frozen=True, slots=True)
class Mode:
    """The kind of attention and of cache that a context is made with."""

    flash_attn: bool
    kv_unified: bool
    paged: bool = False
    """Whether slots have blocks of a cache, which those that begin alike share. It is not unified then."""

    @property
    def mixes(self) -> bool:
        """Whether a batch costs what its rows do, whatever slots they are of."""
        return self.kv_unified or self.paged

    def __str__(self) -> str:
        if self.paged:
            return "paged KV cache"
        cache = "unified" if self.kv_unified else "split"
        return f"{cache} KV cache, flash attention {'on' if self.flash_attn else 'off'}"


PAGED = Mode(flash_attn=True, kv_unified=False, paged=True)
"""OpenVINO's only mode."""


def candidates(options: EngineOptions, *, can_change: bool = True) -> list[Mode]:
    """The modes that come into question, the likelier first: the likelier kind of cache with and without
    flash attention, the other one with it, if both are open. There is no time for four on a slow machine,
    and a unified cache without flash attention is seldom fast: cells of others cost as much as own ones.

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


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """The mode that a context is made as, why, and what batches cost in it."""

    mode: Mode
    reason: str
    profile: Profile
    threads: Threads | None = None
    """The threads with which the profile was measured; None: as the options say."""
    other: tuple[Mode, Profile] | None = None
    """The best mode with the other kind of cache, if both kinds are open."""

    @property
    def profiles(self) -> list[Profile]:
        """The profiles of both kinds, or of the only one."""
        return [self.profile, *([self.other[1]] if self.other else [])]

    def turned(self, reason: str) -> ModeChoice:
        """The other mode instead, for that reason."""
        if self.other is None:
            raise ValueError("There is no other mode.")
        mode, profile = self.other
        return replace(
            self, mode=mode, profile=profile, reason=reason, other=(self.mode, self.profile)
        )


def request_s(profile: Profile, options: EngineOptions, mode: Mode) -> float:
    """Seconds of the machine that a request is expected to take in this mode, on average: of two, one has
    a prompt of an eighth of a slot, the other of three quarters. With something pinned, prompts are that
    and an eighth of the rest. Answers take an eighth. 0 if nothing was measured."""
    costs = CostModel(profile)
    pinned = max((len(tokens) for tokens in options.pinned), default=0)
    shares = (1 / 8,) if pinned else (1 / 8, 3 / 4)
    ends = [pinned + int(share * (options.n_ctx_share - pinned)) for share in shares]
    return sum(_seconds(costs, options, range(pinned, end), mode) for end in ends) / len(ends)


def _seconds(costs: CostModel, options: EngineOptions, tokens: range, mode: Mode) -> float:
    """A prompt's tokens at these positions, and an answer, decoded with all slots busy. Half of the prompts
    are computed while half of the slots decode, if there are several, the others while nobody does."""
    n_cells = tokens.start + options.n_slots * len(tokens) if mode.kv_unified else 0
    beside = (0, options.n_slots // 2) if options.n_slots > 1 else (0,)
    prompts_s = [_prompt_s(costs, options, tokens, n_cells, n, mode.mixes) for n in beside]
    n_generated = options.n_ctx_share // 8
    full = costs.attended(tokens.stop, n_cells)
    answer_s = n_generated * costs.steps_s(options.n_slots, full) / options.n_slots
    return sum(prompts_s) / len(prompts_s) + answer_s


def _prompt_s(
    costs: CostModel,
    options: EngineOptions,
    tokens: range,
    n_cells: int,
    n_beside: int,
    mixes: bool,
) -> float:
    """Seconds that a prompt takes beside so many decoding sequences, which have a bound for gaps."""
    beside_s, within_s = 0.0, math.inf
    if n_beside:
        beside_s = costs.steps_s(n_beside, costs.attended(tokens.stop, n_cells))
        within_s = max(options.max_stall_ms / 1000 - beside_s, beside_s)
    prompt_s, n_past = 0.0, tokens.start
    while n_past < tokens.stop:
        n_most = min(tokens.stop - n_past, options.n_batch)
        depth = costs.attended(n_past, n_cells)
        if mixes:
            fits = costs.chunk(n_most, depth, within_s=within_s + beside_s, n_beside=n_beside)
            n_rows = fits or costs.smallest_chunk(n_most)
            more_s = costs.prefill_s(n_beside + n_rows, depth) - beside_s
            prompt_s += max(more_s, n_rows * costs.prompt_token_s)
        else:
            fits = costs.chunk(n_most, depth, within_s=within_s, beside_s=beside_s)
            n_rows = fits or costs.smallest_chunk(n_most)
            prompt_s += costs.prefill_s(n_rows, depth)
        n_past += n_rows
    return prompt_s


def filled(profile: Profile, like: Profile) -> Profile:
    """A profile of few batches, and the others of one with more, scaled as those that both have."""
    curves: dict[str, Any] = {}
    for name in ("decode_s", "prefill_s", "verify_s"):
        few, more = getattr(profile, name), getattr(like, name)
        both = sorted(set(few) & set(more))
        ratios = [few[n] / more[n] for n in both if more[n]]
        ratio = sum(ratios) / len(ratios) if ratios else 1.0
        curves[name] = {n: ratio * seconds for n, seconds in more.items()} | dict(few)
    return replace(profile, **curves)


def choose(profiles: Mapping[Mode, Profile], options: EngineOptions) -> ModeChoice:
    """The mode in which a request takes least, and why in one line: of those that are about as fast, the
    first. What other programs had of the time of the measurement makes more of them alike."""
    if len(profiles) == 1:
        (mode,) = profiles
        return ModeChoice(mode, f"{mode}: as configured", profiles[mode])
    seconds = {mode: request_s(found, options, mode) for mode, found in alike(profiles).items()}
    share = min(profile.share for profile in profiles.values())
    least, same = min(seconds.values()), max(_SAME, 1 - share)
    best = next(mode for mode in seconds if seconds[mode] <= (1 + same) * least)
    others = ", ".join(f"{seconds[mode]:.2f} s with {mode}" for mode in seconds if mode != best)
    workload = "a common system prompt" if options.pinned else "prompts of their own"
    reason = f"{best}: {seconds[best]:.2f} s for a request, with {workload}; {others}"
    turned = [mode for mode in seconds if mode.kv_unified != best.kv_unified]
    other = min(turned, key=lambda mode: seconds[mode], default=None)
    return ModeChoice(
        best, reason, profiles[best], other=None if other is None else (other, profiles[other])
    )


def alike(profiles: Mapping[Name, Profile]) -> dict[Name, Profile]:
    """Only what was measured in all profiles: time may have been up for some batches in some of them."""
    names = ("decode_s", "prefill_s", "deep_decode_s", "deep_prefill_s")
    sizes = {
        name: set.intersection(*(set(getattr(profile, name)) for profile in profiles.values()))
        for name in names
    }
    same = {}
    for key, profile in profiles.items():
        curves: dict[str, Any] = {
            name: {n: getattr(profile, name)[n] for n in sizes[name]} for name in names
        }
        same[key] = replace(profile, **curves)
    return same


def compared(
    other: Profile, usual: Profile, options: EngineOptions, other_mode: Mode, usual_mode: Mode
) -> tuple[bool, str] | None:
    """Whether the other kernels pay, and the ratios of the times of a request; None if nothing was
    measured.

    A server with several slots often has a single stream, too. So the time is the geometric mean of
    two: with one sequence, and with all slots busy. A ratio counts the same upwards and downwards then.
    """
    profiles = alike({True: other, False: usual})
    ratios = {}
    for n in sorted({1, options.n_slots}):
        sized = replace(options, n_slots=n)
        other_s = request_s(profiles[True], sized, other_mode)
        usual_s = request_s(profiles[False], sized, usual_mode)
        if other_s and usual_s:
            ratios[n] = other_s / usual_s
    if not ratios:
        return None
    mean = math.exp(sum(math.log(ratio) for ratio in ratios.values()) / len(ratios))
    figures = ", ".join(f"{ratio:.2f} with {n} at once" for n, ratio in ratios.items())
    if len(ratios) > 1:
        figures += f", {mean:.2f} in the mean"
    return mean <= 1 - _LEAST_GAIN, figures
