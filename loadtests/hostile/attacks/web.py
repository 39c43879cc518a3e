"""Web pages that reach a server on loopback through a browser, and proxies that open it to everybody."""

from __future__ import annotations

import json
from collections.abc import Mapping

from loadtests.hostile.attack import KEYLESS, Attack
from loadtests.hostile.scene import Answer, Scene
from loadtests.hostile.setups import DEMO

HOSTS = (
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.nip.io",
    "127.0.0.1@evil.example",
    "evil.example:127",
    "192.0.2.1",
    "[2001:db8::1]",
    "0x7f.evil",
    "",
)
"""Host names that browsers send after the server's name was bound anew, and names that look like
loopback and are not."""
FORWARDED = (
    {"X-Forwarded-For": "203.0.113.7"},
    {"X-Forwarded-For": "127.0.0.1, 203.0.113.7"},
    {"X-Forwarded-Host": "corral.example", "X-Forwarded-For": "203.0.113.7"},
    {"Forwarded": "for=203.0.113.7;proto=https"},
    {"Forwarded": 'for="[2001:db8::1]"'},
    {"Via": "1.1 proxy.example"},
    {"x-forwarded-for": "203.0.113.7", "Via": "1.1 a, 1.1 b"},
)
READ = ("/v1/models", "/v1/stats", "/slots", "/props", "/metrics")
ASKED = json.dumps({"model": DEMO, "prompt": "a", "max_tokens": 1}).encode()
_TEXT = {"Content-Type": "text/plain"}
_PAGE = {
    "Origin": "https://evil.example",
    "Sec-Fetch-Site": "cross-site",
    "Sec-Fetch-Mode": "no-cors",
}


def _refused(scene: Scene, answer: Answer, who: str) -> None:
    if answer.status and answer.status < 400:
        scene.found(f"{who} is answered")


def _all(scene: Scene, headers: Mapping[str, str], who: str) -> None:
    for path in READ:
        _refused(scene, scene.request("GET", path, None, None, headers), who)
    as_json = {"Content-Type": "application/json", **headers}
    asked = scene.request("POST", "/v1/completions", ASKED, None, as_json)
    _refused(scene, asked, who)


def _hosts(scene: Scene) -> None:
    for host in HOSTS:
        _all(scene, {"Host": host}, f"Host: {host or 'nothing'}")
    _all(scene, {"Host": f"127.0.0.1:{scene.port}"} | _PAGE, "a page of https://evil.example")


def _proxies(scene: Scene) -> None:
    for headers in FORWARDED:
        told = ", ".join(f"{name}: {value}" for name, value in headers.items())
        _all(scene, headers, told)


def _pages(scene: Scene) -> None:
    """Requests that a page may send without asking first: forms and plain text."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    multipart = {"Content-Type": "multipart/form-data; boundary=a"}
    for kind in (_TEXT, form, multipart, {"Content-Type": ""}):
        for path in ("/v1/completions", "/v1/chat/completions", "/completion", "/tokenize"):
            body = b'{"content":"a"}' if path == "/tokenize" else ASKED
            answer = scene.request("POST", path, body, None, kind | _PAGE)
            _refused(scene, answer, f"a page's {kind['Content-Type'] or 'nameless'} POST to {path}")
    for path in READ:
        answer = scene.request("GET", path, None, None, _PAGE)
        allowed = {name.lower() for name in answer.headers} & {"access-control-allow-origin"}
        if allowed:
            scene.found(f"pages of any site may read {path}")


ATTACKS = (
    Attack(
        name="rebound names",
        family="web",
        what="Requests whose Host is another name: a page has bound its own to loopback.",
        expects="Loopback names only, and those of a list.",
        act=_hosts,
        server=KEYLESS,
        is_short=True,
    ),
    Attack(
        name="proxies",
        family="web",
        what="Requests that a proxy forwards to a server without keys.",
        expects="Refused, with an error that says what to set.",
        act=_proxies,
        server=KEYLESS,
    ),
    Attack(
        name="pages",
        family="web",
        what="What a page of another site may send without a preflight.",
        expects="Not taken for JSON, and nothing that other sites may read.",
        act=_pages,
        server=KEYLESS,
    ),
)
