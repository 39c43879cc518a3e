"""A budget that is used up for weeks is an error at once in the packages that would sleep until then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.clients.environment import HERE
from tests.clients.test_clients import run_client
from tests.e2e.conftest import Corral, model, short_folder, stopped_at_the_end

CLIENTS = sorted((HERE / "budgets").iterdir())
OPERATOR = "operator-secret-0123456789"


def keys_of(client: Path) -> list[str]:
    """The keys of a script's two packages, each of which may make one request in a month."""
    return [f"{client.stem}-{package}-0123456789" for package in ("openai", "anthropic")]


@pytest.fixture(scope="module")
def metered() -> Iterator[Corral]:
    with short_folder() as directory:
        keys = [
            {"name": key, "key": key, "cost_per_month": 0.001}
            for c in CLIENTS
            for key in keys_of(c)
        ]
        file = directory / "keys.yaml"
        file.write_text(yaml.safe_dump({"keys": [*keys, {"name": "operator", "key": OPERATOR}]}))
        prices = {"*": {"prompt": 1000.0}}
        server = Corral(
            directory,
            [model(None, "demo", n_slots=2, n_ctx_slot=512)],
            local=True,
            api_key_file=str(file),
            prices=prices,
        )
        server.http.headers["Authorization"] = f"Bearer {OPERATOR}"
        with stopped_at_the_end(server):
            yield server


@pytest.mark.parametrize("client", CLIENTS, ids=lambda path: path.name)
def test_a_used_up_budget_is_an_error_at_once(
    metered: Corral, client: Path, tmp_path: Path
) -> None:
    run_client(client, tmp_path, metered.url, *keys_of(client))
