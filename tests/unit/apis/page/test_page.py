"""The page's files: who gets them, with which headers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from serve_app.apis.page.page import FOLDER, Page
from serve_app.config.schema import IngressConfig
from serve_app.server.access.network import NetworkPolicy
from tests.doubles.api import build_api

Switch = bool | Literal["auto"]


def browser(access: IngressConfig, host: str = "127.0.0.1") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_api({}, access))
    return httpx.AsyncClient(transport=transport, base_url=f"http://{host}")


@pytest.mark.parametrize(
    ("switch", "host", "status"),
    [
        ("auto", "127.0.0.1", 200),
        ("auto", "[::1]", 200),
        ("auto", "10.0.0.1", 404),
        (True, "10.0.0.1", 200),
        (False, "127.0.0.1", 404),
    ],
)
async def test_who_gets_the_page(switch: Switch, host: str, status: int) -> None:
    access = IngressConfig(allow_anonymous=True, ui=switch)
    async with browser(access, host) as client:
        assert (await client.get("/ui/app.js")).status_code == status
        answer = await client.get("/")
        assert answer.status_code == 200
        assert (answer.text == "Ollama is running") is (status == 404)


async def test_who_wants_no_page_hears_that_the_server_is_running() -> None:
    """As Ollama's clients do, which accept JSON."""
    async with browser(IngressConfig()) as client:
        for accepted, kind in (
            ("text/html,application/xhtml+xml,*/*;q=0.8", "text/html"),
            ("*/*", "text/html"),
            ("application/json", "text/plain"),
        ):
            answer = await client.get("/", headers={"Accept": accepted})
            assert answer.headers["content-type"].startswith(kind)
            head = await client.head("/", headers={"Accept": accepted})
            assert (head.status_code, head.content) == (200, b"")


async def test_the_page_needs_no_key_and_the_api_does(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: ana, key: ana-secret-0123456789}]")
    async with browser(IngressConfig(api_key_file=keys)) as client:
        assert (await client.get("/")).status_code == 200
        assert (await client.get("/ui/style.css")).status_code == 200
        assert "ui/vendor/swagger-ui.js" in (await client.get("/docs")).text
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/v1/live")).status_code == 401


@pytest.mark.parametrize(
    "path", ["/ui/", "/ui/none.js", "/ui/../ingress/page.py", "/ui/%2e%2e/errors.py", "/uix/app.js"]
)
async def test_nothing_else_is_given_out(path: str) -> None:
    async with browser(IngressConfig()) as client:
        assert (await client.get(path)).status_code == 404
        assert (await client.post(path)).status_code in (404, 405)


async def test_headers() -> None:
    async with browser(IngressConfig()) as client:
        first = await client.get("/")
        policy = dict(
            part.split(" ", 1) for part in first.headers["content-security-policy"].split("; ")
        )
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert first.headers["x-content-type-options"] == "nosniff"
        assert first.headers["referrer-policy"] == "no-referrer"
        again = await client.get("/", headers={"If-None-Match": first.headers["etag"]})
        assert again.status_code == 304
        script = await client.get("/ui/app.js")
        assert script.headers["content-type"].startswith("text/javascript")
        assert "content-security-policy" in script.headers


@pytest.mark.parametrize("name", ["app.js", "vendor/swagger-ui.js"])
def test_an_answer_waits_for_nothing_but_its_client_and_goes_in_parts(name: str) -> None:
    """Nothing is read or computed for a request: whoever asks often, or reads nothing, costs little."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("the page answers this")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("an answer needs nothing from its client")

    page = Page(app, True, NetworkPolicy.of(IngressConfig()))
    scope = {"type": "http", "method": "GET", "path": f"/ui/{name}", "client": ("127.0.0.1", 1)}
    asking = page(scope | {"headers": [(b"host", b"127.0.0.1")]}, receive, send)
    with pytest.raises(StopIteration):
        asking.send(None)
    body = (FOLDER / name).read_bytes()
    assert (b"content-length", b"%d" % len(body)) in sent[0]["headers"]
    assert b"".join(message["body"] for message in sent[1:]) == body
    assert max(len(message["body"]) for message in sent[1:]) <= 65536
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(sent) - 2) + [False]


@pytest.mark.parametrize("name", ["index.html", "docs.html"])
def test_the_page_asks_nobody_else_and_has_nothing_inline(name: str) -> None:
    page = (FOLDER / name).read_text()
    assert re.findall(r"(?:src|href)=\"(?!ui/|#|docs)[^\"]*\"", page) == []
    scripts = r"<script(?! type=\"module\" src=| src=)"
    assert re.findall(rf"\bstyle=|\son\w+=|<style|{scripts}", page) == []
    ours = [*FOLDER.glob("*.js"), *FOLDER.glob("*.css")]
    named = {
        (file.name, url) for file in ours for url in re.findall(r"https?://\S+", file.read_text())
    }
    assert {url for _, url in named if "www.w3.org" not in url} == set()  # names of namespaces
    assert [file.name for file in ours if "innerHTML" in file.read_text()] == []
