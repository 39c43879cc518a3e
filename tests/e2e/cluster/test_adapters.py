"""LoRA adapters by request, over real Serve with two replicas, with the official client and httpx."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.cluster.test_routing import REPORTS_TAKE_S
from tests.e2e.conftest import Corral, all_the_time, model, settings, wait_until
from tools.random_models.adapter import write_random_adapter

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
EXACT = {"flash_attn": False, "kv_unified": False, "n_batch": 1, "speculate": False}
"""With these, what is computed of a token does not depend on how many are computed together."""
RESTART_TIMEOUT_S = 90
NAMES = ["m", "m:a", "m:b", "m:c"]
PROMPT = "the people of this long water say"


@pytest.fixture(scope="module")
def adapter_files(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    files = {name: folder / f"{name}.gguf" for name in "abcd"}
    for seed, path in enumerate(files.values()):
        write_random_adapter(gguf, path, rank=4, seed=seed)
    return files


@pytest.fixture(scope="module")
def corral(
    gguf: Path,
    adapter_files: dict[str, Path],
    start_for_module: Callable[[list[dict[str, Any]]], Corral],
) -> Corral:
    """Two replicas, or three under load."""
    served = model(gguf, "m", n_slots=4, n_ctx_slot=2048, max_waiting=32, **EXACT)
    served["serve"]["autoscaling_config"] = {
        "min_replicas": 2,
        "max_replicas": 3,
        "upscale_delay_s": 1,
        "downscale_delay_s": 600,
        "look_back_period_s": 11,
    }
    served["adapters"] = [
        {"id": name, "source": {"path": str(adapter_files[name])}} for name in "abc"
    ]
    with settings({"RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1"}):
        corral = start_for_module([served])
    corral.wait_ready()
    wait_until(lambda: len(corral.replicas()) == 2, RESTART_TIMEOUT_S, "two replicas")
    return corral


def said(corral: Corral, name: str, prompt: str = PROMPT, **fields: Any) -> tuple[str, int]:
    """The text, and how many tokens of the prompt were cached."""
    body = {"model": name, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = corral.http.post("/v1/completions", json=body | fields)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    return told["choices"][0]["text"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


def listed(corral: Corral) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = corral.http.get("/lora-adapters").json()
    return found


def client_of(corral: Corral) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{corral.url}/v1", api_key="none", max_retries=0)


def test_each_name_is_a_model_with_a_text_of_its_own(corral: Corral) -> None:
    client = client_of(corral)
    assert [one.id for one in client.models.list().data] == NAMES
    texts = [
        client.completions.create(
            model=name, prompt=PROMPT, max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
        )
        for name in NAMES
    ]
    assert [one.model for one in texts] == NAMES
    assert len({one.choices[0].text for one in texts}) == len(NAMES)
    assert [one.choices[0].text for one in texts] == [said(corral, name)[0] for name in NAMES]


def test_lora_says_it_by_number(corral: Corral) -> None:
    assert [(one["id"], one["path"]) for one in listed(corral)] == [(0, "a"), (1, "b"), (2, "c")]
    assert said(corral, "m", lora=[{"id": 1, "scale": 1.0}])[0] == said(corral, "m:b")[0]
    assert said(corral, "m:b", lora=[])[0] == said(corral, "m")[0]
    half = said(corral, "m", lora=[{"id": 1, "scale": 0.5}])[0]
    assert half not in {said(corral, name)[0] for name in NAMES}


def test_what_is_not_there_is_refused(corral: Corral) -> None:
    with pytest.raises(openai.NotFoundError, match="m:z"):
        client_of(corral).completions.create(model="m:z", prompt=PROMPT)
    body = {"model": "m", "prompt": PROMPT, "lora": [{"id": 7, "scale": 1}]}
    answer = corral.http.post("/completion", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "lora"


def test_streams_together_are_what_each_is_alone(corral: Corral) -> None:
    asked = [(name, f"{PROMPT} {i}") for i in range(4) for name in NAMES]
    alone = [said(corral, *one)[0] for one in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda one: said(corral, *one, cache_prompt=False)[0], asked))
    assert together == alone


def test_an_adapter_s_requests_go_where_it_has_their_prefix(corral: Corral) -> None:
    text = " ".join(f"Rule {i} is to be kept." for i in range(30))
    assert [said(corral, name, text)[1] for name in NAMES] == [0] * len(NAMES)
    at_once = [said(corral, name, text + " And then?")[1] for name in NAMES]
    time.sleep(REPORTS_TAKE_S)
    later = [said(corral, name, text + " And later?")[1] for name in NAMES]
    assert min(at_once + later) > 100, (at_once, later)


def test_a_lost_replica_s_streams_go_on_with_their_adapter(corral: Corral) -> None:
    n_tokens, n_replicas = 400, len(corral.replicas())
    alone = [said(corral, name, max_tokens=n_tokens)[0] for name in NAMES]
    with ThreadPoolExecutor(len(NAMES)) as pool:
        streams = [
            pool.submit(said, corral, name, max_tokens=n_tokens, cache_prompt=False)
            for name in NAMES
        ]
        wait_until(
            lambda: (
                sum(one["engine"]["queue"]["running"] for one in corral.replicas()) == len(NAMES)
            ),
            30,
            "all run",
        )
        (victim, *_) = corral.pids("ServeReplica:corral:engine-m")
        os.kill(victim, signal.SIGKILL)
        together = [one.result()[0] for one in streams]
    assert together == alone
    wait_until(lambda: len(corral.replicas()) == n_replicas, RESTART_TIMEOUT_S, "all are back")


def change(corral: Corral, **asked: Any) -> None:
    answer = corral.http.post("/lora-adapters", json=asked)
    assert answer.json() == {"success": True}, answer.text


def names(corral: Corral) -> list[str]:
    return [one["id"] for one in corral.http.get("/v1/models").json()["data"]]


def test_adapters_come_and_go_while_others_are_served(
    corral: Corral, adapter_files: dict[str, Path]
) -> None:
    spec = {"id": "d", "source": {"path": str(adapter_files["d"])}}
    expected = {name: said(corral, name)[0] for name in NAMES}

    def ask(client: int) -> None:
        name = NAMES[client % len(NAMES)]
        assert said(corral, name)[0] == expected[name]

    with all_the_time(ask, 4):
        change(corral, load=spec)
        assert names(corral) == [*NAMES, "m:d"]
        text = said(corral, "m:d")[0]
        assert text not in expected.values()
        assert listed(corral)[3] == {"id": 3, "path": "d", "scale": 0.0}
        assert said(corral, "m", lora=[{"id": 3, "scale": 1.0}])[0] == text
        # the file and the name may change: nothing that was computed before is used
        change(corral, unload="d")
        assert names(corral) == NAMES
        body = {"model": "m:d", "prompt": PROMPT}
        assert corral.http.post("/v1/completions", json=body).status_code == 404
        other = spec | {"source": {"path": str(adapter_files["c"])}}
        change(corral, load=other)
        assert said(corral, "m:d")[0] == expected["m:c"]
        assert [one["id"] for one in listed(corral)] == [0, 1, 2, 4]
        change(corral, unload="d")
        change(corral, load=spec)
        assert said(corral, "m:d")[0] == text
    for wrong in (
        {"load": spec},
        {"load": {"id": "e", "source": {"path": "/nowhere.gguf"}}},
        {"load": {"id": "a", "source": {"path": str(adapter_files["d"])}}},
        {"unload": "a"},
        {"unload": "e"},
    ):
        answer = corral.http.post("/lora-adapters", json=wrong)
        assert answer.status_code == 400, answer.text


def test_a_replica_that_comes_later_has_what_was_loaded(corral: Corral) -> None:
    text = said(corral, "m:d")[0]
    before = {one["replica_id"] for one in corral.replicas()}
    with all_the_time(lambda client: said(corral, f"m:{'abc'[client % 3]}", max_tokens=300), 24):
        wait_until(lambda: len(corral.replicas()) == 3, RESTART_TIMEOUT_S, "a third replica")
    (fresh,) = {one["replica_id"] for one in corral.replicas()} - before

    def n_answered() -> int:
        return sum(
            sum(one["engine"]["requests"]["ended"].values())
            for one in corral.replicas()
            if one["replica_id"] == fresh
        )

    before_s = n_answered()
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda i: said(corral, "m:d", cache_prompt=False)[0], range(36)))
    assert set(found) == {text}
    assert n_answered() > before_s


def test_no_trouble_was_logged(corral: Corral) -> None:
    for trouble in ("Traceback", "never awaited"):
        assert trouble not in corral.log
