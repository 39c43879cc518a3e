"""Histories of any shape, in every protocol: what the prompt has, and what the answer names as ignored."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.unit.server.harness import ScriptedEngine

IGNORED = "x-corral-ignored"
USER = {"role": "user", "content": "Hi"}


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}} | more


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


@pytest.mark.parametrize(
    ("message", "expected", "ignored"),
    [
        (assistant(), "assistant:", None),
        (assistant(content=None), "assistant:", None),
        (assistant(content=[]), "assistant:", None),
        (assistant(content=None, tool_calls=[]), "assistant:", None),
        (assistant(content=None, refusal="No."), "assistant:No.", None),
        (assistant(content=[{"type": "refusal", "refusal": "No."}]), "assistant:No.", None),
        (assistant(reasoning_content="Hm."), "assistant:(Hm.)", None),
        (assistant(reasoning="Hm.", content=""), "assistant:(Hm.)", None),
        (assistant(content=["a", {"type": "text", "text": "b"}, None]), "assistant:a\nb", None),
        (assistant(content={"type": "output_text", "text": "a"}), "assistant:a", None),
        (assistant(content=[{"type": "text", "text": None}]), "assistant:", None),
        (
            assistant(content=[{"type": "thinking", "thinking": [{"type": "text", "text": "t"}]}]),
            "assistant:t",
            "messages.content.thinking",
        ),
        (assistant(content=[{"type": "hologram", "data": "x"}]), "assistant:", "messages.content.hologram"),
        (assistant(content="a", audio={"id": "x"}), "assistant:a", "messages.audio"),
        (assistant(tool_calls=[call("{")]), "assistant:f{", None),
        (assistant(tool_calls=[call("[]")]), "assistant:f[]", None),
        (assistant(tool_calls=[call('{"a": "\\ud83d"}')]), "assistant:f{'a': '?'}", None),
        (assistant(tool_calls=[call('{"a": "\\ud83d\\ude00"}')]), "assistant:f{'a': '😀'}", None),
        (assistant(tool_calls=[call("null")]), "assistant:f{}", None),
        (assistant(tool_calls=[call(None)]), "assistant:f{}", None),
        (assistant(tool_calls=[call({"a": 1})]), "assistant:f{'a': 1}", None),
        (assistant(tool_calls=[{"function": {"name": "f"}}]), "assistant:f{}", None),
        (assistant(tool_calls=[call("{}", id=None)]), "assistant:f{}", None),
        (
            assistant(tool_calls=[{"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}}]),
            "assistant:f{'input': 'x'}",
            None,
        ),
        (assistant(function_call={"name": "f", "arguments": "{}"}), "assistant:f{}", None),
        ({"role": "function", "name": "f", "content": "r"}, "tool:r", None),
        ({"role": "tool", "content": [{"type": "text", "text": "r"}]}, "tool:r", None),
        ({"role": "tool", "content": None, "tool_call_id": "c"}, "tool:", None),
        ({"role": "tool", "content": {"t": 21}}, 'tool:{"t": 21}', None),
        ({"role": "tool", "content": [{"t": 21}, 22]}, 'tool:{"t": 21}\n22', None),
        ({"role": "tool", "content": 21}, "tool:21", None),
        (
            {"role": "tool", "content": [
                {"type": "text", "text": "r"}, {"type": "image_url", "image_url": "data:,x"}]},
            "tool:r\n[left out: this model reads text only]",
            None,
        ),
        ({"role": "user", "content": [{"type": "text", "text": {"value": "a", "annotations": []}}]},
         "user:a", None),
        ({"role": "user", "content": "a", "tool_calls": [call("{}")]}, "user:a", None),
        ({"role": "user"}, "user:", None),
        ({"role": "developer", "content": ["a", "b"]}, "system:a\nb", None),
        ({"role": "System", "content": "a"}, "system:a", None),
        ({"role": "human", "content": "a"}, "user:a", None),
        ({"role": "ai", "content": "a", "tool_calls": [call("{}")]}, "assistant:af{}", None),
        ({"role": "ipython", "content": "r"}, "tool:r", None),
        ({"role": "critic", "content": "a"}, "user:<critic>\na\n</critic>", None),
        ({"role": "<x> y", "content": None}, "user:<_x_y>\n</_x_y>", None),
    ],
)  # fmt: skip
async def test_openais(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    message: dict[str, Any],
    expected: str,
    ignored: str | None,
) -> None:
    answer = await client.post("/v1/chat/completions", json={"messages": [USER, message, USER]})
    assert answer.status_code == 200, answer.text
    assert bytes(engine.requests[0].prompt).decode() == f"user:Hi|{expected}|user:Hi"
    assert answer.headers.get(IGNORED) == ignored


def block(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


@pytest.mark.parametrize(
    ("role", "content", "expected", "ignored"),
    [
        ("assistant", None, "assistant:", None),
        ("assistant", [], "assistant:", None),
        ("assistant", [block("text")], "assistant:", None),
        ("assistant", [block("thinking", thinking="Hm.", signature="")], "assistant:(Hm.)", None),
        ("assistant", [block("redacted_thinking", data="x")], "assistant:", None),
        ("assistant", [block("tool_use", id="t", name="f", input="{")], "assistant:f{", None),
        ("assistant", [block("tool_use", id="t", name="f", input=None)], "assistant:f{}", None),
        (
            "assistant",
            [
                block("text", text="a"),
                block("server_tool_use", id="s", name="web_search", input={"query": "q"}),
                block("web_search_tool_result", tool_use_id="s", content=[
                    block("web_search_result", title="T", url="u", encrypted_content="x")]),
            ],
            "assistant:a",
            "messages.content.server_tool_use, messages.content.web_search_tool_result",
        ),
        (
            "assistant",
            [block("mcp_tool_result", content=[block("text", text="r")])],
            "assistant:r",
            "messages.content.mcp_tool_result",
        ),
        ("user", [block("document", source=block("text", data="D"))], "user:D", None),
        ("user", [block("search_result", content=[block("text", text="R")])], "user:R", None),
        (
            "user",
            [block("tool_result", tool_use_id="t", content=[
                block("tool_reference", tool_name="x"), block("text", text="r")])],
            "tool:The function x is no longer there.\nr",
            None,
        ),
        ("user", [block("tool_result", tool_use_id="t", content=None)], "tool:", None),
        ("user", [block("tool_result", tool_use_id="t", content={"t": 21})], 'tool:{"t": 21}', None),
        (
            "user",
            [block("tool_result", tool_use_id="t", content=[
                block("image", source=block("base64", media_type="image/png", data="x"))])],
            "tool:\n[left out: this model reads text only]",
            None,
        ),
        ("user", [block("tool_result", tool_use_id="t", content="r"), block("text", text="So?")],
         "tool:r|user:So?", None),
        ("user", [block("upload", file_id="f"), "a"], "user:a", "messages.content.upload"),
        ("developer", "a", "system:a", None),
        ("critic", "a", "user:<critic>\na\n</critic>", None),
    ],
)  # fmt: skip
async def test_anthropics(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    role: str,
    content: Any,
    expected: str,
    ignored: str | None,
) -> None:
    messages = [USER, {"role": role, "content": content}, USER]
    answer = await client.post("/v1/messages", json={"max_tokens": 9, "messages": messages})
    assert answer.status_code == 200, answer.text
    assert bytes(engine.requests[0].prompt).decode() == f"user:Hi|{expected}|user:Hi"
    assert answer.headers.get(IGNORED) == ignored


@pytest.mark.parametrize(
    ("items", "expected", "ignored"),
    [
        (["a"], "user:a", None),
        ([{"role": "assistant", "content": [block("refusal", refusal="No.")]}], "assistant:No.", None),
        ([{"role": "user", "content": None}], "user:", None),
        ([{"role": "critic", "content": "a"}], "user:<critic>\na\n</critic>", None),
        ([block("function_call", call_id="c", name="f", arguments="{")], "assistant:f{", None),
        ([block("function_call", call_id="c", name="f", arguments=None)], "assistant:f{}", None),
        (
            [
                block("custom_tool_call", call_id="c", name="patch", input="x"),
                block("custom_tool_call_output", call_id="c", output="ok"),
            ],
            "assistant:patch{'input': 'x'}|tool:ok",
            None,
        ),
        (
            [
                block("local_shell_call", call_id="c", action={"c": "ls"}),
                block("local_shell_call_output", call_id="c", output="a"),
            ],
            "assistant:local_shell{'c': 'ls'}|tool:a",
            None,
        ),
        (
            [
                block("shell_call", call_id="c", action={"c": "ls"}),
                block("shell_call_output", call_id="c", output=[{"stdout": "a", "stderr": ""}]),
            ],
            "assistant:shell{'c': 'ls'}|tool:a",
            None,
        ),
        ([], None, None),
        (
            [
                block("function_call_output", call_id="c", output=[
                    block("input_image", image_url="data:,x")]),
            ],
            "tool:[left out: this model reads text only]",
            None,
        ),
        ([block("web_search_call", id="w", action={"query": "q"})], None, "input.web_search_call"),
        (
            [block("mcp_call", name="m", arguments="{}", output="r")],
            "assistant:r",
            "input.mcp_call",
        ),
        ([block("whatever_comes_next", text="t")], "assistant:t", "input.whatever_comes_next"),
    ],
)  # fmt: skip
async def test_responses(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    items: list[Any],
    expected: str | None,
    ignored: str | None,
) -> None:
    answer = await client.post("/v1/responses", json={"input": [USER, *items, USER]})
    assert answer.status_code == 200, answer.text
    middle = "" if expected is None else f"{expected}|"
    assert bytes(engine.requests[0].prompt).decode() == f"user:Hi|{middle}user:Hi"
    assert answer.headers.get(IGNORED) == ignored
    more = {"input": "Bye", "previous_response_id": answer.json()["id"]}
    again = await client.post("/v1/responses", json=more)
    assert again.status_code == 200 or again.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "assistant", "content": None}, "assistant:"),
        ({"role": "assistant", "content": [{"type": "text", "text": "a"}, "b"]}, "assistant:a\nb"),
        (assistant(tool_calls=[{"function": {"name": "f", "arguments": "{"}}]), "assistant:f{"),
        (assistant(tool_calls=[{"function": {"name": "f"}}]), "assistant:f{}"),
        ({"role": "tool", "content": "r"}, "tool:r"),
        ({"role": "tool", "content": {"t": 21}}, 'tool:{"t": 21}'),
        ({"role": "USER", "content": "a"}, "user:a"),
        ({"role": "critic", "content": "a"}, "user:<critic>\na\n</critic>"),
    ],
)
async def test_ollamas(
    client: httpx.AsyncClient, engine: ScriptedEngine, message: dict[str, Any], expected: str
) -> None:
    answer = await client.post("/api/chat", json={"messages": [USER, message, USER]})
    assert answer.status_code == 200, answer.text
    assert bytes(engine.requests[0].prompt).decode() == f"user:Hi|{expected}|user:Hi"


async def test_the_assistants_last_turns_are_continued(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    messages = [USER, assistant(content="It"), assistant(content=["is", "noon"])]
    answer = await client.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 200
    assert bytes(engine.requests[0].prompt).decode() == "user:Hi|no reasoningIt\n\nis\n\nnoon"
