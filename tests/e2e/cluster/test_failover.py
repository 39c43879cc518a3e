"""Replicas are lost in mid-stream, and no client notices but for a pause."""

from __future__ import annotations

import base64
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest
from PIL import Image

from loadtests.common.processes import with_default_signals
from serve_app.prompt.tokenizer import Tokenizer
from tests.e2e.conftest import ROOT, Corral, model, sse, wait_until
from tools.random_models.model import SHAPES as MODELS
from tools.random_models.model import write_random_gguf
from tools.random_models.projector import QWEN_TOKENS, write_random_projector
from tools.random_models.projector import SHAPES as PROJECTORS

RESTART_TIMEOUT_S, N_SLOTS = 90, 4
EXACT = {"flash_attn": False, "kv_unified": False, "n_batch": 1, "speculate": False}
"""With these, what is computed of a token does not depend on how many are computed together."""
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def corral(gguf: Path, start_for_module: Callable[[list[dict[str, Any]]], Corral]) -> Corral:
    """Two replicas."""
    served = model(gguf, "m", n_slots=N_SLOTS, n_ctx_slot=4096, max_waiting=32, **EXACT)
    served["serve"]["num_replicas"] = 2
    corral = start_for_module([served])
    corral.wait_ready()
    wait_until(lambda: len(corral.replicas()) == 2, RESTART_TIMEOUT_S, "two replicas")
    return corral


def body(number: int, n_tokens: int) -> dict[str, Any]:
    return {
        "prompt": f"Stream number {number} says",
        "max_tokens": n_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


class Server(Protocol):
    """What answers."""

    url: str


class Streams:
    """Clients that read, and what has come to them."""

    def __init__(
        self, server: Server, n_streams: int, n_tokens: int, model_id: str | None = None
    ) -> None:
        """They ask the first model if none is named."""
        self.url = f"{server.url}/v1/completions"
        self._model = {} if model_id is None else {"model": model_id}
        self.n_tokens = n_tokens
        self.numbers = range(n_streams)
        self.ids = [""] * n_streams
        self.texts = [""] * n_streams

    def alone(self, number: int) -> str:
        """The same text, undisturbed and whole."""
        asked = body(number, self.n_tokens) | self._model
        answer = httpx.post(self.url, json=asked, timeout=120).json()
        text: str = answer["choices"][0]["text"]
        return text

    def read(self, number: int) -> None:
        """One stream, to its end."""
        usage: dict[str, int] = {}
        asked = body(number, self.n_tokens) | self._model
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", self.url, json=asked, timeout=120) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    chunk = sse(line)
                    assert "error" not in chunk, chunk
                    self.ids[number] = chunk["id"]
                    self.texts[number] += "".join(one["text"] for one in chunk["choices"])
                    usage = chunk.get("usage") or usage
        assert usage["completion_tokens"] == self.n_tokens

    @property
    def n_begun(self) -> int:
        return sum(bool(text) for text in self.texts)


def engines(corral: Corral) -> list[int]:
    """The processes of its replicas. To find them takes longer than some of their answers."""
    return corral.pids("ray::ServeReplica:corral:engine-m")


def kill_a_replica(corral: Corral) -> None:
    """Kill the first one that is still there: another may just go with its node."""
    kill_one(engines(corral))


def kill_one(replicas: list[int]) -> None:
    """Kill the first of these processes that is still there."""
    for victim in replicas:
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
            return
    pytest.fail("no replica to be killed")


def test_streams_go_on_without_a_missing_or_repeated_character(corral: Corral) -> None:
    streams = Streams(corral, 12, 3000)
    with ThreadPoolExecutor(12) as pool:
        alone = list(pool.map(streams.alone, streams.numbers))
        replicas = engines(corral)
        reading = [pool.submit(streams.read, number) for number in streams.numbers]
        wait_until(lambda: streams.n_begun > N_SLOTS, 60, "streams of both replicas")
        kill_one(replicas)
        for one in reading:
            one.result(180)
    assert streams.texts == alone
    answers = [corral.http.get(f"/v1/requests/{answer_id}") for answer_id in streams.ids]
    # What had ended before its replica died is not known any more.
    told = [answer.json()["sequences"][0] for answer in answers if answer.status_code == 200]
    assert all(one["finish_reason"] == "length" for one in told)
    resumed = [one["timings"] for one in told if one["timings"]["failovers"]]
    assert resumed
    assert all(timings["failed_over_ms"] > 0 for timings in resumed)
    wait_until(lambda: len(corral.replicas()) == 2, RESTART_TIMEOUT_S, "two replicas again")


def test_an_answer_about_a_picture_goes_on_elsewhere(
    start: Callable[[list[dict[str, Any]]], Corral], tmp_path: Path
) -> None:
    """The other replica encodes the picture anew. Behind it, tokens have other positions than indices."""
    files = tmp_path / "model.gguf", tmp_path / "projector.gguf"
    write_random_gguf(files[0], MODELS["tiny-qwen2vl"], "q8_0", more_control=QWEN_TOKENS)
    write_random_projector(files[1], PROJECTORS["tiny-qwen2vl"], Tokenizer(files[0]).model.n_embd)
    served = model(files[0], "m", n_slots=2, n_ctx_slot=4096, **EXACT)
    served |= {"projector": {"path": str(files[1])}}
    served["serve"]["num_replicas"] = 2
    corral = start([served])
    corral.wait_ready()
    wait_until(lambda: len(corral.replicas()) == 2, RESTART_TIMEOUT_S, "two replicas")
    made = io.BytesIO()
    Image.effect_noise((90, 200), 80).convert("RGB").save(made, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(made.getvalue()).decode()}"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is in this picture?"},
    ]
    asked = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 3000,
        "temperature": 0,
        "ignore_eos": True,
    }
    whole = corral.http.post("/v1/chat/completions", json=asked, timeout=120).json()
    answer_id, text = read_and_kill(corral, asked)
    assert text == whole["choices"][0]["message"]["content"]
    (ended,) = corral.http.get(f"/v1/requests/{answer_id}").json()["sequences"]
    assert ended["timings"]["failovers"] == 1


def read_and_kill(corral: Corral, asked: dict[str, Any]) -> tuple[str, str]:
    """A streamed chat's id and text; the replica that computes it is killed when it has begun."""
    text, answer_id, processes = "", "", by_replica(corral)
    body = asked | {"stream": True}
    with corral.http.stream("POST", "/v1/chat/completions", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = sse(line)
            assert "error" not in chunk, chunk
            before, answer_id = text, chunk["id"]
            text += "".join(one["delta"].get("content") or "" for one in chunk["choices"])
            if text and not before:
                (begun,) = httpx.get(f"{corral.url}/v1/requests/{answer_id}").json()["sequences"]
                os.kill(processes[begun["replica_id"]], signal.SIGKILL)
    return answer_id, text


def by_replica(corral: Corral) -> dict[str, int]:
    """The process of each replica, which is the process that writes the replica's log."""
    processes: dict[str, int] = {}
    for pid in engines(corral):
        open_files = {str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()}
        for replica in corral.replicas():
            if any(replica["replica_id"] in file for file in open_files):
                processes[replica["replica_id"]] = pid
    assert len(processes) == 2
    return processes


@contextmanager
def second_node(corral: Corral) -> Iterator[subprocess.Popen[bytes]]:
    """Another node of Corral's cluster on this machine, in a process group of its own."""
    (raylet,) = corral.pids("raylet/raylet")
    arguments = Path(f"/proc/{raylet}/cmdline").read_text().split("\0")
    (address,) = [one for one in arguments if one.startswith("--gcs-address=")]
    ray = str(Path(sys.executable).with_name("ray"))
    node = subprocess.Popen(
        with_default_signals(
            ray, "start", "--block", address.replace("--gcs-", "--"), "--num-cpus=2"
        ),
        cwd=ROOT,
        env=os.environ
        | {
            "RAY_AUTH_MODE": "token",
            "RAY_TMPDIR": str(corral.directory),
            "XDG_RUNTIME_DIR": str(corral.directory),
        },
        start_new_session=True,
    )
    try:
        yield node
    finally:
        node.terminate()
        node.wait(60)


def test_200_streams_outlive_replicas_and_a_node(
    gguf: Path, start: Callable[[list[dict[str, Any]]], Corral]
) -> None:
    served = model(gguf, "m", n_slots=16, n_ctx_slot=512, max_waiting=200, **EXACT)
    served["serve"] = {
        "num_replicas": 4,
        "max_queued_requests": 200,  # at worst, none of the replicas is left for a moment
        "ray_actor_options": {"num_cpus": 1},
    }
    corral = start([served])
    corral.wait_ready()
    streams = Streams(corral, 200, 150)
    with second_node(corral) as node, ThreadPoolExecutor(200) as pool:
        wait_until(lambda: len(corral.replicas()) == 4, RESTART_TIMEOUT_S, "four replicas")
        alone = list(pool.map(streams.alone, streams.numbers))
        reading = [pool.submit(streams.read, number) for number in streams.numbers]
        for n_begun in (20, 60, 100, 140):
            wait_until(lambda n=n_begun: streams.n_begun >= n, 120, f"{n_begun} streams")  # type: ignore[misc]
            kill_a_replica(corral)
            if n_begun == 60:
                os.killpg(node.pid, signal.SIGKILL)
        cut = [error for one in reading if (error := one.exception(180))]
    assert not cut
    assert streams.texts == alone


def test_a_rolling_deploy_loses_nothing(
    gguf: Path, start: Callable[[list[dict[str, Any]]], Corral]
) -> None:
    """Streams that are still running when their replica's time is up go on in the new version."""
    served = model(gguf, "m", n_slots=4, n_ctx_slot=1024, max_waiting=64, **EXACT)
    served["serve"] |= {"num_replicas": 2, "graceful_shutdown_timeout_s": 1}
    corral = start([served])
    corral.wait_ready()
    streams = Streams(corral, 40, 600)
    with ThreadPoolExecutor(40) as pool:
        alone = list(pool.map(streams.alone, streams.numbers))
        reading = [pool.submit(streams.read, number) for number in streams.numbers[:8]]
        wait_until(lambda: streams.n_begun == 8, 60, "eight streams")
        before = {replica["replica_id"] for replica in corral.replicas()}
        corral.deploy(n_slots=5)
        for number in streams.numbers[8:]:  # they come while replicas go
            reading.append(pool.submit(streams.read, number))
            time.sleep(0.2)
        for one in reading:
            one.result(180)
    assert streams.texts == alone
    wait_until(lambda: len(corral.replicas()) == 2, RESTART_TIMEOUT_S, "two replicas")
    assert not before & {replica["replica_id"] for replica in corral.replicas()}
    assert {replica["engine"]["n_slots"] for replica in corral.replicas()} == {5}
