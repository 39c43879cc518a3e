"""Names of models: which model a request means."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from serve_app.base.errors import ModelNotFoundError
from serve_app.server.model_registry import ModelInfo, find
from tests.unit.server.harness import N_CTX_SLOT, ByteTokenizer


def models(**aliases: tuple[str, ...]) -> dict[str, ModelInfo]:
    tokenizer: Any = ByteTokenizer()
    return {
        name: ModelInfo(name, N_CTX_SLOT, tokenizer, aliases=names)
        for name, names in aliases.items()
    }


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (None, "old"),
        ("new", "new"),
        ("chat", "new"),
        ("CHAT", "new"),
        ("library/chat:latest", "new"),
        ("Old:latest", "old"),
        ("anything", "rest"),
        ("new:unknown", "rest"),
    ],
)
def test_a_name_finds_its_model(name: str | None, found: str) -> None:
    known = models(old=("before",), new=("chat",), rest=("*",))
    assert find(known, name).id == found


def test_a_name_that_nobody_has_is_an_error() -> None:
    with pytest.raises(ModelNotFoundError):
        find(models(old=("chat",)), "other")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
async def test_every_route_takes_the_names_that_any_lists(
    client: httpx.AsyncClient, path: str
) -> None:
    tags = (await client.get("/api/tags")).json()["models"]
    cards = (await client.get("/v1/models")).json()["data"]
    names = [tag["name"] for tag in tags] + [card["id"] for card in cards]
    assert {"first", "first:latest", "org/second", "org/second:latest"} <= set(names)
    for name in [*names, "FIRST", "library/first:latest"]:
        messages = [{"role": "user", "content": "Hi"}]
        body = {"model": name, "max_tokens": 9, "messages": messages}
        assert (await client.post(path, json=body)).status_code == 200, name
        assert (await client.get(f"/v1/models/{name}")).json()["id"] in ("first", "org/second")
    missing = await client.post(path, json=body | {"model": "first:other"})
    assert missing.status_code == 404


def test_without_a_name_the_first_model_that_is_made_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients of text-embeddings-inference name no model, also beside a chat model."""
    purposes = {"chat": "text", "other": "text", "vectors": "embeddings", "ranks": "rerank"}
    monkeypatch.setattr(ModelInfo, "purpose", property(lambda self: purposes[self.id]))
    served = models(chat=(), other=(), vectors=(), ranks=())
    assert find(served, None).id == "chat"
    assert find(served, None, ("embeddings",)).id == "vectors"
    assert find(served, None, ("rerank",)).id == "ranks"
    assert find(served, None, ("classify",)).id == "chat"
    assert find(served, "other", ("embeddings",)).id == "other"
