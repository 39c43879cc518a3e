"""Measures kernels in turns, in a process of its own, which gives all of its memory back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from serve_app.base.engine_options import EngineOptions
from serve_app.base.sharing import turns
from serve_app.engine.choice.plan import Kernels, Mode, Plan
from serve_app.engine.costs.clocks import Clocks
from serve_app.engine.costs.cost_model import Profile
from serve_app.engine.costs.profiler import CHUNKS, Profiler, in_turns

MODE = Mode(flash_attn=True, kv_unified=False)
"""The mode in which llama.cpp is measured."""
# The tokens that a slot has room for, and those before each batch: without OpenVINO, and beside it.
_ROOM, _ROOM_BESIDE_OPENVINO = (256, 0), (512, 256)


def kernels_profiles(
    path: Path, options: EngineOptions, kernels: list[Kernels], limit_s: float
) -> list[Profile]:
    """The times of a few batches with each of these, in turns, in about `limit_s`. What it opens is left to
    the end of the process. Raises ConfigError."""
    with turns.join(options.turns):
        return _profiles(path, options, kernels, limit_s)


def _profiles(
    path: Path, options: EngineOptions, kernels: list[Kernels], limit_s: float
) -> list[Profile]:
    from serve_app.engine.backends.opening import open_planned  # which chooses by this module

    has_openvino = any(candidate.backend == "openvino" for candidate in kernels)
    n_ctx_slot, n_before = _ROOM_BESIDE_OPENVINO if has_openvino else _ROOM
    n_ctx_slot = min(options.n_ctx_share, n_ctx_slot)
    n_before = min(n_before, options.n_ctx_share // 2)
    n_batch = min(options.n_batch, n_ctx_slot)
    options = EngineOptions(
        options.n_slots,
        n_ctx_slot,
        options.threads,
        options.threads_batch,
        computing_cpus=options.computing_cpus,
        n_batch=n_ctx_slot,
        flash_attn=MODE.flash_attn,
        kv_unified=MODE.kv_unified,
        cache_type_k=options.cache_type_k,
        cache_type_v=options.cache_type_v,
        load_mode=options.load_mode,
        max_converted_bytes=options.max_converted_bytes,
        speculate=False,
        profile_limit_s=0.0,
    )
    # OpenVINO's threads do not wait by computing on. So CPU time tells of all batches together only.
    clocks = Clocks(None if has_openvino else options.threads_of)
    profilers = []
    for candidate in kernels:
        profiler = Profiler(
            open_planned(Plan(candidate), path, options),
            n_slots=options.n_slots,
            n_ctx_slot=n_ctx_slot - n_before,
            n_batch=n_batch,
            clocks=clocks,
            # Only in a long prompt, each expert has rows enough for other kernels.
            chunks=(*CHUNKS, n_ctx_slot - n_before),
        )
        profiler.fill(n_before, options.n_slots)
        profilers.append(profiler)
    whole = Clocks(options.threads_of)
    whole.begin()
    in_turns(profilers, limit_s)
    _, share = whole.end(n_batch)
    profiles = [profiler.profile for profiler in profilers]
    return [replace(profile, share=min(profile.share, share)) for profile in profiles]
