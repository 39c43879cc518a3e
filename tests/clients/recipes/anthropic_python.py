"""The `anthropic` package: messages, streams, tools, counted tokens."""

from __future__ import annotations

import sys

import anthropic

URL = sys.argv[1]
FACT = [{"role": "user", "content": "What is the capital of Italy?"}]
ANSWER = "The capital of Italy is Rome."
GREEDY = {"temperature": 0}
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}

with anthropic.Anthropic(base_url=URL, api_key="none") as client:
    whole = client.messages.create(model="demo", messages=FACT, max_tokens=60, extra_body=GREEDY)
    assert whole.content[0].text == ANSWER
    with client.messages.stream(
        model="demo", messages=FACT, max_tokens=60, extra_body=GREEDY
    ) as stream:
        assert "".join(stream.text_stream) == ANSWER
    asked = client.messages.create(
        model="demo",
        messages=[{"role": "user", "content": "What is the weather in Lisbon?"}],
        tools=[WEATHER],
        max_tokens=100,
        extra_body=GREEDY,
    )
    (call,) = asked.content
    assert (call.name, call.input) == ("get_weather", {"city": "Lisbon"})
    counted = client.messages.count_tokens(model="demo", messages=FACT)
    assert counted.input_tokens > 5
