"""OpenAI's responses over a scripted engine."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from serve_app.base.errors import DecodeError, QueueFullError
from serve_app.base.values.answers import (
    FinishReason,
    PromptProgress,
    SequenceEnd,
    Timings,
    TokenDelta,
    Usage,
)
from tests.unit.server.answering.test_tools import CALL, script
from tests.unit.server.harness import HELLO, N_CTX_SLOT, ScriptedEngine, named_events

EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
CUT = SequenceEnd(FinishReason.LENGTH, Usage(5, 2, 3), Timings(0, 0, 0))
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
USAGE = {
    "input_tokens": 5,
    "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
    "output_tokens": 2,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 7,
}


def asked(content: Any = "Hi", **fields: Any) -> dict[str, Any]:
    return {"input": content, **fields}


async def answer(client: httpx.AsyncClient, **fields: Any) -> Any:
    response = await client.post("/v1/responses", json=asked(**fields))
    assert response.status_code == 200, response.text
    Response.model_validate(response.json())
    return response.json()


async def streamed(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    events = named_events(await client.post("/v1/responses", json=asked(stream=True, **fields)))
    for event in events:
        EVENT.validate_python(event)
    assert [event.pop("sequence_number") for event in events] == list(range(len(events)))
    return events


@pytest.mark.parametrize("route", ["/v1/responses", "/v1/responses/input_tokens"])
@pytest.mark.parametrize("body", [b"\0", b"\0 2\n{}", b'\0{"input": "Hi"}'])
async def test_no_client_can_write_the_record_of_a_response(
    client: httpx.AsyncClient, engine: ScriptedEngine, route: str, body: bytes
) -> None:
    headers = {"content-type": "application/json"}
    refused = await client.post(route, content=body, headers=headers)
    assert (refused.status_code, engine.requests) == (400, []), refused.text
    assert "cannot be read as JSON" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "metadata",
    [{str(n): "a" for n in range(17)}, {"a": "b" * 513}, {"a" * 65: "b"}],
    ids=["many", "a long value", "a long name"],
)
async def test_metadata_has_the_bounds_of_openai(
    client: httpx.AsyncClient, engine: ScriptedEngine, metadata: dict[str, str]
) -> None:
    """It is in each answer: to write 100,000 entries held up the event loop for 190 ms."""
    refused = await client.post("/v1/responses", json=asked(metadata=metadata))
    assert (refused.status_code, engine.requests) == (400, []), refused.text
    most = {f"{n:064}": "b" * 512 for n in range(16)}
    assert (await client.post("/v1/responses", json=asked(metadata=most))).json()[
        "metadata"
    ] == most


async def test_a_whole_response(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    body = await answer(client, model="org/second", metadata={"a": "b"}, temperature=0.5, user="u")
    (request,) = engine.requests
    assert request.id.startswith("resp_")
    assert (bytes(request.prompt), request.client) == (b"user:Hi", "u")
    assert body.pop("completed_at") >= body.pop("created_at") > 0
    (message,) = body.pop("output")
    assert message.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    assert message == {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }
    assert body == {
        "id": request.id,
        "object": "response",
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "model": "org/second",
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 0.95,
        "truncation": "disabled",
        "usage": USAGE,
        "user": "u",
    }


async def test_a_streamed_response(client: httpx.AsyncClient) -> None:
    created, in_progress, *events, completed = await streamed(client)
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    begun = created["response"]
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    message = {"type": "message", "id": events[0]["item"]["id"], "role": "assistant"}
    place = {"item_id": message["id"], "output_index": 0, "content_index": 0}
    part = {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    item = message | {"status": "completed", "content": [part]}
    delta = {"type": "response.output_text.delta", **place, "logprobs": []}
    assert events == [
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": message | {"status": "in_progress", "content": []},
        },
        {"type": "response.content_part.added", **place, "part": part | {"text": ""}},
        delta | {"delta": "Hel"},
        delta | {"delta": "lo"},
        {"type": "response.output_text.done", **place, "text": "Hello", "logprobs": []},
        {"type": "response.content_part.done", **place, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
    ]
    assert completed["type"] == "response.completed"
    assert completed["timings"]["predicted_n"] == 2
    assert completed["response"].pop("completed_at") >= begun.pop("created_at")
    assert begun.pop("completed_at") is None
    del completed["response"]["created_at"]
    assert completed["response"] == begun | {
        "status": "completed",
        "output": [item],
        "usage": USAGE,
    }


async def test_parameters_reach_the_engine(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    neutral = {"store": True, "truncation": "disabled", "include": [], "top_logprobs": 0}
    inert = {"prompt_cache_key": "k"}
    await answer(client, temperature=0, top_p=0.5, max_output_tokens=7, **neutral, **inert)
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0, 0.5, 7)


async def test_items_make_the_prompt(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    call = {"type": "function_call", "id": "fc", "call_id": "c", "name": "f", "status": "completed"}
    output = {"type": "function_call_output", "call_id": "c"}
    said = {"type": "output_text", "text": "I", "annotations": []}
    items = [
        {"role": "user", "content": "Go"},
        {"type": "reasoning", "id": "rs", "summary": []},
        {"type": "message", "id": "msg", "role": "assistant", "status": "x", "content": [said]},
        call | {"arguments": '{"x": 1}'},
        call | {"arguments": ""},
        output | {"output": "one"},
        output | {"output": [{"type": "input_text", "text": "2"}]},
    ]
    await answer(client, content=items, instructions="B")
    prompt = bytes(engine.requests[0].prompt)
    assert prompt == b"system:B|user:Go|assistant:If{'x': 1}f{}|tool:one|tool:2"


async def test_a_call_needs_no_text_before_it(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    await answer(client, content=[{"role": "user", "content": "Go"}, call])
    assert bytes(engine.requests[0].prompt) == b"user:Go|assistant:f{}"


async def test_calls_in_a_whole_response(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = script(f"I will look.\n{CALL}")
    body = await answer(client, tools=[TOOL])
    message, call = body["output"]
    assert message["content"][0]["text"] == "I will look."
    assert call.pop("id").startswith("fc_")
    assert call.pop("call_id").startswith("call_")
    assert call == {
        "type": "function_call",
        "name": "get_weather",
        "arguments": '{"city": "Oslo"}',
        "status": "completed",
    }
    assert (body["status"], body["tools"]) == ("completed", [TOOL])
    assert bytes(engine.requests[0].prompt) == b"[get_weather]user:Hi"


async def test_calls_in_a_stream(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = [TokenDelta(f"So: {CALL}", (1,)), HELLO[-1]]
    _, _, *events, completed = await streamed(client, tools=[TOOL])
    text = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done"]
    text += ["content_part.done", "output_item.done"]
    arguments = "function_call_arguments"
    call = ["output_item.added", f"{arguments}.delta", f"{arguments}.done", "output_item.done"]
    names = [event["type"].removeprefix("response.") for event in events]
    assert names == [*text, *call, *text]
    assert [event["output_index"] for event in events] == [0] * 6 + [1] * 4 + [2] * 6
    added, delta, done, item_done = events[6:10]
    item = item_done["item"]
    assert added["item"] == item | {"arguments": "", "status": "in_progress"}
    assert delta["item_id"] == done["item_id"] == item["id"]
    assert done["name"] == item["name"] == "get_weather"
    assert delta["delta"] == done["arguments"] == item["arguments"] == '{"city": "Oslo"}'
    assert completed["response"]["output"][1] == item


async def test_strict_tools_are_a_grammar(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    body = await answer(client, tools=[TOOL | {"strict": True}])
    assert body["tools"][0]["strict"] is True
    assert "get_weather" in (engine.requests[0].sampling.grammar or "")


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "name": "get_weather"}]
)
async def test_forced_calls_are_a_grammar(
    client: httpx.AsyncClient, engine: ScriptedEngine, choice: Any
) -> None:
    body = await answer(client, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    assert (body["tool_choice"], body["parallel_tool_calls"]) == (choice, False)
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None
    assert "get_weather" in grammar


@pytest.mark.parametrize(
    ("format_", "expected"),
    [
        ({"type": "json_object"}, '"object"'),
        ({"type": "json_schema", "name": "n", "schema": {"const": "yes"}}, '"yes"'),
    ],
)
async def test_formats_are_grammars(
    client: httpx.AsyncClient, engine: ScriptedEngine, format_: dict[str, Any], expected: str
) -> None:
    body = await answer(client, text={"format": format_, "verbosity": "medium"})
    assert format_.items() <= body["text"]["format"].items()
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None
    assert expected in grammar.replace("\\", "")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_response_is_incomplete(
    client: httpx.AsyncClient, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script = [HELLO[0], TokenDelta("", (2,), CUT)]
    if stream:
        *_, last = await streamed(client)
        assert last["type"] == "response.completed"
        body = last["response"]
    else:
        body = await answer(client)
    assert body["status"] == body["output"][0]["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"max_output_tokens": 2**31}, "max_output_tokens", "less than or equal to 2147483647"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "'resp_1' not found"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"background": True, "store": False}, "background", "needs 'store'"),
        ({"content": []}, "input", "'input' is empty"),
        (
            {"content": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input",
            "File input is not supported",
        ),
        ({"tools": [{"type": "custom"}]}, "tools.0.custom.name", "Field required"),
        ({"tool_choice": "required"}, "tool_choice", "needs 'tools'"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "no"}}}},
            "json_schema",
            "type",
        ),
    ],
)
async def test_bad_requests_are_refused(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    fields: dict[str, Any],
    param: str,
    message: str,
) -> None:
    response = await client.post("/v1/responses", json=asked(**fields))
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert message in error["message"]
    assert error["param"] == param
    assert engine.requests == []


async def test_a_failure_before_the_first_token_has_a_status(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = [QueueFullError("full", 7)]
    response = await client.post("/v1/responses", json=asked(stream=True))
    assert (response.status_code, response.headers["Retry-After"]) == (429, "7")
    assert response.json()["error"]["code"] == "queue_full"


async def test_a_failure_in_mid_stream_is_the_last_event(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = [HELLO[0], DecodeError("cannot decode")]
    *_, last = await streamed(client)
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "cannot decode"}


async def test_too_long_an_input_is_refused(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    error = (await client.post("/v1/responses", json=asked("x" * N_CTX_SLOT))).json()["error"]
    assert (error["type"], error["code"]) == (
        "exceed_context_size_error",
        "context_length_exceeded",
    )
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (N_CTX_SLOT + len("user:"), N_CTX_SLOT)
    assert engine.requests == []


async def test_progress_and_timings(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    progress = PromptProgress(5, 3, 5, 0.5)
    engine.script = [TokenDelta("", (), progress=(progress,)), TokenDelta("a", (97,)), *HELLO[-1:]]
    events = await streamed(client, return_progress=True, timings_per_token=True)
    (told,) = [event for event in events if "prompt_progress" in event]
    assert told["type"] == "response.in_progress"
    assert told["prompt_progress"] == {"total": 5, "cache": 3, "processed": 5, "time_ms": 500}
    timed = {event["type"]: event["timings"] for event in events if "timings" in event}
    assert timed["response.output_text.delta"]["prompt_n"] == 2
    end = HELLO[-1].end
    assert end is not None
    assert timed["response.completed"]["predicted_n"] == end.usage.completion_tokens


@pytest.mark.parametrize("path", ["/v1/responses/input_tokens", "/responses/input_tokens"])
async def test_input_tokens(client: httpx.AsyncClient, path: str) -> None:
    answer = (await client.post(path, json={"input": "Hi"})).json()
    assert answer == {"object": "response.input_tokens", "input_tokens": len("user:Hi")}


@pytest.mark.parametrize("choice", ["sometimes", 3, {"type": "allowed_tools", "mode": "loud"}])
async def test_a_tool_choice_that_is_none_is_refused(
    client: httpx.AsyncClient, choice: object
) -> None:
    response = await client.post("/v1/responses", json=asked(tools=[TOOL], tool_choice=choice))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tool_choice"
    assert "'required', or an object that names a tool" in response.json()["error"]["message"]
