"""What Prometheus gets from Ray's exporter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.e2e.conftest import ROOT, Corral, model, wait_until

pytestmark = pytest.mark.long
EXPORT_TIMEOUT_S = 60  # the replica's counts follow every five seconds
LOOK_EVERY_S = 1.0  # each look keeps Ray's exporter from taking in what is new

RARE = {"ray_cluster_active_nodes"}
"""The autoscaler's, which is not here."""


@pytest.fixture(scope="module")
def corral(gguf: Path, start_for_module: Callable[[list[dict[str, Any]]], Corral]) -> Corral:
    """By `serve run`: Ray's dashboard tells Prometheus where to look."""
    server = start_for_module([model(gguf, "big", n_slots=16, n_ctx_slot=2048)])
    server.wait_ready()
    return server


def exports(corral: Corral) -> Iterator[Sample]:
    """All that the cluster exports."""
    discovery = corral.directory / "ray" / "prom_metrics_service_discovery.json"
    for target in [t for entry in json.loads(discovery.read_text()) for t in entry["targets"]]:
        try:
            text = httpx.get(f"http://{target}/metrics", timeout=5, verify=False).text
        except httpx.TransportError:
            continue
        for family in text_string_to_metric_families(text):
            yield from family.samples


def samples(corral: Corral) -> dict[str, float]:
    """Corral's samples of the model "big", by name and, if there is one, reason."""
    found = {}
    for sample in exports(corral):
        if sample.name.startswith("ray_corral") and sample.labels.get("model") == "big":
            reason = sample.labels.get("reason")
            found[f"{sample.name} {reason}" if reason else sample.name] = sample.value
    return found


def test_the_dashboards_metrics_are_exported_with_their_labels(corral: Corral) -> None:
    dashboard = (ROOT / "cluster" / "monitoring" / "grafana.json").read_text()
    body = {"model": "big", "prompt": "Hello " * 50, "max_tokens": 8, "ignore_eos": True}
    for _ in range(2):  # the second finds the first one's prompt
        assert corral.http.post("/v1/completions", json=body).status_code == 200
    wanted = set(re.findall(r"\b(ray_\w+)", dashboard)) - RARE
    labels = set(re.findall(r"by \(([^)]+)\)", dashboard)) - {"node_type"}
    assert len(wanted) > 15

    seen: set[str] = set()

    def missing() -> set[str]:
        for sample in exports(corral):  # a gauge is not in every one: only after its replica set it
            seen.update((sample.name, *sample.labels))
        return (wanted | labels) - seen

    wait_until(lambda: not missing(), EXPORT_TIMEOUT_S, lambda: f"{missing()}", LOOK_EVERY_S)


def test_requests_and_tokens_are_counted(corral: Corral) -> None:
    body = {"model": "big", "prompt": "Hello", "max_tokens": 8, "ignore_eos": True}
    assert corral.http.post("/v1/completions", json=body).status_code == 200
    stats = corral.stats()

    def exported() -> bool:
        found = samples(corral)
        return (
            found.get("ray_corral_requests_total length", 0) >= stats["requests"]["ended"]["length"]
            and found.get("ray_corral_generated_tokens_total", 0)
            >= stats["tokens"]["generated_tokens"]
            and found.get("ray_corral_time_to_first_token_seconds_count", 0) >= 1
            and found.get("ray_corral_request_latency_seconds_sum", 0) > 0
            and found.get("ray_corral_inter_token_latency_seconds_count", 0) >= 7
            and found.get("ray_corral_kv_cache_used_ratio", 0) > 0
            and found.get("ray_corral_slots_busy") == 0
        )

    def what() -> str:
        return f"metrics exported: {samples(corral)} of {stats}"

    wait_until(exported, EXPORT_TIMEOUT_S, what, LOOK_EVERY_S)
