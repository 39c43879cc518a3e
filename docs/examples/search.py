"""The lines of a text that are most like a question, by embeddings: python search.py QUESTION < TEXT."""

import os
import sys

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("CORRAL_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("CORRAL_API_KEY", "none"),
)
models = client.models.list().data
model = next((one.id for one in models if "embeddings" in one.capabilities), models[0].id)
question = sys.argv[1]
lines = [line.strip() for line in sys.stdin if line.strip()]
answer = client.embeddings.create(model=model, input=[question, *lines])
asked, *found = [item.embedding for item in answer.data]


def likeness(vector):
    """The cosine of two vectors of length 1."""
    return sum(a * b for a, b in zip(asked, vector, strict=True))


for score, line in sorted(zip(map(likeness, found), lines, strict=True), reverse=True)[:3]:
    print(f"{score:.2f} {line}")
