"""Measures kernels in turns, in a process of its own, which gives all of its memory back."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from serve_app.engine.autotune.clocks import Clocks
from serve_app.engine.autotune.cost_model import Profile
from serve_app.engine.autotune.profiler import CHUNKS, Profiler, in_turns
from serve_app.engine.choice.plan import OPENVINO, Kernels, Mode
from serve_app.engine.options import EngineOptions
from serve_app.llama.context import Context, ContextOptions
from serve_app.llama.formats import Threads
from serve_app.llama.model import Model

if TYPE_CHECKING:
    from serve_app.openvino.paged.context import PagedContext

MODE = Mode(flash_attn=True, kv_unified=False)
"""The mode of llama.cpp's contexts here."""
# The tokens that a slot has room for, and those before each batch: without OpenVINO, and beside it.
_ROOM, _ROOM_BESIDE_OPENVINO = (256, 0), (512, 256)


def kernels_profiles(
    path: Path, options: EngineOptions, kernels: list[Kernels], limit_s: float
) -> list[Profile]:
    """The times of a few batches with each of these, in turns, in about `limit_s`. What it opens is left to
    the end of the process. Raises ConfigError."""
    if options.computing_cpus is not None:
        os.sched_setaffinity(0, options.computing_cpus)
    n_ctx_slot, n_before = _ROOM_BESIDE_OPENVINO if OPENVINO in kernels else _ROOM
    n_ctx_slot = min(options.n_ctx_share, n_ctx_slot)
    n_before = min(n_before, options.n_ctx_share // 2)
    model = Model(path, load_mode=options.load_mode)
    threads = Threads.alike(options.threads, options.threads_batch)
    # OpenVINO's threads do not wait by computing on. So CPU time tells of all batches together only.
    clocks = Clocks(None if OPENVINO in kernels else threads)
    profilers = []
    for candidate in kernels:
        context = _open(model, options, candidate, n_ctx_slot)
        context.warm_up()
        profiler = Profiler(
            context,
            n_slots=options.n_slots,
            n_ctx_slot=n_ctx_slot - n_before,
            n_batch=min(options.n_batch, n_ctx_slot),
            clocks=clocks,
            # Only in a long prompt, each expert has rows enough for other kernels.
            chunks=(*CHUNKS, n_ctx_slot - n_before),
        )
        profiler.fill(n_before, options.n_slots)
        profilers.append(profiler)
    whole = Clocks(threads)
    whole.begin()
    in_turns(profilers, limit_s)
    _, share = whole.end(options.n_batch)
    profiles = [profiler.profile for profiler in profilers]
    return [replace(profile, share=min(profile.share, share)) for profile in profiles]


def _open(
    model: Model, options: EngineOptions, kernels: Kernels, n_ctx_slot: int
) -> Context | PagedContext:
    if kernels == OPENVINO:
        from serve_app.engine.backends import openvino

        return openvino.small_context(model, options, n_ctx_slot)
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
            # All weights are repacked here. As they are stored, each batch is computed over the file.
            stored_from=kernels.stored_from if kernels.repack else 1,
        ),
    )
