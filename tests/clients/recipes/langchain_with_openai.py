"""`langchain-openai`."""

from __future__ import annotations

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

URL = sys.argv[1]
QUESTION = "What is the capital of Italy?"
ANSWER = "The capital of Italy is Rome."


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city"""
    return '{"temperature": 19, "condition": "sunny"}'


chat = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model="demo", temperature=0)
assert chat.invoke(QUESTION).content == ANSWER
assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == ANSWER
asking = chat.bind_tools([get_weather]).invoke("What is the weather in Lisbon?")
(call,) = asking.tool_calls
assert (call["name"], call["args"]) == ("get_weather", {"city": "Lisbon"})
result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
told = chat.bind_tools([get_weather]).invoke(
    [HumanMessage("What is the weather in Lisbon?"), asking, result]
)
assert told.content == "It is sunny in Lisbon, at 19 degrees."
