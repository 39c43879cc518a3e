"""OpenVINO's kernels behind the whole server."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import mul
from typing import Any

import openai
import pytest

from tests.e2e.cluster.test_failover import Streams
from tests.e2e.conftest import Corral, model, short_folder, stopped_at_the_end, wait_until

pytest.importorskip("openvino", reason="corral[openvino] is not installed")

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server() -> Iterator[Corral]:
    engine: dict[str, int | str] = {"n_slots": 4, "n_ctx_slot": 512, "backend": "openvino"}
    with short_folder() as directory:
        staged = model(None, "staged", stages=2, **engine)
        models = [model(None, "demo", **engine), staged]
        models[0]["engine"]["system_prompts"] = ["Be brief."]
        with stopped_at_the_end(Corral(directory, models)) as server:
            yield server


@pytest.fixture
def client(server: Corral) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def say(client: openai.OpenAI, text: str, model_id: str = "demo") -> str:
    stream = client.chat.completions.create(
        model=model_id,
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=48,
        stream=True,
    )
    return "".join(part.choices[0].delta.content or "" for part in stream if part.choices)


def test_streams_that_share_a_batch_are_right(server: Corral, client: openai.OpenAI) -> None:
    capitals = {"Portugal": "Lisbon", "France": "Paris", "Italy": "Rome", "Japan": "Tokyo"}
    with ThreadPoolExecutor(len(capitals)) as pool:
        answers = dict(
            zip(
                capitals,
                pool.map(lambda one: say(client, f"What is the capital of {one}?"), capitals),
                strict=True,
            )
        )
    assert {one: capitals[one] in answer for one, answer in answers.items()} == dict.fromkeys(
        capitals, True
    )
    (replica,) = server.replicas()
    assert "OpenVINO" in replica["engine"]["compute"]["mode_reason"]
    assert "pinned" in {slot["state"] for slot in replica["engine"]["slots"]}


def test_a_schema_holds(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt="A", max_tokens=8, extra_body={"regex": "(red|green)"}
    )
    assert answer.choices[0].text in {"red", "green"}


def test_embeddings_and_answers_come_from_one_model(client: openai.OpenAI) -> None:
    near, far, other = client.embeddings.create(
        model="demo",
        input=["What is the capital of France?", "What is the capital of Italy?", "17 plus 25"],
    ).data
    products = [sum(map(mul, near.embedding, one.embedding)) for one in (far, other)]
    assert products[0] > products[1]
    assert say(client, "What is the capital of Portugal?")


def stages(server: Corral) -> list[dict[str, Any]]:
    """The stages of the model that two replicas compute together."""
    replicas = [replica["stage"] for replica in server.replicas(1)]
    return sorted(replicas, key=lambda stage: stage["stage"])


def test_two_replicas_compute_one_model(server: Corral, client: openai.OpenAI) -> None:
    whole = {one: say(client, f"Hello {one}!") for one in "abcdef"}
    with ThreadPoolExecutor(len(whole)) as pool:
        answers = pool.map(lambda one: say(client, f"Hello {one}!", "staged"), whole)
        assert dict(zip(whole, answers, strict=True)) == whole
    first, second = stages(server)
    assert [stage["stage"] for stage in (first, second)] == [0, 1]
    assert first["first_layer"] == 0
    assert first["n_layers"] == second["first_layer"]
    assert first["n_layers"] + second["n_layers"] == 6
    assert second["n_layers"] > 0
    for stage in (first, second):
        assert stage["computed_s"] > 0
        assert stage["sent_bytes"] > 0


@pytest.mark.timeout(200)
def test_streams_go_on_when_a_stage_is_killed(server: Corral) -> None:
    """The rest of each text comes from replicas that Serve has started anew, both of them."""
    before = server.pids("ray::ServeReplica:corral:engine-staged")
    streams = Streams(server, 6, 400, "staged")
    with ThreadPoolExecutor(6) as pool:
        reading = [pool.submit(streams.read, i) for i in streams.numbers]
        wait_until(lambda: streams.n_begun == 6, 30, "six streams that have begun")
        os.kill(before[0], signal.SIGKILL)
        for stream in reading:
            stream.result()
    assert not {*before} & {*server.pids("ray::ServeReplica:corral:engine-staged")}
