"""The `anthropic` package against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import pytest
from anthropic.types import Message, MessageParam, ToolChoiceParam, ToolParam

from tests.e2e.conftest import Corral

WEATHER: ToolParam = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
GREEDY = {"temperature": 0}
"""The route takes it; version 2 of the package has no argument for it."""
FACT: list[MessageParam] = [{"role": "user", "content": "What is the capital of Italy?"}]
SIGHT: list[MessageParam] = [{"role": "user", "content": "What is the weather in Lisbon?"}]


@pytest.fixture
def client(corral: Corral) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=corral.url, api_key="none", max_retries=0) as client:
        yield client


def test_whole_and_streamed_are_the_same(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model="demo", messages=FACT, max_tokens=60, extra_body=GREEDY)
    (block,) = whole.content
    assert block.type == "text"
    assert block.text == "The capital of Italy is Rome."
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
    with client.messages.stream(
        model="demo", messages=FACT, max_tokens=60, extra_body=GREEDY
    ) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == block.text
    assert final.content[0].type == "text"
    assert final.content[0].text == block.text
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == whole.usage.output_tokens
    # The second one found the first one's prompt in the cache, all but what must be decoded again.
    assert final.usage.cache_read_input_tokens
    assert final.usage.input_tokens >= 1


@pytest.mark.parametrize("tools", [[], [WEATHER]])
def test_counted_tokens_are_those_that_are_used(
    client: anthropic.Anthropic, tools: list[ToolParam]
) -> None:
    system = "Answer in one word."
    counted = client.messages.count_tokens(
        model="demo", messages=FACT, system=system, tools=tools
    ).input_tokens
    usage = client.messages.create(
        model="demo", messages=FACT, system=system, tools=tools, max_tokens=1
    ).usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted
    assert usage.output_tokens == 1


def test_a_system_prompt_is_followed(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        model="demo",
        messages=FACT,
        system=[
            {
                "type": "text",
                "text": "Answer in upper case.",
                "cache_control": {"type": "ephemeral"},
            }
        ],
        max_tokens=60,
        extra_body=GREEDY,
    )
    assert answer.content[0].type == "text"
    assert answer.content[0].text == "THE CAPITAL OF ITALY IS ROME."


def test_stop_reasons(client: anthropic.Anthropic) -> None:
    cut = client.messages.create(model="demo", messages=FACT, max_tokens=2, extra_body=GREEDY)
    assert cut.stop_reason == "max_tokens"
    stopped = client.messages.create(
        model="demo", messages=FACT, max_tokens=60, extra_body=GREEDY, stop_sequences=[" is"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " is")
    assert stopped.content[0].type == "text"
    assert stopped.content[0].text == "The capital of Italy"


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_told(client: anthropic.Anthropic, stream: bool) -> None:
    if stream:
        with client.messages.stream(
            model="demo", messages=SIGHT, tools=[WEATHER], max_tokens=100, extra_body=GREEDY
        ) as events:
            asked: Message = events.get_final_message()
    else:
        asked = client.messages.create(
            model="demo", messages=SIGHT, tools=[WEATHER], max_tokens=100, extra_body=GREEDY
        )
    assert asked.stop_reason == "tool_use"
    (call,) = asked.content
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("get_weather", {"city": "Lisbon"})
    result = json.dumps({"temperature": 19, "condition": "sunny"})
    told = client.messages.create(
        model="demo",
        messages=[
            *SIGHT,
            {"role": "assistant", "content": [call]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": call.id, "content": result}],
            },
        ],
        tools=[WEATHER],
        max_tokens=100,
        extra_body=GREEDY,
    )
    assert told.stop_reason == "end_turn"
    assert told.content[0].type == "text"
    assert told.content[0].text == "It is sunny in Lisbon, at 19 degrees."


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
    ],
)
def test_a_forced_call_is_made_even_if_it_is_not_needed(
    client: anthropic.Anthropic, choice: ToolChoiceParam
) -> None:
    answer = client.messages.create(
        model="demo",
        messages=FACT,
        tools=[WEATHER],
        tool_choice=choice,
        max_tokens=200,
        extra_body=GREEDY,
    )
    assert answer.stop_reason == "tool_use"
    (call,) = answer.content
    assert call.type == "tool_use"
    assert call.name == "get_weather"
    assert isinstance(call.input["city"], str)


def test_clients_see_errors_as_anthropics(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="'none' does not exist"):
        client.messages.create(model="none", messages=FACT, max_tokens=1)
    long: list[MessageParam] = [{"role": "user", "content": "word " * 3000}]
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError, match="> 2047 maximum"):
            client.messages.create(model="demo", messages=long, max_tokens=1, stream=stream)
