"""Keys that operators make, change and revoke while the server runs."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from serve_app.config.schema import IngressConfig
from serve_app.server.access import created_keys
from serve_app.server.model_registry import ServedModel
from tests.doubles.api import build_api
from tests.unit.server.harness import N_CTX_SLOT, ByteTokenizer, ScriptedEngine

OP, ANA = "op-secret-0123456789", "ana-secret-0123456789"
Open = Callable[..., httpx.AsyncClient]


def by(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@pytest.fixture
def ingress(engine: ScriptedEngine, tokenizer: ByteTokenizer, tmp_path: Path) -> Open:
    """Makes ingresses that share a folder."""
    keys = [{"name": "op", "key": OP, "admin": True}, {"name": "ana", "key": ANA}]
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"keys": keys}))
    models = {"m": ServedModel("m", N_CTX_SLOT, tokenizer, engine=engine)}  # type: ignore[arg-type]

    def made(folder: Path = tmp_path) -> httpx.AsyncClient:
        api = build_api(
            models,
            IngressConfig(api_key_file=tmp_path / "keys.yaml", usage_folder=folder / "usage"),
        )
        transport = httpx.ASGITransport(api, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=by(OP))

    return made


async def status(client: httpx.AsyncClient, secret: str) -> int:
    return (await client.get("/v1/models", headers=by(secret))).status_code


async def made(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/v1/keys", json=fields)
    assert answer.status_code == 200, answer.text
    key: dict[str, Any] = answer.json()
    return key


async def test_a_key_is_valid_at_all_ingresses_until_it_is_revoked(
    ingress: Open, tmp_path: Path
) -> None:
    here, there = ingress(), ingress()
    key = await made(here, name="ben", tokens_per_minute=5, labels={"team": "search"})
    assert [await status(one, key["key"]) for one in (here, there)] == [200, 200]
    listed = (await there.get("/v1/keys")).json()["data"]
    assert [one["name"] for one in listed] == ["op", "ana", "ben"]
    assert listed[2] == {name: value for name, value in key.items() if name != "key"}
    assert listed[2]["labels"] == {"team": "search"}
    file = tmp_path / "usage" / "keys.json"
    assert file.stat().st_mode & 0o777 == 0o600
    assert key["key"] not in file.read_text()
    body = {"prompt": "more than five"}
    assert (await there.post("/v1/completions", json=body, headers=by(key["key"]))).is_success
    refused = await here.post("/v1/completions", json=body, headers=by(key["key"]))
    assert refused.status_code == 429
    rotated = (await there.post("/v1/keys/ben/rotate")).json()["key"]
    assert [await status(here, secret) for secret in (key["key"], rotated)] == [401, 200]
    assert (await there.delete("/v1/keys/ben")).json()["deleted"]
    assert [await status(one, rotated) for one in (here, there)] == [401, 401]


async def test_only_operators_make_keys_and_see_them(ingress: Open) -> None:
    client = ingress()
    for method, path in (
        ("GET", "/v1/keys"),
        ("POST", "/v1/keys"),
        ("POST", "/v1/keys/op/rotate"),
        ("DELETE", "/v1/keys/op"),
    ):
        refused = await client.request(method, path, json={"name": "x"}, headers=by(ANA))
        assert refused.status_code == 403
        assert "admin: true" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"name": ""},
        {"name": "a/b"},
        {"name": "x" * 129},
        {"name": "line\nbreak"},
        {"name": "ben", "token_per_minute": 5},
        {"name": "ben", "tokens_per_minute": 0},
        {"name": "ben", "key": "of-my-own-0123456789"},
        {"name": "ben", "sha256": "0" * 64},
        {"name": "ben", "expires": "soon"},
        {"name": "ben", "expires": "2030-01-01T00:00:00"},  # where?
        {"name": "ana"},
    ],
    ids=str,
)
async def test_wrong_entries_are_refused(ingress: Open, fields: dict[str, Any]) -> None:
    client = ingress()
    refused = await client.post("/v1/keys", json=fields)
    assert refused.status_code == 400
    assert len((await client.get("/v1/keys")).json()["data"]) == 2


async def test_keys_of_the_file_stay(ingress: Open) -> None:
    client = ingress()
    assert (await client.delete("/v1/keys/ana")).status_code == 404
    assert (await client.post("/v1/keys/ana/rotate")).status_code == 404
    assert await status(client, ANA) == 200


async def test_a_key_expires(ingress: Open) -> None:
    client = ingress()
    now = datetime.now(UTC)
    early = await made(client, name="early", expires=(now - timedelta(seconds=1)).isoformat())
    late = await made(client, name="late", expires=(now + timedelta(hours=1)).isoformat())
    assert [await status(client, key["key"]) for key in (early, late)] == [401, 200]
    refused = await client.get("/v1/models", headers=by(early["key"]))
    assert "has expired" in refused.json()["error"]["message"]


async def test_keys_that_are_made_at_once_are_all_there(
    ingress: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(created_keys, "MOST_KEYS", 10)
    both = [ingress(), ingress()]
    posts = (both[i % 2].post("/v1/keys", json={"name": f"k{i % 12}"}) for i in range(24))
    answers = await asyncio.gather(*posts)
    assert sorted(answer.status_code for answer in answers) == [200] * 10 + [400] * 14
    assert [await status(both[0], a.json()["key"]) for a in answers if a.is_success] == [200] * 10


async def test_a_full_disk_is_said_and_changes_nothing(ingress: Open, tmp_path: Path) -> None:
    client = ingress()
    key = await made(client, name="ben")
    new = tmp_path / "usage" / "keys.json.new"  # where the next version would be written
    new.unlink()
    new.mkdir()
    answer = await client.post("/v1/keys", json={"name": "cleo"})
    assert answer.status_code == 507
    assert await status(client, key["key"]) == 200


@pytest.mark.parametrize("n_keys", [1, 2, 40])
async def test_keys_are_revoked_while_the_disk_is_full(
    ingress: Open, small_disk: Path, n_keys: int
) -> None:
    """Also while the ledger has counts that it cannot write."""
    here, there = ingress(small_disk), ingress(small_disk)
    secrets = {f"k{i}": (await made(here, name=f"k{i}"))["key"] for i in range(n_keys)}
    with suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        while filler.write(bytes(512)):
            pass
    large = {"name": "large", "labels": {f"l{i}": "x" * 256 for i in range(16)}}
    assert (await here.post("/v1/keys", json=large)).status_code == 507
    body = {"prompt": "counted"}
    for name, secret in secrets.items():
        assert (await here.post("/v1/completions", json=body, headers=by(secret))).is_success
        assert (await here.delete(f"/v1/keys/{name}")).json()["deleted"]
        assert [await status(one, secret) for one in (here, there)] == [401, 401]


async def test_a_broken_file_leaves_the_keys_that_were_there(
    ingress: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = ingress()
    key = await made(client, name="ben")
    assert await status(client, key["key"]) == 200
    (tmp_path / "usage" / "keys.json").write_text("{")
    with caplog.at_level(logging.ERROR, "corral.ingress"):
        assert await status(client, key["key"]) == 200
    assert "previous keys stay valid" in caplog.text


async def test_what_operators_do_is_in_the_log(
    ingress: Open, caplog: pytest.LogCaptureFixture
) -> None:
    client = ingress()
    with caplog.at_level(logging.INFO, "corral.audit"):
        key = await made(client, name="ben")
        await client.delete("/v1/keys/ben", headers={"x-request-id": "r1"})
        await client.get("/v1/keys")
    entries = [json.loads(one.getMessage()) for one in caplog.records if one.name == "corral.audit"]
    assert [(one["key"], one["method"], one["path"]) for one in entries] == [
        ("op", "POST", "/v1/keys"),
        ("op", "DELETE", "/v1/keys/ben"),
    ]
    assert entries[1]["id"] == "r1"
    assert key["key"] not in caplog.text


async def test_without_a_place_for_keys_none_are_made(
    engine: ScriptedEngine, tokenizer: ByteTokenizer, tmp_path: Path, ingress: Open
) -> None:
    models = {"m": ServedModel("m", N_CTX_SLOT, tokenizer, engine=engine)}  # type: ignore[arg-type]
    for access, setting in (
        (IngressConfig(api_key_file=tmp_path / "keys.yaml"), "ingress.usage_folder"),
        (IngressConfig(), "ingress.api_key_file"),
    ):
        transport = httpx.ASGITransport(build_api(models, access))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            refused = await client.post("/v1/keys", json={"name": "ben"}, headers=by(OP))
            assert refused.status_code == 501
            assert setting in refused.json()["error"]["message"]
