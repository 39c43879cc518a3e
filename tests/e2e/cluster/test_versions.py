"""A model is replaced without a gap: a canary, all of it, and back again, by real `serve deploy`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.cluster.test_failover import EXACT, RESTART_TIMEOUT_S
from tests.e2e.conftest import ROOT, Corral, all_the_time, model, sse, wait_until
from tools.random_models.model import SHAPES, write_random_gguf

N_STREAMS, N_CLIENTS = 2, 2
PATIENCE_S = 120
READ_EVERY_S, N_MORE = 0.2, 50
pytestmark = [pytest.mark.long, pytest.mark.timeout(560)]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model, with another vocabulary."""
    path = tmp_path_factory.mktemp("other") / "other.gguf"
    control = [f"<|{number}|>" for number in range(200)]
    write_random_gguf(path, SHAPES["tiny"], "q8_0", seed=1, more_control=control)
    return path


@pytest.fixture
def damaged(tmp_path: Path) -> dict[str, Any]:
    """An adapter that is none, which nobody but an engine reads."""
    path = tmp_path / "damaged.gguf"
    path.write_bytes(b"GGUF, and nothing else")
    return {"id": "damaged", "source": {"path": str(path)}}


def version(path: Path, **fields: Any) -> dict[str, Any]:
    """An entry of `models`: one of the versions of "m"."""
    entry = model(path, "m", n_slots=8, n_ctx_slot=512, max_waiting=32, **EXACT)
    entry["serve"]["ray_actor_options"]["num_cpus"] = 0.3
    return entry | fields


def deploy(corral: Corral, *entries: dict[str, Any]) -> None:
    """`serve deploy` of these models."""
    path = corral.directory / "serve_config.yaml"
    config = yaml.safe_load(path.read_text())
    config["applications"][0]["args"]["models"] = list(entries)
    path.write_text(yaml.safe_dump(config))
    corral.deploy()


def shares(corral: Corral) -> dict[str, float]:
    versions = corral.http.get("/v1/models/m").json()["versions"]
    return {one["version"]: one["share"] for one in versions}


def replicas(corral: Corral) -> dict[str, set[str]]:
    """The ids of each version's replicas."""
    found = corral.http.get("/v1/stats").json()["models"]
    return {one["id"]: {each["replica_id"] for each in one["replicas"]} for one in found}


def corral_command(corral: Corral, *arguments: str) -> str:
    """What `corral` prints."""
    command = [sys.executable, "-m", "serve_app.cli", *arguments, "--url", corral.url]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    """The first part of what a version says."""
    body = {"model": name, "prompt": prompt(number), "max_tokens": 100, "ignore_eos": True}
    answer = corral.http.post("/v1/completions", json=body | {"temperature": 0})
    text: str = answer.json()["choices"][0]["text"]
    return text


def n_running(corral: Corral, name: str) -> int:
    """Requests that a version's replicas work on."""
    found = corral.http.get("/v1/stats").json()["models"]
    return sum(
        each["engine"]["queue"]["running"]
        for one in found
        if one["id"] == name
        for each in one["replicas"]
    )


def test_a_model_is_replaced_without_a_gap_and_back_again(
    gguf: Path,
    other: Path,
    damaged: dict[str, Any],
    start: Callable[[list[dict[str, Any]]], Corral],
) -> None:
    corral = start([version(gguf)])
    corral.wait_ready()
    (old_replica,) = replicas(corral)["m"]
    answers: list[tuple[int, str]] = []
    numbers = iter(range(10**6))

    def ask(_: int) -> None:
        """One of many conversations."""
        body = {"model": "m", "prompt": f"Conversation {next(numbers)}", "max_tokens": 4}
        answer = httpx.post(f"{corral.url}/v1/completions", json=body, timeout=120)
        said = answer.json()
        answers.append((answer.status_code, said.get("model", json.dumps(said))))

    def since(n: int) -> set[str]:
        return {name for _, name in answers[n:]}

    streams = Streams(corral)
    with ThreadPoolExecutor(N_STREAMS) as pool:
        reading = [pool.submit(streams.read, number) for number in range(N_STREAMS)]
        assert all(begun.wait(60) for begun in streams.begun)
        with all_the_time(ask, N_CLIENTS):
            # Another file is loaded beside the old one, which goes on as it is; so does one that cannot be.
            deploy(
                corral,
                version(gguf, weight=100),
                version(other, version="new", weight=0),
                version(gguf, version="damaged", weight=100, adapters=[damaged]),
            )
            wait_until(
                lambda: bool(replicas(corral).get("m@new")), RESTART_TIMEOUT_S, "new is there"
            )
            assert replicas(corral)["m@default"] == {old_replica}
            assert shares(corral) == {"default": 1, "new": 0, "damaged": 0}
            assert "m@new" not in since(0)
            # A canary.
            printed = corral_command(corral, "weights", "m", "new=50", "damaged=0")
            assert "m@new" in printed
            assert "50%" in printed
            n = len(answers) + N_CLIENTS
            wait_until(lambda: len(answers) >= n + 60, PATIENCE_S, "60 conversations")
            names = [name for _, name in answers[n : n + 60]]
            assert 12 <= names.count("m@new") <= 48  # of 30; by chance outside once in 500,000
            # All of it, while the first streams go on at the old one.
            corral_command(corral, "weights", "m", "new=100")
            n = len(answers) + 2 * N_CLIENTS
            wait_until(lambda: len(answers) >= n + 20, PATIENCE_S, "20 conversations")
            assert since(n) == {"m@new"}
            assert n_running(corral, "m@default") >= N_STREAMS
            assert not any(one.done() for one in reading)
            # And back again.
            corral_command(corral, "rollback", "m")
            assert shares(corral) == {"default": 1, "new": 0, "damaged": 0}
            n = len(answers) + 2 * N_CLIENTS
            wait_until(lambda: len(answers) >= n + 20, PATIENCE_S, "20 conversations")
            assert since(n) == {"m@default"}
        streams.over.set()
        ends = [one.result(240) for one in reading]
    assert {status for status, _ in answers} == {200}
    assert since(0) == {"m", "m@default", "m@new"}
    assert replicas(corral)["m@default"] == {old_replica}
    for number, (text, models) in enumerate(ends):
        assert models == {"m"}
        assert text.startswith(text_of(corral, "m@default", number))
        assert not text.startswith(text_of(corral, "m@new", number))
