"""LangChain's `ChatOpenAI` against a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from tests.e2e.conftest import Corral


@pytest.fixture(scope="module")
def chat(corral: Corral) -> Iterator[ChatOpenAI]:
    model = ChatOpenAI(
        model="demo",
        base_url=f"{corral.url}/v1",
        api_key=SecretStr("none"),
        temperature=0,
        max_retries=0,
        timeout=60,
    )
    yield model
    model.root_client.close()


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"It is sunny in {city}."


class City(BaseModel):
    """A city."""

    name: str
    country: str


def test_invoke(chat: ChatOpenAI) -> None:
    answer = chat.invoke([HumanMessage("What is the capital of Portugal?")])
    assert answer.text == "The capital of Portugal is Lisbon."
    assert answer.response_metadata["finish_reason"] == "stop"
    assert isinstance(answer, AIMessage)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0


def test_stream(chat: ChatOpenAI) -> None:
    question = "What is the capital of Portugal?"
    chunks = list(chat.stream(question))
    assert len(chunks) > 3
    assert "".join(chunk.text for chunk in chunks) == chat.invoke(question).text
    assert isinstance(chunks[0], AIMessageChunk)


def test_tools_there_and_back(chat: ChatOpenAI) -> None:
    question = HumanMessage("What is the weather in Lisbon?")
    asking = chat.bind_tools([get_weather], tool_choice="get_weather").invoke([question])
    assert isinstance(asking, AIMessage)
    (call,) = asking.tool_calls
    assert call["name"] == "get_weather"
    assert set(call["args"]) == {"city"}
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    answer = chat.bind_tools([get_weather]).invoke([question, asking, result])
    assert answer.text


def test_structured_output(chat: ChatOpenAI) -> None:
    found = chat.with_structured_output(City, method="json_schema").invoke("Name a city.")
    assert isinstance(found, City)
