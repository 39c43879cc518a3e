"""What a chat template is told of effort and verbosity, and what changes nothing."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from serve_app.server.answering.messages import ChatCompletionRequest
from tests.unit.server.harness import ScriptedEngine, chat, events


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, {}),
        ({"verbosity": "low"}, {"verbosity": "low"}),
        *(
            (
                {"reasoning_effort": effort},
                {"enable_thinking": thinks, "thinking": thinks, "reasoning_effort": level},
            )
            for effort, thinks, level in (
                ("none", False, "low"),
                ("minimal", False, "low"),
                ("low", True, "low"),
                ("medium", True, "medium"),
                ("high", True, "high"),
                ("xhigh", True, "high"),
            )
        ),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True, "thinking": False, "reasoning_effort": "low"},
        ),
    ],
)
def test_what_the_template_is_told(fields: dict[str, Any], told: dict[str, Any]) -> None:
    assert ChatCompletionRequest.model_validate(chat(**fields)).template_kwargs == told


async def test_it_reaches_the_template(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    for path, body in (
        ("/v1/chat/completions", chat(reasoning_effort="high", verbosity="low")),
        (
            "/v1/responses",
            {"input": "Hi", "reasoning": {"effort": "high"}, "text": {"verbosity": "low"}},
        ),
    ):
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert bytes(engine.requests[-1].prompt) == b"user:Hihighlow"


async def test_what_openais_clients_send_besides(client: httpx.AsyncClient) -> None:
    inert = {
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "service_tier": "flex",
        "store": True,
        "metadata": {"a": "b"},
        "user": "u",
    }
    for path, body in (("/v1/chat/completions", chat()), ("/v1/responses", {"input": "Hi"})):
        answer = await client.post(path, json=body | inert)
        assert (answer.status_code, answer.headers.get("x-corral-ignored")) == (200, None)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_noise_hides_the_sizes_of_pieces(client: httpx.AsyncClient, path: str) -> None:
    options = {"include_obfuscation": True, "include_usage": True}
    asked = chat() if "chat" in path else {"prompt": "x"}
    body = asked | {"stream": True, "stream_options": options}
    *chunks, usage, _ = events(await client.post(path, json=body))
    sizes = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        text = choice["delta"].get("content") if "delta" in choice else choice["text"]
        sizes.append(len(text or "") + len(chunk["obfuscation"]))
    assert set(sizes) <= {0, 64}
    assert sizes.count(64) == 2
    assert "obfuscation" not in usage
