"""The built-in model behind a real server, through the `openai` package."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from tests.e2e.conftest import DEMO_SLOTS, Corral

WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture
def client(corral: Corral) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{corral.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, *messages: ChatCompletionMessageParam) -> str:
    answer = client.chat.completions.create(model="demo", messages=messages, temperature=0)
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].message.content or ""


def user(text: str) -> ChatCompletionMessageParam:
    return {"role": "user", "content": text}


async def test_sixteen_clients_ask_a_fact_at_once(corral: Corral) -> None:
    async with openai.AsyncOpenAI(base_url=f"{corral.url}/v1", api_key="none") as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model="demo", messages=[user("What is the capital of Italy?")], temperature=0
                )
                for _ in range(16)
            )
        )
    assert {answer.choices[0].message.content for answer in answers} == {
        "The capital of Italy is Rome."
    }


async def test_every_chat_recalls_its_own_after_others_used_its_slot(corral: Corral) -> None:
    cities = ["Oslo", "Lima", "Boston", "Vienna", "Dublin", "Athens", "Seville", "Prague"]
    assert len(cities) > DEMO_SLOTS
    async with openai.AsyncOpenAI(base_url=f"{corral.url}/v1", api_key="none") as client:

        async def say(history: list[ChatCompletionMessageParam], text: str) -> str:
            history.append(user(text))
            answer = await client.chat.completions.create(
                model="demo", messages=history, temperature=0
            )
            content = answer.choices[0].message.content or ""
            history.append({"role": "assistant", "content": content})
            return content

        chats: list[list[ChatCompletionMessageParam]] = [[] for _ in cities]
        for said in (
            "I live in {}.",
            "What is the opposite of day?",
            "Name two animals.",
            "Thanks!",
        ):
            await asyncio.gather(
                *(say(chat, said.format(city)) for chat, city in zip(chats, cities, strict=True))
            )
        answers = await asyncio.gather(*(say(chat, "Where do I live?") for chat in chats))
    assert answers == [f"You live in {city}." for city in cities]


def test_json_on_request(client: openai.OpenAI) -> None:
    text = "Petra is 31 years old and lives in Leeds."
    answer = ask(client, user(f"Write a JSON object with name, age and city: {text}"))
    assert json.loads(answer) == {"name": "Petra", "age": 31, "city": "Leeds"}


def test_a_system_prompt_is_followed(client: openai.OpenAI) -> None:
    question = user("What is the capital of Spain?")
    assert ask(client, {"role": "system", "content": "Answer in one word."}, question) == "Madrid."
    upper = ask(client, {"role": "system", "content": "Answer in upper case."}, question)
    assert upper == "THE CAPITAL OF SPAIN IS MADRID."


def test_a_tool_is_called_and_its_result_told(client: openai.OpenAI) -> None:
    messages: list[Any] = [user("What is the weather in Lisbon?")]
    asked = client.chat.completions.create(
        model="demo", messages=messages, tools=[WEATHER], temperature=0
    )
    assert asked.choices[0].finish_reason == "tool_calls"
    message = asked.choices[0].message
    assert message.content is None
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Lisbon"}

    result = json.dumps({"temperature": 19, "condition": "sunny"})
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    told = client.chat.completions.create(
        model="demo", messages=messages, tools=[WEATHER], temperature=0
    )
    assert told.choices[0].finish_reason == "stop"
    assert told.choices[0].message.content == "It is sunny in Lisbon, at 19 degrees."


def test_a_streamed_call_is_the_whole_ones(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="demo",
        messages=[user("What is the weather in Lisbon?")],
        tools=[WEATHER],
        temperature=0,
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls"
    (call,) = final.choices[0].message.tool_calls or []
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Lisbon"}


def test_tools_that_are_not_needed_are_left_alone(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=[user("What is the capital of France?")],
        tools=[WEATHER],
        temperature=0,
    )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert not answer.choices[0].message.tool_calls


def test_calls_that_may_be_made_can_be_held_to_their_schema(client: openai.OpenAI) -> None:
    strict: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    called, told = (
        client.chat.completions.create(
            model="demo",
            messages=[user(question)],
            tools=[strict],
            parallel_tool_calls=False,
            temperature=0,
        ).choices[0]
        for question in ("What is the weather in Lisbon?", "What is the capital of France?")
    )
    assert called.finish_reason == "tool_calls"
    (call,) = called.message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Lisbon"}
    assert told.finish_reason == "stop"
    assert told.message.content == "The capital of France is Paris."


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_forced_call_is_made_even_if_it_is_not_needed(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=[user("What is the capital of France?")],
        tools=[WEATHER],
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=200,
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)
