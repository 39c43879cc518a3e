"""Ollama's chats and completions over a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from serve_app.apis.ollama.protocol import OllamaMessage
from serve_app.base.errors import DecodeError, EngineUnavailableError, QueueFullError
from serve_app.base.values.answers import (
    FinishReason,
    SequenceEnd,
    Timings,
    TokenDelta,
    TokenLogprobs,
    Usage,
)
from serve_app.prompt import normaliser
from tests.unit.server.harness import HELLO, N_CTX_SLOT, ByteTokenizer, ScriptedEngine, ndjson

END = SequenceEnd(
    FinishReason.STOP, Usage(5, 2, 3), Timings(queue_s=0.5, prefill_s=0.25, decode_s=2)
)
DURATIONS = {
    "load_duration": 500_000_000,
    "prompt_eval_count": 5,
    "prompt_eval_cached_count": 3,
    "prompt_eval_duration": 250_000_000,
    "eval_count": 2,
    "eval_duration": 2_000_000_000,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def asked(content: str = "Hi", **fields: Any) -> dict[str, Any]:
    return {"model": "first", "messages": [user(content)], **fields}


def prompt_of(engine: ScriptedEngine) -> str:
    return bytes(engine.requests[-1].prompt).decode()


def without_times(line: dict[str, Any]) -> dict[str, Any]:
    assert line.pop("created_at").endswith("Z")
    if line["done"]:
        assert line.pop("total_duration") > 0
    return line


async def test_a_chat_line_by_line(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = [HELLO[0], HELLO[1], TokenDelta("lo", (3,), END)]
    first, second, last = map(without_times, ndjson(await client.post("/api/chat", json=asked())))
    message = {"role": "assistant", "content": "Hel"}
    assert first == {"model": "first", "message": message, "done": False}
    assert second == first | {"message": message | {"content": "lo"}}
    end = {"done": True, "done_reason": "stop", **DURATIONS}
    assert last == first | {"message": message | {"content": ""}} | end
    assert prompt_of(engine) == "user:Hi"


async def test_a_whole_chat(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = [HELLO[0], TokenDelta("lo", (3,), END)]
    answer = await client.post("/api/chat", json=asked(stream=False))
    assert answer.headers["content-type"] == "application/json"
    assert without_times(answer.json()) == {
        "model": "first",
        "message": {"role": "assistant", "content": "Hello"},
        "done": True,
        "done_reason": "stop",
        **DURATIONS,
    }


async def test_a_cut_answer_says_length(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    end = SequenceEnd(FinishReason.LENGTH, Usage(5, 2, 3), Timings(0, 0, 0))
    engine.script = [TokenDelta("Hel", (1,), end)]
    *_, last = ndjson(await client.post("/api/chat", json=asked()))
    assert last["done_reason"] == "length"


@pytest.mark.parametrize(
    "name", ["first", "first:latest", "FIRST", "library/first", "registry.ollama.ai/library/First"]
)
async def test_names(client: httpx.AsyncClient, name: str) -> None:
    answer = await client.post("/api/chat", json=asked(model=name, stream=False))
    assert answer.json()["model"] == name


@pytest.mark.parametrize("name", ["first:1b", "third", "org/first", "second", ""])
async def test_names_that_nothing_has(client: httpx.AsyncClient, name: str) -> None:
    answer = await client.post("/api/chat", json=asked(model=name))
    assert (answer.status_code, answer.json()) == (404, {"error": f"model '{name}' not found"})


async def test_bodies_are_read_whatever_their_type_is(client: httpx.AsyncClient) -> None:
    body = json.dumps(asked(stream=False))
    for kind in ("application/x-www-form-urlencoded", "text/plain", ""):  # curl -d says the first
        answer = await client.post("/api/chat", content=body, headers={"Content-Type": kind})
        assert answer.json()["message"]["content"] == "Hello"


async def test_unknown_fields_are_ignored_and_named(client: httpx.AsyncClient) -> None:
    options = {"num_gpu": 99, "zeal": 1, "low_vram": True, "num_ctx": 8192}
    odd = asked(stream=False, zeal=1, options=options)
    odd["messages"][0]["zeal"] = 1
    answer = await client.post("/api/chat", json=odd)
    assert answer.status_code == 200
    ignored = answer.headers["x-corral-ignored"]
    assert ignored == "zeal, options.zeal, options.num_ctx, messages.zeal"


async def test_a_format_beside_tools_is_for_answers_without_calls(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    schema = {"type": "object", "properties": {"mood": {"type": "string"}}}
    answer = await client.post("/api/chat", json=asked(tools=[tool], format=schema))
    assert answer.status_code == 200, answer.text
    grammar = (engine.requests[-1].sampling.grammar or "").replace("\\", "")
    assert "mood" in grammar
    assert "<tool_call>" in grammar


async def test_options(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    options = {
        "num_predict": 7,
        "num_keep": 5,
        "num_ctx": 4096,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.1,
        "typical_p": 0.7,
        "repeat_penalty": 1.5,
        "repeat_last_n": 9,
        "temperature": 0.3,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.4,
        "seed": 42,
        "stop": ["a", "b", ""],
    }
    await client.post("/api/chat", json=asked(options=options, shift=True))
    request = engine.requests[-1]
    sampling = request.sampling
    assert (request.n_keep, request.context_shift) == (5, True)
    assert (sampling.max_tokens, sampling.stop, sampling.seed) == (7, ("a", "b"), 42)
    for name in ("num_predict", "num_keep", "num_ctx", "seed", "stop"):
        del options[name]
    assert {name: getattr(sampling, name) for name in options} == options


@pytest.mark.parametrize("most", [0, -1, -2, None])
async def test_no_limit(client: httpx.AsyncClient, engine: ScriptedEngine, most: int) -> None:
    options = {"num_predict": most, "seed": -1, "stop": "x"}
    await client.post("/api/chat", json=asked(options=options, shift=True))
    sampling = engine.requests[-1].sampling
    assert (sampling.max_tokens, sampling.seed, sampling.stop) == (None, None, ("x",))


async def test_whose_it_is(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    await client.post("/api/chat", json=asked(user="ana", priority=3, cache_salt="s"))
    request = engine.requests[-1]
    assert (request.client, request.priority) == ("ana", 3)
    assert request.cache_group


async def test_thinking(
    client: httpx.AsyncClient, engine: ScriptedEngine, tokenizer: ByteTokenizer
) -> None:
    tokenizer.thinks = True
    engine.script = [TokenDelta("<think>\nHm.\n</think>\n\nYes", (1,)), TokenDelta("", (), END)]
    thinking, last = ndjson(await client.post("/api/chat", json=asked()))
    assert thinking["message"] == {"role": "assistant", "content": "Yes", "thinking": "Hm."}
    assert last["message"]["content"] == ""
    whole = (await client.post("/api/chat", json=asked(think=False, stream=False))).json()
    assert whole["message"] == {"role": "assistant", "content": "Yes"}
    level = await client.post("/api/chat", json=asked(think="high", stream=False))
    assert level.json()["message"]["thinking"] == "Hm."
    assert prompt_of(engine) == "user:Hihigh"  # this template writes all texts that it is told
    generated = await client.post("/api/generate", json={"prompt": "x", "stream": False})
    assert (generated.json()["thinking"], generated.json()["response"]) == ("Hm.", "Yes")


async def test_what_the_model_cannot_do(
    client: httpx.AsyncClient, tokenizer: ByteTokenizer
) -> None:
    tokenizer.can_infill = False
    for path, fields, told in (
        ("/api/chat", {"think": True}, '"first" does not support thinking'),
        ("/api/generate", {"prompt": "x", "think": "low"}, '"first" does not support thinking'),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, '"first" does not support insert'),
    ):
        answer = await client.post(path, json=asked(**fields))
        assert (answer.status_code, answer.json()) == (400, {"error": told})


async def test_tools_are_called(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Lisbon"}}\n</tool_call>'
    engine.script = [TokenDelta(call, (1,)), TokenDelta("", (), END)]
    body = asked(tools=[WEATHER])
    lines = ndjson(await client.post("/api/chat", json=body))
    whole = (await client.post("/api/chat", json=body | {"stream": False})).json()
    for message in (lines[0]["message"], whole["message"]):
        assert message["content"] == ""
        (made,) = message["tool_calls"]
        assert made["id"].startswith("call_")
        arguments = {"city": "Lisbon"}
        assert made["function"] == {"index": 0, "name": "weather", "arguments": arguments}
    assert prompt_of(engine) == "[weather]user:Hi"


async def test_tools_are_called_after_thinking(
    client: httpx.AsyncClient, engine: ScriptedEngine, tokenizer: ByteTokenizer
) -> None:
    tokenizer.thinks = True
    pieces = ["<think>\nH", "m.\n</think>\n\n<tool_call>\n", '{"name": "weather", "argu']
    pieces += ['ments": {"city": "Lisbon"}}\n</tool_call>']
    engine.script = [*(TokenDelta(piece, (1,)) for piece in pieces), TokenDelta("", (), END)]
    body = asked(tools=[WEATHER], think=True)
    *lines, last = ndjson(await client.post("/api/chat", json=body))
    assert "".join(line["message"].get("thinking", "") for line in lines) == "Hm."
    assert "".join(line["message"]["content"] for line in lines) == ""
    made = [call for line in lines for call in line["message"].get("tool_calls", [])]
    whole = (await client.post("/api/chat", json=body | {"stream": False})).json()["message"]
    for call in (*made, *whole["tool_calls"]):
        arguments = {"city": "Lisbon"}
        assert call["function"] == {"index": 0, "name": "weather", "arguments": arguments}
    assert (len(made), len(whole["tool_calls"]), whole["thinking"]) == (1, 1, "Hm.")
    assert (last["done"], last["done_reason"]) == (True, "stop")
    turn = OllamaMessage.model_validate(whole).as_turn()
    assert (turn.reasoning, turn.calls[0].name, turn.calls[0].call_id) == (
        "Hm.",
        "weather",
        whole["tool_calls"][0]["id"],
    )


def test_results_of_tools_find_their_calls() -> None:
    def called(name: str, **fields: Any) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"a": "ä"}}, **fields}

    turns = [
        user("x"),
        {"role": "assistant", "tool_calls": [called("f"), called("g", id="g1")], "thinking": "Hm."},
        {"role": "tool", "tool_name": "g", "content": "of g"},
        {"role": "TOOL", "content": "of f"},
        {"role": "tool", "content": "of nothing", "tool_call_id": "z"},
    ]
    conversation = [OllamaMessage.model_validate(turn).as_turn() for turn in turns]
    _, called_both, *results = normaliser.complete(conversation)
    first, second = called_both.calls
    assert (first.name, first.arguments) == ("f", '{"a": "ä"}')
    assert second.call_id == "g1"
    assert called_both.reasoning == "Hm."
    answered = [(result.call_id, result.name, result.text) for result in results]
    assert answered == [("g1", "g", "of g"), (first.call_id, "f", "of f"), ("z", "", "of nothing")]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_formats(client: httpx.AsyncClient, engine: ScriptedEngine, path: str) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
    grammars = []
    for wanted in ("json", schema, "", None):
        body = asked(format=wanted, prompt="Hi")
        assert (await client.post(path, json=body)).status_code == 200
        grammars.append(engine.requests[-1].sampling.grammar)
    any_object, of_schema, *none = grammars
    assert any_object is not None
    assert of_schema is not None
    assert "age" in of_schema
    assert none == [None, None]
    refused = await client.post(path, json=asked(format="yaml", prompt="Hi"))
    assert (refused.status_code, "JSON Schema" in refused.json()["error"]) == (400, True)


async def test_log_probabilities(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    found = TokenLogprobs(-0.5, ((72, -0.5), (74, -1.5)))
    engine.script = [TokenDelta("H", (72,), END, (found,))]
    body = asked(logprobs=True, top_logprobs=2)
    first, _ = ndjson(await client.post("/api/chat", json=body))
    (entry,) = first["logprobs"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("H", -0.5, [72])
    assert [one["token"] for one in entry["top_logprobs"]] == ["H", "J"]
    assert engine.requests[-1].sampling.logprobs == 2
    await client.post("/api/generate", json={"prompt": "x", "logprobs": True})
    assert engine.requests[-1].sampling.logprobs == 0


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize(
    ("keep_alive", "reason"),
    [
        (None, "load"),
        (-1, "load"),
        ("5m", "load"),
        ("1h30m", "load"),
        (0, "unload"),
        ("0", "unload"),
        ("0s", "unload"),
    ],
)
async def test_an_empty_prompt_loads_or_unloads(
    client: httpx.AsyncClient, engine: ScriptedEngine, path: str, keep_alive: Any, reason: str
) -> None:
    answer = await client.post(path, json={"model": "first", "keep_alive": keep_alive})
    found = answer.json()
    assert (found["model"], found["done"], found["done_reason"]) == ("first", True, reason)
    empty = found["message"]["content"] if path == "/api/chat" else found["response"]
    assert empty == ""
    assert engine.requests == []


async def test_keep_alive_must_be_a_duration(client: httpx.AsyncClient) -> None:
    answer = await client.post("/api/chat", json=asked(keep_alive="soon"))
    assert (answer.status_code, "not a duration" in answer.json()["error"]) == (400, True)


async def test_generate(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    body = {"model": "first", "prompt": "Hi", "system": "Be kind."}
    *said, last = ndjson(await client.post("/api/generate", json=body))
    assert [line["response"] for line in said] == ["Hel", "lo"]
    assert prompt_of(engine) == "system:Be kind.|user:Hi"
    assert last["context"] == [*engine.requests[-1].prompt, 1, 2, 3]
    again = {"prompt": "And?", "context": last["context"], "stream": False}
    answer = (await client.post("/api/generate", json=again)).json()
    assert engine.requests[-1].prompt == (*last["context"], *b"user:And?")
    assert answer["context"] == [*last["context"], *b"user:And?", 1, 2, 3]


async def test_raw_prompts_and_infill(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    for fields, prompt in (({"raw": True}, "a"), ({"suffix": "b"}, "<a|b>")):
        answer = await client.post("/api/generate", json={"prompt": "a", "stream": False, **fields})
        assert answer.json()["response"] == "Hello"
        assert "context" not in answer.json()
        assert prompt_of(engine) == prompt


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        ("/api/generate", {"raw": True, "system": "x"}, "raw mode does not support"),
        ("/api/generate", {"template": "{{ .Prompt }}"}, "raw: true"),
        ("/api/generate", {"images": ["aGk="]}, "Image input is not supported"),
        ("/api/generate", {"context": [9999]}, "context: token ids"),
        ("/api/chat", {"messages": [user("x") | {"images": ["aGk="]}]}, "Image input"),
        ("/api/chat", {"messages": [{"role": 7, "content": "x"}]}, "messages.0.role"),
        ("/api/chat", {"options": {"temperature": "hot"}}, "options.temperature"),
        ("/api/chat", {"top_logprobs": 21}, "top_logprobs"),
        ("/api/chat", {"think": "a lot"}, "think"),
        ("/api/chat", {"messages": [user("refuse")]}, "The template refuses."),
    ],
)
async def test_what_is_refused(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], told: str
) -> None:
    answer = await client.post(path, json=asked(prompt="Hi") | fields)
    assert answer.status_code == (500 if told.startswith("Image") else 400)  # as llama-server
    assert list(answer.json()) == ["error"]
    assert told in answer.json()["error"]


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (QueueFullError("Full.", 7), 503, "7"),
        (EngineUnavailableError("None is up."), 503, "1"),
        (DecodeError("It said no."), 500, None),
    ],
)
async def test_refusals_of_the_engine(
    client: httpx.AsyncClient, engine: ScriptedEngine, error: Any, status: int, retry: str | None
) -> None:
    engine.script = [error]
    answer = await client.post("/api/chat", json=asked())
    assert (answer.status_code, answer.json()) == (status, {"error": error.message})
    assert answer.headers.get("retry-after") == retry


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_a_failure_in_mid_stream_is_the_last_line(
    client: httpx.AsyncClient, engine: ScriptedEngine, path: str
) -> None:
    for failure, told in (
        (DecodeError("It said no."), "It said no."),
        (ValueError("a mistake"), "The server failed to handle this request."),
    ):
        engine.script = [HELLO[0], failure]
        answer = await client.post(path, json=asked(prompt="Hi"))
        assert answer.status_code == 200
        assert ndjson(answer)[-1] == {"error": told}


async def test_the_oldest_turns_go_where_there_is_no_room(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    turns = [{"role": "system", "content": "S"}]
    for number in range(9):
        turns += [user(f"q{number}"), {"role": "assistant", "content": f"a{number}"}]
    turns.append(user("last"))
    answer = await client.post("/api/chat", json={"messages": turns, "stream": False})
    assert answer.status_code == 200
    assert prompt_of(engine) == "system:S|user:q8|assistant:a8|user:last"
    assert len(engine.requests[-1].prompt) <= N_CTX_SLOT * 3 // 4
    kept = await client.post("/api/chat", json={"messages": turns, "truncate": False})
    assert kept.status_code == 400
    assert "available context size of 64 tokens" in kept.json()["error"]
    alone = await client.post("/api/chat", json=asked("x" * N_CTX_SLOT))
    assert alone.status_code == 400


async def test_a_long_prompt_loses_its_middle(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    text = "".join(chr(ord("0") + i % 75) for i in range(100))
    body = {"prompt": text, "raw": True, "options": {"num_keep": 2, "num_predict": 8}}
    assert (await client.post("/api/generate", json=body)).status_code == 200
    assert prompt_of(engine) == text[:2] + text[-(N_CTX_SLOT - 8 - 2) :]
    refused = await client.post("/api/generate", json=body | {"truncate": False})
    assert refused.status_code == 400
    whole = {"prompt": text[:50], "suffix": text[50:]}
    assert (await client.post("/api/generate", json=whole)).status_code == 400
