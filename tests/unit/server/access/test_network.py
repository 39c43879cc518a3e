"""Addresses, names, proxies and other sites' pages, without keys and with them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from starlette.datastructures import Headers

from serve_app.base.errors import (
    AuthenticationError,
    CorralError,
    CrossSiteError,
    HostNotAllowedError,
)
from serve_app.server.access.network import NetworkPolicy

LOCAL = NetworkPolicy()
OPEN = NetworkPolicy(allow_anonymous=True)
KEYS = NetworkPolicy(has_keys=True)


def verdict(
    policy: NetworkPolicy,
    server: str = "127.0.0.1",
    method: str = "POST",
    http_version: str = "1.1",
    **headers: str,
) -> type[CorralError] | None:
    """What a request is refused with."""
    scope: dict[str, Any] = {
        "method": method,
        "server": (server, 8000),
        "http_version": http_version,
    }
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    refused = None
    try:
        policy.check(scope, Headers(named))
    except CorralError as error:
        refused = error
    assert refused is None or "ingress." in refused.message, "it says what to set"
    return None if refused is None else type(refused)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:8000",
        "localhost",
        "LocalHost.:8000",
        "app.localhost",
        "[::1]",
        "[::1]:8000",
        "127.3.2.1:",
        "[::ffff:127.0.0.1]:80",
    ],
)
def test_names_of_this_machine(host: str) -> None:
    assert verdict(LOCAL, host=host) is None
    assert LOCAL.is_local({"server": ("::1", 80)}, Headers({"host": host}))


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evillocalhost",
        "localhost@evil.example",
        "localhost, evil.example",
        "10.0.0.1",
        "0.0.0.0:8000",
        "[::]",
        "[fe80::1]",
        "2130706433",
        "127.1",
        "",
        "[",
        "::1",
        "x:y:z",
        "localhost:80:80",
        "a\xffb",
    ],
)
def test_names_of_others(host: str) -> None:
    """A page may have its own name resolve to 127.0.0.1 once it is loaded."""
    assert verdict(LOCAL, host=host) is HostNotAllowedError
    assert not LOCAL.is_local({"server": ("127.0.0.1", 80)}, Headers({"host": host}))
    assert verdict(OPEN, server="10.0.0.1", host=host) is None
    assert verdict(KEYS, server="10.0.0.1", host=host) is None


def test_of_two_hosts_both_must_be_known() -> None:
    raw = [(b"host", b"localhost"), (b"host", b"evil.example")]
    with pytest.raises(HostNotAllowedError):
        LOCAL.check({"method": "GET", "server": ("127.0.0.1", 80)}, Headers(raw=raw))


@pytest.mark.parametrize(
    ("allowed", "host", "known"),
    [
        ("corral.example", "corral.example", True),
        ("corral.example", "Corral.Example.:8000", True),
        ("corral.example", "a.corral.example", False),
        ("corral.example", "xcorral.example", False),
        ("*.example", "corral.example:1", True),
        ("*.example", "example", False),
        ("*.example", "example.evil", False),
        ("10.0.0.1", "10.0.0.1:8000", True),
        ("fd00::1", "[fd00::1]:8000", True),
        ("*", "whatever", True),
        ("*", "[", True),
        ("corral.example", "localhost:8000", True),
    ],
)
def test_configured_names(allowed: str, host: str, known: bool) -> None:
    expected = None if known else HostNotAllowedError
    for policy in (LOCAL, OPEN, KEYS):
        named = dataclasses.replace(policy, allowed_hosts=(allowed,))
        assert verdict(named, host=host) is expected


@pytest.mark.parametrize("server", ["10.0.0.1", "::", "fd00::1", "0.0.0.0"])
def test_other_addresses(server: str) -> None:
    assert verdict(LOCAL, server=server, host="localhost") is AuthenticationError
    assert verdict(OPEN, server=server, host="localhost") is None


@pytest.mark.parametrize(
    "header",
    ["Forwarded", "Via", "X-Forwarded-For", "X_Forwarded_Host", "X_Real_IP", "X-Forwarded-Proto"],
)
def test_proxies_on_this_machine(header: str) -> None:
    told = {"host": "localhost", header: "10.0.0.9"}
    assert verdict(LOCAL, **told) is AuthenticationError
    assert verdict(OPEN, **told) is None
    assert verdict(KEYS, **told) is None
    assert verdict(NetworkPolicy(allowed_hosts=("*",)), **told) is AuthenticationError


def test_nginx_says_nothing_and_asks_by_http_1_0() -> None:
    assert verdict(LOCAL, http_version="1.0", host="127.0.0.1:8000") is AuthenticationError
    assert verdict(OPEN, http_version="1.0", host="127.0.0.1:8000") is None


PAGE = "https://chat.example"


@pytest.mark.parametrize("policy", [LOCAL, OPEN], ids=["local", "open"])
@pytest.mark.parametrize(
    ("told", "refused"),
    [
        ({}, False),
        ({"sec_fetch_site": "none"}, False),
        ({"sec_fetch_site": "same-origin", "origin": "http://localhost:8000"}, False),
        ({"sec_fetch_site": "same-site", "origin": "http://localhost:3000"}, True),
        ({"sec_fetch_site": "cross-site", "origin": PAGE}, True),
        ({"sec_fetch_site": "cross-site"}, True),
        ({"sec_fetch_site": "cross-site", "origin": "null"}, True),
        ({"origin": "http://localhost:8000"}, False),
        ({"origin": "HTTP://LOCALHOST:8000"}, False),
        ({"origin": PAGE}, True),
        ({"origin": "http://localhost:3000"}, True),
        ({"origin": "http://localhost"}, True),
        ({"origin": "null"}, True),
        ({"origin": ""}, True),
    ],
)
def test_pages_of_other_sites(policy: NetworkPolicy, told: dict[str, str], refused: bool) -> None:
    told = {"host": "localhost:8000", **told}
    assert verdict(policy, **told) is (CrossSiteError if refused else None)
    assert verdict(KEYS, **told) is None, "no page has a key unless it was given one"


def test_pages_of_sites_that_may() -> None:
    for origins in ((PAGE,), ("*",)):
        policy = NetworkPolicy(cors_origins=origins)
        told = {"host": "localhost", "sec_fetch_site": "cross-site"}
        assert verdict(policy, origin=PAGE, **told) is None
        other = verdict(policy, origin="https://chat.example.evil", **told)
        assert other is (None if origins == ("*",) else CrossSiteError)


@pytest.mark.parametrize(
    ("origin", "refused"),
    [
        ("http://localhost:3000", False),
        ("https://127.0.0.1:8080", False),
        ("http://[::1]", False),
        ("http://chat.localhost:1", False),
        ("http://localhost.evil.example", True),
        ("http://notlocalhost", True),
        ("file://localhost", True),
        ("null", True),
    ],
)
def test_pages_of_this_machine(origin: str, refused: bool) -> None:
    policy = NetworkPolicy(cors_origins=("localhost",))
    found = verdict(policy, origin=origin, host="localhost", sec_fetch_site="cross-site")
    assert found is (CrossSiteError if refused else None)


@pytest.mark.parametrize(
    ("origin", "refused"),
    [
        ("app://obsidian.md", False),
        ("tauri://localhost", False),
        ("vscode-webview://1a2b", False),
        ("https://app.example", True),
        ("apps://x", True),
        ("http://localhost:3000", True),
    ],
)
def test_pages_of_apps(origin: str, refused: bool) -> None:
    policy = NetworkPolicy(cors_origins=("apps",))
    found = verdict(policy, origin=origin, host="localhost", sec_fetch_site="cross-site")
    assert found is (CrossSiteError if refused else None)


def test_a_page_behind_a_proxy_that_renames_the_host() -> None:
    told = {"host": "10.0.0.5:8000", "x_forwarded_host": "corral.example"}
    assert verdict(OPEN, origin="http://corral.example", **told) is None
    assert verdict(OPEN, origin="http://evil.example", **told) is CrossSiteError


def test_a_link_may_be_followed() -> None:
    told = {
        "host": "localhost",
        "sec_fetch_site": "cross-site",
        "sec_fetch_mode": "navigate",
        "sec_fetch_dest": "document",
    }
    assert verdict(LOCAL, method="GET", **told) is None
    assert verdict(LOCAL, method="POST", **told) is CrossSiteError, "a form"
    assert verdict(LOCAL, method="GET", **(told | {"sec_fetch_dest": "iframe"})) is CrossSiteError
