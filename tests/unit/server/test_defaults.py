"""What a model's configuration says of requests that say nothing, and by which names it is found."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from serve_app.base.errors import ModelNotFoundError
from serve_app.config.defaults import ModelDefaults
from serve_app.server.model_registry import ServedModel, find
from tests.doubles.api import build_api
from tests.unit.server.harness import N_CTX_SLOT, ByteTokenizer, ScriptedEngine

CHAT = {"messages": [{"role": "user", "content": "x"}]}
DEFAULTS = ModelDefaults(
    sampling={"temperature": 0.25, "top_k": 7, "stop": ("END",), "ignore_eos": True, "seed": 5},
    max_tokens=9,
    system_prompt="Be short.",
)


def connected(engine: ScriptedEngine, defaults: ModelDefaults) -> httpx.AsyncClient:
    model = ServedModel("m", N_CTX_SLOT, ByteTokenizer(), engine=engine, defaults=defaults)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(build_api({"m": model}))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", CHAT),
        ("/completion", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", CHAT | {"max_tokens": 9}),
    ],
)
async def test_what_a_request_leaves_open_has_the_models_defaults(
    engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    async with connected(engine, DEFAULTS) as client:
        assert (await client.post(path, json=body)).status_code == 200
    (sampling,) = (request.sampling for request in engine.requests)
    assert (sampling.temperature, sampling.top_k, sampling.stop) == (0.25, 7, ("END",))
    assert (sampling.seed, sampling.ignore_eos, sampling.max_tokens) == (5, True, 9)


@pytest.mark.parametrize(
    ("path", "body", "most"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 3}, 3),
        ("/v1/chat/completions", CHAT | {"max_completion_tokens": 3}, 3),
        ("/completion", {"prompt": "x", "n_predict": 3}, 3),
        ("/completion", {"prompt": "x", "n_predict": -1}, None),
    ],
)
async def test_what_a_request_says_counts(
    engine: ScriptedEngine, path: str, body: dict[str, Any], most: int | None
) -> None:
    said = {"temperature": 1.0, "top_k": 0, "stop": ["x"], "ignore_eos": False, "seed": 6}
    async with connected(engine, DEFAULTS) as client:
        assert (await client.post(path, json=body | said)).status_code == 200
    (sampling,) = (request.sampling for request in engine.requests)
    assert (sampling.temperature, sampling.top_k, sampling.stop) == (1.0, 0, ("x",))
    assert (sampling.seed, sampling.ignore_eos, sampling.max_tokens) == (6, False, most)


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([{"role": "user", "content": "a"}], "system:Be short.|user:a"),
        ([{"role": "system", "content": "b"}, {"role": "user", "content": "a"}], "system:b|user:a"),
    ],
)
async def test_chats_without_a_system_prompt_get_the_models(
    engine: ScriptedEngine, messages: list[dict[str, str]], prompt: str
) -> None:
    async with connected(engine, DEFAULTS) as client:
        await client.post("/v1/chat/completions", json={"messages": messages})
    assert bytes(engine.requests[0].prompt).decode() == prompt


def test_what_is_configured_goes_before_what_the_file_recommends() -> None:
    assert DEFAULTS.over({"temperature": 0.6, "min_p": 0.1}).sampling == {
        **DEFAULTS.sampling,
        "min_p": 0.1,
    }


def model(name: str, *aliases: str) -> ServedModel:
    return ServedModel(name, N_CTX_SLOT, ByteTokenizer(), aliases=aliases, engine=ScriptedEngine())  # type: ignore[arg-type]


def test_models_are_found_by_all_their_names() -> None:
    models = {"a": model("a"), "b": model("b", "gpt-4o-mini", "*"), "c": model("c", "claude")}
    wanted = [None, "a", "b", "c", "gpt-4o-mini", "claude", "anything"]
    assert [find(models, name).id for name in wanted] == ["a", "a", "b", "c", "b", "c", "b"]
    del models["b"]
    with pytest.raises(ModelNotFoundError):
        find(models, "anything")
