"""`litellm`, by three of its providers: OpenAI's protocol, Ollama's chat, and Anthropic's."""

from __future__ import annotations

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

URL = sys.argv[1]
QUESTION = [{"role": "user", "content": "What is the capital of Italy?"}]
ANSWER = "The capital of Italy is Rome."
PROVIDERS = {"openai": f"{URL}/v1", "ollama_chat": URL, "ollama": URL, "anthropic": URL}

for provider, base in PROVIDERS.items():
    asked = {
        "model": f"{provider}/demo",
        "api_base": base,
        "api_key": "none",
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 60,
    }
    whole = litellm.completion(**asked)
    assert whole.choices[0].message.content == ANSWER, (provider, whole)
    stream = litellm.completion(**asked, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == ANSWER, (provider, text)
