"""Histories that agents send, in every protocol, to a real server with a real template."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Corral

QUESTION = "What is the capital of Italy?"
ANSWER = "The capital of Italy is Rome."
USER = {"role": "user", "content": QUESTION}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{"}}
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.{}; cc_entrypoint=cli;"


def answer_of(corral: Corral, path: str, body: dict[str, Any]) -> tuple[str, httpx.Response]:
    fields = {"model": "demo", "temperature": 0, "stream": False, **body}
    answer = httpx.post(f"{corral.url}{path}", json=fields, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.text, answer


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "assistant", "content": "Hello!"},
                    {"role": "user", "content": "Look."},
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                    {"role": "tool", "content": [{"type": "text", "text": "Nothing."}]},
                    {"role": "assistant"},
                    {"role": "developer", "content": ["Be brief."]},
                    USER,
                ]
            },
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 40,
                "messages": [
                    {"role": "user", "content": "Look."},
                    {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s"}]},
                    USER,
                ],
            },
        ),
        (
            "/v1/responses",
            {
                "input": [
                    {"role": "user", "content": "Look."},
                    {"type": "custom_tool_call", "call_id": "c", "name": "look", "input": "x"},
                    {"type": "custom_tool_call_output", "call_id": "c", "output": "Nothing."},
                    {"type": "web_search_call", "id": "w"},
                    USER,
                ]
            },
        ),
        ("/api/chat", {"messages": [{"role": "assistant", "content": None}, USER]}),
    ],
)
def test_the_model_answers_behind_any_history(
    corral: Corral, path: str, body: dict[str, Any]
) -> None:
    text, answer = answer_of(corral, path, body)
    assert "Rome" in text
    ignored = answer.headers.get("x-corral-ignored", "")
    assert ("server_tool_use" in ignored) == ("server_tool_use" in str(body))
    assert ("web_search_call" in ignored) == ("web_search_call" in str(body))


def test_sessions_share_a_prefix_whatever_their_billing_header(corral: Corral) -> None:
    """The header differs with each session, and stood before the whole system prompt."""
    cached = []
    for version in ("4f1", "a07"):
        system = [
            {"type": "text", "text": BILLING.format(version)},
            {"type": "text", "text": "You are an agent that answers briefly. " * 20},
        ]
        body = {"max_tokens": 20, "system": system, "messages": [USER]}
        _, answer = answer_of(corral, "/v1/messages", body)
        usage = answer.json()["usage"]
        n_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
        cached.append(usage["cache_read_input_tokens"] / n_prompt)
    assert cached[1] > 0.95
