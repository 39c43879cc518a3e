"""Keys, limits, budgets, deadlines and traces, over a server without Ray."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from serve_app.server.usage.telemetry import ENDPOINTS
from tests.e2e.conftest import Corral, model, settings, short_folder, stopped_at_the_end, wait_until

ANA, BEN = "ana-secret-0123456789", "ben-secret-0123456789"
CAL = "cal-secret-0123456789"
STAGES = ["receive", "prepare", "queue", "prefill", "decode", "send"]


def write_keys(directory: Path, *keys: dict[str, Any]) -> Path:
    path = directory / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": list(keys)}))
    return path


@pytest.fixture(scope="module")
def guarded(gguf: Path) -> Iterator[Corral]:
    """A server with one slot, for two who have keys."""
    ben = {"name": "ben", "key": BEN, "max_prompt_tokens": 20, "max_concurrent_requests": 1}
    cal = {"name": "cal", "key": CAL, "tokens_per_minute": 40, "cost_per_month": 100}
    entry = model(gguf, "m", n_slots=1, n_ctx_slot=32768, max_waiting=4)
    with short_folder() as directory:
        keys = write_keys(directory, {"name": "ana", "key": ANA}, ben, cal)
        with settings({ENDPOINTS[1]: f"file://{directory}/traces.jsonl"}):
            server = Corral(
                directory,
                [entry],
                local=True,
                api_key_file=str(keys),
                usage_folder=str(directory / "usage"),
                request_log=True,
                prices={"*": {"prompt": 1e6, "generated": 2e6}},
            )
        server.http.headers["Authorization"] = f"Bearer {ANA}"
        with stopped_at_the_end(server):
            yield server


@pytest.fixture
def ana(guarded: Corral) -> Iterator[openai.OpenAI]:
    with client(guarded, ANA) as client_:
        yield client_


@pytest.fixture
def ben(guarded: Corral) -> Iterator[openai.OpenAI]:
    with client(guarded, BEN) as client_:
        yield client_


def client(server: Corral, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def test_a_key_is_demanded(guarded: Corral, ana: openai.OpenAI) -> None:
    assert ana.models.list().data[0].id == "m"
    with (
        client(guarded, "sk-wrong") as stranger,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        stranger.models.list()
    assert refused.value.code == "invalid_api_key"
    assert httpx.get(f"{guarded.url}/health").status_code == 200


def test_keys_and_salts_share_no_prefixes(ana: openai.OpenAI, ben: openai.OpenAI) -> None:
    prompt = list(range(300, 320))
    found = []
    for who, salt in [(ana, None), (ana, None), (ben, None), (ben, "s"), (ben, "s"), (ben, "t")]:
        answer = who.completions.create(
            model="m", prompt=prompt, max_tokens=1, extra_body={"cache_salt": salt}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        found.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert found == [0, 19, 0, 0, 19, 0]


def test_limits_of_a_key(guarded: Corral, ben: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ben.completions.create(model="m", prompt=[5] * 21, max_tokens=1)
    assert refused.value.code == "key_limit_exceeded"
    body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {BEN}"}
    with guarded.http.stream("POST", "/v1/completions", json=body, headers=headers) as running:
        lines = running.iter_lines()
        next(lines)
        with pytest.raises(openai.RateLimitError) as busy:
            ben.completions.create(model="m", prompt="x", max_tokens=1)
        assert busy.value.code == "rate_limit_exceeded"
    wait_until(lambda: guarded.stats()["queue"]["running"] == 0, 10, "the slot is free")
    answer = ben.completions.create(model="m", prompt="x", max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1


def test_what_a_request_waited_for(guarded: Corral) -> None:
    """The second of two for one slot: it says so while it waits, and at its end how long it has."""
    body = {"prompt": "x", "max_tokens": 32000, "ignore_eos": True, "stream": True}
    with (
        ThreadPoolExecutor(1) as pool,
        guarded.http.stream("POST", "/v1/completions", json=body) as first,
    ):
        lines = first.iter_lines()
        next(lines)
        headers = {**guarded.http.headers, "x-request-id": "second"}
        asked = {"prompt": "x", "max_tokens": 4, "ignore_eos": True, "timings": True}
        url = f"{guarded.url}/v1/completions"
        second = pool.submit(httpx.post, url, json=asked, headers=headers, timeout=60)
        wait_until(lambda: state_of(guarded, "second") == "waiting", 10, "the second waits")
        seen = time.monotonic()
        first.close()
        waited_s = time.monotonic() - seen
        answer = second.result()
    assert answer.headers["x-request-id"] == "second"
    timings = answer.json()["timings"]
    assert timings["queue_ms"] > 1000 * waited_s
    explained = guarded.http.get("/v1/requests/second").json()
    (sequence,) = explained["sequences"]
    assert sequence["timings"] == timings
    assert (sequence["state"], sequence["finish_reason"]) == ("ended", "length")
    (replica,) = guarded.replicas()
    assert sequence["replica_id"] == replica["replica_id"]
    by_answer = guarded.http.get(f"/v1/requests/{answer.json()['id']}").json()
    assert by_answer["sequences"] == [sequence]


def state_of(server: Corral, request_id: str) -> str | None:
    """What a live request is doing; None if it is not there."""
    answer = server.http.get(f"/v1/requests/{request_id}")
    return answer.json()["sequences"][0]["state"] if answer.status_code == 200 else None


def test_another_is_not_told(guarded: Corral, ana: openai.OpenAI) -> None:
    answer = ana.completions.create(model="m", prompt="x", max_tokens=1)
    path = f"/v1/requests/{answer.id}"
    assert guarded.http.get(path).status_code == 200
    foreign = guarded.http.get(path, headers={"Authorization": f"Bearer {BEN}"})
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (404, "request_not_found")


def test_requests_are_in_the_log_with_their_id(guarded: Corral) -> None:
    headers = {"x-request-id": "find-me"}
    body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
    answer = guarded.http.post("/v1/completions", json=body, headers=headers).json()
    line = f'"id": "{answer["id"]}", "request_id": "find-me", "key": "ana"'
    wait_until(lambda: line in guarded.log, 20, line)


def test_a_body_that_is_too_large(guarded: Corral) -> None:
    answer = guarded.http.post("/v1/completions", content=b" " * (8 * 2**20 + 1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


def test_a_budget_holds_and_usage_is_the_clients_count(guarded: Corral) -> None:
    with client(guarded, CAL) as cal:
        usages = []
        for _ in range(2):
            answer = cal.completions.with_raw_response.create(
                model="m", prompt=[5] * 10, max_tokens=6, extra_body={"ignore_eos": True}
            )
            usages.append(answer.parse().usage)
            assert answer.headers["x-corral-cost"] == "22"
        with pytest.raises(openai.RateLimitError) as refused:
            cal.completions.create(model="m", prompt=[5] * 10, max_tokens=6)
        assert "tokens per minute" in refused.value.message
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
    headers = {"Authorization": f"Bearer {CAL}"}
    page = guarded.http.get("/v1/usage?group_by=api_key_id", headers=headers).json()
    (result,) = page["data"][-1]["results"]
    assert result["api_key_id"] == "cal"
    assert result["input_tokens"] == sum(usage.prompt_tokens for usage in usages if usage)
    assert result["output_tokens"] == sum(usage.completion_tokens for usage in usages if usage)
    assert (result["num_model_requests"], result["cost"]) == (2, 44)
    wait_until(
        lambda: (
            'ray_corral_key_generated_tokens_total{key="cal",model="m"} 12.0'
            in guarded.http.get("/metrics", headers=headers).text
        ),
        20,
        lambda: guarded.http.get("/metrics", headers=headers).text,
    )


def test_an_answer_has_its_forecast_and_an_impossible_deadline_is_refused(guarded: Corral) -> None:
    body = {"prompt": "x" * 4000, "max_tokens": 20, "ignore_eos": True}

    def post(**headers: str) -> httpx.Response:
        names = {f"x-corral-{name.replace('_', '-')}-ms": value for name, value in headers.items()}
        return guarded.http.post("/v1/completions", json=body, headers=names)

    answer = post(first_token="60000", deadline="90000")
    assert answer.status_code == 200, answer.text
    first, end = (
        int(answer.headers[f"x-corral-forecast-{what}-ms"]) for what in ("first-token", "end")
    )
    assert 0 < first <= end
    assert answer.headers["x-corral-tier"] == "default"
    late = post(deadline="1")
    assert (late.status_code, late.json()["error"]["type"]) == (400, "invalid_request_error")
    assert post(deadline="soon").json()["error"]["param"] == "x-corral-deadline-ms"
    assert guarded.stats()["forecasts"]["first_tokens"] > 0


def test_a_deadline_behind_others_is_refused_with_the_time_when_it_fits(guarded: Corral) -> None:
    """The only slot has a long prompt of another client: alone, the request would be in time."""
    long = {"prompt": "y" * 12000, "max_tokens": 32, "ignore_eos": True, "stream": True}
    body = {"prompt": "x", "max_tokens": 2, "ignore_eos": True}
    with guarded.http.stream("POST", "/v1/completions", json=long):
        refused = guarded.http.post(
            "/v1/completions", json=body, headers={"x-corral-deadline-ms": "100"}
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "deadline_unmet")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        # Behind all others, in the background, it would be later still.
        flex = guarded.http.post(
            "/v1/completions",
            json=body | {"service_tier": "flex"},
            headers={"x-corral-deadline-ms": "60000"},
        )
    assert (flex.status_code, flex.headers["x-corral-tier"]) == (200, "background")
    wait_until(lambda: guarded.stats()["queue"]["running"] == 0, 10, "the slot is free")
    fits = guarded.http.post("/v1/completions", json=body, headers={"x-corral-deadline-ms": "2000"})
    assert fits.status_code == 200, fits.text


def test_the_stages_of_a_request_add_up_in_a_trace(guarded: Corral) -> None:
    body = {"prompt": "Hello there", "max_tokens": 16, "ignore_eos": True}
    parent = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{parent}-b7ad6b7169203331-01"}
    assert guarded.http.post("/v1/completions", json=body, headers=headers).status_code == 200
    file = guarded.directory / "traces.jsonl"

    def spans() -> list[dict[str, Any]]:
        entries = [json.loads(line)["resourceSpans"][0] for line in file.read_text().splitlines()]
        found = [span for one in entries for span in one["scopeSpans"][0]["spans"]]
        return [span for span in found if span["traceId"] == parent]

    wait_until(lambda: len(spans()) > len(STAGES), 20, "the trace is written")
    (root,) = [span for span in spans() if span["parentSpanId"] == "b7ad6b7169203331"]
    stages = sorted(
        (span for span in spans() if span is not root and span["parentSpanId"] == root["spanId"]),
        key=lambda span: (int(span["startTimeUnixNano"]), STAGES.index(span["name"])),
    )
    assert [span["name"] for span in stages] == STAGES
    times = [(int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])) for span in stages]
    assert [end for _, end in times[:-1]] == [start for start, _ in times[1:]]
    assert times[0][0] == int(root["startTimeUnixNano"])
    assert times[-1][1] == int(root["endTimeUnixNano"])
    decode_ns = times[4][1] - times[4][0]
    assert decode_ns > 0
    assert sum(end - start for start, end in times) == times[-1][1] - times[0][0]


def test_new_keys_are_valid_at_once_and_old_ones_not_any_more(
    guarded: Corral, ana: openai.OpenAI, ben: openai.OpenAI
) -> None:
    write_keys(guarded.directory, {"name": "ana", "key": ANA})
    with pytest.raises(openai.AuthenticationError):
        ben.models.list()
    assert ana.models.list().data[0].id == "m"
