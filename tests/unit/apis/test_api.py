"""The routes over a scripted engine: HTTP in, GenerationRequests out, deltas in, HTTP out."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import httpx
import pytest

from serve_app.base.errors import CorralError, DecodeError, QueueFullError
from serve_app.base.sampling import LogitBias
from serve_app.base.values.answers import Accepted
from serve_app.base.values.replicas import FetchingReplica
from serve_app.base.values.requests import NO_DEADLINE
from tests.unit.server.harness import HELLO, N_CTX_SLOT, ScriptedEngine, chat, events


async def test_chat_whole(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    response = await client.post("/v1/chat/completions", json=chat(model="org/second"))
    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["model"] == "org/second"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    (request,) = engine.requests
    assert request.id == body["id"]
    assert bytes(request.prompt) == b"user:Hi"


async def test_chat_stream(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json=chat(stream=True))
    *chunks, done = events(response)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [c["delta"] for c in choices] == [
        {"role": "assistant", "content": None},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert [c["finish_reason"] for c in choices] == [None, None, None, "stop"]


async def test_text_stream_with_usage(client: httpx.AsyncClient) -> None:
    body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = events(await client.post("/v1/completions", json=body))
    assert done == "[DONE]"
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hel", "lo", ""]
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 7


async def test_token_ids_are_a_prompt(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    await client.post("/v1/completions", json={"prompt": [7, 8, 9]})
    assert engine.requests[0].prompt == (7, 8, 9)


async def test_long_text_is_tokenized_too(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={"prompt": "x" * 5000})
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_parameters_reach_the_engine(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": -1,
        "min_p": 0.125,
        "typical_p": 0.75,
        "repeat_penalty": 1.5,
        "repeat_last_n": -1,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "logit_bias": {"7": 5, "8": -100},
        "seed": -3,
        "max_tokens": 9,
        "stop": "END",
        "ignore_eos": True,
    }
    await client.post("/v1/completions", json={"prompt": "x", **fields})
    sampling = engine.requests[0].sampling
    expected = fields | {
        "top_k": 0,
        "logit_bias": LogitBias.of({7: 5, 8: float("-inf")}),
        "stop": ("END",),
    }
    assert {name: getattr(sampling, name) for name in fields} == expected


async def test_cache_groups_reach_the_engine(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    """Without API keys, all share but those who send a salt."""
    salts = [None, "s", "t", "s"]
    for path, body in [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", chat()),
        ("/completion", {"prompt": "x"}),
        ("/infill", {"input_prefix": "x", "input_suffix": "y"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", chat(max_tokens=9)),
    ]:
        engine.requests.clear()
        for salt in salts:
            said = body if salt is None else body | {"cache_salt": salt}
            answer = await client.post(path, json=said)
            assert answer.status_code == 200, (path, answer.text)
        none, one, other, again = (request.cache_group for request in engine.requests)
        assert none == ""
        assert one == again
        assert len({none, one, other}) == 3


@pytest.mark.parametrize("salt", ["", "x" * 257, 7, ["s"]])
async def test_a_wrong_cache_salt_is_refused(client: httpx.AsyncClient, salt: object) -> None:
    answer = await client.post("/v1/completions", json={"prompt": "x", "cache_salt": salt})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("cache_salt")


async def test_all_answers_to_a_request_share_a_cache_group(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    body = {"prompt": ["x", "y"], "n": 2, "cache_salt": "s"}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert len(engine.requests) == 4
    assert len({request.cache_group for request in engine.requests}) == 1


async def test_client_and_priority_reach_the_engine(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    await client.post("/v1/completions", json={"prompt": "x"})
    await client.post("/v1/completions", json={"prompt": "x", "user": "ana", "priority": -2})
    assert [(r.client, r.priority) for r in engine.requests] == [("", 0), ("ana", -2)]


async def test_a_safety_identifier_names_the_client_too(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    """Gateways drop `user`, which OpenAI calls deprecated, and pass this on."""
    for names in ({}, {"user": None}, {"user": "ana"}):
        named = {"safety_identifier": "ben"} | names
        await client.post("/v1/completions", json={"prompt": "x"} | named)
        await client.post("/v1/chat/completions", json=chat(**named))
        await client.post("/v1/responses", json={"input": "x"} | named)
    assert [request.client for request in engine.requests] == ["ben"] * 6 + ["ana"] * 3


@pytest.mark.parametrize(
    ("tier", "is_behind"), [("flex", True), ("auto", False), ("priority", False), (None, False)]
)
async def test_a_flexible_request_runs_behind_all_others(
    client: httpx.AsyncClient, engine: ScriptedEngine, tier: str | None, is_behind: bool
) -> None:
    posts = (
        ("/v1/chat/completions", chat()),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/messages", chat(max_tokens=5)),
        ("/v1/responses", {"input": "x"}),
    )
    for path, body in posts:
        answer = await client.post(path, json=body | {"service_tier": tier})
        assert answer.status_code == 200
    assert answer.json()["service_tier"] == ("flex" if is_behind else "default")
    assert [request.background for request in engine.requests] == [is_behind] * 4


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_reaches_the_engine_and_the_forecast_the_client(
    client: httpx.AsyncClient, engine: ScriptedEngine, stream: bool
) -> None:
    engine.accepted = Accepted(0.1234, 2.5, True)
    headers = {"x-corral-first-token-ms": "1500", "x-corral-deadline-ms": "60000"}
    answer = await client.post("/v1/chat/completions", json=chat(stream=stream), headers=headers)
    assert 59 < engine.requests[0].deadline.end_s <= 60
    assert 0.5 < engine.requests[0].deadline.first_token_s <= 1.5
    assert {name: answer.headers[name] for name in answer.headers if "x-corral" in name} == {
        "x-corral-tier": "background",
        "x-corral-forecast-first-token-ms": "124",
        "x-corral-forecast-end-ms": "2500",
    }


async def test_of_several_answers_the_last_one_is_forecast(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    answer = await client.post("/v1/completions", json={"prompt": "x", "n": 2})
    assert engine.requests[0].deadline == NO_DEADLINE
    assert answer.headers["x-corral-tier"] == "default"
    assert "x-corral-forecast-end-ms" not in answer.headers, "nothing was measured"


@pytest.mark.parametrize(
    "value", ["", "0", "-1", "1.5", "soon", "1" * 5000, f"{1:011}{9:05000}", "٣"]
)
async def test_a_deadline_is_a_number_of_milliseconds(
    client: httpx.AsyncClient, engine: ScriptedEngine, value: str
) -> None:
    headers = {b"x-corral-deadline-ms": value.encode()}
    answer = await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-corral-deadline-ms"
    assert not engine.requests


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 4),
        ({}, None),
    ],
)
async def test_chat_max_tokens(
    client: httpx.AsyncClient, engine: ScriptedEngine, fields: dict[str, Any], expected: int | None
) -> None:
    await client.post("/v1/chat/completions", json=chat(**fields))
    assert engine.requests[0].sampling.max_tokens == expected


async def test_completions_default_to_16_tokens(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    await client.post("/v1/completions", json={"prompt": "x"})
    await client.post("/v1/completions", json={"prompt": "x", "max_tokens": None})
    assert [r.sampling.max_tokens for r in engine.requests] == [16, None]


async def test_neutral_values_are_accepted(client: httpx.AsyncClient) -> None:
    fields: dict[str, Any] = {
        "service_tier": "auto",
        "store": False,
        "tools": [],
        "response_format": {"type": "text"},
    }
    response = await client.post("/v1/chat/completions", json=chat(user="u", **fields))
    assert response.status_code == 200


async def test_message_parts_and_roles(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "tool_calls": None, "refusal": None},
        {"role": "user", "content": "d"},
    ]
    await client.post("/v1/chat/completions", json={"messages": messages})
    assert bytes(engine.requests[0].prompt) == b"system:Be brief.|user:a\nb|assistant:c|user:d"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"max_tokens": -1}, None),
        ({"n_predict": 3}, 3),
        ({"n_predict": 3, "max_tokens": 7}, 3),
        ({"n_predict": -1, "max_tokens": 7}, None),
        ({"n_predict": 0}, 0),
    ],
)
async def test_llama_servers_names_in_openais_requests(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    path: str,
    fields: dict[str, int],
    most: int | None,
) -> None:
    body = chat() | {"prompt": "x", "logit_bias": [[5, 2], ["ab", False]], "n_probs": 2} | fields
    await client.post(path, json=body)
    sampling = engine.requests[0].sampling
    banned = float("-inf")
    assert sampling.logit_bias == LogitBias.of({5: 2.0, 97: banned, 98: banned})
    assert (sampling.max_tokens, sampling.logprobs) == (most, 2)


BEGUN = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, b"user:a|no reasoningb"),
        ({"continue_final_message": True}, b"user:a|no reasoningb"),
        ({"add_generation_prompt": False, "continue_final_message": True}, b"user:a|no reasoningb"),
        ({"add_generation_prompt": False}, b"user:a|no reasoningb"),
        ({"continue_final_message": False}, b"user:a|assistant:b"),
    ],
)
async def test_the_assistants_last_message_begins_the_answer(
    client: httpx.AsyncClient, engine: ScriptedEngine, fields: dict[str, bool], prompt: bytes
) -> None:
    await client.post("/v1/chat/completions", json={"messages": BEGUN, **fields})
    assert bytes(engine.requests[0].prompt) == prompt


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"]
)
async def test_input_tokens(client: httpx.AsyncClient, engine: ScriptedEngine, path: str) -> None:
    answer = await client.post(path, json=chat("Hello"))
    assert answer.json() == {"object": "response.input_tokens", "input_tokens": len("user:Hello")}
    assert engine.requests == []


BAD_REQUESTS: list[tuple[str, dict[str, Any], str | None, str]] = [
    (
        "/v1/chat/completions",
        chat(add_generation_prompt=True, continue_final_message=True),
        "continue_final_message",
        "cannot be combined",
    ),
    (
        "/v1/chat/completions",
        chat(functions=[{"name": "f"}]),
        "functions",
        "'functions' is not supported, except as null or []",
    ),
    ("/completion", {"prompt": "x", "lora": [{"id": 0, "scale": 1}]}, "lora", "This model has 0"),
    ("/v1/completions", {"prompt": "x", "n": 33}, "n", "less than or equal to 32"),
    ("/v1/completions", {"prompt": "x", "best_of": 1, "n": 2}, "best_of", "less than 'n'"),
    ("/v1/completions", {"prompt": ["x"] * 17, "n": 2}, "prompt", "More than 32 answers"),
    ("/v1/completions", {"prompt": ["x", "y"], "suffix": "z"}, "suffix", "one text"),
    ("/v1/completions", {"prompt": "x", "logprobs": 21}, "logprobs", "less than or equal to 20"),
    ("/v1/completions", {"prompt": "x", "regex": "("}, "regex", "regex"),
    ("/v1/completions", {"prompt": "x", "grammar": "root"}, "grammar", "expected '::='"),
    ("/v1/completions", {"prompt": "x", "grammar": "root ::= root"}, "grammar", "no text matches"),
    ("/v1/completions", {"prompt": "x", "json_schema": {"$ref": "#"}}, "json_schema", "no text"),
    (
        "/v1/completions",
        {"prompt": "x", "json_schema": {"type": "integer", "maximum": 10**400}},
        "json_schema",
        "is no number",
    ),
    ("/completion", {"prompt": "x", "token_bias": [["a", 1]]}, "token_bias", "Unknown parameter"),
    ("/v1/completions", {"prompt": "x", "regex": "a", "grammar": "b"}, "regex", "Only one of"),
    ("/v1/completions", {"prompt": "x", "json_schema": {"type": "no"}}, "json_schema", "type"),
    ("/v1/chat/completions", chat(top_logprobs=1), "top_logprobs", "needs 'logprobs'"),
    (
        "/v1/chat/completions",
        chat(response_format={"type": "json_schema"}),
        "response_format",
        "needs 'json_schema'",
    ),
    ("/v1/completions", {"prompt": "x", "temperature": -1}, "temperature", "greater than"),
    ("/v1/completions", {"prompt": "x", "max_tokens": -2}, "max_tokens", "greater than"),
    ("/v1/completions", {"prompt": ""}, "prompt", "empty"),
    ("/v1/completions", {}, "prompt", "Field required"),
    ("/v1/completions", {"prompt": [300]}, "prompt", "below 257"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"257": 1}}, "logit_bias", "below 257"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"5": "y"}}, "logit_bias", "number"),
    ("/v1/chat/completions", chat("refuse"), "messages", "The template refuses."),
    (
        "/v1/chat/completions",
        {"messages": [{"role": 7, "content": "x"}]},
        "messages.0.role",
        "Input should be",
    ),
]


@pytest.mark.parametrize(("path", "body", "param", "message"), BAD_REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_requests_never_reach_the_engine(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    path: str,
    body: dict[str, Any],
    param: str | None,
    message: str,
    stream: bool,
) -> None:
    if "stream_options" not in body:
        body = {**body, "stream": stream}
    response = await client.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param
    assert message in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_too_long_names_both_numbers(client: httpx.AsyncClient, stream: bool) -> None:
    body = {"prompt": "x" * N_CTX_SLOT, "stream": stream}
    response = await client.post("/v1/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert (
        f"{N_CTX_SLOT} tokens exceeds the available context size of {N_CTX_SLOT}"
        in error["message"]
    )
    assert (await client.post("/v1/completions", json={"prompt": "x" * 63})).status_code == 200


@pytest.mark.parametrize(
    ("content", "content_type", "message"),
    [
        (b"{", "application/json", "The body cannot be read as JSON"),
        (b"[]", "application/json", "valid dictionary"),
        (b'{"prompt": "x"}', "text/plain", "Send JSON"),
    ],
)
async def test_bodies_that_are_no_objects(
    client: httpx.AsyncClient, content: bytes, content_type: str, message: str
) -> None:
    headers = {"Content-Type": content_type}
    response = await client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (QueueFullError("full", 7), 429, {"Retry-After": "7"}),
        (DecodeError("cannot decode"), 500, {}),
    ],
)
async def test_failures_before_the_first_token_have_a_status(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    error: CorralError,
    status: int,
    headers: dict[str, str],
    stream: bool,
) -> None:
    engine.script = [error]
    response = await client.post("/v1/chat/completions", json=chat(stream=stream))
    assert response.status_code == status
    assert response.json()["error"]["message"] == error.message
    assert response.json()["error"]["code"] == error.code
    assert {name: response.headers[name] for name in headers} == headers


async def test_failure_in_mid_stream_is_the_last_event(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = [HELLO[0], DecodeError("cannot decode")]
    *_, last = events(await client.post("/v1/chat/completions", json=chat(stream=True)))
    assert last["error"]["code"] == "decode_failed"


async def test_failure_in_mid_answer_is_a_500(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = [HELLO[0], DecodeError("cannot decode")]
    assert (await client.post("/v1/chat/completions", json=chat())).status_code == 500


async def test_a_stream_without_an_end_is_an_error(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = [HELLO[0]]
    *_, last = events(await client.post("/v1/chat/completions", json=chat(stream=True)))
    assert last["error"]["type"] == "server_error"


async def test_unexpected_exceptions_are_hidden(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = [RuntimeError("secret detail")]
    response = await client.post("/v1/chat/completions", json=chat())
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["error"]["type"] == "server_error"


async def test_models(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert [card["id"] for card in listed["data"]] == ["first", "org/second"]
    assert (await client.get("/v1/models/org/second")).json()["n_ctx_slot"] == N_CTX_SLOT
    for response in (
        await client.get("/v1/models/third"),
        await client.post("/v1/chat/completions", json=chat(model="third")),
    ):
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (404, "model_not_found")
        assert "'third'" in error["message"]


async def test_models_as_anthropics_clients_read_them(client: httpx.AsyncClient) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    listed = (await client.get("/v1/models", headers=headers)).json()
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (
        *(False, "first"),
        "org/second",
    )
    plain = (await client.get("/v1/models")).json()
    assert "has_more" not in plain
    for card, usual in zip(listed["data"], plain["data"], strict=True):
        assert (card["type"], card["display_name"]) == ("model", card["id"])
        created = datetime.fromisoformat(card["created_at"]).timestamp()
        assert (created, card["max_input_tokens"]) == (card["created"], N_CTX_SLOT)
        assert usual.items() <= card.items()
    one = (await client.get("/v1/models/org/second", headers=headers)).json()
    assert one == listed["data"][1]
    assert (await client.get("/v1/models/org/second")).json() == plain["data"][1]


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/chat/completions/input_tokens", "/v1/messages"]
)
async def test_a_chat_has_a_message(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(path, json={"messages": [], "max_tokens": 8})
    assert response.status_code == 400
    assert "messages" in response.json()["error"]["message"]


async def test_what_is_not_supported_is_not_tried_again(client: httpx.AsyncClient) -> None:
    """The SDKs of OpenAI and Anthropic send a request three times that fails with 501."""
    body = {"query": "q", "documents": ["d"]}
    response = await client.post("/v1/rerank", json=body)
    assert (response.status_code, response.headers["x-should-retry"]) == (501, "false")


async def test_stats_of_every_model(client: httpx.AsyncClient) -> None:
    body = (await client.get("/v1/stats")).json()
    assert [model["id"] for model in body["models"]] == ["first", "org/second"]
    (replica,) = body["models"][0]["replicas"]
    assert (replica["replica_id"], replica["node_id"]) == ("r1", "n1")
    assert [slot["id"] for slot in replica["engine"]["slots"]] == [0, 1, 2]
    assert body["models"][0]["missing"] == []


async def test_stats_name_who_is_missing(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.missing = "r2", "r3"
    answer = await client.get("/v1/stats")
    assert answer.status_code == 200
    for model in answer.json()["models"]:
        assert model["missing"] == ["r2", "r3"]
        assert [replica["replica_id"] for replica in model["replicas"]] == ["r1"]


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/no", 404), ("PUT", "/health", 405)]
)
async def test_unknown_routes(
    client: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    response = await client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_health(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).json() == {"status": "ok"}


async def test_stats_say_who_downloads(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.fetching_replicas = (FetchingReplica("r2", "n2", "downloading", 0.25),)
    for model in (await client.get("/v1/stats")).json()["models"]:
        assert model["fetching"] == [
            {
                "replica_id": "r2",
                "node_id": "n2",
                "stage": "downloading",
                "done": 0.25,
                "limit_s": None,
            }
        ]


@pytest.mark.parametrize("asked", [{}, {"verbose": True}])
async def test_a_prompt_is_told_to_those_who_ask(
    client: httpx.AsyncClient, asked: dict[str, Any]
) -> None:
    told = {"prompt": "user:Hi"} if asked else None
    whole = await client.post("/v1/chat/completions", json=chat(**asked))
    assert whole.json().get("__verbose") == told
    stream = await client.post("/v1/chat/completions", json=chat(stream=True, **asked))
    *before, last, _ = events(stream)
    assert last.get("__verbose") == told
    assert not any("__verbose" in chunk for chunk in before)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
async def test_answers_by_llama_servers_name(client: httpx.AsyncClient, path: str) -> None:
    body = chat(n_cmpl=2, n=3) if "chat" in path else {"prompt": "x", "n_cmpl": 2, "n": 3}
    answer = (await client.post(path, json=body)).json()
    assert len(answer if isinstance(answer, list) else answer["choices"]) == 2
