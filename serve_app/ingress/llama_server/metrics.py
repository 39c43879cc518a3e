"""Metrics by the names of llama-server and of vLLM, for their dashboards.

Sources: llama.cpp, tools/server/README.md, "GET /metrics"; vLLM, docs/design/metrics.md; Prometheus's text
format.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from serve_app.types import ReplicaStats

_OF_VLLM = {
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "request_latency_seconds": "e2e_request_latency_seconds",
    "queue_time_seconds": "request_queue_time_seconds",
    "prefill_time_seconds": "request_prefill_time_seconds",
}
"""vLLM's names of Corral's histograms."""
_OWN = re.compile(
    rf"^(# \w+ )?ray_corral_({'|'.join(_OF_VLLM)})(_bucket|_sum|_count)?(?=[ {{])(.*)$".encode(),
    re.MULTILINE,
)


def render(replicas: Sequence[ReplicaStats], n_missing: int) -> bytes:
    """A model's metrics in Prometheus's text format, summed over the replicas that answered; `n_missing`
    did not."""
    engines = [replica.engine for replica in replicas]

    def total(group: str, field: str) -> float:
        return float(sum(engine[group][field] for engine in engines))

    prompt_tokens, prompt_s = total("tokens", "prompt_tokens"), total("requests", "prefill_s")
    predicted, predicted_s = total("tokens", "generated_tokens"), total("requests", "generation_s")
    batches, busy_slots = total("timing", "batches"), total("timing", "busy_slots")
    embedded = total("embeddings", "embedded_tokens")
    n_decode = batches + total("embeddings", "embedding_batches")
    largest = float(max((engine["tokens"]["n_tokens_max"] for engine in engines), default=0))
    counters = {
        "prompt_tokens_total": (prompt_tokens + embedded, "Number of prompt tokens processed."),
        "prompt_tokens_cached_total": (
            total("tokens", "cached_tokens"),
            "Number of prompt tokens reused from the cache.",
        ),
        "prompt_seconds_total": (prompt_s, "Prompt process time in seconds."),
        "tokens_predicted_total": (predicted, "Number of generation tokens processed."),
        "tokens_predicted_seconds_total": (predicted_s, "Predict process time in seconds."),
        "n_decode_total": (n_decode, "Total number of llama_decode() calls."),
        "spec_decode_num_drafts_total": (
            total("speculation", "drafts"),
            "Speculative verification steps.",
        ),
        "spec_decode_num_draft_tokens_total": (
            total("speculation", "drafted_tokens"),
            "Total draft tokens generated.",
        ),
        "spec_decode_num_accepted_tokens_total": (
            total("speculation", "accepted_tokens"),
            "Total draft tokens accepted.",
        ),
        "n_tokens_max": (largest, "Largest observed n_tokens."),
    }
    gauges = {
        "prompt_tokens_seconds": (
            _rate(prompt_tokens, prompt_s),
            "Average prompt throughput in tokens/s.",
        ),
        "predicted_tokens_seconds": (
            _rate(predicted, predicted_s),
            "Average generation throughput in tokens/s.",
        ),
        "requests_processing": (total("queue", "running"), "Number of requests processing."),
        "requests_deferred": (total("queue", "waiting"), "Number of requests deferred."),
        "n_busy_slots_per_decode": (
            _rate(busy_slots, batches),
            "Average number of busy slots per llama_decode() call.",
        ),
    }
    what = "Replicas that run and are not in these numbers, as they did not answer in time."
    lines = [_written(f"llamacpp:{name}", "counter", *of) for name, of in counters.items()]
    lines += [_written(f"llamacpp:{name}", "gauge", *of) for name, of in gauges.items()]
    lines.append(_written("corral_replicas_missing", "gauge", float(n_missing), what))
    return "".join(lines).encode()


def render_as_vllm(model: str, replicas: Sequence[ReplicaStats], exposition: bytes) -> bytes:
    """The figures by vLLM's names: a model's, summed over its replicas, and all histograms of this
    exposition, which has Corral's names."""
    engines = [replica.engine for replica in replicas]

    def total(group: str, field: str) -> float:
        return float(sum(engine[group][field] for engine in engines))

    computed, cached = total("tokens", "prompt_tokens"), total("tokens", "cached_tokens")
    n_held = sum(slot["n_past"] for engine in engines for slot in engine["slots"])
    held = _rate(n_held, sum(engine["n_ctx"] for engine in engines))
    generated, preemptions = total("tokens", "generated_tokens"), total("requests", "preemptions")
    running, waiting = total("queue", "running"), total("queue", "waiting")
    figures = (
        ("num_requests_running", "gauge", running, "Requests that have a slot."),
        ("num_requests_waiting", "gauge", waiting, "Requests that wait for a slot."),
        ("kv_cache_usage_perc", "gauge", held, "KV cache in use, from 0 to 1."),
        ("prompt_tokens_total", "counter", computed + cached, "Prompt tokens."),
        ("generation_tokens_total", "counter", generated, "Generated tokens."),
        ("prefix_cache_queries_total", "counter", computed + cached, "Prompt tokens, looked up."),
        ("prefix_cache_hits_total", "counter", cached, "Prompt tokens that were cached."),
        ("num_preemptions_total", "counter", preemptions, "Sequences that lost their slot."),
    )
    name = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    label = f'{{model_name="{name}"}}'
    text = "".join(
        _written(f"vllm:{figure}", kind, value, what, label)
        for figure, kind, value, what in figures
    )
    return text.encode() + b"".join(map(_renamed, _OWN.finditer(exposition)))


def _renamed(line: re.Match[bytes]) -> bytes:
    comment, name, suffix, rest = (part or b"" for part in line.groups())
    label = re.sub(rb'(?<=[{,])model="', b'model_name="', rest, count=1)
    return comment + b"vllm:" + _OF_VLLM[name.decode()].encode() + suffix + label + b"\n"


def _written(name: str, kind: str, value: float, what: str, label: str = "") -> str:
    return f"# HELP {name} {what}\n# TYPE {name} {kind}\n{name}{label} {value}\n"


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else 0.0
