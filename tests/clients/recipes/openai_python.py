"""The `openai` package: chat completions, responses, completions, embeddings, tools."""

from __future__ import annotations

import json
import sys

import openai

URL = sys.argv[1]
QUESTION = "What is the capital of Italy?"
ANSWER = "The capital of Italy is Rome."
WEATHER = {
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

with openai.OpenAI(base_url=f"{URL}/v1", api_key="none") as client:
    user = [{"role": "user", "content": QUESTION}]
    chat = client.chat.completions.create(model="demo", messages=user, temperature=0)
    assert chat.choices[0].message.content == ANSWER
    stream = client.chat.completions.create(model="demo", messages=user, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == ANSWER, text
    asked = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "What is the weather in Lisbon?"}],
        tools=[WEATHER],
        temperature=0,
    )
    (call,) = asked.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Lisbon"}
    response = client.responses.create(model="demo", input=QUESTION, temperature=0)
    assert response.output_text == ANSWER
    completion = client.completions.create(model="demo", prompt="Once upon", max_tokens=4)
    assert completion.usage.completion_tokens == 4
    embeddings = client.embeddings.create(model="demo", input=["A fox.", "A brave fox."])
    assert [len(one.embedding) for one in embeddings.data] == [256, 256]
    assert [one.id for one in client.models.list()] == ["demo", "small", "ranker"]
