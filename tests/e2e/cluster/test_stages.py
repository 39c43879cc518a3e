"""One model in three stages, each on a host of its own."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from tests.e2e.cluster.hosts import Hosts, hosts, needs_namespaces
from tests.e2e.cluster.test_failover import Streams
from tests.e2e.conftest import model, wait_until

pytest.importorskip("openvino", reason="corral[openvino] is not installed")
pytestmark = [pytest.mark.long, pytest.mark.timeout(580), needs_namespaces]
_N_STAGES, _N_STREAMS = 3, 16
_ENGINE: dict[str, int | str] = {
    "backend": "openvino",
    "n_slots": 8,
    "n_ctx_slot": 1024,
    "speculate": False,
}
_DELAY_S = 0.0005
_START_S = 120
_PAUSE_S = 60
"""The longest pause of all streams. With this cluster's settings, Ray gives a host up after 14 s, and three
processes start in 7 to 13 s on two cores."""


def nodes(cluster: Hosts) -> set[str]:
    """The hosts of the stages that can be asked."""
    return {replica["node_id"] for replica in cluster.replicas("staged")}


def have_begun(streams: Streams) -> bool:
    return streams.n_begun == _N_STREAMS


def answer(cluster: Hosts, model_id: str, text: str) -> str:
    body = {"model": model_id, "messages": [{"role": "user", "content": text}], "temperature": 0}
    response = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=60)
    answered: str = response.json()["choices"][0]["message"]["content"]
    return answered


def test_streams_outlive_each_stage_and_a_cut_cable() -> None:
    staged = model(None, "staged", stages=_N_STAGES, **_ENGINE)
    staged["serve"]["ray_actor_options"]["num_cpus"] = 1
    with (
        hosts(_N_STAGES, n_cpus=2, delay_s=_DELAY_S) as cluster,
        ThreadPoolExecutor(_N_STREAMS) as pool,
    ):
        log = cluster.serve([staged, model(None, "whole", **_ENGINE)])

        def wait_for_stages() -> None:
            wait_until(
                lambda: len(nodes(cluster)) == _N_STAGES and bool(cluster.replicas("whole")),
                _START_S,
                log.read_text,
            )

        wait_for_stages()
        texts = [f"Hello {name}!" for name in "abcdefghijklmnop"]
        whole, staged_texts = (
            list(pool.map(partial(answer, cluster, model_id), texts))
            for model_id in ("whole", "staged")
        )
        assert staged_texts == whole

        for stage in range(_N_STAGES):
            streams = Streams(cluster, _N_STREAMS, 300, "staged")
            reading = [pool.submit(streams.read, i) for i in streams.numbers]
            wait_until(partial(have_begun, streams), 60, "16 streams")
            processes = cluster.pids("ray::ServeReplica:corral:engine-staged")
            assert len(processes) == _N_STAGES
            os.kill(processes[stage], signal.SIGKILL)
            for stream in reading:
                stream.result(120)
            wait_for_stages()

        streams = Streams(cluster, _N_STREAMS, 600, "staged")
        reading = [pool.submit(streams.read, i) for i in streams.numbers]
        wait_until(partial(have_begun, streams), 60, "16 streams")
        cluster.cut(_N_STAGES - 1)
        time.sleep(1)  # what was on its way has come
        before = [len(text) for text in streams.texts]
        wait_until(
            lambda: all(
                stream.done() or len(text) > n
                for stream, text, n in zip(reading, streams.texts, before, strict=True)
            ),
            _PAUSE_S,
            log.read_text,
        )
        for stream in reading:
            stream.result(120)
        assert len(nodes(cluster)) == _N_STAGES - 1
