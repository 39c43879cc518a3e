"""Data in the form of a JSON schema, out of free text: python extract.py < TEXT."""

import json
import os
import sys

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("CORRAL_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("CORRAL_API_KEY", "none"),
)
model = client.models.list().data[0].id
schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "fruits": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
    },
    "required": ["name", "fruits"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": f"Extract the name and the fruits: {sys.stdin.read()}"}],
    response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    temperature=0,
)
person = json.loads(answer.choices[0].message.content)
print(person["name"], person["fruits"])
