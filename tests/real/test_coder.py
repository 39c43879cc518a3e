"""A real model that was trained for tool calls and to fill in, behind the API, on both backends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from serve_app.base.engine_options import EngineOptions
from serve_app.base.formats import BackendName
from serve_app.engine import Engine
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.server.model_registry import ServedModel
from tests.doubles.api import build_api
from tests.real.models import qwen_coder
from tools.local_client import LocalClient

N_CTX_SLOT = 4096
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                "required": ["a", "b"],
            },
        },
    },
]
QUESTIONS = [
    ("What is the weather in Lisbon?", "get_weather", {"city": "Lisboa"}),
    ("Add 17 and 25.", "add", {"a": 17, "b": 25}),
]


@pytest.fixture(scope="module", params=["llama.cpp", "openvino"])
def model(request: pytest.FixtureRequest) -> Iterator[ServedModel]:
    backend: BackendName = request.param
    options = EngineOptions(
        n_slots=2, n_ctx_slot=N_CTX_SLOT, threads=2, profile_limit_s=0, backend=backend
    )
    engine = Engine.load(qwen_coder(), options)
    yield ServedModel("coder", N_CTX_SLOT, Tokenizer(qwen_coder()), engine=LocalClient(engine))
    engine.close(0)


@pytest.fixture
async def client(model: ServedModel) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(build_api({"coder": model}), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


async def ask(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    answer = await client.post(path, json={"temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize(("question", "name", "arguments"), QUESTIONS)
async def test_it_calls_the_right_function(
    client: httpx.AsyncClient, is_named: bool, question: str, name: str, arguments: Any
) -> None:
    """With the right arguments. Unasked, this model writes its calls as code, without its tags."""
    named = {"type": "function", "function": {"name": name}}
    answer = await ask(
        client,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": question}],
        tools=TOOLS,
        tool_choice=named if is_named else "required",
        parallel_tool_calls=False,
        max_tokens=80,
    )
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == name
    assert json.loads(call["function"]["arguments"]) == arguments


async def test_it_fills_in(client: httpx.AsyncClient) -> None:
    """By llama-server's route and by OpenAI's, alike."""
    before, after = "import math\n\n\ndef area(radius):\n    return ", " * radius**2\n"
    body = {"input_prefix": before, "input_suffix": after, "n_predict": 8}
    filled = (await ask(client, "/infill", **body))["content"]
    assert filled.startswith("math.pi")
    body = {"prompt": before, "suffix": after, "max_tokens": 8}
    (choice,) = (await ask(client, "/v1/completions", **body))["choices"]
    assert choice["text"] == filled
