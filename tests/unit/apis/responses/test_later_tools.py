"""Tools that a response's input makes known: by the client's own search, or by items that add some."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from serve_app.config.schema import IngressConfig
from serve_app.server.model_registry import ServedModel
from tests.doubles.api import build_api
from tests.unit.apis.responses.test_client_tools import call
from tests.unit.server.answering.test_tools import script
from tests.unit.server.harness import ByteTokenizer, ScriptedEngine, takes

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "parameters": CITY, "defer_loading": True}
SPACE = {"type": "namespace", "name": "crm", "description": "Clients.", "tools": [WEATHER]}
CUSTOM = {"type": "custom", "name": "sql", "defer_loading": True}
SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Finds.",
    "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
}
TOOLS = [SEARCH, WEATHER, SPACE, CUSTOM]
SEARCHED = {
    "type": "tool_search_call",
    "call_id": "c",
    "execution": "client",
    "arguments": {"q": "x"},
}
ASKED = {"role": "user", "content": "Hi"}


def found(*tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [*tools]}


def added(*tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "additional_tools", "role": "developer", "tools": [*tools]}


@pytest.fixture
async def client(engine: ScriptedEngine) -> AsyncIterator[httpx.AsyncClient]:
    model = ServedModel("first", 8192, ByteTokenizer(), engine=engine)  # type: ignore[arg-type]
    app = build_api({"first": model}, IngressConfig())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as connected:
        yield connected


async def ask(client: httpx.AsyncClient, *items: Any, **fields: Any) -> dict[str, Any]:
    body = {"tools": TOOLS, "input": [*items], **fields}
    answer = await client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert "x-corral-ignored" not in answer.headers
    whole: dict[str, Any] = answer.json()
    return whole


def prompt(engine: ScriptedEngine) -> str:
    return bytes(engine.requests[-1].prompt).decode()


async def test_the_clients_search_is_a_tool(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = script(call("tool_search", q="weather"))
    (item,) = (await ask(client, ASKED))["output"]
    assert prompt(engine) == "[tool_search]user:Hi"
    assert item["type"] == "tool_search_call"
    assert (item["execution"], item["arguments"]) == ("client", {"q": "weather"})
    (past,) = (await ask(client, ASKED, item, found() | {"call_id": item["call_id"]}))["output"][:1]
    assert past["type"] == "tool_search_call"
    assert prompt(engine).endswith("|assistant:tool_search{'q': 'weather'}|tool:No tool was found.")


@pytest.mark.parametrize("make", [found, added])
async def test_tools_are_known_from_their_item_on(
    client: httpx.AsyncClient, engine: ScriptedEngine, make: Any
) -> None:
    await ask(client, ASKED, SEARCHED)
    first = prompt(engine)
    await ask(client, ASKED, SEARCHED, make(WEATHER))
    second = prompt(engine)
    assert second.startswith(first)
    assert second.removeprefix(first) == (
        f"|{'tool' if make is found else 'system'}:"
        '<functions>\n<function>{"description": "", "name": "weather", "parameters": {"type": "object", '
        '"properties": {"city": {"type": "string"}}, "required": ["city"]}}</function>\n</functions>'
    )
    await ask(client, ASKED, SEARCHED, make(WEATHER), ASKED, make(SPACE))
    assert prompt(engine).startswith(second)
    assert '"name": "crm__weather"' in prompt(engine).removeprefix(second)


@pytest.mark.parametrize(
    ("tool", "said", "expected"),
    [
        (WEATHER, call("weather", city="Bonn"), {"type": "function_call", "name": "weather"}),
        (SPACE, call("crm__weather", city="Bonn"), {"name": "weather", "namespace": "crm"}),
        (CUSTOM, call("sql", input="x"), {"type": "custom_tool_call", "name": "sql", "input": "x"}),
    ],
)
async def test_a_known_tool_is_called_in_its_form(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    tool: Any,
    said: str,
    expected: dict[str, Any],
) -> None:
    engine.script = script(said)
    answer = await ask(client, ASKED, SEARCHED, found(tool), tool_choice="required")
    (item,) = answer["output"]
    assert item.items() >= expected.items()
    assert takes(engine.requests[-1].sampling.grammar or "", said)
    assert answer["tools"] == (await client.get(f"/v1/responses/{answer['id']}")).json()["tools"]
    kept = await client.get(f"/v1/responses/{answer['id']}")
    assert kept.json()["output"] == [item]
    later = await ask(client, "And?", previous_response_id=answer["id"], tool_choice="required")
    assert later["output"][0].items() >= expected.items()


async def test_a_deferred_tool_can_be_forced_when_it_is_known(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    choice = {"type": "function", "name": "weather"}
    body = {"tools": TOOLS, "input": [ASKED], "tool_choice": choice}
    assert (await client.post("/v1/responses", json=body)).status_code == 400
    await ask(client, ASKED, SEARCHED, found(WEATHER), tool_choice=choice)
    grammar = engine.requests[-1].sampling.grammar or ""
    assert takes(grammar, call("weather", city="Bonn"))
    assert not takes(grammar, call("tool_search", q="x"))


@pytest.mark.parametrize(
    ("search", "ignored"),
    [({"type": "tool_search"}, "tools.tool_search"), ({"type": "shell"}, None)],
)
async def test_without_a_search_of_the_client_no_tool_is_deferred(
    client: httpx.AsyncClient, engine: ScriptedEngine, search: dict[str, Any], ignored: str | None
) -> None:
    body = {"tools": [search, WEATHER, SPACE], "input": [ASKED]}
    answer = await client.post("/v1/responses", json=body)
    assert answer.headers.get("x-corral-ignored") == ignored
    assert "[weather][crm__weather]user:Hi" in prompt(engine)


@pytest.mark.parametrize(
    "item", [{"type": "compaction", "encrypted_content": "x"}, {"type": "compaction_trigger"}]
)
async def test_items_that_stand_for_a_lost_conversation_are_refused(
    client: httpx.AsyncClient, engine: ScriptedEngine, item: dict[str, Any]
) -> None:
    answer = await client.post("/v1/responses", json={"input": [ASKED, item]})
    assert (answer.status_code, engine.requests) == (400, [])
    assert item["type"] in answer.json()["error"]["message"]


async def test_the_last_configuration_counts(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    schema = {"type": "object", "properties": {"mood": {"type": "string"}}}
    form = {"type": "json_schema", "name": "m", "schema": schema}
    update = {
        "type": "configuration_update",
        "reasoning": {"effort": "high"},
        "text": {"format": form},
    }
    await ask(client, ASKED, update, ASKED, tools=[], reasoning={"effort": "low"})
    assert prompt(engine) == "user:Hi|user:Hihigh"
    assert "mood" in (engine.requests[-1].sampling.grammar or "")
    back = {"type": "configuration_update", "text": {"format": {"type": "text"}}}
    await ask(client, ASKED, update, ASKED, back, tools=[])
    assert engine.requests[-1].sampling.grammar is None
    assert prompt(engine).endswith("high")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"top_logprobs": 3}),
        ("/v1/responses", {"moderation": {"model": "omni"}}),
        ("/v1/responses", {"prompt_cache_options": {"prewarm": True}}),
        ("/v1/chat/completions", {"moderation": {"model": "omni"}}),
        ("/v1/chat/completions", {"prompt_cache_options": {"prewarm": True}}),
        ("/v1/chat/completions", {"truncate_prompt_tokens": 5}),
        ("/v1/completions", {"truncate_prompt_tokens": 5}),
        ("/v1/responses", {"input": []}),
    ],
)
async def test_what_would_change_the_answer_is_refused(
    client: httpx.AsyncClient, engine: ScriptedEngine, path: str, fields: dict[str, Any]
) -> None:
    asked = {"/v1/responses": {"input": "x"}, "/v1/completions": {"prompt": "x"}}
    answer = await client.post(path, json=asked.get(path, {"messages": [ASKED]}) | fields)
    assert (answer.status_code, engine.requests) == (400, [])
