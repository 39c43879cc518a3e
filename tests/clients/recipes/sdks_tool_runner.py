"""The tool runner of the `anthropic` package: without a thread, it sends whole histories."""

from __future__ import annotations

import json
import sys

import anthropic

URL = sys.argv[1]
GREEDY = {"temperature": 0}
sent: list[dict] = []


def record(request) -> None:
    if request.url.path == "/v1/messages":
        sent.append(json.loads(request.read()))


@anthropic.beta_tool
def get_weather(city: str) -> str:
    """Get the weather of a city"""
    assert city == "Lisbon"
    return "It is sunny."


@anthropic.beta_tool
def get_time(city: str) -> str:
    """Get the time in a city"""
    return "It is noon."


http_client = anthropic.DefaultHttpxClient(event_hooks={"request": [record]})
with anthropic.Anthropic(base_url=URL, api_key="none", http_client=http_client) as client:
    runner = client.beta.messages.tool_runner(
        model="demo",
        max_tokens=100,
        tools=[get_weather],
        messages=[{"role": "user", "content": "What is the weather in Lisbon?"}],
        extra_body=GREEDY,
    )
    called = next(iter(runner))
    assert called.stop_reason == "tool_use", called
    runner.add_tools(get_time)
    last = runner.until_done()
    assert last.stop_reason == "end_turn", last
    assert last.content[0].text, last

refused, first, second = sent
assert refused["thread"] == {"type": "create"}
assert "thread" not in first
assert "thread" not in second
assert [message["role"] for message in first["messages"]] == ["user"]
roles = [message["role"] for message in second["messages"]]
assert roles == ["user", "assistant", "user", "system"], roles
(change,) = second["messages"][-1]["content"]
assert change["tool"]["definition"]["name"] == "get_time"
assert second["tools"] == first["tools"]
