"""A model is replaced without a gap, and back again, by an alias that moves with a real `serve deploy`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.cluster.test_failover import EXACT, RESTART_TIMEOUT_S
from tests.e2e.conftest import Corral, all_the_time, model, sse, wait_until
from tools.random_models.model import SHAPES, write_random_gguf

N_STREAMS, N_CLIENTS = 2, 2
PATIENCE_S, N_ALIKE = 120, 20
READ_EVERY_S, N_MORE = 0.2, 50
pytestmark = [pytest.mark.long, pytest.mark.timeout(560)]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model, with another vocabulary."""
    path = tmp_path_factory.mktemp("other") / "other.gguf"
    control = [f"<|{number}|>" for number in range(200)]
    write_random_gguf(path, SHAPES["tiny"], "q8_0", seed=1, more_control=control)
    return path


def entry(path: Path, model_id: str, *aliases: str) -> dict[str, Any]:
    """An entry of `models`."""
    fields = model(path, model_id, n_slots=8, n_ctx_slot=512, max_waiting=32, **EXACT)
    fields["serve"]["ray_actor_options"]["num_cpus"] = 0.3
    return fields | {"aliases": list(aliases)}


def deploy(corral: Corral, *entries: dict[str, Any]) -> None:
    """`serve deploy` of these models."""
    path = corral.directory / "serve_config.yaml"
    config = yaml.safe_load(path.read_text())
    config["applications"][0]["args"]["models"] = list(entries)
    path.write_text(yaml.safe_dump(config))
    corral.deploy()


def replicas(corral: Corral) -> dict[str, set[str]]:
    """The ids of each model's replicas."""
    found = corral.http.get("/v1/stats").json()["models"]
    return {one["id"]: {each["replica_id"] for each in one["replicas"]} for one in found}


class Streams:
    """Streams that go on until `over` is set, and then a little more."""

    def __init__(self, corral: Corral) -> None:
        self._url = corral.url
        self.over = threading.Event()
        self.begun = [threading.Event() for _ in range(N_STREAMS)]

    def read(self, number: int) -> tuple[str, set[str]]:
        """The text, and the models that its parts name. It is read slowly: what it costs to write and to
        read each token would hold the rest up."""
        body = {"model": "m", "prompt": prompt(number), "max_tokens": 1_000_000}
        body |= {"context_shift": True, "ignore_eos": True, "stream": True, "temperature": 0}
        texts, models, n_more = [], set(), N_MORE
        url = f"{self._url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=240) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    chunk = sse(line)
                    assert "error" not in chunk, chunk
                    texts.append(chunk["choices"][0]["text"])
                    models.add(chunk["model"])
                    self.begun[number].set()
                    n_more -= self.over.wait(READ_EVERY_S)
                    if not n_more:
                        break
        return "".join(texts), models


def prompt(number: int) -> str:
    return f"For ever {number}"


def text_of(corral: Corral, name: str, number: int) -> str:
    """The first part of what a model says."""
    body = {"model": name, "prompt": prompt(number), "max_tokens": 100, "ignore_eos": True}
    answer = corral.http.post("/v1/completions", json=body | {"temperature": 0})
    text: str = answer.json()["choices"][0]["text"]
    return text


def n_running(corral: Corral, name: str) -> int:
    """Requests that a model's replicas work on."""
    found = corral.http.get("/v1/stats").json()["models"]
    return sum(
        each["engine"]["queue"]["running"]
        for one in found
        if one["id"] == name
        for each in one["replicas"]
    )


def test_a_model_is_replaced_without_a_gap_and_back_again(
    gguf: Path, other: Path, start: Callable[[list[dict[str, Any]]], Corral]
) -> None:
    corral = start([entry(gguf, "old", "m")])
    corral.wait_ready()
    (old_replica,) = replicas(corral)["old"]
    answers: list[tuple[int, str]] = []
    numbers = iter(range(10**6))

    def ask(_: int) -> None:
        """One of many conversations."""
        body = {"model": "m", "prompt": f"Conversation {next(numbers)}", "max_tokens": 4}
        answer = httpx.post(f"{corral.url}/v1/completions", json=body, timeout=120)
        said = answer.json()
        answers.append((answer.status_code, said.get("model", json.dumps(said))))

    def wait_for(name: str) -> None:
        """Wait until all conversations are answered by this model."""
        before = len(answers)

        def all_are() -> bool:
            last = answers[max(before, len(answers) - N_ALIKE) :]
            return len(last) == N_ALIKE and all(said == name for _, said in last)

        wait_until(all_are, PATIENCE_S, f"{name} answers")

    streams = Streams(corral)
    with ThreadPoolExecutor(N_STREAMS) as pool:
        reading = [pool.submit(streams.read, number) for number in range(N_STREAMS)]
        assert all(begun.wait(60) for begun in streams.begun)
        with all_the_time(ask, N_CLIENTS):
            # Another file is loaded beside the old one, which goes on as it is.
            deploy(corral, entry(gguf, "old", "m"), entry(other, "new"))
            wait_until(lambda: bool(replicas(corral).get("new")), RESTART_TIMEOUT_S, "new is there")
            assert replicas(corral)["old"] == {old_replica}
            assert {name for _, name in answers} == {"old"}
            (new_replica,) = replicas(corral)["new"]
            # The alias moves, while the first streams go on at the old model.
            deploy(corral, entry(gguf, "old"), entry(other, "new", "m"))
            wait_for("new")
            assert n_running(corral, "old") >= N_STREAMS
            assert not any(one.done() for one in reading)
            # And back again.
            deploy(corral, entry(gguf, "old", "m"), entry(other, "new"))
            wait_for("old")
        streams.over.set()
        ends = [one.result(240) for one in reading]
    assert {status for status, _ in answers} == {200}
    assert {name for _, name in answers} == {"old", "new"}
    found = replicas(corral)
    assert (found["old"], found["new"]) == ({old_replica}, {new_replica})
    for number, (text, models) in enumerate(ends):
        assert models == {"old"}
        assert text.startswith(text_of(corral, "old", number))
        assert not text.startswith(text_of(corral, "new", number))
