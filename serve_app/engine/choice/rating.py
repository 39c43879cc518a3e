"""Rates candidates by the seconds that a request takes. Pure: no model, no threads, no clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from serve_app.base.engine_options import EngineOptions
from serve_app.engine.choice.plan import Mode
from serve_app.engine.costs.cost_model import CostModel, Profile, predict_s

Name = TypeVar("Name")


def request_s(profile: Profile, options: EngineOptions, mode: Mode) -> float:
    """Seconds of the machine that a request is expected to take in this mode, on average. Of two, one has
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
    full = costs.effective_past(tokens.stop, n_cells)
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
        beside_s = costs.steps_s(n_beside, costs.effective_past(tokens.stop, n_cells))
        within_s = max(options.max_stall_ms / 1000 - beside_s, beside_s)
    prompt_s, n_past = 0.0, tokens.start
    while n_past < tokens.stop:
        n_most = min(tokens.stop - n_past, options.n_batch)
        depth = costs.effective_past(n_past, n_cells)
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


def fastest(seconds: Mapping[Name, Sequence[float]], same: float) -> Name:
    """The candidate that takes least, by the geometric mean of its times. Those that take up to `same`
    longer, as a part, are as fast: of these, the first."""
    means = {name: math.prod(times) ** (1 / len(times)) for name, times in seconds.items()}
    most_s = (1 + same) * min(means.values())
    return next(name for name, mean_s in means.items() if mean_s <= most_s)


def comparison(seconds: Mapping[Name, Sequence[float]], load: str) -> str:
    """The seconds of a request under that load with each candidate, as a sentence without its period."""
    times = {name: " and ".join(f"{s:.2f}" for s in each) for name, each in seconds.items()}
    return f"a request {load} takes " + "; ".join(
        f"{text} s with {name}" for name, text in times.items()
    )


def alike(profiles: Mapping[Name, Profile]) -> dict[Name, Profile]:
    """The profiles with only what was measured in all of them: time may have been up for some batches
    in some of them."""
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


def fill_profile(profile: Profile, like: Profile) -> Profile:
    """A profile of few batches, and the others of one with more, scaled as those that both have."""
    curves: dict[str, Any] = {}
    for name in ("decode_s", "prefill_s", "verify_s"):
        few, more = getattr(profile, name), getattr(like, name)
        ratios = [few[n] / more[n] for n in sorted(set(few) & set(more)) if more[n]]
        ratio = sum(ratios) / len(ratios) if ratios else 1.0
        curves[name] = {n: ratio * seconds for n, seconds in more.items()} | dict(few)
    return replace(profile, **curves)


def join_profiles(few: Profile, many: Profile) -> tuple[int, Profile] | None:
    """The number of rows from which on batches take less time by the second profile; None if that is so for
    all of them, or for none. With it comes a profile that is the first one below it and the second one from
    there on."""
    few_s, many_s = ({**profile.decode_s, **profile.prefill_s} for profile in (few, many))
    most = max(many_s.keys() & few_s.keys(), default=0)
    slower = [n for n in range(1, most + 1) if predict_s(many_s, n) >= predict_s(few_s, n)]
    n_rows = max(slower, default=0) + 1
    if not 1 < n_rows <= most:
        return None
    curves: dict[str, Any] = {
        name: {n: getattr(many if n >= n_rows else few, name)[n] for n in getattr(few, name)}
        for name in ("decode_s", "prefill_s")
    }
    return n_rows, replace(few, **curves)
