"""The stages where a request's time went, as answers tell it.

Source of the first fields: llama.cpp, tools/server/README.md, `timings`.
"""

from __future__ import annotations

import time
from typing import Any

from serve_app import __version__
from serve_app.base.values.answers import PromptProgress, SequenceEnd, TokenDelta
from serve_app.base.values.replicas import RequestRecord

Json = dict[str, Any]

BUILD = f"b-corral-{__version__}"
"""The version, in the form of llama-server's builds."""


def llama_timings(end: SequenceEnd) -> Json:
    """llama-server's `timings`."""
    usage, spent = end.usage, end.timings
    n_prompt = usage.prompt_tokens - usage.cached_tokens
    n_predicted = usage.completion_tokens - spent.n_resumed
    return {
        "cache_n": usage.cached_tokens,
        **_rates("prompt", n_prompt, n_prompt, spent.prefill_s),
        **_rates("predicted", n_predicted, max(0, n_predicted - 1), spent.decode_s),
    }


def timings(end: SequenceEnd) -> Json:
    """llama-server's `timings`, and what the request waited for besides."""
    spent = end.timings
    return {
        **llama_timings(end),
        "queue_ms": 1000 * spent.queue_s,
        "stalled_ms": 1000 * spent.stalled_s,
        "preempted_ms": 1000 * spent.preempted_s,
        "preemptions": spent.n_preemptions,
        "mean_batch": spent.mean_batch,
        "failed_over_ms": 1000 * spent.failed_over_s,
        "failovers": spent.n_failovers,
    }


class Running:
    """llama-server's `timings` of a sequence that has not ended, for `timings_per_token`: its prompt's are
    the engine's, and those of its tokens are measured here."""

    def __init__(self) -> None:
        self._progress = PromptProgress(0, 0, 0, 0.0)
        self._n_tokens = 0
        self._began_s: float | None = None
        """The time when its first token came."""

    def saw(self, delta: TokenDelta) -> None:
        """The newest delta."""
        self._progress = delta.progress[-1] if delta.progress else self._progress
        self._n_tokens += len(delta.token_ids)
        if delta.token_ids and self._began_s is None:
            self._began_s = time.monotonic()

    def to_json(self, progress: PromptProgress | None = None) -> Json:
        """The timings as they are now, or at that earlier point of the prompt."""
        at = progress or self._progress
        n_tokens = 0 if progress else self._n_tokens
        n_prompt = at.n_processed - at.n_cached
        seconds = time.monotonic() - self._began_s if n_tokens and self._began_s else 0.0
        return {
            "cache_n": at.n_cached,
            **_rates("prompt", n_prompt, n_prompt, at.seconds),
            **_rates("predicted", n_tokens, max(0, n_tokens - 1), seconds),
        }


def prompt_progress(progress: PromptProgress) -> Json:
    """llama-server's `prompt_progress`."""
    return {
        "total": progress.n_total,
        "cache": progress.n_cached,
        "processed": progress.n_processed,
        "time_ms": 1000 * progress.seconds,
    }


def _rates(name: str, n: int, n_timed: int, seconds: float) -> Json:
    """Fields about `n` tokens, of which `n_timed` took this time: the first comes with the prompt."""
    return {
        f"{name}_n": n,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / n_timed if n_timed else 0.0,
        f"{name}_per_second": n_timed / seconds if seconds else 0.0,
    }


def explain_record(record: RequestRecord) -> Json:
    """The fields about a sequence of a request."""
    fields: Json = {
        "id": record.id,
        "replica_id": record.replica_id,
        "node_id": record.node_id,
        "state": record.state,
    }
    if record.end is not None:
        fields["finish_reason"] = record.end.reason.value
        fields["timings"] = timings(record.end)
        if record.end.error is not None:
            fields["error"] = record.end.error.message
    return fields
