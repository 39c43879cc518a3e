"""What Prometheus gets from Ray's exporter."""

from __future__ import annotations

import json

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import Corral, wait_until

EXPORT_TIMEOUT_S = 60  # Ray exports every ten seconds, and the replica's counts follow every five


def samples(corral: Corral) -> dict[str, float]:
    """Corral's samples of the model "big", by name and, if there is one, reason."""
    found = {}
    discovery = corral.directory / "ray" / "prom_metrics_service_discovery.json"
    for target in [t for entry in json.loads(discovery.read_text()) for t in entry["targets"]]:
        try:
            text = httpx.get(f"http://{target}/metrics", timeout=5).text
        except httpx.TransportError:
            continue
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("ray_corral") and sample.labels.get("model") == "big":
                    reason = sample.labels.get("reason")
                    found[f"{sample.name} {reason}" if reason else sample.name] = sample.value
    return found


def test_requests_and_tokens_are_counted(corral: Corral) -> None:
    body = {"model": "big", "prompt": "Hello", "max_tokens": 8, "ignore_eos": True}
    assert corral.http.post("/v1/completions", json=body).status_code == 200
    stats = corral.stats()

    def exported() -> bool:
        found = samples(corral)
        return (
            found.get("ray_corral_requests_total length", 0) >= stats["ended"]["length"]
            and found.get("ray_corral_generated_tokens_total", 0) >= stats["generated_tokens"]
            and found.get("ray_corral_time_to_first_token_seconds_count", 0) >= 1
            and found.get("ray_corral_request_latency_seconds_sum", 0) > 0
            and found.get("ray_corral_kv_cache_used_ratio", 0) > 0
            and found.get("ray_corral_slots_busy") == 0
        )

    wait_until(exported, EXPORT_TIMEOUT_S, f"metrics exported: {samples(corral)}")
