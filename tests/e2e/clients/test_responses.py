"""OpenAI's responses, through the `openai` package, against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import FunctionToolParam
from pydantic import BaseModel

from tests.e2e.conftest import Corral

WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
    "strict": False,
}
FACT = "What is the capital of Italy?"
SIGHT = "What is the weather in Lisbon?"


@pytest.fixture
def client(corral: Corral) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{corral.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_whole_and_streamed_are_the_same(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="demo", input=FACT, temperature=0)
    assert whole.output_text == "The capital of Italy is Rome."
    assert whole.status == "completed"
    with client.responses.stream(model="demo", input=FACT, temperature=0) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(pieces) == final.output_text == whole.output_text
    assert whole.usage is not None
    assert final.usage is not None
    assert final.usage.total_tokens == whole.usage.total_tokens
    assert final.usage.input_tokens_details.cached_tokens > 0


def test_instructions_and_earlier_turns(client: openai.OpenAI) -> None:
    first = client.responses.create(
        model="demo", input=FACT, instructions="Answer in one word.", temperature=0
    )
    assert first.output_text == "Rome."
    turns: list[Any] = [{"role": "user", "content": "I live in Oslo."}]
    turns += client.responses.create(model="demo", input=turns, temperature=0).output
    turns.append({"role": "user", "content": "Where do I live?"})
    answer = client.responses.create(model="demo", input=turns, temperature=0)
    assert answer.output_text == "You live in Oslo."


def test_a_cut_response_is_incomplete(client: openai.OpenAI) -> None:
    cut = client.responses.create(model="demo", input=FACT, max_output_tokens=2, temperature=0)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_told(client: openai.OpenAI, stream: bool) -> None:
    fields: dict[str, Any] = {"model": "demo", "tools": [WEATHER], "temperature": 0}
    turns: list[Any] = [{"role": "user", "content": SIGHT}]
    if stream:
        with client.responses.stream(input=turns, **fields) as events:
            asked: Any = events.get_final_response()
    else:
        asked = client.responses.create(input=turns, **fields)
    (call,) = asked.output
    assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
    assert json.loads(call.arguments) == {"city": "Lisbon"}
    result = json.dumps({"temperature": 19, "condition": "sunny"})
    turns += [call, {"type": "function_call_output", "call_id": call.call_id, "output": result}]
    told = client.responses.create(input=turns, **fields)
    assert told.output_text == "It is sunny in Lisbon, at 19 degrees."


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_forced_call_is_made_even_if_it_is_not_needed(client: openai.OpenAI, choice: Any) -> None:
    answer = client.responses.create(
        model="demo",
        input=FACT,
        tools=[WEATHER],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_output_tokens=200,
        temperature=0,
    )
    (call,) = answer.output
    assert call.type == "function_call"
    assert isinstance(json.loads(call.arguments)["city"], str)


class City(BaseModel):
    """What the answer is parsed into."""

    size: Literal["big", "small"]
    coastal: bool


def test_an_answer_is_parsed_into_a_type(client: openai.OpenAI) -> None:
    answer = client.responses.parse(
        model="demo", input=FACT, text_format=City, max_output_tokens=400, temperature=0
    )
    assert isinstance(answer.output_parsed, City)


def test_errors_are_openais(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'none' does not exist"):
        client.responses.create(model="none", input="x")
    with pytest.raises(openai.BadRequestError, match="'resp_1' not found") as bad:
        client.responses.create(model="demo", input="x", previous_response_id="resp_1")
    assert bad.value.param == "previous_response_id"
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as too_long:
            client.responses.create(model="demo", input="word " * 3000, stream=stream)
        assert too_long.value.code == "context_length_exceeded"
        assert too_long.value.param == "input"
