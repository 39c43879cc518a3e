"""The client of `corral`'s commands."""

from __future__ import annotations

import pytest

from serve_app.cli.client import Client, ServerError
from tests.unit.cli.conftest import Told


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_of_this_machine_is_asked_directly(
    told: Told, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    told.json("/health", {"status": "ok"})
    url = told.url.replace("127.0.0.1", host)
    assert Client(url).get("/health") == {"status": "ok"}


def test_other_servers_are_asked_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with pytest.raises(ServerError, match=r"No server answers at http://corral\.example: "):
        Client("corral.example").get("/health")
