"""The routes with which operators make and revoke API keys."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Depends

from serve_app.base.errors import InvalidRequestError, NotSupportedError
from serve_app.config.keys import ApiKey
from serve_app.server.access import created_keys
from serve_app.server.access.api_keys import KeyAccounts
from serve_app.server.access.created_keys import CreatedKeys, with_secret
from serve_app.server.http.dependencies import of_app, operators_only, prepare_with
from serve_app.server.http.description import api_router

ROUTER = api_router(dependencies=[operators_only("API keys")])


_NO_KEYS = "This server asks for no API keys. Set ingress.api_key_file."
Accounts = Annotated[KeyAccounts, of_app("accounts", lambda: NotSupportedError(_NO_KEYS))]


async def _created_keys(accounts: Accounts) -> CreatedKeys:
    if accounts.created is None:
        raise NotSupportedError(
            "Keys are made if there is a folder for them: ingress.usage_folder."
        )
    return accounts.created


Created = Annotated[CreatedKeys, Depends(_created_keys)]


@ROUTER.get("/v1/keys")
async def list_keys(accounts: Accounts) -> dict[str, Any]:
    """All API keys, with their limits and without their secrets. For operators."""
    return {"object": "list", "data": [_public_fields(key) for key in accounts.all_keys()]}


@ROUTER.post("/v1/keys")
async def create_key(
    accounts: Accounts,
    key: Annotated[ApiKey, prepare_with(created_keys.new_key, kind=ApiKey)],
    created: Created,
) -> dict[str, Any]:
    """Make an API key. Only this answer has its secret. For operators."""
    if accounts.find_by_name(key.name) is not None:
        raise InvalidRequestError(f"There is a key {key.name!r}.", "name")
    key, secret = with_secret(key)
    await asyncio.to_thread(created.add, key)
    return _public_fields(key) | {"key": secret}


@ROUTER.post("/v1/keys/{name}/rotate")
async def rotate_key(created: Created, name: str) -> dict[str, Any]:
    """Give an API key another secret; the one before is not valid any more. For operators."""
    key, secret = await asyncio.to_thread(created.rotate, name)
    return _public_fields(key) | {"key": secret}


@ROUTER.delete("/v1/keys/{name}")
async def revoke_key(created: Created, name: str) -> dict[str, Any]:
    """Revoke an API key. Its requests that run go on. For operators."""
    await asyncio.to_thread(created.revoke, name)
    return {"object": "api_key", "name": name, "deleted": True}


def _public_fields(key: ApiKey) -> dict[str, Any]:
    fields = key.model_dump(mode="json", exclude={"key", "sha256"}, exclude_defaults=True)
    return {"object": "api_key", **fields}
