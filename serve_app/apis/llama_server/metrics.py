"""Metrics by the names of llama-server and of vLLM, for their dashboards.

Sources: llama.cpp, tools/server/README.md, "GET /metrics"; vLLM, docs/design/metrics.md; Prometheus's text
format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from serve_app.base.values.replicas import ReplicaStats
from serve_app.server.http import request_context

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


_LABEL = re.compile(rb'[{,](model|key)="((?:[^"\\]|\\.)+)"')
_ESCAPED = re.compile(rb"\\(.)")


_Figure = tuple[str, str, float, str]
"""A metric's name, kind, value and meaning."""


def render_as_llama_server(replicas: Sequence[ReplicaStats], n_missing: int) -> bytes:
    """A model's metrics in Prometheus's text format, summed over the replicas but for `n_missing`."""
    total = _totals(replicas)
    prompt_tokens, prompt_s = total("tokens.prompt_tokens"), total("requests.prefill_s")
    generated, generated_s = total("tokens.generated_tokens"), total("requests.generation_s")
    prompts = prompt_tokens + total("embeddings.embedded_tokens")
    cached = total("tokens.cached_tokens")
    batches, busy_slots = total("timing.batches"), total("timing.busy_slots")
    n_decode = batches + total("embeddings.embedding_batches")
    drafts, drafted = total("speculation.drafts"), total("speculation.drafted_tokens")
    accepted = total("speculation.accepted_tokens")
    longest = float(max((one.engine["tokens"]["n_tokens_max"] for one in replicas), default=0))
    prompt_rate, rate = _rate(prompt_tokens, prompt_s), _rate(generated, generated_s)
    running, waiting = total("queue.running"), total("queue.waiting")
    busy = _rate(busy_slots, batches)
    figures = (
        ("prompt_tokens_total", "counter", prompts, "Number of prompt tokens processed."),
        ("prompt_tokens_cached_total", "counter", cached, "Prompt tokens reused from the cache."),
        ("prompt_seconds_total", "counter", prompt_s, "Prompt process time in seconds."),
        ("tokens_predicted_total", "counter", generated, "Generation tokens processed."),
        ("tokens_predicted_seconds_total", "counter", generated_s, "Predict time in seconds."),
        ("n_decode_total", "counter", n_decode, "Total number of llama_decode() calls."),
        ("spec_decode_num_drafts_total", "counter", drafts, "Speculative verification steps."),
        ("spec_decode_num_draft_tokens_total", "counter", drafted, "Draft tokens generated."),
        ("spec_decode_num_accepted_tokens_total", "counter", accepted, "Draft tokens accepted."),
        ("n_tokens_max", "counter", longest, "Largest observed n_tokens."),
        ("prompt_tokens_seconds", "gauge", prompt_rate, "Prompt throughput in tokens/s."),
        ("predicted_tokens_seconds", "gauge", rate, "Generation throughput in tokens/s."),
        ("requests_processing", "gauge", running, "Number of requests processing."),
        ("requests_deferred", "gauge", waiting, "Number of requests deferred."),
        ("n_busy_slots_per_decode", "gauge", busy, "Busy slots per llama_decode() call."),
    )
    what = "Replicas that run and are not in these numbers, as they did not answer in time."
    missing = ("corral_replicas_missing", "gauge", float(n_missing), what)
    return (_write_figures("llamacpp:", figures) + _write_figures("", [missing])).encode()


def render_as_vllm(model: str, replicas: Sequence[ReplicaStats], exposition: bytes) -> bytes:
    """The figures by vLLM's names: a model's, summed over its replicas, and all histograms of this
    exposition, which has Corral's names."""
    total = _totals(replicas)
    computed, cached = total("tokens.prompt_tokens"), total("tokens.cached_tokens")
    n_held = sum(slot["n_past"] for one in replicas for slot in one.engine["slots"])
    cache_usage = _rate(n_held, sum(one.engine["n_ctx"] for one in replicas))
    generated, preemptions = total("tokens.generated_tokens"), total("requests.preemptions")
    running, waiting = total("queue.running"), total("queue.waiting")
    figures = (
        ("num_requests_running", "gauge", running, "Requests that have a slot."),
        ("num_requests_waiting", "gauge", waiting, "Requests that wait for a slot."),
        ("kv_cache_usage_perc", "gauge", cache_usage, "KV cache in use, from 0 to 1."),
        ("prompt_tokens_total", "counter", computed + cached, "Prompt tokens."),
        ("generation_tokens_total", "counter", generated, "Generated tokens."),
        ("prefix_cache_queries_total", "counter", computed + cached, "Prompt tokens, looked up."),
        ("prefix_cache_hits_total", "counter", cached, "Prompt tokens that were cached."),
        ("num_preemptions_total", "counter", preemptions, "Sequences that lost their slot."),
    )
    name = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    text = _write_figures("vllm:", figures, f'{{model_name="{name}"}}')
    return text.encode() + b"".join(map(_rename, _OWN.finditer(exposition)))


def visible(text: bytes) -> bytes:
    """The lines of an exposition that the present caller may see. They are of models that it may use, and
    of its own key if it is no operator."""
    caller = request_context.current()
    if caller.account is None or (caller.is_operator and caller.allowed_models is None):
        return text

    def is_visible(line: bytes) -> bool:
        labels = {
            kind: _ESCAPED.sub(lambda escape: escape[1].replace(b"n", b"\n"), value).decode()
            for kind, value in _LABEL.findall(line)
            if not line.startswith(b"#")
        }
        is_own = caller.is_operator or labels.get(b"key") in (None, caller.key_name)
        return is_own and (b"model" not in labels or caller.may_use(labels[b"model"]))

    return b"".join(line for line in text.splitlines(keepends=True) if is_visible(line))


def _totals(replicas: Sequence[ReplicaStats]) -> Callable[[str], float]:
    """Sums over the replicas, by `GROUP.FIELD` of their statistics."""

    def total(name: str) -> float:
        group, _, field = name.partition(".")
        return float(sum(one.engine[group][field] for one in replicas))

    return total


def _rename(line: re.Match[bytes]) -> bytes:
    comment, name, suffix, rest = (part or b"" for part in line.groups())
    label = re.sub(rb'(?<=[{,])model="', b'model_name="', rest, count=1)
    return comment + b"vllm:" + _OF_VLLM[name.decode()].encode() + suffix + label + b"\n"


def _write_figures(prefix: str, figures: Iterable[_Figure], label: str = "") -> str:
    return "".join(
        f"# HELP {prefix}{name} {what}\n# TYPE {prefix}{name} {kind}\n{prefix}{name}{label} {value}\n"
        for name, kind, value, what in figures
    )


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else 0.0
