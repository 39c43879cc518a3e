"""Requests enter an engine in no time, however heavy they are: health checks have turns in between."""

from __future__ import annotations

import time

from serve_app.base.sampling import LogitBias
from serve_app.base.values.answers import Accepted
from serve_app.config.serve_options import RayServeOptions
from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from serve_app.run.replica.loaded_model import MOST_ENTERING
from serve_app.store.builtin_model import BUILTIN_MODEL

N_CTX = 131_072


def test_the_heaviest_requests_together_leave_time_for_health_checks() -> None:
    options = EngineOptions(
        n_slots=2, n_ctx_slot=N_CTX, threads=1, n_batch=64, max_waiting=64, profile_limit_s=0
    )
    engine = Engine.load(BUILTIN_MODEL, options)
    try:
        bias = LogitBias.of(dict.fromkeys(range(256), 1.0))
        sampling = SamplingParams(logit_bias=bias, max_tokens=1, stop=("x" * 100,) * 16)
        requests = [
            GenerationRequest(f"r{n}", (n + 5,) * (N_CTX - 8), sampling)
            for n in range(MOST_ENTERING)
        ]
        began = time.thread_time()
        outcomes = engine.submit_to([(request, lambda _: None) for request in requests])
        cpu_s = time.thread_time() - began
    finally:
        engine.close(timeout_s=0)
    assert [type(outcome) for outcome in outcomes] == [Accepted] * MOST_ENTERING
    assert cpu_s < RayServeOptions().health_check_timeout_s / 10
