"""Tools that a chat makes known behind the prompt's front, as Claude Code 2.1.332 and SDKs send them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from serve_app.config.schema import IngressConfig
from serve_app.server.model_registry import ServedModel
from tests.doubles.api import build_api
from tests.unit.server.answering.test_tools import script
from tests.unit.server.harness import ByteTokenizer, ScriptedEngine, takes

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SEARCH = {"name": "ToolSearch", "description": "Finds tools.", "input_schema": {"type": "object"}}
WEATHER = {
    "name": "weather",
    "description": "Wéather.",
    "input_schema": CITY,
    "defer_loading": True,
}
CLOCK = {"name": "clock", "description": "Time.", "input_schema": {}, "defer_loading": True}
PLACEHOLDER = {
    "name": "DeferredToolPlaceholder",
    "description": "Reserved placeholder that keeps deferred tool loading active; never call this tool.",
    "input_schema": {"type": "object", "properties": {}},
    "defer_loading": True,
}
TOOLS = [SEARCH, WEATHER, CLOCK, PLACEHOLDER]
SHOWN = (
    '<functions>\n<function>{"description": "Wéather.", "name": "weather", "parameters": '
    '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}</function>'
    "\n</functions>"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
ASKED = {"role": "user", "content": "Hi"}
SEARCHED = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {"query": "q"}}],
}


def found(*names: str) -> dict[str, Any]:
    references = [{"type": "tool_reference", "tool_name": name} for name in names]
    return {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t", "content": references}],
    }


def changed(*blocks: tuple[str, dict[str, Any]], **fields: Any) -> dict[str, Any]:
    content = [{"type": f"tool_{kind}", "tool": tool} for kind, tool in blocks]
    return {"role": "system", "content": content, **fields}


def reference(name: str) -> dict[str, Any]:
    return {"type": "tool_reference", "name": name}


def definition(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_definition", "definition": tool}


@pytest.fixture
async def client(engine: ScriptedEngine) -> AsyncIterator[httpx.AsyncClient]:
    model = ServedModel("first", 8192, ByteTokenizer(), engine=engine)  # type: ignore[arg-type]
    app = build_api({"first": model}, IngressConfig())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as connected:
        yield connected


async def ask(
    client: httpx.AsyncClient, *messages: dict[str, Any], **fields: Any
) -> httpx.Response:
    body = {"max_tokens": 9, "tools": TOOLS, "messages": [*messages], **fields}
    return await client.post("/v1/messages", json=body)


async def prompt(
    client: httpx.AsyncClient, engine: ScriptedEngine, *messages: Any, **fields: Any
) -> str:
    answer = await ask(client, *messages, **fields)
    assert answer.status_code == 200, answer.text
    assert "x-corral-ignored" not in answer.headers
    return bytes(engine.requests[-1].prompt).decode()


async def test_a_reference_is_the_tools_description(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    """The front of the prompt is the same in all turns, byte by byte."""
    first = await prompt(client, engine, ASKED)
    assert first == "[ToolSearch]user:Hi"
    second = await prompt(client, engine, ASKED, SEARCHED, found("weather"))
    assert second == f"{first}|assistant:ToolSearch{{'query': 'q'}}|tool:{SHOWN}"
    third = await prompt(
        client, engine, ASKED, SEARCHED, found("weather"), SEARCHED, found("clock")
    )
    assert third.startswith(second)
    assert '"name": "clock"' in third.removeprefix(second)
    assert "Placeholder" not in third


async def test_a_found_tool_can_be_called(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = script(CALL)
    answer = await ask(client, ASKED, SEARCHED, found("weather"))
    (called,) = answer.json()["content"]
    assert (called["name"], called["input"]) == ("weather", {"city": "Bonn"})


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "weather"}, {"type": "any"}])
async def test_a_found_tool_can_be_forced(
    client: httpx.AsyncClient, engine: ScriptedEngine, choice: dict[str, Any]
) -> None:
    before = await ask(client, ASKED, tool_choice=choice)
    unknown = "" if before.status_code == 400 else engine.requests[-1].sampling.grammar or ""
    assert "weather" not in unknown
    answer = await ask(client, ASKED, SEARCHED, found("weather"), tool_choice=choice)
    assert answer.status_code == 200, answer.text
    grammar = engine.requests[-1].sampling.grammar or ""
    assert takes(grammar, CALL)
    assert not takes(grammar, CALL.replace("city", "town"))
    assert not takes(grammar, CALL.replace("weather", "clock"))


async def test_a_tool_that_nothing_made_known_cannot_be_forced(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    answer = await ask(client, ASKED, tool_choice={"type": "tool", "name": "weather"})
    assert (answer.status_code, engine.requests) == (400, [])
    assert "weather" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "tools",
    [
        [
            SEARCH,
            WEATHER,
            {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
        ],
        [WEATHER],
    ],
)
async def test_what_nobody_could_find_is_at_the_front(
    client: httpx.AsyncClient, engine: ScriptedEngine, tools: list[Any]
) -> None:
    """The search is run by Anthropic's servers, or there is none."""
    answer = await ask(client, ASKED, tools=tools)
    assert answer.status_code == 200
    assert b"[weather]user:Hi" in bytes(engine.requests[-1].prompt)


async def test_a_search_of_anthropics_servers_in_the_history(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    content = {
        "type": "tool_search_tool_search_result",
        "tool_references": [{"type": "tool_reference", "tool_name": "weather"}],
    }
    result = {"type": "tool_search_tool_result", "tool_use_id": "s", "content": content}
    said = {"role": "assistant", "content": [result]}
    assert SHOWN in await prompt(client, engine, ASKED, said, ASKED)


@pytest.mark.parametrize("tool", [reference("weather"), definition(WEATHER)])
async def test_a_tool_is_added(
    client: httpx.AsyncClient, engine: ScriptedEngine, tool: dict[str, Any]
) -> None:
    first = await prompt(client, engine, ASKED)
    said = {"role": "assistant", "content": "Ah"}
    added = await prompt(client, engine, ASKED, said, ASKED, changed(("addition", tool)))
    assert added == f"{first}|assistant:Ah|user:Hi|system:{SHOWN}"
    engine.script = script(CALL)
    answer = await ask(client, ASKED, changed(("addition", tool)), tool_choice={"type": "any"})
    assert answer.json()["content"][0]["input"] == {"city": "Bonn"}
    assert takes(engine.requests[-1].sampling.grammar or "", CALL)


async def test_a_tool_is_removed_and_added_again(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    removed = changed(("addition", reference("weather")), ("removal", reference("weather")))
    text = "These functions can no longer be called: weather"
    assert (await prompt(client, engine, ASKED, removed)).endswith(f"{SHOWN}\n{text}")
    forced = {"type": "tool", "name": "weather"}
    assert (await ask(client, ASKED, removed, tool_choice=forced)).status_code == 400
    again = changed(("addition", reference("weather")))
    assert (await ask(client, ASKED, removed, ASKED, again, tool_choice=forced)).status_code == 200


async def test_a_tool_of_the_front_is_removed(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    removed = changed(("removal", reference("ToolSearch")))
    assert (await prompt(client, engine, ASKED, removed)).startswith("[ToolSearch]user:Hi|")
    forced = {"type": "tool", "name": "ToolSearch"}
    assert (await ask(client, ASKED, removed, tool_choice=forced)).status_code == 400


async def test_a_chat_without_tools_gets_one(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    """Templates say at the front how calls are written, so one is shown there from then on."""
    added = changed(("addition", definition(WEATHER)))
    first = await prompt(client, engine, ASKED, added, tools=[])
    assert first == f"[weather]user:Hi|system:{SHOWN}"
    more = changed(("addition", definition(CLOCK)))
    assert (await prompt(client, engine, ASKED, added, ASKED, more, tools=[])).startswith(first)


@pytest.mark.parametrize(
    "tool",
    [
        reference("nobody"),
        {"type": "mcp_tool_reference", "server_name": "s", "name": "n"},
        {"type": "mcp_toolset_reference", "server_name": "s"},
    ],
)
@pytest.mark.parametrize("kind", ["addition", "removal"])
async def test_a_change_of_an_undefined_tool_is_refused(
    client: httpx.AsyncClient, engine: ScriptedEngine, kind: str, tool: dict[str, Any]
) -> None:
    answer = await ask(client, ASKED, changed((kind, tool)))
    assert (answer.status_code, engine.requests) == (400, [])
    assert answer.json()["error"]["details"] == {"error_code": "tool_reference_unresolved"}


async def test_a_change_of_a_tool_that_is_left_out_changes_nothing(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    advisor = {"type": "advisor_20260301", "name": "advisor", "model": "m", "defer_loading": True}
    tools = [SEARCH, advisor]
    answer = await ask(client, ASKED, changed(("addition", reference("advisor"))), tools=tools)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-corral-ignored"] == "tools.advisor_20260301"
    assert b"advisor" not in bytes(engine.requests[-1].prompt)
    web = definition({"type": "web_search_20260318", "name": "web_search"})
    answer = await ask(client, ASKED, changed(("addition", web)))
    assert answer.headers["x-corral-ignored"] == "tools.web_search_20260318"


@pytest.mark.parametrize("role", ["user", "assistant"])
async def test_only_the_system_changes_tools(client: httpx.AsyncClient, role: str) -> None:
    message = changed(("addition", reference("weather"))) | {"role": role}
    assert (await ask(client, ASKED, message)).status_code == 400


async def test_a_cleared_message_leaves_its_tools(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    message = changed(("addition", reference("weather")), clear_at="next_user_message")
    message["content"].append({"type": "text", "text": "Note."})
    assert (await prompt(client, engine, ASKED, message)).endswith("\nNote.")
    later = await prompt(client, engine, ASKED, message, ASKED)
    assert SHOWN in later
    assert "Note." not in later


async def test_the_last_effort_counts(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    changes = {"role": "system", "output_config": {"effort": "high"}}
    fields = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}
    assert (await prompt(client, engine, ASKED, **fields)).endswith("Hilow")
    assert (await prompt(client, engine, ASKED, changes, **fields)).endswith("user:Hihigh")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}, {}]
)
async def test_threads_are_refused_so_that_clients_send_all(
    client: httpx.AsyncClient, engine: ScriptedEngine, path: str, thread: dict[str, Any]
) -> None:
    body = {"max_tokens": 9, "messages": [ASKED], "thread": thread}
    answer = await client.post(path, json=body)
    assert (answer.status_code, engine.requests) == (400, [])
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert error["details"] == details
    body["thread"] = None
    assert (await client.post(path, json=body)).status_code == 200


@pytest.mark.parametrize("field", ["compaction", "container"])
async def test_what_would_change_the_answer_is_refused(
    client: httpx.AsyncClient, field: str
) -> None:
    answer = await ask(client, ASKED, **{field: {"type": "x"}})
    assert answer.status_code == 400
    assert field in json.dumps(answer.json())


@pytest.mark.parametrize(
    ("messages", "thinks"), [([ASKED], False), ([ASKED, SEARCHED, found("weather")], True)]
)
async def test_thinking_between_tools(
    client: httpx.AsyncClient, engine: ScriptedEngine, messages: list[Any], thinks: bool
) -> None:
    fields = {"thinking": {"type": "between_tools"}, "output_config": {"effort": "low"}}
    assert (await prompt(client, engine, *messages, **fields)).endswith("low") is thinks
