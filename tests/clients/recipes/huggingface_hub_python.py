"""The `huggingface_hub` package: embeddings as of text-embeddings-inference, and chats."""

from __future__ import annotations

import sys

from huggingface_hub import InferenceClient

URL = sys.argv[1]

for address in (URL, f"{URL}/embed"):
    client = InferenceClient(address)
    vectors = client.feature_extraction(["The fox", "A cat"], normalize=True)
    assert vectors.shape == (2, 256)
    assert abs((vectors[0] ** 2).sum() - 1) < 1e-3
    cut = client.feature_extraction("The fox. " * 3000, truncate=True, truncation_direction="left")
    assert cut.shape == (1, 256)
messages = [{"role": "user", "content": "What is the capital of Italy?"}]
chat = InferenceClient(base_url=f"{URL}/v1")
whole = chat.chat_completion(messages, model="demo", temperature=0)
assert whole.choices[0].message.content == "The capital of Italy is Rome."
parts = chat.chat_completion(messages, model="demo", temperature=0, stream=True)
assert (
    "".join(part.choices[0].delta.content or "" for part in parts)
    == "The capital of Italy is Rome."
)
