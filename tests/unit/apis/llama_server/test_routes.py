"""llama-server's own API over a scripted engine."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from serve_app.apis.llama_server.metrics import render_as_vllm
from serve_app.base.errors import InvalidRequestError
from serve_app.base.sampling import LogitBias, Triggers
from serve_app.base.values.answers import (
    FinishReason,
    PromptProgress,
    SequenceEnd,
    Timings,
    TokenDelta,
    TokenLogprobs,
    Usage,
)
from tests.unit.server.harness import END, N_CTX_SLOT, ByteModelFile, ScriptedEngine

TIMED = SequenceEnd(FinishReason.STOP, Usage(10, 4, 6), Timings(0.5, 0.2, 0.4), stop="END")
SAID = [TokenDelta("a\n", (97, 10)), TokenDelta("b", (98, 69), TIMED)]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("path", ["/completion", "/completions"])
async def test_completion(client: httpx.AsyncClient, engine: ScriptedEngine, path: str) -> None:
    engine.script = list(SAID)
    answer = (await client.post(path, json={"prompt": "Hi", "return_tokens": True})).json()
    settings = answer.pop("generation_settings")
    timings = answer.pop("timings")
    assert answer == {
        "index": 0,
        "content": "a\nb",
        "tokens": [97, 10, 98, 69],
        "id_slot": -1,
        "stop": True,
        "model": "first",
        "tokens_predicted": 4,
        "tokens_evaluated": 10,
        "prompt": "^Hi",
        "has_new_line": True,
        "truncated": False,
        "stop_type": "word",
        "stopping_word": "END",
        "tokens_cached": 6,
    }
    assert timings == pytest.approx(
        {
            "cache_n": 6,
            "prompt_n": 4,
            "prompt_ms": 200,
            "prompt_per_token_ms": 50,
            "prompt_per_second": 20,
            "predicted_n": 4,
            "predicted_ms": 400,
            "predicted_per_token_ms": 400 / 3,
            "predicted_per_second": 7.5,
            "queue_ms": 500,
            "stalled_ms": 0,
            "preempted_ms": 0,
            "preemptions": 0,
            "mean_batch": 0,
            "failed_over_ms": 0,
            "failovers": 0,
        }
    )
    assert (settings["n_predict"], settings["temperature"], settings["n_ctx"]) == (
        -1,
        0.8,
        N_CTX_SLOT,
    )


async def test_stream(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = list(SAID)
    first, second, last = events(
        await client.post("/completion", json={"prompt": "Hi", "stream": True})
    )
    assert (first["content"], first["tokens"], first["stop"]) == ("a\n", [97, 10], False)
    assert (second["content"], second["tokens_predicted"], second["stop"]) == ("b", 4, False)
    assert (last["content"], last["stop"], last["stop_type"]) == ("", True, "word")
    assert last["timings"]["predicted_n"] == 4
    assert last["has_new_line"] is True


@pytest.mark.parametrize(
    ("prompt", "expected", "is_list"),
    [
        ("ab", [b"^ab"], False),
        ([97, 98], [b"ab"], False),
        ([97, "b", 99], [b"abc"], False),
        (["a", 98], [b"^ab"], False),
        (["a", "b"], [b"^a", b"^b"], True),
        (["a"], [b"^a"], False),
        ([[97, "b"], [99], "d"], [b"ab", b"c", b"^d"], True),
        ([[97]], [b"a"], True),
    ],
)
async def test_shapes_of_prompts(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    prompt: Any,
    expected: list[bytes],
    is_list: bool,
) -> None:
    answer = (await client.post("/completion", json={"prompt": prompt})).json()
    assert [bytes(r.prompt) for r in engine.requests] == expected
    assert isinstance(answer, list) is is_list
    if is_list:
        assert [one["index"] for one in answer] == list(range(len(expected)))


async def test_parameters_reach_the_engine(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    body = {
        "prompt": "x",
        "n_predict": 7,
        "seed": -1,
        "n_probs": 3,
        "logit_bias": [[5, 1.5], ["ab", False]],
        "stop": [],
        "grammar": "",
        "cache_prompt": True,
        "id_slot": -1,
        "mirostat": 0,
        "mirostat_tau": 9.0,
        "dry_base": 2.0,
        "samplers": ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    }
    assert (await client.post("/completion", json=body)).status_code == 200
    sampling = engine.requests[0].sampling
    banned = float("-inf")
    assert sampling.logit_bias == LogitBias.of({5: 1.5, 97: banned, 98: banned})
    assert (sampling.max_tokens, sampling.seed, sampling.logprobs) == (7, None, 3)
    assert (sampling.stop, sampling.grammar) == ((), None)


async def test_probabilities(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    found = TokenLogprobs(-0.5, ((72, -0.5), (256, -1.0)))
    engine.script = [TokenDelta("H", (72,), END, (found,))]
    answer = (await client.post("/completion", json={"prompt": "x", "n_probs": 2})).json()
    entry = {"id": 72, "token": "H", "bytes": [72], "logprob": -0.5}
    assert answer["completion_probabilities"] == [
        entry | {"top_logprobs": [entry, {"id": 256, "token": "", "bytes": [], "logprob": -1.0}]}
    ]


async def test_probabilities_after_sampling(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    found = TokenLogprobs(math.log(0.25), ((72, math.log(0.5)), (73, math.log(0.25))))
    engine.script = [TokenDelta("H", (72,), END, (found,))]
    body = {"prompt": "x", "n_probs": 2, "post_sampling_probs": True}
    answer = (await client.post("/completion", json=body)).json()
    (told,) = answer["completion_probabilities"]
    assert told["prob"] == pytest.approx(0.25)
    assert [one["prob"] for one in told["top_probs"]] == pytest.approx([0.5, 0.25])
    assert engine.requests[0].sampling.post_sampling_probs
    assert answer["generation_settings"]["post_sampling_probs"] is True


PROGRESS = (PromptProgress(10, 4, 4, 0.0), PromptProgress(10, 4, 10, 0.5))
PROGRESSED = [
    TokenDelta("", (), progress=PROGRESS[:1]),
    TokenDelta("a", (97,), progress=PROGRESS[1:]),
    TokenDelta("b", (98,), TIMED),
]
WATCHING = {"stream": True, "return_progress": True, "timings_per_token": True}


def told_of_progress(found: list[dict[str, Any]]) -> None:
    told = [one["prompt_progress"] for one in found if "prompt_progress" in one]
    assert told == [
        {"total": 10, "cache": 4, "processed": 4, "time_ms": 0},
        {"total": 10, "cache": 4, "processed": 10, "time_ms": 500},
    ]
    timings = [one["timings"] for one in found if "timings" in one]
    assert [one["prompt_n"] for one in timings] == [0, 6, 6, *[6] * (len(timings) - 4), 4]
    assert [one["predicted_n"] for one in timings[:3]] == [0, 0, 1]
    assert timings[1]["prompt_ms"] == 500


async def test_progress(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = list(PROGRESSED)
    found = events(await client.post("/completion", json={"prompt": "x"} | WATCHING))
    told_of_progress(found)
    assert "".join(one["content"] for one in found) == "ab"
    assert engine.requests[0].return_progress


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
async def test_progress_in_openais_streams(
    client: httpx.AsyncClient, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    engine.script = list(PROGRESSED)
    response = await client.post(path, json=body | WATCHING)
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    told_of_progress([json.loads(line) for line in lines if line != "[DONE]"])


async def test_without_keys_properties_cannot_be_changed(client: httpx.AsyncClient) -> None:
    assert not (await client.get("/props")).json()["endpoint_props"]
    answer = await client.post("/props", json={})
    assert (answer.status_code, answer.json()["error"]["type"]) == (501, "not_supported_error")


async def test_several_prompts_in_one_stream(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    found = events(await client.post("/completion", json={"prompt": ["x", "y"], "stream": True}))
    for index in (0, 1):
        own = [one for one in found if one["index"] == index]
        assert "".join(one["content"] for one in own) == "Hello"
        assert [one["stop"] for one in own] == [False] * (len(own) - 1) + [True]


async def test_what_the_engine_is_asked_for(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    body = {"prompt": "x", "id_slot": 3, "n_discard": 5, "n_indent": 2, "t_max_predict_ms": 7}
    for _ in range(2):
        await client.post("/completion", json=body | {"cache_prompt": False})
    one, other = engine.requests
    assert (one.slot_id, one.n_discard) == (3, 5)
    assert (one.sampling.n_indent, one.sampling.t_max_predict_ms) == (2, 7)
    assert one.cache_group != other.cache_group


async def test_response_fields(client: httpx.AsyncClient) -> None:
    fields = ["content", "generation_settings/n_predict", "nothing", "timings/no"]
    body = {"prompt": "x", "response_fields": fields}
    answer = (await client.post("/completion", json=body)).json()
    assert answer == {"content": "Hello", "generation_settings/n_predict": -1}
    refused = await client.post("/completion", json=body | {"response_fields": ["content"] * 257})
    assert refused.status_code == 400


async def test_a_full_context_is_told(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    end = SequenceEnd(FinishReason.LENGTH, Usage(60, N_CTX_SLOT - 60, 0), Timings(0, 0, 0))
    engine.script = [TokenDelta("x", (120,), end)]
    answer = (await client.post("/completion", json={"prompt": "x"})).json()
    assert (answer["stop_type"], answer["truncated"]) == ("limit", True)


async def test_infill(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    body = {"input_prefix": "a", "prompt": "b", "input_suffix": "c"}
    assert (await client.post("/infill", json=body)).json()["content"] == "Hello"
    assert bytes(engine.requests[0].prompt) == b"<ab|c>"


async def test_infill_with_other_files(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    files = [{"filename": "a.py", "text": "A", "time": 7}, {"text": "B"}]
    body = {"input_prefix": "a", "input_suffix": "c", "input_extra": files}
    await client.post("/infill", json=body)
    long = body | {"input_extra": [{"text": "x" * 100}]}
    await client.post("/infill", json=long)
    far_too_long = await client.post("/infill", json=body | {"input_extra": [{"text": "x" * 1000}]})
    assert bytes(engine.requests[0].prompt) == b"[a.py:A][tmp:B]<a|c>"
    kept = N_CTX_SLOT * 3 // 4 - len("<a|c>")
    assert bytes(engine.requests[1].prompt) == b"x" * (kept - 1) + b"]<a|c>"
    assert far_too_long.status_code == 400
    assert far_too_long.json()["error"]["param"] == "input_extra"


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/completion", {"prompt": []}, "prompt", "empty"),
        ("/completion", {"prompt": [[]]}, "prompt", "empty"),
        ("/completion", {"prompt": [300]}, "prompt", "below 257"),
        ("/completion", {"prompt": "x", "logit_bias": [[300, 1]]}, "logit_bias", "below 257"),
        ("/completion", {"prompt": "x", "lora": [{"id": 0}]}, "lora", "There is no LoRA adapter 0"),
        ("/infill", {"input_prefix": "a"}, "input_suffix", "Field required"),
        ("/tokenize", {}, "content", "Field required"),
        ("/tokenize", {"content": "a" * (3 * 2**18 + 1)}, "content", "at most 786432"),
        ("/detokenize", {"tokens": [257]}, "tokens", "below 257"),
    ],
)
async def test_bad_requests(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    path: str,
    body: dict[str, Any],
    param: str,
    message: str,
) -> None:
    response = await client.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]
    assert engine.requests == []


async def test_tokenize_and_back(client: httpx.AsyncClient) -> None:
    async def post(path: str, **body: Any) -> Any:
        return (await client.post(path, json=body)).json()

    assert await post("/tokenize", content="ab") == {"tokens": [97, 98]}
    assert await post("/tokenize", content="a", add_special=True) == {"tokens": [94, 97]}
    assert await post("/tokenize", content="aé", with_pieces=True) == {
        "tokens": [
            {"id": 97, "piece": "a"},
            {"id": 195, "piece": [195]},
            {"id": 169, "piece": [169]},
        ]
    }
    both = {"content": "aé</s>", "prompt": "aé</s>"}
    assert await post("/detokenize", tokens=[97, 195, 169, 256]) == both
    assert await post("/detokenize", model="first", tokens=[97]) == {"content": "a", "prompt": "a"}
    messages = [{"role": "user", "content": "Hi"}]
    assert await post("/apply-template", messages=messages) == {"prompt": "user:Hi"}


async def test_tokenize_as_vllm_has_it(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm-router 0.1.17 asks so of each worker, and lm-eval 0.4.13 of its one."""
    monkeypatch.setattr(ByteModelFile, "text_of", lambda self, token: f"<{token}>", raising=False)

    async def post(**body: Any) -> Any:
        return (await client.post("/tokenize", json=body)).json()

    def told(tokens: list[int], strings: list[str] | None = None) -> dict[str, Any]:
        counts = {"count": len(tokens), "max_model_len": N_CTX_SLOT}
        return {**counts, "tokens": tokens, "token_strs": strings}

    assert await post(model="first", prompt="ab") == told([94, 97, 98])
    assert await post(prompt="", add_special_tokens=False) == told([])
    assert await post(prompt="a", add_special_tokens=False, return_token_strs=True) == told(
        [97], ["<97>"]
    )
    messages = [{"role": "user", "content": "Hi"}]
    chat = list(b"user:Hi")
    for fields in (
        {},
        {"add_generation_prompt": True, "add_special_tokens": False, "chat_template_kwargs": {}},
        {"continue_final_message": False, "return_token_strs": None},
    ):
        assert await post(model="first", messages=messages, **fields) == told(chat)
    both = await post(content="a", prompt="b")  # llama-server's clients know no prompt
    assert both == {"tokens": [97]}
    error = (await post(prompt=7))["error"]
    assert (error["param"], error["message"]) == (
        "prompt",
        "prompt: Input should be a valid string",
    )


@pytest.mark.parametrize(
    ("path", "body", "prompts"),
    [
        ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": "Hi"}]}, None),
        ("/v1/responses/render", {"input": "Hi"}, None),
        ("/v1/completions/render", {"prompt": "ab"}, [[97, 98]]),
        ("/v1/completions/render", {"prompt": ["ab", "c"]}, [[97, 98], [99]]),
        ("/v1/completions/render", {"prompt": [5, 6]}, [[5, 6]]),
    ],
)
async def test_prompts_as_vllms_routers_ask_for_them(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], prompts: list[list[int]] | None
) -> None:
    answer = (await client.post(path, json={"model": "first", "stream": True, **body})).json()
    found = [answer] if prompts is None else answer
    assert [one["token_ids"] for one in found] == (prompts or [list(b"user:Hi")])
    assert all(one["features"] is None for one in found)


async def test_the_tokenizer_as_vllm_describes_it(client: httpx.AsyncClient) -> None:
    """lm-eval 0.4.13 takes a server without `eos_token` for one that has no tokenizer."""
    described = (await client.get("/tokenizer_info", params={"model": "first"})).json()
    assert (described["bos_token"], described["eos_token"]) == (None, "</s>")
    assert described["chat_template"] == "{{ messages }}"
    assert described["model_max_length"] == N_CTX_SLOT


async def test_props_and_slots(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    slots = (await client.get("/slots")).json()
    assert [(s["id"], s["is_processing"], s["id_task"]) for s in slots] == [
        (0, False, None),
        (1, True, "cmpl-1"),
    ]
    assert slots[1]["next_token"] == [{"n_remain": -1, "n_decoded": 3}]
    assert (await client.get("/slots?fail_on_no_slot=1")).status_code == 200
    engine.busy = True
    refused = await client.get("/slots?fail_on_no_slot=1")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
    props = (await client.get("/props?model=org/second")).json()
    assert (props["total_slots"], props["model_alias"]) == (2, "org/second")
    assert (props["model_path"], props["bos_token"]) == (str(ByteModelFile.path), "<s>")
    assert props["default_generation_settings"]["params"]["top_k"] == 40


@pytest.mark.parametrize(
    ("path", "same_as"), [("/models", "/v1/models"), ("/v1/health", "/health")]
)
async def test_aliases(client: httpx.AsyncClient, path: str, same_as: str) -> None:
    assert (await client.get(path)).json() == (await client.get(same_as)).json()


async def test_metrics_of_all_replicas(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.n_replicas = 2
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = [line for line in response.text.splitlines() if not line.startswith("#")]
    values = {name: float(value) for name, value in (line.split() for line in lines)}
    assert values == {
        "llamacpp:prompt_tokens_total": 8,
        "llamacpp:prompt_tokens_cached_total": 4,
        "llamacpp:prompt_seconds_total": 1,
        "llamacpp:prompt_tokens_seconds": 4,
        "llamacpp:tokens_predicted_total": 4,
        "llamacpp:tokens_predicted_seconds_total": 4,
        "llamacpp:predicted_tokens_seconds": 1,
        "llamacpp:requests_processing": 4,
        "llamacpp:requests_deferred": 4,
        "llamacpp:n_decode_total": 8,
        "llamacpp:n_busy_slots_per_decode": 1,
        "llamacpp:n_tokens_max": 50,
        "llamacpp:spec_decode_num_drafts_total": 4,
        "llamacpp:spec_decode_num_draft_tokens_total": 4,
        "llamacpp:spec_decode_num_accepted_tokens_total": 4,
        "corral_replicas_missing": 0,
        'vllm:num_requests_running{model_name="first"}': 4,
        'vllm:num_requests_waiting{model_name="first"}': 4,
        'vllm:kv_cache_usage_perc{model_name="first"}': 0.135,  # 3 slots of 9, of 200
        'vllm:prompt_tokens_total{model_name="first"}': 8,
        'vllm:generation_tokens_total{model_name="first"}': 4,
        'vllm:prefix_cache_queries_total{model_name="first"}': 8,
        'vllm:prefix_cache_hits_total{model_name="first"}': 4,
        'vllm:num_preemptions_total{model_name="first"}': 0,
    }
    assert "# TYPE llamacpp:prompt_tokens_total counter" in response.text
    assert "# TYPE vllm:num_requests_running gauge" in response.text


def test_histograms_have_vllms_names_too() -> None:
    """As prometheus_client writes them, read by its own parser."""
    registry = CollectorRegistry()
    for name in ("time_to_first_token_seconds", "steps_seconds"):
        of_model = Histogram(
            f"ray_corral_{name}", "What.", ["model"], registry=registry, buckets=(0.5, 1)
        )
        of_model.labels('a"b').observe(0.75)
    text = render_as_vllm('a"b\n', [], generate_latest(registry)).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert "vllm:steps_seconds" not in families
    assert families["vllm:num_requests_running"].samples[0].labels == {"model_name": 'a"b\n'}
    family = families["vllm:time_to_first_token_seconds"]
    assert family.type == "histogram"
    assert [
        (sample.name.removeprefix(family.name), sample.labels.get("le"), sample.value)
        for sample in family.samples
    ] == [
        ("_bucket", "0.5", 0),
        ("_bucket", "1.0", 1),
        ("_bucket", "+Inf", 1),
        ("_count", None, 1),
        ("_sum", None, 0.75),
    ]
    assert {sample.labels["model_name"] for sample in family.samples} == {'a"b'}


async def test_missing_replicas_are_told_of(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    assert "x-corral-missing" not in (await client.get("/slots")).headers
    assert (await client.get("/props")).json()["missing"] == []
    engine.missing = "r2", "r3"
    slots = await client.get("/slots")
    assert (slots.status_code, len(slots.json())) == (200, 2)
    assert slots.headers["x-corral-missing"] == "r2, r3"
    props = (await client.get("/props")).json()
    assert (props["total_slots"], props["missing"]) == (2, ["r2", "r3"])
    metrics = (await client.get("/metrics")).text.splitlines()
    assert "corral_replicas_missing 2.0" in metrics
    assert "llamacpp:n_decode_total 4.0" in metrics


async def test_a_missing_replica_may_be_meant(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.missing = ("r2",)
    answer = await client.post("/slots/3?action=erase")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "replica_id")
    assert "r1, r2" in answer.json()["error"]["message"]
    assert (await client.post("/slots/3?action=erase&replica_id=r2")).status_code == 200
    assert engine.slot_actions == [("r2", "erase", 3, "")]


async def test_metrics_without_replicas(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.n_replicas = 0
    assert "llamacpp:n_decode_total 0.0" in (await client.get("/metrics")).text


@pytest.mark.parametrize(
    ("action", "body", "answer"),
    [
        ("save", {"filename": "a.bin"}, {"filename": "a.bin", "n_saved": 17, "n_written": 170,
                                         "timings": {"save_ms": 250}}),
        ("restore", {"filename": "a.bin"}, {"filename": "a.bin", "n_restored": 17, "n_read": 170,
                                            "timings": {"restore_ms": 250}}),
        ("erase", None, {"n_erased": 17}),
    ],
)  # fmt: skip
async def test_slot_actions(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    action: str,
    body: dict[str, str] | None,
    answer: dict[str, Any],
) -> None:
    found = await client.post(f"/slots/3?action={action}", json=body)
    assert found.json() == {"id_slot": 3, **answer}
    assert engine.slot_actions == [("r1", action, 3, (body or {}).get("filename", ""))]


@pytest.mark.parametrize(
    ("query", "body", "param"),
    [
        ("action=shred", None, "action"),
        ("", None, "action"),
        ("action=save", None, "filename"),
        ("action=erase", {"filename": "a"}, "filename"),
        ("action=erase&replica_id=r9", None, "replica_id"),
    ],
)
async def test_slot_actions_that_are_wrong(
    client: httpx.AsyncClient, engine: ScriptedEngine, query: str, body: Any, param: str
) -> None:
    answer = await client.post(f"/slots/3?{query}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert engine.slot_actions == []


async def test_one_of_several_replicas_must_be_named(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.n_replicas = 2
    answer = await client.post("/slots/3?action=erase")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "replica_id")
    assert (await client.post("/slots/3?action=erase&replica_id=r1")).status_code == 200


async def test_there_are_no_adapters(client: httpx.AsyncClient) -> None:
    assert (await client.get("/lora-adapters")).json() == []
    assert (await client.post("/lora-adapters", json=[])).json() == {"success": True}
    refused = await client.post("/lora-adapters", json=[{"id": 0, "scale": 1}])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "id")


async def test_adapters_are_loaded_and_unloaded(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    async def post(**body: Any) -> httpx.Response:
        return await client.post("/lora-adapters", json=body)

    legal = {"id": "legal", "source": {"path": "/legal.gguf"}, "scale": 0.5}
    assert (await post(load=legal)).json() == {"success": True}
    (loaded,) = engine.adapters
    assert (loaded.id, loaded.scale, loaded.source.path) == ("legal", 0.5, Path("/legal.gguf"))
    assert (await post(unload="legal", model="first")).json() == {"success": True}
    assert engine.adapters == []
    engine.refusal = InvalidRequestError("no such file", "load")
    assert (await post(load=legal)).json()["error"]["param"] == "load"
    for wrong in ({}, {"load": legal, "unload": "legal"}, {"load": {"id": "x"}}):
        assert (await post(**wrong)).status_code == 400
    assert (await post(model="other", unload="x")).status_code == 404


async def test_a_prompt_can_be_computed_only(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    end = dataclasses.replace(END, reason=FinishReason.LENGTH)
    engine.script = [TokenDelta("", (), end)]
    body = {"prompt": "x", "n_predict": 0}
    answer = (await client.post("/completion", json=body)).json()
    assert engine.requests[0].sampling.max_tokens == 0
    assert (answer["content"], answer["stop_type"]) == ("", "limit")


LAZY = {"prompt": "x", "grammar": 'root ::= "<f>" [0-9]', "grammar_lazy": True}


async def test_a_grammar_that_waits_for_a_trigger(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    triggers = [
        {"type": 1, "value": "<f>"},
        {"type": 1, "value": "a"},  # one byte: one token
        {"type": 0, "value": "b", "token": 98},
    ]
    body = LAZY | {"grammar_triggers": triggers, "preserved_tokens": ["c", "several"]}
    settings = (await client.post("/completion", json=body)).json()["generation_settings"]
    sampling = engine.requests[0].sampling
    assert sampling.triggers == Triggers((97, 98), ("<f>",))
    assert sampling.preserved_tokens == (99,)
    assert (settings["grammar_lazy"], settings["preserved_tokens"]) == (True, [99])
    assert settings["grammar_triggers"] == triggers


@pytest.mark.parametrize(
    ("triggers", "why"),
    [
        ([], "no triggers set for lazy grammar"),
        ([{"type": 2, "value": "a+"}], "regular expression is not supported: send a text"),
        ([{"type": 0, "value": "x"}], "needs its 'token'"),
        ([{"type": 0, "value": "x", "token": 10**6}], "token ids of this model"),
        ([{"type": 4, "value": "x"}], "less than or equal to 3"),
    ],
    ids=repr,
)
async def test_triggers_that_are_none(client: httpx.AsyncClient, triggers: Any, why: str) -> None:
    answer = await client.post("/completion", json=LAZY | {"grammar_triggers": triggers})
    assert (answer.status_code, why in answer.text) == (400, True), answer.text
