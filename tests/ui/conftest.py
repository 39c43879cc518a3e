"""The page in a real browser, before a real server: `make test-ui` installs what that needs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtests.common import servers
from tests.e2e.conftest import Corral, gguf, model, short_folder, wait_until

try:
    from playwright import sync_api
except ImportError:  # only `make test-ui` installs it
    collect_ignore_glob = ["test_*"]

__all__ = ["gguf", "sync_api"]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
KEY = "ana-secret-0123456789"
N_REPLICAS, N_SLOTS = 2, 8
ENDLESS = {"max_tokens": 200_000, "ignore_eos": True, "context_shift": True}
"""Parameters of an answer that does not end by itself while a test runs."""

Open = Callable[..., Any]


def launch(playwright: Any) -> Any:
    """Debian's Chromium, with a microphone of its own; as root it has no sandbox."""
    microphone = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    return playwright.chromium.launch(executable_path=CHROMIUM, args=microphone)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium")
    sync_api.expect.set_options(timeout=20_000)
    with sync_api.sync_playwright() as playwright:
        browser = launch(playwright)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def ui_server(gguf: Path) -> Iterator[Corral]:
    """Two replicas of the built-in model, and another model to compare it with."""
    demo = model(None, "demo", n_slots=N_SLOTS, n_ctx_slot=2048, max_waiting=32)
    demo["serve"] = {"num_replicas": N_REPLICAS, "ray_actor_options": {"num_cpus": 0.5}}
    yield from served([demo, model(gguf, "random", n_slots=2, n_ctx_slot=512)])


@pytest.fixture(scope="session")
def guarded_server() -> Iterator[Corral]:
    """A server that wants a key."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.yaml"
        keys.write_text(yaml.safe_dump({"keys": [{"name": "ana", "key": KEY}]}))
        yield from served([model(None, "demo", n_slots=2, n_ctx_slot=512)], keys)


@pytest.fixture(scope="session")
def batch_server() -> Iterator[Corral]:
    """A server that takes batches."""
    with tempfile.TemporaryDirectory() as folder:
        demo = model(None, "demo", n_slots=2, n_ctx_slot=512)
        yield from served([demo], batch={"folder": folder})


@pytest.fixture(scope="session")
def on_demand_server() -> Iterator[Corral]:
    """A server whose model is loaded on demand."""
    demo = model(None, "demo", n_slots=2, n_ctx_slot=512) | {"keep_alive": "1h"}
    yield from served([demo], n_loaded=0)


def served(
    models: list[dict[str, Any]],
    keys: Path | None = None,
    n_loaded: int | None = None,
    **ingress: Any,
) -> Iterator[Corral]:
    """A server with these models, for who has one of the keys; all are loaded at first unless it is said
    how many."""
    with short_folder() as directory:
        ingress |= {} if keys is None else {"api_key_file": str(keys)}
        server = Corral(directory, models, **ingress)
        if keys is not None:
            server.http.headers["Authorization"] = f"Bearer {KEY}"
        try:
            if n_loaded is None:
                server.wait_ready()
            else:
                ready = partial(servers.is_healthy, server.url)
                servers.wait_ready(server.process, ready, directory)
            wanted = [
                one["serve"].get("num_replicas", 1) if n_loaded is None else n_loaded
                for one in models
            ]
            wait_until(
                lambda: [len(one["replicas"]) for one in states(server)] == wanted,
                60,
                "all replicas",
            )
            yield server
        finally:
            server.stop()


def states(server: Corral) -> list[dict[str, Any]]:
    """What `/v1/stats` tells of each model."""
    models: list[dict[str, Any]] = server.http.get("/v1/stats").json()["models"]
    return models


def n_running(server: Corral) -> int:
    """Requests that have a slot, of the first model."""
    return sum(replica["engine"]["queue"]["running"] for replica in states(server)[0]["replicas"])


class Watched:
    """What the pages of a test should not do, but did."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.hosts: set[str] = set()

    def look_at(self, page: Any) -> None:
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._console)
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))

    def _console(self, message: Any) -> None:
        if message.type == "error" and "status of 4" not in message.text:  # told on the page, too
            self.errors.append(message.text)


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture
def open_page(browser: Any, watched: Watched) -> Iterator[Open]:
    """Opens a view of a server's page in a browser that has never seen it."""
    contexts = []

    def open_one(server: Corral, view: str = "chat", **options: Any) -> Any:
        given = {"viewport": {"width": 1280, "height": 800}} | options
        contexts.append(browser.new_context(base_url=server.url, **given))
        page = contexts[-1].new_page()
        page.set_default_timeout(30_000)
        watched.look_at(page)
        page.goto(f"/#/{view}")
        page.locator("html[data-ready]").wait_for()
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert watched.errors == []
    assert len(watched.hosts) <= 1, "the page asked somebody else"
