"""`langchain-ollama`."""

from __future__ import annotations

import sys

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from pydantic import BaseModel

URL = sys.argv[1]


class City(BaseModel):
    """A city."""

    name: str
    country: str


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city"""
    return '{"temperature": 19, "condition": "sunny"}'


chat = ChatOllama(model="demo", base_url=URL, temperature=0, validate_model_on_init=True)
question = "What is the capital of Italy?"
answer = "The capital of Italy is Rome."

whole = chat.invoke(question)
assert whole.content == answer, whole
assert whole.usage_metadata
assert whole.usage_metadata["output_tokens"] > 5
assert "".join(str(chunk.content) for chunk in chat.stream(question)) == answer

asking = chat.bind_tools([get_weather]).invoke("What is the weather in Lisbon?")
assert isinstance(asking, AIMessage)
(call,) = asking.tool_calls
assert (call["name"], call["args"]) == ("get_weather", {"city": "Lisbon"})
told = chat.bind_tools([get_weather]).invoke(
    [
        HumanMessage("What is the weather in Lisbon?"),
        asking,
        ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]),
    ]
)
assert told.content == "It is sunny in Lisbon, at 19 degrees.", told

short = ChatOllama(model="demo", base_url=URL, temperature=0, num_predict=60, num_ctx=2048)
found = short.with_structured_output(City, method="json_schema").invoke("Name a city.")
assert isinstance(found, City), found
assert OllamaLLM(model="demo", base_url=URL, temperature=0).invoke(question) == answer
vectors = OllamaEmbeddings(model="demo", base_url=URL).embed_documents(["A fox.", "A brave fox."])
assert [len(vector) for vector in vectors] == [256, 256]
