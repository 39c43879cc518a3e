"""`pydantic-ai`: an agent that calls a tool, over OpenAI's chat."""

from __future__ import annotations

import json
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL = sys.argv[1]
model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
agent = Agent(model, model_settings={"temperature": 0})


@agent.tool_plain
def get_weather(city: str) -> str:
    """Get the weather of a city"""
    return json.dumps({"temperature": 19, "condition": "sunny"})


told = agent.run_sync("What is the weather in Lisbon?")
assert told.output == "It is sunny in Lisbon, at 19 degrees.", told
plain = Agent(model, model_settings={"temperature": 0}).run_sync("What is the capital of Italy?")
assert plain.output == "The capital of Italy is Rome.", plain
