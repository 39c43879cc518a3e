"""Models that think before they answer, over a scripted engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from serve_app.base.values.answers import Usage
from tests.unit.server.answering.test_tools import CALL, CUT, WEATHER, script
from tests.unit.server.harness import END, ByteTokenizer, ScriptedEngine, chat, events, takes

REASONING = "<think>\nHm,\nso.\n</think>\n\n"


@pytest.fixture(autouse=True)
def _thinks(tokenizer: ByteTokenizer) -> None:
    tokenizer.thinks = True


async def answer(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/chat/completions", json=chat(**fields))
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["choices"][0]
    return found


async def test_reasoning_in_a_whole_answer(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = script(f"{REASONING}Hello.")
    assert (await answer(client))["message"] == {
        "role": "assistant",
        "content": "Hello.",
        "reasoning_content": "Hm,\nso.",
    }


async def test_reasoning_in_a_stream(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = script(f"{REASONING}Hello.")
    response = await client.post("/v1/chat/completions", json=chat(stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in events(response)[1:-1]]
    pieces = [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]
    assert "".join(pieces) == "Hm,\nso."
    assert len(pieces) > 1
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello."


@pytest.mark.parametrize(("text", "n_tokens"), [(REASONING, len("Hm,\nso.")), ("", 0)])
async def test_reasoning_is_counted(
    client: httpx.AsyncClient, engine: ScriptedEngine, text: str, n_tokens: int
) -> None:
    end = replace(END, usage=Usage(5, 40, 3))
    for stream in (False, True):
        engine.script = script(f"{text}Hello.", end)
        options = {"stream_options": {"include_usage": True}} if stream else {}
        response = await client.post(
            "/v1/chat/completions", json=chat() | {"stream": stream, **options}
        )
        usage = (events(response)[-2] if stream else response.json())["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": n_tokens}


async def test_a_call_after_reasoning(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = script(f"<think>{CALL}</think>{CALL}")
    said = await answer(client, tools=[WEATHER])
    assert said["finish_reason"] == "tool_calls"
    assert said["message"]["content"] is None
    assert said["message"]["reasoning_content"] == CALL
    assert len(said["message"]["tool_calls"]) == 1


async def test_reasoning_that_is_cut(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = script("<think>\nHm </thi", CUT)
    said = await answer(client)
    assert said["finish_reason"] == "length"
    assert said["message"]["content"] == ""
    assert said["message"]["reasoning_content"] == "Hm </thi"


async def test_a_prompt_that_begins_the_reasoning(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = script("Hm.\n</think>\nHello.")
    said = await answer(client, chat_template_kwargs={"x": "|<think>\n"})
    assert bytes(engine.requests[0].prompt).endswith(b"|<think>\n")
    assert said["message"]["reasoning_content"] == "Hm."
    assert said["message"]["content"] == "Hello."


async def test_reasoning_can_be_left_in_the_content(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = script(f"{REASONING}Hello.")
    said = await answer(client, reasoning_format="none")
    assert said["message"] == {"role": "assistant", "content": f"{REASONING}Hello."}


async def test_a_model_that_does_not_think(
    client: httpx.AsyncClient, engine: ScriptedEngine, tokenizer: ByteTokenizer
) -> None:
    tokenizer.thinks = False
    engine.script = script(f"\n{REASONING}Hello.")
    said = await answer(client, reasoning_format="auto")
    assert said["message"] == {"role": "assistant", "content": f"\n{REASONING}Hello."}


@pytest.mark.parametrize(
    "fields",
    [
        {"grammar": 'root ::= "{}"'},
        {"regex": "x+"},
        {"tools": [WEATHER], "tool_choice": "required"},
    ],
)
async def test_what_begins_as_it_must_is_no_reasoning(
    client: httpx.AsyncClient, engine: ScriptedEngine, fields: dict[str, Any]
) -> None:
    engine.script = script("{}")
    said = await answer(client, **fields)
    assert bytes(engine.requests[0].prompt).endswith(b"|no reasoning")
    assert said["message"] == {"role": "assistant", "content": "{}"}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"json_schema": {"type": "object"}},
        {"response_format": {"type": "json_object"}, "tools": [WEATHER]},
    ],
)
async def test_reasoning_comes_before_what_a_schema_holds(
    client: httpx.AsyncClient, engine: ScriptedEngine, fields: dict[str, Any]
) -> None:
    engine.script = script("<think>Hm.</think>\n\n{}")
    said = await answer(client, **fields)
    assert said["message"] == {"role": "assistant", "content": "{}", "reasoning_content": "Hm."}
    grammar = engine.requests[0].sampling.grammar or ""
    assert takes(grammar, "<think>Hm {}.</think>\n\n{}")
    assert takes(grammar, "{}")
    assert not takes(grammar, "Hm. {}")


async def test_a_model_that_does_not_think_keeps_to_the_schema_at_once(
    client: httpx.AsyncClient, engine: ScriptedEngine, tokenizer: ByteTokenizer
) -> None:
    tokenizer.thinks = False
    engine.script = script("{}")
    await answer(client, response_format={"type": "json_object"})
    assert not takes(engine.requests[0].sampling.grammar or "", "<think>Hm.</think>{}")


async def test_reasoning_of_earlier_turns(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello.", "reasoning_content": "Hm."},
        {"role": "user", "content": "Bye"},
    ]
    await client.post("/v1/chat/completions", json={"messages": messages})
    assert bytes(engine.requests[0].prompt) == b"user:Hi|assistant:(Hm.)Hello.|user:Bye"


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"thinking": False}},
        {"reasoning_effort": "none"},
    ],
)
@pytest.mark.parametrize("tools", [[], [WEATHER]])
async def test_reasoning_that_is_off_does_not_begin_before_what_a_schema_holds(
    client: httpx.AsyncClient, engine: ScriptedEngine, fields: dict[str, Any], tools: list[Any]
) -> None:
    """Not even where the template leaves it open, as Granite 3.3's does."""
    engine.script = script("{}")
    await answer(client, response_format={"type": "json_object"}, tools=tools, **fields)
    assert bytes(engine.requests[0].prompt).endswith(b"|no reasoning")
    grammar = engine.requests[0].sampling.grammar or ""
    assert takes(grammar, "{}")
    assert not takes(grammar, "<think>Hm.</think>{}")


async def test_ollamas_format_comes_behind_the_reasoning(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = script("<think>Hm.</think>\n\n{}")
    body = {"messages": [{"role": "user", "content": "Hi"}], "format": "json", "stream": False}
    for think, takes_reasoning in ((True, True), (None, True), (False, False)):
        said = (await client.post("/api/chat", json=body | {"think": think})).json()
        grammar = engine.requests[-1].sampling.grammar or ""
        assert takes(grammar, "{}")
        assert takes(grammar, "<think>Hm.</think>{}") is takes_reasoning
        if takes_reasoning:
            assert (said["message"]["thinking"], said["message"]["content"]) == ("Hm.", "{}")
