"""Tools over a scripted engine: into the prompt, and out of the text."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from serve_app.base.values.answers import FinishReason, SequenceEnd, Timings, TokenDelta, Usage
from serve_app.prompt import grammars
from serve_app.prompt.grammars import Dialect
from serve_app.prompt.tool_calls import GENERIC, ToolFormat
from tests.unit.prompt.tool_calls.formats import EXAMPLE_CALLS, EXAMPLES, TOOLS, every_format
from tests.unit.server.harness import END, ByteTokenizer, ScriptedEngine, chat, events, takes

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CUT = SequenceEnd(FinishReason.LENGTH, Usage(5, 2, 3), Timings(0, 0, 0))


def script(text: str, end: SequenceEnd = END) -> list[TokenDelta | Exception]:
    """The text in deltas of three characters."""
    pieces = [text[i : i + 3] for i in range(0, len(text), 3)]
    return [*(TokenDelta(piece, (1,)) for piece in pieces), TokenDelta("", (2,), end)]


async def answer(client: httpx.AsyncClient, **fields: Any) -> Any:
    body = chat("Weather in Oslo?", **{"tools": [WEATHER], **fields})
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def streamed(client: httpx.AsyncClient, **fields: Any) -> list[Any]:
    body = chat("Weather in Oslo?", stream=True, **{"tools": [WEATHER], **fields})
    *chunks, done = events(await client.post("/v1/chat/completions", json=body))
    assert done == "[DONE]"
    return [chunk["choices"][0] for chunk in chunks]


def called(choices: list[Any]) -> list[Any]:
    """The calls of a stream, put together as OpenAI's clients do."""
    found: list[Any] = []
    for choice in choices:
        for piece in choice["delta"].get("tool_calls", []):
            if "id" in piece:
                assert piece["index"] == len(found)
                found.append({**piece, "function": dict(piece["function"])})
            else:
                assert piece["index"] == len(found) - 1
                found[-1]["function"]["arguments"] += piece["function"]["arguments"]
    return found


async def test_tools_reach_the_prompt(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    await answer(client)
    await answer(client, tool_choice="none")
    prompts = [bytes(request.prompt) for request in engine.requests]
    assert prompts == [b"[get_weather]user:Weather in Oslo?", b"user:Weather in Oslo?"]


async def test_a_call_in_a_whole_answer(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = script(CALL)
    choice = await answer(client)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert set(call) == {"id", "type", "function"}
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}


async def test_calls_in_a_stream(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = script(f"I will look.\n{CALL}\n{CALL}")
    opening, *choices = await streamed(client)
    assert opening["delta"] == {"role": "assistant", "content": None}
    assert "".join(c["delta"].get("content", "") for c in choices) == "I will look."
    calls = called(choices)
    assert [call["index"] for call in calls] == [0, 1]
    assert len({call["id"] for call in calls}) == 2
    assert {call["type"] for call in calls} == {"function"}
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert [call["function"] for call in calls] == [function, function]
    assert [c["finish_reason"] for c in choices][-2:] == [None, "tool_calls"]


async def test_an_answer_without_calls(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = script("It is <b>sunny</b>.\n")
    choice = await answer(client)
    assert choice["message"] == {"role": "assistant", "content": "It is <b>sunny</b>.\n"}
    assert choice["finish_reason"] == "stop"


async def test_arguments_come_in_pieces(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = script(CALL)
    _, *choices = await streamed(client)
    (start, *pieces) = [c["delta"]["tool_calls"][0] for c in choices if "tool_calls" in c["delta"]]
    assert start["function"] == {"name": "get_weather", "arguments": ""}
    assert pieces == [
        {"index": 0, "function": {"arguments": piece}}
        for piece in ('{"', "cit", 'y":', ' "O', "slo", '"}')
    ]


@pytest.mark.parametrize("end", [40, len(CALL) - 15])
async def test_a_call_cut_short_is_told_as_far_as_it_came(
    client: httpx.AsyncClient, engine: ScriptedEngine, end: int
) -> None:
    engine.script = script(CALL[:end], CUT)
    choices = await streamed(client)
    arguments = CALL[CALL.index('{"city') : end]
    calls = called(choices)
    assert [call["function"]["arguments"] for call in calls] == [arguments] * bool(arguments)
    content = "".join(c["delta"].get("content") or "" for c in choices)
    assert content == ("" if arguments else CALL[:end])
    assert choices[-1]["finish_reason"] == "length"


async def test_a_call_cut_short_is_text_in_a_whole_answer(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = script(CALL[:-15], CUT)
    choice = await answer(client)
    assert choice["message"] == {"role": "assistant", "content": CALL[:-15]}
    assert choice["finish_reason"] == "length"


GENERIC_CALL = '{"tool_calls": [{"name": "get_weather", "arguments": {"city": "Oslo"}}]}'


@pytest.mark.parametrize("stream", [False, True])
async def test_models_without_tools_answer_in_json(
    client: httpx.AsyncClient, engine: ScriptedEngine, tokenizer: ByteTokenizer, stream: bool
) -> None:
    """A grammar holds every answer, also where the model may do without calls."""
    tokenizer.tool_format = GENERIC
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    for text, calls, content in (
        (GENERIC_CALL, [function], ""),
        ('{"response": "It is \\"sunny\\"."}', [], 'It is "sunny".'),
    ):
        engine.script = script(text)
        if stream:
            _, *choices = await streamed(client)
            found, reason = called(choices), choices[-1]["finish_reason"]
            said = "".join(c["delta"].get("content", "") for c in choices)
        else:
            choice = await answer(client)
            found, reason = choice["message"].get("tool_calls", []), choice["finish_reason"]
            said = choice["message"]["content"] or ""
        assert [call["function"] for call in found] == calls
        assert said == content
        assert reason == ("tool_calls" if calls else "stop")
        assert "response" in (engine.requests[-1].sampling.grammar or "")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
async def test_a_forced_call_is_one_unless_more_are_asked_for(
    client: httpx.AsyncClient, engine: ScriptedEngine, choice: Any
) -> None:
    engine.script = script(CALL)
    for parallel in (None, False, True):
        await answer(client, tool_choice=choice, parallel_tool_calls=parallel)
    one, other, several = (request.sampling.grammar for request in engine.requests)
    assert one == other != several


async def test_models_without_tools_call_one_function_unless_more_are_asked_for(
    client: httpx.AsyncClient, engine: ScriptedEngine, tokenizer: ByteTokenizer
) -> None:
    tokenizer.tool_format = GENERIC
    engine.script = script(GENERIC_CALL)
    for parallel in (None, False, True):
        await answer(client, tool_choice="required", parallel_tool_calls=parallel)
    grammars = [request.sampling.grammar for request in engine.requests]
    assert grammars[0] == grammars[1] != grammars[2]


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_that_are_not_to_be_parsed_are_text(
    client: httpx.AsyncClient, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script = script(CALL)
    if stream:
        _, *choices = await streamed(client, parse_tool_calls=False)
        content = "".join(c["delta"].get("content") or "" for c in choices)
        assert called(choices) == []
        reason = choices[-1]["finish_reason"]
    else:
        choice = await answer(client, parse_tool_calls=False)
        content, reason = choice["message"]["content"], choice["finish_reason"]
    assert (content, reason) == (CALL, "stop")
    assert bytes(engine.requests[0].prompt) == b"[get_weather]user:Weather in Oslo?"


async def test_text_that_looks_like_a_call_needs_tools_to_be_one(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = script(CALL)
    choice = await answer(client, tool_choice="none")
    assert choice["message"] == {"role": "assistant", "content": CALL}
    assert choice["finish_reason"] == "stop"


async def test_calls_and_results_of_earlier_turns(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": None, "tool_calls": [call | {"index": 0}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "done"}]},
    ]
    await client.post("/v1/chat/completions", json={"messages": messages})
    assert bytes(engine.requests[0].prompt) == b"user:Go.|assistant:f{'x': 1}|tool:done"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
async def test_forced_calls_are_a_grammar(
    client: httpx.AsyncClient, engine: ScriptedEngine, choice: Any
) -> None:
    engine.script = script(CALL)
    said = await answer(client, tool_choice=choice, parallel_tool_calls=False)
    assert said["finish_reason"] == "tool_calls"
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None
    assert "get_weather" in grammar


STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}


@pytest.mark.parametrize(
    "fields", [{"parallel_tool_calls": False}, {"tools": [STRICT]}, {"tools": [WEATHER, STRICT]}]
)
async def test_calls_that_may_be_made_are_a_grammar_too(
    client: httpx.AsyncClient, engine: ScriptedEngine, fields: dict[str, Any]
) -> None:
    engine.script = script(f"I will look.\n{CALL}")
    body = chat("Weather in Oslo?") | {"tools": [WEATHER]} | fields
    response = await client.post("/v1/chat/completions", json=body)
    choice = response.json()["choices"][0]
    assert choice["message"]["content"] == "I will look."
    assert choice["finish_reason"] == "tool_calls"
    (request,) = engine.requests
    assert "get_weather" in (request.sampling.grammar or "")
    assert "strict" not in bytes(request.prompt).decode()


@pytest.mark.parametrize(
    "fields",
    [
        {"parallel_tool_calls": True},
        {"tool_choice": "none", "parallel_tool_calls": False},
        {"tool_choice": "auto"},
    ],
)
async def test_other_calls_are_left_to_the_model(
    client: httpx.AsyncClient, engine: ScriptedEngine, fields: dict[str, Any]
) -> None:
    await answer(client, **fields)
    assert engine.requests[0].sampling.grammar is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required"])
@every_format
async def test_every_format(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    tokenizer: ByteTokenizer,
    form: ToolFormat,
    choice: str,
    stream: bool,
) -> None:
    tokenizer.tool_format = form
    engine.script = script(EXAMPLES[form.name].first)
    if stream:
        _, *choices = await streamed(client, tools=TOOLS, tool_choice=choice)
        (call,) = called(choices)
        reason = choices[-1]["finish_reason"]
        assert not any("content" in c["delta"] for c in choices)
    else:
        said = await answer(client, tools=TOOLS, tool_choice=choice)
        (call,), reason = said["message"]["tool_calls"], said["finish_reason"]
    assert call["function"]["name"] == EXAMPLE_CALLS[0].name
    assert json.loads(call["function"]["arguments"]) == json.loads(EXAMPLE_CALLS[0].arguments)
    assert reason == "tool_calls"
    grammar = engine.requests[0].sampling.grammar
    assert (grammar is not None) is (choice == "required")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (chat(tools=[{}]), "Field required"),
        (chat(tools=[{"type": "function", "function": {"name": "a" * 129}}]), "at most 128"),
        (chat(tool_choice="required"), "'tool_choice' needs 'tools'"),
        (chat(tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "no"}}), "'no'"),
        (chat(tools=[WEATHER], regex="a"), "together with 'tools'"),
    ],
)  # fmt: skip
async def test_bad_tools_are_refused(
    client: httpx.AsyncClient, engine: ScriptedEngine, body: dict[str, Any], message: str
) -> None:
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert engine.requests == []


# -- tools of other kinds, and names ----------------------------------------------------------------

CUSTOM = {"type": "custom", "custom": {"name": "run_sql", "description": "Runs SQL."}}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_custom_tool_takes_a_text(
    client: httpx.AsyncClient, engine: ScriptedEngine, stream: bool
) -> None:
    said = {"name": "run_sql", "arguments": {"input": "SELECT 'ø'"}}
    engine.script = script(f"<tool_call>\n{json.dumps(said)}\n</tool_call>{CALL}")
    tools = [CUSTOM, WEATHER]
    if stream:
        choices = await streamed(client, tools=tools)
        calls = [call for one in choices for call in one["delta"].get("tool_calls", ())]
        assert [call.pop("index") for call in calls] == [0, 1]
    else:
        calls = (await answer(client, tools=tools))["message"]["tool_calls"]
    custom, function = calls
    assert custom.pop("id").startswith("call_")
    assert custom == {"type": "custom", "custom": {"name": "run_sql", "input": "SELECT 'ø'"}}
    assert function["function"]["name"] == "get_weather"


WEB = {"type": "web_search"}


async def test_what_nobody_here_runs_is_left_out(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    body = chat(tools=[{"type": "web_search"}, WEATHER])
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert response.headers["x-corral-ignored"] == "tools.web_search"
    assert bytes(engine.requests[0].prompt) == b"[get_weather]user:Hi"


@pytest.mark.parametrize(
    ("choice", "named"),
    [
        ({"type": "web_search"}, "web_search"),
        ({"type": "mcp", "server_label": "s", "name": "get_weather"}, "mcp"),
        ({"type": "function", "function": {"name": "nobody"}}, "nobody"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [WEB]}}, "tools"),
        ({"type": "allowed_tools", "mode": "required", "tools": []}, "tools"),
    ],
)
async def test_a_forced_call_that_nobody_could_make_is_refused(
    client: httpx.AsyncClient, engine: ScriptedEngine, choice: dict[str, Any], named: str
) -> None:
    body = chat(tools=[WEB, WEATHER], tool_choice=choice)
    response = await client.post("/v1/chat/completions", json=body)
    assert (response.status_code, engine.requests) == (400, [])
    error = response.json()["error"]
    assert error["param"] == "tool_choice"
    assert named in error["message"]


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_an_allowed_tool_that_nobody_here_runs_is_left_out(
    client: httpx.AsyncClient, engine: ScriptedEngine, mode: str
) -> None:
    allowed = [
        WEB,
        {"type": "mcp", "name": "get_time"},
        {"type": "function", "name": "get_weather"},
    ]
    choice = {"type": "allowed_tools", "mode": mode, "tools": allowed}
    body = chat(tools=[WEB, WEATHER], tool_choice=choice)
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    ignored = "tools.web_search, tool_choice.tools.web_search, tool_choice.tools.mcp"
    assert {*response.headers["x-corral-ignored"].split(", ")} == {*ignored.split(", ")}
    assert bytes(engine.requests[0].prompt).startswith(b"[get_weather]user:Hi")


CALL_OF = '<tool_call>\n{{"name": "{}", "arguments": {{}}}}\n</tool_call>'
ALLOWED = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("choice", "shown", "forced"),
    [
        (NAMED, "[get_weather][now]", ["now"]),
        ({"type": "function", "name": "now"}, "[get_weather][now]", ["now"]),
        ({"type": "tool", "name": "now"}, "[get_weather][now]", ["now"]),
        ("any", "[get_weather][now]", ["get_weather", "now"]),
        ({"type": "required"}, "[get_weather][now]", ["get_weather", "now"]),
        ({"type": "auto"}, "[get_weather][now]", []),
        ({"type": "none"}, "", []),
        ({"type": "allowed_tools", "allowed_tools": ALLOWED}, "[now]", ["now"]),
        ({"type": "allowed_tools", **ALLOWED}, "[now]", ["now"]),
        ({"type": "allowed_tools", **ALLOWED, "mode": "auto"}, "[now]", []),
    ],
)  # fmt: skip
async def test_choices_in_all_forms(
    client: httpx.AsyncClient, engine: ScriptedEngine, choice: Any, shown: str, forced: list[str]
) -> None:
    await answer(client, tools=[WEATHER, NOW], tool_choice=choice)
    (request,) = engine.requests
    assert bytes(request.prompt).decode().startswith(f"{shown}user:")
    grammar = request.sampling.grammar
    taken = [
        name for name in ("get_weather", "now") if grammar and takes(grammar, CALL_OF.format(name))
    ]
    assert taken == forced


async def test_an_odd_schema_refuses_no_chat(
    client: httpx.AsyncClient, engine: ScriptedEngine, tokenizer: ByteTokenizer
) -> None:
    """Neither where calls are held to it, nor in the generic format, where every answer is."""
    odd = {
        "type": "object",
        "properties": {"city": {"type": "string", "pattern": "^(?!x)"}, "more": {"type": "any"}},
        "propertyNames": {"pattern": "^[a-z]+$"},
        "required": None,
    }
    tools = [
        {"type": "function", "function": {"name": "f", "description": None, "parameters": odd}}
    ]
    paths = ["properties.more.type", "propertyNames", "properties.city.pattern"]
    for form, choice in ((tokenizer.tool_format, "required"), (GENERIC, "auto")):
        tokenizer.tool_format = form
        body = chat(tools=tools, tool_choice=choice)
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        ignored = ", ".join(f"tools.f.parameters.{path}" for path in paths)
        assert response.headers["x-corral-ignored"] == ignored


async def test_a_function_may_have_its_fields_beside_its_type(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    """As in responses, where a chat's form is taken, too."""
    flat = {"type": "function", **WEATHER["function"]}
    await client.post("/v1/chat/completions", json=chat(tools=[flat]))
    await client.post("/v1/responses", json={"input": "Hi", "tools": [WEATHER]})
    prompts = [bytes(request.prompt) for request in engine.requests]
    assert prompts == [b"[get_weather]user:Hi"] * 2


@pytest.mark.parametrize(
    "response_format",
    [
        {
            "type": "json_schema",
            "json_schema": {"name": "Page[Item, 2]", "schema": {"type": "null"}},
        },
        {"type": "json_schema", "schema": {"type": "null"}},
        {"type": "json_object", "schema": {"type": "null"}},
    ],
)
async def test_a_schema_of_any_name(
    client: httpx.AsyncClient, engine: ScriptedEngine, response_format: dict[str, Any]
) -> None:
    response = await client.post("/v1/chat/completions", json=chat(response_format=response_format))
    assert response.status_code == 200, response.text
    assert takes(engine.requests[0].sampling.grammar or "", "null")
    assert not takes(engine.requests[0].sampling.grammar or "", "{}")


def test_hundreds_of_tools_with_long_descriptions() -> None:
    """What a schema says to people costs the grammar nothing."""
    properties = {
        name: {"type": "string", "description": "说明文字" * 100} for name in ("a", "b", "c", "d")
    }
    grammar = grammars.from_tool_calls(
        [{"name": f"f{i}", "parameters": {"properties": properties}} for i in range(300)],
        Dialect(GENERIC),
        forced=False,
        parallel=False,
        param="tools",
    )
    assert len(grammar) < grammars.MAX_CHARS
    assert takes(grammar, '{"tool_calls": [{"name": "f299", "arguments": {"a": "x"}}]}')
