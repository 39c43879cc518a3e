"""Tools of responses that are no functions, and reasoning: both ways, over a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from serve_app.apis.responses.items import (
    MOST_REASONING_BYTES,
    Items,
    reasoning_fields,
    turns,
    unseal,
)
from serve_app.apis.responses.tools import CustomTextTool, NamespaceTool, functions
from serve_app.server.answering.tools import LaterTools
from tests.unit.apis.responses.test_routes import TOOL, answer, asked, streamed
from tests.unit.server.answering.test_tools import script
from tests.unit.server.harness import ByteTokenizer, ScriptedEngine

ITEMS: TypeAdapter[list[Any]] = TypeAdapter(Items)
CUSTOM = {"type": "custom", "name": "run_sql", "description": "Runs SQL."}
NAMESPACE = {
    "type": "namespace",
    "name": "mcp__files",
    "description": "Files.",
    "tools": [{"type": "function", "name": "read", "parameters": {"type": "object"}}],
}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


PATCH = {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b\n"}
KINDS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "custom": (
        CUSTOM,
        call("run_sql", input="SELECT 'ø'\n"),
        {"type": "custom_tool_call", "name": "run_sql", "input": "SELECT 'ø'\n"},
    ),
    "namespace": (
        NAMESPACE,
        call("mcp__files__read", path="a"),
        {
            "type": "function_call",
            "name": "read",
            "namespace": "mcp__files",
            "arguments": '{"path": "a"}',
        },
    ),
    "local_shell": (
        {"type": "local_shell"},
        call("local_shell", command=["ls", "-l"]),
        {
            "type": "local_shell_call",
            "action": {"type": "exec", "command": ["ls", "-l"], "env": {}},
        },
    ),
    "shell": (
        {"type": "shell"},
        call("shell", commands=["ls"]),
        {
            "type": "shell_call",
            "action": {"commands": ["ls"], "timeout_ms": None, "max_output_length": None},
        },
    ),
    "apply_patch": (
        {"type": "apply_patch"},
        call("apply_patch", **PATCH),
        {"type": "apply_patch_call", "operation": PATCH},
    ),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
async def test_a_call_has_the_form_of_its_tool(
    client: httpx.AsyncClient, engine: ScriptedEngine, kind: str
) -> None:
    tool, said, expected = KINDS[kind]
    engine.script = script(said)
    (whole,) = (await answer(client, tools=[tool]))["output"]
    *events, last = await streamed(client, tools=[tool])
    (item,) = last["response"]["output"]
    assert item["status"] == whole["status"] == "completed"
    assert item.items() >= expected.items()
    assert whole.items() >= expected.items()
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == [item]
    deltas = [event for event in events if event["type"].endswith(".delta")]
    written = "".join(event["delta"] for event in deltas)
    assert written == expected.get("input", expected.get("arguments", ""))


async def test_half_a_character_in_a_call_is_a_question_mark(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    """No JSON has it: the answer could not be written."""
    for kind, name in ("custom", "run_sql"), ("local_shell", "local_shell"):
        arguments = r'{"input": "a\ud83d", "command": ["a\ud83d"]}'
        engine.script = script(
            f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        )
        tools = [KINDS[kind][0]]
        (whole,) = (await answer(client, tools=tools))["output"]
        (item,) = (await streamed(client, tools=tools))[-1]["response"]["output"]
        for one in whole, item:
            assert one.get("input") == "a?" or one["action"]["command"] == ["a?"]


@pytest.mark.parametrize("kind", ["function", "custom"])
def test_a_name_may_be_longer_with_its_namespace(kind: str) -> None:
    name, space = "f" * 128, "n" * 128
    tool = {"type": "namespace", "name": space, "tools": [{"type": kind, "name": name}]}
    (made,) = functions([NamespaceTool.model_validate(tool)])
    assert made.function.name == made.for_template()["function"]["name"] == f"{space}__{name}"


@every_kind
async def test_a_call_and_its_output_come_back(
    client: httpx.AsyncClient, engine: ScriptedEngine, kind: str
) -> None:
    """As the call of the function that stands for the tool."""
    tool, said, _ = KINDS[kind]
    engine.script = script(said)
    (item,) = (await answer(client, tools=[tool]))["output"]
    key = "id" if kind == "local_shell" else "call_id"
    output = {"type": f"{item['type']}_output", key: item["call_id"], "output": "Done."}
    called, result = turns(ITEMS.validate_python([item, output]), LaterTools())
    (past,) = called.calls
    function = json.loads(said.splitlines()[1])
    assert past.name == function["name"]
    assert past.value.items() >= function["arguments"].items()
    assert (result.role, result.text, result.call_id) == ("tool", "Done.", past.call_id)


def test_the_output_of_a_shell_is_text() -> None:
    """Its parts are of types of its own."""
    parts = [{"stdout": "a.py", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
    item = {"type": "shell_call_output", "call_id": "call_1", "output": parts}
    (result,) = turns(ITEMS.validate_python([item]), LaterTools())
    assert "a.py" in result.text


async def test_what_only_openai_runs_is_left_out(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    tools = [
        {"type": "web_search", "external_web_access": False},
        {"type": "image_generation"},
        {"type": "mcp", "server_label": "a", "server_url": "https://a.example"},
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "tool_of_the_future"},
        TOOL,
    ]
    response = await client.post("/v1/responses", json=asked(tools=tools))
    assert response.status_code == 200, response.text
    names = ["web_search", "image_generation", "mcp", "code_interpreter", "tool_of_the_future"]
    assert response.headers["x-corral-ignored"] == ", ".join(f"tools.{name}" for name in names)
    for name in names:
        body = asked(tools=tools, tool_choice={"type": name})
        response = await client.post("/v1/responses", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "tool_choice")
        assert name in error["message"]
    assert len(engine.requests) == 1
    prompt = bytes(engine.requests[0].prompt).decode()
    assert "get_weather" in prompt
    assert "image_generation" not in prompt


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "name": "run_sql"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "run_sql"}]},
    ],
)  # fmt: skip
async def test_a_custom_tool_can_be_forced(
    client: httpx.AsyncClient, engine: ScriptedEngine, choice: dict[str, Any]
) -> None:
    engine.script = script(call("run_sql", input="x"))
    body = await answer(client, tools=[TOOL, CUSTOM], tool_choice=choice)
    assert body["tool_choice"] == choice
    grammar = engine.requests[0].sampling.grammar or ""
    assert "run_sql" in grammar
    assert "get_weather" not in grammar


async def test_the_grammar_of_a_custom_tool_counts(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}
    await answer(client, tools=[CUSTOM | {"format": form}], tool_choice="required")
    assert "[0-9]+" in (engine.requests[0].sampling.grammar or "")


def test_a_grammar_that_cannot_hold_a_text_is_described() -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": "start: NUMBER"}
    (tool,) = functions([CustomTextTool.model_validate(CUSTOM | {"format": form})])
    assert tool.function.description is not None
    assert tool.function.description.endswith("this Lark grammar:\nstart: NUMBER")


# -- reasoning --------------------------------------------------------------------------------------


@pytest.fixture
def thinking(engine: ScriptedEngine, tokenizer: ByteTokenizer) -> None:
    tokenizer.thinks = True
    engine.script = script("<think>\nHm, so.\n</think>\n\nHello.")


async def test_reasoning_is_an_item(client: httpx.AsyncClient, thinking: None) -> None:
    body = await answer(client, include=["reasoning.encrypted_content"])
    reasoning, message = body["output"]
    assert message["content"][0]["text"] == "Hello."
    assert reasoning["type"] == "reasoning"
    assert reasoning["summary"] == []
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm, so."}]
    assert unseal(reasoning["encrypted_content"]) == "Hm, so."
    # A token of this tokenizer is a byte; the script's end says that there were two.
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


async def test_reasoning_is_streamed(client: httpx.AsyncClient, thinking: None) -> None:
    events = await streamed(client)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[2:4] == ["output_item.added", "content_part.added"]
    deltas = [event["delta"] for event in events if event["type"].endswith("reasoning_text.delta")]
    assert "".join(deltas) == "Hm, so."
    assert len(deltas) > 1
    assert kinds.index("reasoning_text.done") < kinds.index("output_text.delta")
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "message"]


@pytest.mark.parametrize("name", ["summary", "generate_summary"])
async def test_reasoning_is_its_summary_where_that_is_read(
    client: httpx.AsyncClient, engine: ScriptedEngine, thinking: None, name: str
) -> None:
    body = await answer(client, reasoning={name: "auto"})
    assert body["reasoning"]["summary"] == "auto"
    assert body["output"][0]["summary"] == [{"type": "summary_text", "text": "Hm, so."}]
    assert body["output"][0]["content"] == []
    events = await streamed(client, reasoning={name: "auto"})
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[2:4] == ["output_item.added", "reasoning_summary_part.added"]
    told = [event for event in events if event["type"].endswith("reasoning_summary_text.delta")]
    assert "".join(event["delta"] for event in told) == "Hm, so."
    assert {event["summary_index"] for event in told} == {0}
    assert not any("reasoning_text" in kind for kind in kinds)
    assert events[-1]["response"]["output"][0]["summary"][0]["text"] == "Hm, so."


@pytest.mark.parametrize("field", ["content", "encrypted_content", "summary"])
async def test_reasoning_comes_back(
    client: httpx.AsyncClient, engine: ScriptedEngine, thinking: None, field: str
) -> None:
    """In whichever field a client keeps it."""
    reasoning, message = (await answer(client))["output"]
    kept = {
        "content": reasoning["content"],
        "encrypted_content": reasoning["encrypted_content"],
        "summary": [{"type": "summary_text", "text": "Hm, so."}],
    }
    item = {"type": "reasoning", "id": "rs_1", "summary": [], field: kept[field]}
    history = [{"role": "user", "content": "Hi"}, item, message, {"role": "user", "content": "Bye"}]
    await answer(client, content=history)
    prompt = bytes(engine.requests[-1].prompt).decode()
    assert prompt == "user:Hi|assistant:(Hm, so.)Hello.|user:Bye"


async def test_reasoning_of_a_kept_response_comes_back(
    client: httpx.AsyncClient, engine: ScriptedEngine, thinking: None
) -> None:
    first = await answer(client)
    await answer(client, content="Bye", previous_response_id=first["id"])
    prompt = bytes(engine.requests[-1].prompt).decode()
    assert prompt == "user:Hi|assistant:(Hm, so.)Hello.|user:Bye"


def test_what_another_server_has_sealed_stays_closed() -> None:
    assert unseal("gAAAAABo") == ""
    assert unseal("corral-reasoning-1:!!") == ""
    sealed = reasoning_fields("a" * (MOST_REASONING_BYTES + 1), is_sealed=True)
    assert len(unseal(sealed["encrypted_content"])) == MOST_REASONING_BYTES
