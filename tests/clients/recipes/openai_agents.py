"""`openai-agents`: an agent that calls a tool, over OpenAI's chat and responses."""

from __future__ import annotations

import json
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

URL = sys.argv[1]
set_tracing_disabled(True)


@function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city"""
    return json.dumps({"temperature": 19, "condition": "sunny"})


for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
    model = kind("demo", AsyncOpenAI(base_url=f"{URL}/v1", api_key="none"))
    agent = Agent(
        name="Weather",
        model=model,
        model_settings=ModelSettings(temperature=0, max_tokens=200),
        tools=[get_weather],
    )
    told = Runner.run_sync(agent, "What is the weather in Lisbon?")
    assert told.final_output == "It is sunny in Lisbon, at 19 degrees.", (kind, told)
