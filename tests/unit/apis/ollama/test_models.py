"""What Ollama's clients are told of models and the server, and embeddings."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from serve_app.apis.ollama.catalogue import human, value_of
from serve_app.base.errors import EngineUnavailableError
from serve_app.server.model_registry import ServedModel
from tests.doubles.api import build_api
from tests.unit.server.harness import N_CTX_SLOT, ByteTokenizer, ScriptedEngine

DETAILS = {
    "parent_model": "",
    "format": "gguf",
    "family": "bytes",
    "families": ["bytes"],
    "parameter_size": "1.5B",
    "quantization_level": "Q4_K_M",
}


async def test_tags(client: httpx.AsyncClient) -> None:
    first, second = (await client.get("/api/tags")).json()["models"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", first.pop("modified_at"))
    assert first == {
        "name": "first:latest",
        "model": "first:latest",
        "size": 1_500_000,
        "digest": bytes(range(32)).hex(),
        "details": DETAILS,
        "capabilities": ["completion", "tools", "insert"],
    }
    assert second["name"] == "org/second:latest"


async def test_aliases_are_names_with_tags_in_any_case() -> None:
    engine, tokenizer = ScriptedEngine(), ByteTokenizer()
    models = {
        name: ServedModel(name, N_CTX_SLOT, tokenizer, aliases=aliases, engine=engine)  # type: ignore[arg-type]
        for name, aliases in (("a", ["GPT-4o", "Llama3.2:3B"]), ("b", ["*"]))
    }
    transport = httpx.ASGITransport(build_api(models))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        listed = (await client.get("/api/tags")).json()["models"]
        names = [one["name"] for one in listed]
        assert names == ["a:latest", "b:latest", "GPT-4o:latest", "Llama3.2:3B"]
        assert {one["model"] for one in listed} == set(names)
        for asked, served in (
            ("A:latest", "a"),
            ("gpt-4O", "a"),
            ("gpt-4o:LATEST", "a"),
            ("library/llama3.2:3b", "a"),
            ("llama3.2", "b"),
            ("whatever:7b", "b"),
        ):
            body = {"model": asked, "messages": [{"role": "user", "content": "x"}], "stream": False}
            answer = await client.post("/api/chat", json=body)
            assert answer.json()["model"] == asked
            shown = (await client.post("/api/show", json={"model": asked})).json()
            assert f"FROM {served}\n" in shown["modelfile"]


async def test_running_models(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    first, _ = (await client.get("/api/ps")).json()["models"]
    assert first["details"] == DETAILS
    assert (first["size_vram"], first["context_length"]) == (0, N_CTX_SLOT)
    assert first["expires_at"] > "2100"
    engine.n_replicas = 0
    assert (await client.get("/api/ps")).json() == {"models": []}
    engine.missing = ("r2",)  # runs, and is late
    assert len((await client.get("/api/ps")).json()["models"]) == 2


@pytest.mark.parametrize("asked", [{"model": "first"}, {"name": "FIRST:latest", "verbose": True}])
async def test_show(client: httpx.AsyncClient, asked: dict[str, Any]) -> None:
    found = (await client.post("/api/show", json=asked)).json()
    assert found["model_info"] == {
        "general.architecture": "bytes",
        "general.file_type": 15,
        "general.license": "mit",
        "general.parameter_count": 1_520_000_000,
        "general.version": "2.5",
        "bytes.context_length": N_CTX_SLOT,
        "bytes.rope.freq_base": 10000.0,
        "tokenizer.ggml.add_bos_token": False,
    }
    assert found["parameters"].split() == ["num_ctx", str(N_CTX_SLOT)]
    assert found["template"] == "{{ messages }}"
    assert found["details"] == DETAILS
    assert found["license"] == "mit"


async def test_capabilities(client: httpx.AsyncClient, tokenizer: ByteTokenizer) -> None:
    async def capabilities() -> list[str]:
        found = (await client.post("/api/show", json={})).json()["capabilities"]
        return list(found)

    tokenizer.thinks = True
    tokenizer.can_infill = False
    assert await capabilities() == ["completion", "tools", "thinking"]


@pytest.mark.parametrize(
    ("pooling", "is_causal", "reranks", "found", "purpose"),
    [
        ("last", True, False, ["embedding"], "embeddings"),
        (None, False, False, ["embedding"], "embeddings"),
        ("rank", True, True, [], "rerank"),
    ],
)
async def test_capabilities_of_models_that_do_not_write(
    client: httpx.AsyncClient,
    tokenizer: ByteTokenizer,
    pooling: str | None,
    is_causal: bool,
    reranks: bool,
    found: list[str],
    purpose: str,
) -> None:
    """/v1/models says what they are made for."""
    card, *_ = (await client.get("/v1/models")).json()["data"]
    assert card["capabilities"] == []
    tokenizer.model.pooling, tokenizer.model.is_causal = pooling, is_causal
    tokenizer.reranks = reranks
    assert (await client.post("/api/show", json={})).json()["capabilities"] == found
    card, *_ = (await client.get("/v1/models")).json()["data"]
    assert card["capabilities"] == [purpose]


async def test_version_and_heads(client: httpx.AsyncClient) -> None:
    version = (await client.get("/api/version")).json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
    for path in ("/api/version", "/api/tags", "/"):
        head = await client.head(path)
        assert (head.status_code, head.content) == (200, b"")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/pull"),
        ("POST", "/api/push"),
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("DELETE", "/api/delete"),
        ("POST", "/api/blobs/sha256:0123"),
    ],
)
async def test_models_are_not_changed(client: httpx.AsyncClient, method: str, path: str) -> None:
    answer = await client.request(method, path, json={"model": "first"})
    assert answer.status_code == 403
    assert "configuration" in answer.json()["error"]  # `manage_models` is not set


async def test_a_blob_is_not_received(client: httpx.AsyncClient) -> None:
    n_sent = 0

    async def blob() -> AsyncIterator[bytes]:
        nonlocal n_sent
        for _ in range(100):
            n_sent += 1
            yield b"x" * 2**20

    answer = await client.post("/api/blobs/sha256:0123", content=blob())
    assert answer.status_code == 403
    assert n_sent == 0
    assert (await client.head("/api/blobs/sha256:0123")).status_code == 403


async def test_embed(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    body = {"model": "first", "input": ["a fox", "b"], "keep_alive": "1m", "user": "ana"}
    found = (await client.post("/api/embed", json=body)).json()
    assert found.pop("total_duration") > 0
    (x, y, z), (_, _, _) = found.pop("embeddings")
    assert (x / y, z) == (pytest.approx(ord("x") / 5), 0)
    assert x * x + y * y == pytest.approx(1)
    assert found == {"model": "first", "load_duration": 0, "prompt_eval_count": 6}
    assert engine.clients == ["ana"]
    short = await client.post("/api/embed", json={"input": "a fox", "dimensions": 1})
    assert short.json()["embeddings"] == [[1]]
    whole = await client.post("/api/embed", json={"input": "a fox", "dimensions": -1})
    assert len(whole.json()["embeddings"][0]) == 3
    nothings: tuple[Any, ...] = ("", [], None)
    for nothing in nothings:
        answer = await client.post("/api/embed", json={"input": nothing})
        assert answer.json() == {"model": "first:latest", "embeddings": []}


async def test_long_texts_are_cut(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    body = {"input": ["x" * 100, "short"]}
    assert (await client.post("/api/embed", json=body)).status_code == 200
    assert [len(text) for text in engine.texts[-1]] == [N_CTX_SLOT, 5]
    refused = await client.post("/api/embed", json=body | {"truncate": False})
    assert (refused.status_code, "100 tokens" in refused.json()["error"]) == (400, True)


async def test_the_older_embeddings(client: httpx.AsyncClient) -> None:
    answer = await client.post("/api/embeddings", json={"model": "first", "prompt": "ab"})
    assert answer.json() == {"embedding": [98, 2, 0]}
    nothing = await client.post("/api/embeddings", json={"model": "first"})
    assert nothing.json() == {"embedding": []}


async def test_embeddings_that_cannot_be_made(
    client: httpx.AsyncClient, engine: ScriptedEngine, tokenizer: ByteTokenizer
) -> None:
    engine.refusal = EngineUnavailableError("None is up.")
    answer = await client.post("/api/embed", json={"input": "x"})
    assert (answer.status_code, answer.json()) == (503, {"error": "None is up."})
    tokenizer.reranks = True
    assert (await client.post("/api/embed", json={"input": "x"})).status_code == 501


@pytest.mark.parametrize(
    ("number", "written"),
    [
        (7_615_616_512, "7.6B"),
        (8_000_000_000, "8B"),
        (5_509_120, "5.51M"),
        (2_000_000, "2M"),
        (1500, "2K"),
        (7, "7"),
    ],
)
def test_numbers(number: int, written: str) -> None:
    assert human(number) == written


def test_values_of_metadata() -> None:
    assert value_of("general.name", "7") == "7"
    assert value_of("x.block_count", "7") == 7
    assert value_of("x.rope.freq_base", "1e6") == 1e6
    assert value_of("x.attention.causal", "false") is False
    assert value_of("tokenizer.ggml.pre", "qwen2") == "qwen2"
    for text in ("nan", "inf", "1_000", "[1]"):
        assert value_of("x.y", text) == text
