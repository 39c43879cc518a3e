"""A chat whose answers are streamed: python chat.py [MODEL]."""

import os
import sys

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("CORRAL_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("CORRAL_API_KEY", "none"),
)
model = sys.argv[1] if len(sys.argv) > 1 else client.models.list().data[0].id
messages = []
for question in sys.stdin:
    messages.append({"role": "user", "content": question.strip()})
    answer = ""
    for chunk in client.chat.completions.create(model=model, messages=messages, stream=True):
        if chunk.choices and (text := chunk.choices[0].delta.content):
            answer += text
            print(text, end="", flush=True)
    print()
    messages.append({"role": "assistant", "content": answer})
