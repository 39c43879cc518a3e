"""The `ollama` package."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import httpx
import ollama

URL = sys.argv[1]
GREEDY = {"temperature": 0}
FACT = [{"role": "user", "content": "What is the capital of Italy?"}]
ANSWER = "The capital of Italy is Rome."


def get_weather(city: str) -> str:
    """Get the weather of a city

    Args:
        city: The city
    """
    return json.dumps({"city": city, "temperature": 19, "condition": "sunny"})


def chats(client: ollama.Client) -> None:
    """Whole and in lines, with what is told at the end."""
    whole = client.chat("demo", FACT, options=GREEDY)
    assert whole.message.content == ANSWER, whole
    assert (whole.model, whole.done, whole.done_reason) == ("demo", True, "stop")
    assert whole.created_at
    pieces = list(client.chat("Demo:latest", FACT, options=GREEDY, stream=True, keep_alive="5m"))
    assert "".join(piece.message.content or "" for piece in pieces) == ANSWER
    assert len(pieces) >= 2  # the last one has the numbers only
    last = pieces[-1]
    assert last.prompt_eval_count == whole.prompt_eval_count
    assert last.eval_count == whole.eval_count
    for duration in (last.total_duration, last.prompt_eval_duration, last.eval_duration):
        assert duration, last
        assert 0 < duration < 60e9
    cut = client.chat("demo", FACT, options={**GREEDY, "num_predict": 2})
    assert (cut.done_reason, cut.eval_count) == ("length", 2)
    assert client.chat("demo").done_reason == "load"


def tools(client: ollama.Client) -> None:
    """A Python function is called, and its result told."""
    messages: list[object] = [{"role": "user", "content": "What is the weather in Lisbon?"}]
    for stream in (False, True):
        if stream:
            parts = client.chat("demo", messages, tools=[get_weather], options=GREEDY, stream=True)
            calls = [call for part in parts for call in part.message.tool_calls or ()]
        else:
            asked = client.chat("demo", messages, tools=[get_weather], options=GREEDY)
            calls = list(asked.message.tool_calls or ())
        (call,) = calls
        assert call.function.name == "get_weather"
        assert call.function.arguments == {"city": "Lisbon"}
    result = {"role": "tool", "tool_name": "get_weather", "content": get_weather("Lisbon")}
    told = client.chat(
        "demo", [*messages, asked.message, result], tools=[get_weather], options=GREEDY
    )
    assert told.message.content == "It is sunny in Lisbon, at 19 degrees.", told


def completions(client: ollama.Client) -> None:
    """Through the template, with a format, raw, and with what was said before."""
    question = FACT[0]["content"]
    whole = client.generate("demo", question, options=GREEDY)
    assert whole.response == ANSWER
    pieces = list(client.generate("demo", question, options=GREEDY, stream=True))
    assert "".join(piece.response for piece in pieces) == ANSWER
    told = client.generate("demo", "I live in Oslo.", options=GREEDY)
    where = client.generate("demo", "Where do I live?", context=told.context, options=GREEDY)
    assert where.response == "You live in Oslo.", where
    upper = client.generate("demo", question, system="Answer in upper case.", options=GREEDY)
    assert upper.response == ANSWER.upper()
    raw = client.generate("demo", "Once upon", raw=True, options={**GREEDY, "num_predict": 4})
    assert (raw.eval_count, raw.context) == (4, None)
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
    text = "Write a JSON object with name and age: Petra is 31 years old."
    for wanted in (schema, "json"):
        found = client.generate("demo", text, format=wanted, options=GREEDY)
        assert isinstance(json.loads(found.response), dict), found
    assert set(json.loads(client.generate("demo", text, format=schema).response)) == {"name", "age"}


def refusal(act: Callable[[], object]) -> ollama.ResponseError:
    """The error that this raises."""
    try:
        act()
    except ollama.ResponseError as error:
        return error
    raise AssertionError("it was not refused")


def models(client: ollama.Client) -> None:
    """What is served, and what it can do."""
    assert [model.model for model in client.list().models] == [
        "demo:latest",
        "small:latest",
        "ranker:latest",
    ]
    shown = client.show("demo")
    assert shown.capabilities == ["completion", "tools", "vision"], shown.capabilities
    assert shown.modelinfo
    assert shown.modelinfo["general.architecture"] == "qwen3"
    assert shown.modelinfo["qwen3.context_length"] == 2048
    assert shown.details
    assert (shown.details.quantization_level, shown.details.parameter_size) == ("Q8_0", "5.51M")
    running = client.ps().models
    assert [(model.name, model.context_length) for model in running] == [
        ("demo:latest", 2048),
        ("small:latest", 2048),
        ("ranker:latest", 1024),
    ]
    for forbidden in (
        lambda: client.pull("llama3"),
        lambda: client.create("x", from_="demo"),
        lambda: client.copy("demo", "x"),
        lambda: client.delete("demo"),
        lambda: client.push("demo"),
    ):
        refused = refusal(forbidden)
        assert (refused.status_code, "configuration" in refused.error) == (403, True), refused


def embeddings(client: ollama.Client) -> None:
    """Several texts, and one in the older form."""
    found = client.embed("demo", ["A fox.", "A brave fox."])
    lengths = [sum(x * x for x in vector) for vector in found.embeddings]
    assert all(abs(length - 1) < 1e-3 for length in lengths), lengths
    assert [len(vector) for vector in found.embeddings] == [256, 256]
    assert len(client.embeddings("demo", "A fox.").embedding) == 256


def errors(client: ollama.Client) -> None:
    """They are raised with their status."""
    for stream in (False, True):
        refused = refusal(lambda stream=stream: list(client.chat("none", FACT, stream=stream)))
        assert (refused.status_code, refused.error) == (404, "model 'none' not found"), refused


def pings() -> None:
    """A stream that waits for long is read as any other; once a second, a part without text comes."""
    with httpx.Client(base_url=URL, timeout=60) as other, ollama.Client(URL) as client:
        endless = {"model": "small", "prompt": "x", "max_tokens": 200_000, "context_shift": True}
        with other.stream("POST", "/v1/completions", json=endless | {"stream": True}) as first:
            reading_first = first.iter_bytes()  # which would close it if it were dropped
            next(reading_first)
            parts = client.chat("small", FACT, options={"num_predict": 4}, stream=True)
            silent = [next(parts), next(parts)]
        lines = list(parts)
    assert [(part.message.content, part.done) for part in silent] == [("", False)] * 2
    assert lines[-1].done_reason == "length", lines
    assert lines[-1].load_duration
    assert lines[-1].load_duration > 1e9


with ollama.Client(URL) as ollamas:
    for part in (chats, tools, completions, models, embeddings, errors):
        part(ollamas)
pings()
