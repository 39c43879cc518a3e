"""The packages `openai` and `anthropic`: a used-up budget is an error at once, and not a sleep of weeks."""

from __future__ import annotations

import sys

import anthropic
import openai

URL, *KEYS = sys.argv[1:]
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
asked = []


def ask_openai(key: str) -> object:
    http = openai.DefaultHttpxClient(event_hooks={"request": [asked.append]})
    with openai.OpenAI(base_url=f"{URL}/v1", api_key=key, http_client=http) as client:
        return client.chat.completions.create(**CHAT)


def ask_anthropic(key: str) -> object:
    http = anthropic.DefaultHttpxClient(event_hooks={"request": [asked.append]})
    with anthropic.Anthropic(base_url=URL, api_key=key, http_client=http) as client:
        return client.messages.create(**CHAT)


for package, ask, key in ((openai, ask_openai, KEYS[0]), (anthropic, ask_anthropic, KEYS[1])):
    ask(key)
    asked.clear()
    refused = None
    try:
        ask(key)
    except package.RateLimitError as error:
        refused = error
    assert refused is not None, "the budget is not used up"
    assert "has used up its" in str(refused)
    assert int(refused.response.headers["retry-after"]) > 60
    assert refused.response.headers["x-should-retry"] == "false"
    assert len(asked) == 1, "it was asked again"
