"""Where a request's time went, as answers tell it.

Source of the first fields: llama.cpp, tools/server/README.md, `timings`.
"""

from __future__ import annotations

from typing import Any

from serve_app.types import RequestRecord, SequenceEnd

Json = dict[str, Any]


def timings(end: SequenceEnd) -> Json:
    """llama-server's `timings`, and what the request waited for besides."""
    usage, spent = end.usage, end.timings
    n_prompt = usage.prompt_tokens - usage.cached_tokens
    n_predicted = usage.completion_tokens - spent.n_resumed
    return {
        "cache_n": usage.cached_tokens,
        **_rates("prompt", n_prompt, n_prompt, spent.prefill_s),
        **_rates("predicted", n_predicted, max(0, n_predicted - 1), spent.decode_s),
        "queue_ms": 1000 * spent.queue_s,
        "stalled_ms": 1000 * spent.stalled_s,
        "preempted_ms": 1000 * spent.preempted_s,
        "preemptions": spent.n_preemptions,
        "mean_batch": spent.mean_batch,
        "failed_over_ms": 1000 * spent.failed_over_s,
        "failovers": spent.n_failovers,
    }


def _rates(name: str, n: int, n_timed: int, seconds: float) -> Json:
    """Of `n` tokens, `n_timed` took this time: the first of an answer comes with its prompt."""
    return {
        f"{name}_n": n,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / n_timed if n_timed else 0.0,
        f"{name}_per_second": n_timed / seconds if seconds else 0.0,
    }


def explained(record: RequestRecord) -> Json:
    """One sequence of a request."""
    found: Json = {
        "id": record.id,
        "replica_id": record.replica_id,
        "node_id": record.node_id,
        "state": record.state,
    }
    if record.end is not None:
        found["finish_reason"] = record.end.reason.value
        found["timings"] = timings(record.end)
        if record.end.error is not None:
            found["error"] = record.end.error.message
    return found
