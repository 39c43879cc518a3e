"""A model that calls a function of this program: python tools.py [QUESTION]."""

import json
import os
import sys

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("CORRAL_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("CORRAL_API_KEY", "none"),
)
model = client.models.list().data[0].id
question = sys.argv[1] if len(sys.argv) > 1 else "What is the weather in Lisbon?"


def get_weather(city):
    return {"city": city, "weather": "sunny", "celsius": 21}


tool = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
messages = [{"role": "user", "content": question}]
first = client.chat.completions.create(
    model=model, messages=messages, tools=[tool], tool_choice="required", temperature=0
)
messages.append(first.choices[0].message)
for call in first.choices[0].message.tool_calls:
    result = get_weather(**json.loads(call.function.arguments))
    print(f"{call.function.name}({call.function.arguments}) = {json.dumps(result)}")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
second = client.chat.completions.create(model=model, messages=messages, tools=[tool], temperature=0)
print(second.choices[0].message.content)
