"""Anthropic's routes over a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from serve_app.base.errors import DecodeError, EngineUnavailableError, QueueFullError
from serve_app.base.values.answers import FinishReason, SequenceEnd, Timings, TokenDelta, Usage
from tests.unit.server.answering.test_tools import CALL, script
from tests.unit.server.harness import HELLO, N_CTX_SLOT, ScriptedEngine, named_events, takes

EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
TOOL = {
    "name": "get_weather",
    "description": "Weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
"""Run by Anthropic."""
THINKING = {"type": "enabled", "budget_tokens": 1024}
USAGE = {
    "input_tokens": 2,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 3,
    "output_tokens": 2,
}


def asked(content: Any = "Hi", **fields: Any) -> dict[str, Any]:
    return {"max_tokens": 9, "messages": [{"role": "user", "content": content}], **fields}


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    events = named_events(response)
    for event in events:
        if event["type"] not in ("ping", "error"):  # which the package takes before its types do
            EVENT.validate_python(event)
    return events


async def prompt_of(client: httpx.AsyncClient, engine: ScriptedEngine, body: Any) -> str:
    response = await client.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    return bytes(engine.requests[-1].prompt).decode()


async def test_a_whole_message(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    response = await client.post("/v1/messages", json=asked(model="org/second"))
    assert response.status_code == 200
    (request,) = engine.requests
    assert request.id.startswith("msg_")
    assert response.json() == {
        "id": request.id,
        "type": "message",
        "role": "assistant",
        "model": "org/second",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": USAGE,
    }
    assert bytes(request.prompt) == b"user:Hi"
    Message.model_validate(response.json())


async def test_a_streamed_message(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    events = events_of(await client.post("/v1/messages", json=asked(stream=True)))
    assert events == [
        {
            "type": "message_start",
            "message": {
                "id": engine.requests[0].id,
                "type": "message",
                "role": "assistant",
                "model": "first",
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {
                    "input_tokens": len("user:Hi"),
                    "cache_creation_input_tokens": 0,
                    "cache_read_input_tokens": 0,
                    "output_tokens": 0,
                },
            },
        },
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "lo"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": USAGE,
        },
        {"type": "message_stop"},
    ]


async def test_parameters_reach_the_engine(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    fields = {"temperature": 0.5, "top_p": 0.25, "top_k": 7}
    neutral = {"service_tier": "auto", "thinking": {"type": "disabled"}, "container": None}
    body = asked(stop_sequences=["END"], metadata={"user_id": "ana"}, **fields, **neutral)
    await client.post("/v1/messages", json=body)
    (request,) = engine.requests
    assert {name: getattr(request.sampling, name) for name in fields} == fields
    assert (request.sampling.max_tokens, request.sampling.stop) == (9, ("END",))
    assert request.client == "ana"


async def test_system_and_blocks_make_the_prompt(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    blocks = [{"type": "text", "text": "a", **cached}, {"type": "text", "text": "b"}]
    assert await prompt_of(client, engine, asked(blocks, system="Be.")) == "system:Be.|user:a\nb"
    assert await prompt_of(client, engine, asked(system=blocks)) == "system:a\nb|user:Hi"
    assert await prompt_of(client, engine, asked(system="")) == "user:Hi"


async def test_calls_and_results_of_earlier_turns(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}
    reasoning = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    result = {"type": "tool_result", "tool_use_id": "t1"}
    body = asked()
    body["messages"] += [
        {"role": "assistant", "content": [reasoning, {"type": "text", "text": "I"}, call]},
        {
            "role": "user",
            "content": [
                result | {"content": "one"},
                result | {"content": [{"type": "text", "text": "2"}], "is_error": True},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    body["thinking"] = {"type": "disabled"}
    expected = "user:Hi|assistant:If{'x': 1}|tool:one|tool:Error: 2|user:So?"
    assert await prompt_of(client, engine, body) == expected
    body["messages"][-1]["content"] = [result]
    assert await prompt_of(client, engine, body) == "user:Hi|assistant:If{'x': 1}|tool:"


async def test_a_call_in_a_whole_message(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = script(f"I will look.\n{CALL}")
    body = (await client.post("/v1/messages", json=asked(tools=[TOOL]))).json()
    text, call = body["content"]
    assert text == {"type": "text", "text": "I will look."}
    assert call.pop("id").startswith("toolu_")
    assert call == {"type": "tool_use", "name": "get_weather", "input": {"city": "Oslo"}}
    assert (body["stop_reason"], body["stop_sequence"]) == ("tool_use", None)
    assert bytes(engine.requests[0].prompt) == b"[get_weather]user:Hi"


async def test_calls_in_a_stream(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = [TokenDelta(f"So: {CALL}\n{CALL}", (1,)), HELLO[-1]]
    body = asked(tools=[TOOL], stream=True)
    _, _, *events, delta, _ = events_of(await client.post("/v1/messages", json=body))
    found = [(event["type"].removeprefix("content_block_"), event["index"]) for event in events]
    steps = ("start", "delta", "stop")
    assert found == [(step, index) for index in range(4) for step in steps]
    first = events[3:5]
    assert first[0]["content_block"] == {
        "type": "tool_use",
        "id": first[0]["content_block"]["id"],
        "name": "get_weather",
        "input": {},
    }
    assert first[1]["delta"] == {"type": "input_json_delta", "partial_json": '{"city": "Oslo"}'}
    assert events[-2]["delta"] == {"type": "text_delta", "text": "lo"}
    assert delta["delta"]["stop_reason"] == "tool_use"


async def test_no_tools_are_shown_with_the_choice_none(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = script(CALL)
    body = asked(tools=[TOOL], tool_choice={"type": "none"})
    answer = (await client.post("/v1/messages", json=body)).json()
    assert answer["content"] == [{"type": "text", "text": CALL}]
    assert bytes(engine.requests[0].prompt) == b"user:Hi"


async def test_tools_of_anthropics_servers_are_left_out(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    for kind in ("web_search_20260209", "web_fetch_20250910", "code_execution_20250825"):
        declared = [SEARCH | {"type": kind}, TOOL]
        assert await prompt_of(client, engine, asked(tools=declared)) == "[get_weather]user:Hi"
    assert await prompt_of(client, engine, asked(tools=[SEARCH])) == "user:Hi"
    body = asked(tools=[SEARCH, {"type": "of_the_future"}, TOOL], tool_choice={"type": "auto"})
    answer = await client.post("/v1/messages", json=body)
    left_out = f"tools.{SEARCH['type']}, tools.of_the_future"
    assert answer.headers["x-corral-ignored"] == left_out


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        ([SEARCH, TOOL], {"type": "tool", "name": SEARCH["name"]}),
        ([SEARCH, TOOL], {"type": "tool", "name": "nobody"}),
        ([SEARCH], {"type": "any"}),
        ([], {"type": "any"}),
    ],
)
async def test_a_forced_call_that_nobody_could_make_is_refused(
    client: httpx.AsyncClient, engine: ScriptedEngine, tools: list[Any], choice: dict[str, str]
) -> None:
    body = asked(tools=tools, tool_choice=choice)
    answer = await client.post("/v1/messages", json=body)
    assert (answer.status_code, engine.requests) == (400, [])
    assert choice.get("name", "tool_choice") in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("tool", "arguments", "refused"),
    [
        ({"type": "bash_20250124", "name": "bash"}, {"command": "ls"}, {"path": "a"}),
        (
            {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
            {"command": "view", "path": "a.py", "view_range": [1, 2]},
            {"command": "list"},
        ),
        (
            {"type": "memory_20250818", "name": "memory"},
            {"command": "rename", "old_path": "/memories/a", "new_path": "/memories/b"},
            {"command": "find"},
        ),
        (TOOL | {"type": "of_the_future"}, {"city": "Oslo"}, {"a": 1}),
    ],
)  # fmt: skip
async def test_a_clients_tools_of_a_known_type_have_a_schema(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    tool: dict[str, Any],
    arguments: dict[str, Any],
    refused: dict[str, Any],
) -> None:
    said = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
    engine.script = script(said.format(tool["name"], json.dumps(arguments)))
    body = asked(tools=[tool], tool_choice={"type": "any"})
    (block,) = (await client.post("/v1/messages", json=body)).json()["content"]
    assert (block["name"], block["input"]) == (tool["name"], arguments)
    grammar = engine.requests[0].sampling.grammar or ""
    assert takes(grammar, said.format(tool["name"], json.dumps(arguments)))
    assert not takes(grammar, said.format(tool["name"], json.dumps(refused)))


async def test_strict_tools_are_a_grammar(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    await client.post("/v1/messages", json=asked(tools=[TOOL | {"strict": True}]))
    assert "get_weather" in (engine.requests[0].sampling.grammar or "")


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "auto"}, {"type": "tool", "name": "get_weather"}]
)
async def test_forced_calls_are_a_grammar(
    client: httpx.AsyncClient, engine: ScriptedEngine, choice: dict[str, Any]
) -> None:
    choice = choice | {"disable_parallel_tool_use": True}
    await client.post("/v1/messages", json=asked(tools=[TOOL], tool_choice=choice))
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None
    assert "get_weather" in grammar


@pytest.mark.parametrize(
    ("reason", "stop", "expected"),
    [
        (FinishReason.LENGTH, None, ("max_tokens", None)),
        (FinishReason.STOP, "END", ("stop_sequence", "END")),
        (FinishReason.STOP, None, ("end_turn", None)),
    ],
)
async def test_stop_reasons(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    reason: FinishReason,
    stop: str | None,
    expected: tuple[str, str | None],
) -> None:
    end = SequenceEnd(reason, Usage(5, 0, 3), Timings(0, 0, 0), stop)
    engine.script = [TokenDelta("", (), end)]
    body = (await client.post("/v1/messages", json=asked())).json()
    assert (body["stop_reason"], body["stop_sequence"]) == expected
    assert body["content"] == []


@pytest.mark.parametrize("version", [None, "2023-06-01"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/models"])
async def test_answers_have_the_id_by_anthropics_name(
    client: httpx.AsyncClient, path: str, version: str | None
) -> None:
    """anthropic 2.14.0 has it as `message._request_id`, and in its errors."""
    headers = {"x-request-id": "abc"} | ({"anthropic-version": version} if version else {})
    method = "GET" if path == "/v1/models" else "POST"
    for body in asked(), {"max_tokens": 0}:
        answer = await client.request(method, path, json=body, headers=headers)
        is_anthropic = version is not None or path != "/v1/models"
        assert answer.headers.get("request-id") == ("abc" if is_anthropic else None)


async def test_tokens_are_counted(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    body = asked("Hé", system="S", tools=[TOOL])
    del body["max_tokens"]
    response = await client.post("/v1/messages/count_tokens", json=body)
    assert response.json() == {"input_tokens": len("[get_weather]system:S|user:Hé".encode())}
    assert engine.requests == []


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
RESULT = {"type": "tool_result", "tool_use_id": "t"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": asked()["messages"]}, "max_tokens: Field required"),
        (asked(max_tokens=0), "max_tokens: Input should be greater"),
        (asked(max_tokens=2**31), "max_tokens: Input should be less"),
        (asked(temperature=1.5), "temperature: Input should be less than or equal to 1"),
        (asked(thinking={"type": "enabled", "budget_tokens": 0}), "greater than or equal to 1"),
        (asked(thinking={"type": "enabled"}), "'budget_tokens' goes with"),
        (asked(thinking={"type": "adaptive", "budget_tokens": 2000}), "'budget_tokens' goes with"),
        (asked(thinking=THINKING), "'budget_tokens' must be less than 'max_tokens'"),
        (
            asked(thinking={"type": "adaptive"}, tools=[TOOL], tool_choice={"type": "any"}),
            "'thinking' is not supported together with a forced",
        ),
        (asked([{"type": "text", "text": 1}]), "messages.0.content.0.text.text: Input should be"),
        (asked([{"type": "document", "source": {"type": "base64"}}]), "Document input"),
        (asked([{"type": "tool_use", "id": "t", "name": "f", "input": {}}]), "turn of the user"),
        (asked(tools=[{"input_schema": {}}]), "name: Field required"),
        (asked(tools=[None, SEARCH]), "tools.0: Input should be"),
        (asked(tool_choice={"type": "any"}), "'tool_choice' needs 'tools'"),
        (asked(tools=[TOOL], tool_choice={"type": "tool", "name": "no"}), "no function 'no'"),
        (asked(tool_choice={"type": "tool"}), "'name' goes with"),
        (asked("refuse"), "The template refuses."),
        (asked("x" * N_CTX_SLOT), f"prompt is too long: 69 tokens > {N_CTX_SLOT - 1} maximum. Whoever"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_requests_are_refused(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    body: dict[str, Any],
    message: str,
    stream: bool,
) -> None:
    response = await client.post("/v1/messages", json=body | {"stream": stream})
    answer = response.json()
    assert response.status_code == 400
    assert message in answer["error"].pop("message")
    assert answer == {"type": "error", "error": {"type": "invalid_request_error"}}
    assert engine.requests == []


async def test_pictures_are_refused_as_llama_server_does(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    response = await client.post("/v1/messages", json=asked([IMAGE]))
    assert (response.status_code, response.headers["x-should-retry"]) == (500, "false")
    assert response.json() == {
        "type": "error",
        "error": {
            "type": "api_error",
            "message": "Image input is not supported: this model reads text only, as it has no projector.",
        },
    }
    assert engine.requests == []


@pytest.mark.parametrize(
    ("error", "status", "kind", "headers"),
    [
        (QueueFullError("full", 7), 429, "rate_limit_error", {"Retry-After": "7"}),
        (EngineUnavailableError("none is up"), 503, "overloaded_error", {"Retry-After": "1"}),
        (DecodeError("cannot decode"), 500, "api_error", {}),
        (RuntimeError("secret detail"), 500, "api_error", {}),
    ],
)
async def test_failures_have_anthropics_shape(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    error: Exception,
    status: int,
    kind: str,
    headers: dict[str, str],
) -> None:
    engine.script = [error]
    response = await client.post("/v1/messages", json=asked(stream=True))
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    assert "secret" not in response.text
    assert {name: response.headers[name] for name in headers} == headers


async def test_a_failure_in_mid_stream_is_the_last_event(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = [HELLO[0], DecodeError("cannot decode")]
    *_, last = events_of(await client.post("/v1/messages", json=asked(stream=True)))
    assert last == {"type": "error", "error": {"type": "api_error", "message": "cannot decode"}}


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("GET", "/v1/messages", 405, "invalid_request_error"),
    ],
)
async def test_unknown_routes(
    client: httpx.AsyncClient, method: str, path: str, status: int, kind: str
) -> None:
    response = await client.request(method, path)
    assert response.status_code == status
    answer = response.json()
    assert path in answer["error"].pop("message")
    assert answer == {"type": "error", "error": {"type": kind}}


async def test_other_paths_keep_openais_shape(client: httpx.AsyncClient) -> None:
    response = await client.get("/v1/messages_of_others")
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_unknown_models_are_not_found(client: httpx.AsyncClient, path: str) -> None:
    body = asked(model="third")
    if path.endswith("count_tokens"):
        del body["max_tokens"]
    response = await client.post(path, json=body)
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found_error"
    assert "'third'" in response.json()["error"]["message"]


FORMAT = {
    "type": "json_schema",
    "schema": {"type": "object", "properties": {"mood": {"type": "string"}}},
}


@pytest.mark.parametrize(
    "fields", [{"output_config": {"format": FORMAT}}, {"output_format": FORMAT}]
)
async def test_a_format_is_a_grammar(
    client: httpx.AsyncClient, engine: ScriptedEngine, fields: dict[str, Any]
) -> None:
    response = await client.post("/v1/messages", json=asked(**fields))
    assert (response.status_code, response.headers.get("x-corral-ignored")) == (200, None)
    assert "mood" in (engine.requests[0].sampling.grammar or "")


async def test_what_agents_send(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    kept = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    text = {"type": "text", "text": "H", **kept}
    called = {"type": "tool_use", "id": "t", "name": "f", "input": {}, **kept}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text], **kept}
    body = asked(
        system=[text],
        tools=[TOOL | kept | {"name": "f"}, SEARCH],
        thinking={"type": "adaptive", "display": "summarized"},
        output_config={"effort": "high"},
        betas=["context-management-2025-06-27"],
        metadata={"user_id": "u"},
        service_tier="auto",
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        **kept,
    )
    body["messages"] = [
        {"role": "user", "content": [text], **kept},
        {"role": "assistant", "content": [called]},
        {"role": "user", "content": [result]},
        {"role": "system", "content": "N"},
        {"role": "assistant", "content": "So"},
    ]
    response = await client.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-corral-ignored"] == "tools.web_search_20250305, context_management"
    prompt = bytes(engine.requests[0].prompt)
    assert b"tool:H|system:N" in prompt
    assert prompt.endswith(b"So"), "the answer goes on with it"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "S", "tools": [TOOL], "tool_choice": {"type": "any"}},
        {"output_config": {"format": FORMAT, "effort": "low"}},
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
        {"messages": [*asked()["messages"], {"role": "assistant", "content": "So"}]},
    ],
)
async def test_a_count_is_what_the_answer_says(
    client: httpx.AsyncClient, engine: ScriptedEngine, fields: dict[str, Any]
) -> None:
    body = asked() | fields
    await client.post("/v1/messages", json=body)
    n_prompt = len(engine.requests[0].prompt)
    del body["max_tokens"]
    counted = (await client.post("/v1/messages/count_tokens", json=body)).json()
    assert counted == {"input_tokens": n_prompt}
